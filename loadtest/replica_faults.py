"""Replicas under load while one of them fails, or while the wire between them does.

    python -m loadtest.replica_faults [--fault stop|kill|mute|wire ...] [--seconds N] [--rate N]

Two slot trackers hear each other and a third member, the one that fails: stopped (SIGSTOP), killed
and started again, each with and without catch-up, or a subscriber that never reads. Reports the
latency of the two before, during and after, their memory, and when the loads agree again. `wire`
puts a proxy between two replicas that duplicates, reorders and drops a tenth of the events.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import zmq
import zmq.asyncio

from lean_selector.wire.replica_frames import TOPIC
from loadtest.child_service import free_port
from tests.replica_member import MODEL, SCOPE, TOKENS, Loads, Member

CONNECTIONS = 8
FAULTS = 0.1
HELD = 200  # requests that stay live throughout
AGREE_S = 30.0


def rss_mb(member: Member) -> float:
    for line in Path(f"/proc/{member.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


class Client:
    """Lifecycles through one member at a paced rate; notes the latency of each call."""

    def __init__(self, member: Member, name: str) -> None:
        self.member = member
        self.latencies_ms: list[float] = []
        self.done = 0
        self._name = name
        self._numbers = iter(range(10**9))

    async def run(self, lifecycles_per_s: float, stop: Callable[[], bool]) -> None:
        """Until `stop` says so, between lifecycles."""
        pause = CONNECTIONS / lifecycles_per_s
        await asyncio.gather(*(self._connection(pause, stop) for _ in range(CONNECTIONS)))

    async def _connection(self, pause: float, stop: Callable[[], bool]) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.member.port)
        due = time.perf_counter() + random.random() * pause
        while not stop():
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            due = max(due + pause, time.perf_counter() - 1.0)
            request_id = f"{self._name}-{next(self._numbers)}"
            start = random.randrange(100) * 100
            where = {"worker_id": 7, "dp_rank": random.randrange(2), "new_isl_tokens": TOKENS}
            add = {**where, "sequence_hashes": list(range(start, start + 16))}
            for path, body in (("add", add), ("prefill_complete", {}), ("free", {})):
                content = json.dumps({**SCOPE, "request_id": request_id, **body}).encode()
                began = time.perf_counter()
                writer.write(
                    b"POST /%b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                    b"content-length: %d\r\n\r\n%b" % (path.encode(), len(content), content)
                )
                head = await reader.readuntil(b"\r\n\r\n")
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
                answer = await reader.readexactly(int(length))
                self.latencies_ms.append((time.perf_counter() - began) * 1e3)
                assert head.split()[1] in (b"200", b"201"), (path, head, answer)
            self.done += 1
        writer.close()


def shown(latencies: list[float]) -> str:
    ordered = sorted(latencies)
    at = [ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99, 0.999)]
    return f"{at[0]:6.2f} {at[1]:6.2f} {at[2]:6.2f} ms p50 p99 p99.9 of {len(ordered)} calls"


async def agreement(members: list[Member], loads: Loads) -> float | None:
    """Seconds until all show `loads`, or None."""
    began = time.monotonic()
    while time.monotonic() - began < AGREE_S:
        if all(member.loads() == loads for member in members):
            return time.monotonic() - began
        await asyncio.sleep(0.05)
    return None


async def phase(name: str, clients: list[Client], seconds: float) -> None:
    for client in clients:
        client.latencies_ms.clear()
    await asyncio.sleep(seconds)
    latencies = [latency for client in clients for latency in client.latencies_ms]
    memory = ", ".join(f"{rss_mb(client.member):.0f} MB" for client in clients)
    print(f"  {name:8} {shown(latencies)}; memory {memory}", flush=True)


async def member_fault(fault: str, seconds: float, rate: float) -> None:
    ports = [free_port() for _ in range(3)]
    endpoints = [f"tcp://127.0.0.1:{port}" for port in ports]
    quiet = ("--log-level", "error")

    http_ports = [free_port() for _ in range(3)]
    urls = ",".join(f"http://127.0.0.1:{port}" for port in http_ports[:2])
    catch_up = ["--replica-sync-catch-up", urls] if fault.endswith("+catch-up") else []

    def member(at: int) -> Member:
        others = [endpoint for endpoint in endpoints if endpoint != endpoints[at]]
        flags = (*quiet, *(catch_up if at == 2 else ()))
        return Member("tracker", *flags, peers=others, sync_port=ports[at], port=http_ports[at])

    context = zmq.asyncio.Context()
    with contextlib.ExitStack() as stack:
        a, b, third = (stack.enter_context(member(at)) for at in range(3))
        everyone = [a, b, third]
        for each in everyone:
            each.register()
        for each in everyone:
            for other in everyone:
                if each is not other:
                    each.hears(other)
        for n in range(HELD):
            everyone[n % 2].add(f"held-{n}", 0, [1, 2, 3])
        held: Loads = [(HELD * TOKENS, 3), (0, 0)]
        assert await agreement(everyone, held) is not None
        stopping = False
        clients = [Client(a, "a"), Client(b, "b")]
        running = [asyncio.create_task(client.run(rate, lambda: stopping)) for client in clients]
        await phase("warm-up", clients, 2.0)
        await phase("before", clients, seconds)
        if fault.startswith("stop"):
            third.process.send_signal(signal.SIGSTOP)
        elif fault == "mute":
            mute = context.socket(zmq.SUB)
            mute.linger, mute.rcvhwm = 0, 1
            mute.subscribe(TOPIC)
            for endpoint in endpoints:
                mute.connect(endpoint)
        else:
            third.stop(signal.SIGKILL)
        await phase("during", clients, seconds)
        if fault.startswith("stop"):
            third.process.send_signal(signal.SIGCONT)
        elif fault == "mute":
            mute.close()
        else:
            third = stack.enter_context(member(2))
            third.register()
        await phase("after", clients, seconds)
        stopping = True
        await asyncio.gather(*running)
        took = await agreement([a, b], held)
        print(f"  the two agree {_after(took)}; {sum(c.done for c in clients)} lifecycles")
        took = await agreement([third], held)
        print(f"  the third {f'agrees {_after(took)}' if took is not None else third.loads()}")
        for n in range(HELD):
            everyone[n % 2].free(f"held-{n}")
        took = await agreement([a, b, third], [(0, 0), (0, 0)])
        print(f"  all are idle {_after(took)}", flush=True)
    context.destroy(linger=0)


def _after(took: float | None) -> str:
    return "never" if took is None else f"after {took:.2f} s"


@contextlib.asynccontextmanager
async def bad_wire(
    context: zmq.asyncio.Context, source: str, rng: random.Random
) -> AsyncIterator[str]:
    """An endpoint that says what `source` says, but for a tenth each lost, doubled or delayed."""
    sub, pub = context.socket(zmq.SUB), context.socket(zmq.PUB)
    sub.rcvhwm = pub.sndhwm = 0
    sub.subscribe(TOPIC)
    sub.connect(source)
    port = pub.bind_to_random_port("tcp://127.0.0.1")

    async def late(frames: list[bytes]) -> None:
        await asyncio.sleep(rng.random() * 0.2)
        await pub.send_multipart(frames)

    async def carry() -> None:
        async with asyncio.TaskGroup() as delayed:
            while True:
                frames = await sub.recv_multipart()
                if rng.random() < FAULTS:
                    continue
                for _ in range(2 if rng.random() < FAULTS else 1):
                    if rng.random() < FAULTS:
                        delayed.create_task(late(frames))
                    else:
                        await pub.send_multipart(frames)

    carrying = asyncio.create_task(carry())
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        carrying.cancel()
        await asyncio.gather(carrying, return_exceptions=True)
        sub.close(0)
        pub.close(0)


async def wire_fault(lifecycles: int, rate: float) -> None:
    context = zmq.asyncio.Context()
    rng = random.Random(7)
    ports = [free_port(), free_port()]
    expiry_s = 5.0
    flags = ("--log-level", "error", "--reservation-expiry-secs", str(expiry_s))
    async with contextlib.AsyncExitStack() as stack:
        wires = [
            await stack.enter_async_context(bad_wire(context, f"tcp://127.0.0.1:{port}", rng))
            for port in reversed(ports)
        ]
        members = [
            stack.enter_context(Member("tracker", *flags, peers=[wire], sync_port=port))
            for wire, port in zip(wires, ports, strict=True)
        ]
        for member in members:
            member.register()
        await asyncio.sleep(1.0)
        clients = [Client(member, f"c{at}") for at, member in enumerate(members)]
        began = time.monotonic()
        await asyncio.gather(
            *(c.run(rate, lambda c=c: c.done >= lifecycles) for c in clients)  # type: ignore[misc] # bound at once
        )
        print(f"  {[c.done for c in clients]} lifecycles in {time.monotonic() - began:.1f} s")
        await asyncio.sleep(1.0)
        for member in members:
            detail = member.detail()
            dropped = {reason: count for reason, count in detail["dropped"].items() if count}
            print(f"  left over {member.loads()}; applied {detail['applied']}; dropped {dropped}")
            assert min(number for row in member.loads() for number in row) >= 0
        print("  waiting for copies to expire", flush=True)
        deadline = time.monotonic() + expiry_s + 60.0 + AGREE_S
        while any(any(map(any, member.loads())) for member in members):
            assert time.monotonic() < deadline, "something leaked"
            await asyncio.sleep(0.2)
        print(f"  nothing left of model {MODEL!r} after expiry", flush=True)
    context.destroy(linger=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    faults = ["stop", "stop+catch-up", "kill", "kill+catch-up", "mute", "wire"]
    parser.add_argument("--fault", action="append", choices=faults)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of each phase")
    parser.add_argument("--rate", type=float, default=200.0, help="lifecycles per second, each")
    parser.add_argument("--lifecycles", type=int, default=20_000, help="of each, for `wire`")
    args = parser.parse_args()
    for fault in args.fault or faults:
        print(f"{fault}:", flush=True)
        if fault == "wire":
            asyncio.run(wire_fault(args.lifecycles, 5 * args.rate))
        else:
            asyncio.run(member_fault(fault, args.seconds, args.rate))


if __name__ == "__main__":
    main()
