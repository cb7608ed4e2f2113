"""CPU of a request's life in process: select_and_reserve, prefill_complete and DELETE, and select.

    python -m tests.bench.bench_lifecycle [--calls] [--blocks 8] [--workers 16]

Requests go through the protocol into the core and back, from bytes to bytes, without sockets. 512
requests live at a time over 32 connections, as in `loadtest/versus.py`; half of the prompts begin
with blocks that workers hold. Prints microseconds per request, the least of many rounds, and with
`--calls` which Python functions one request of each kind calls. On a busy machine only ratios hold.
"""

import argparse
import asyncio
import gc
import json
import random
import struct
import sys
import time
from collections import Counter
from types import FrameType

from lean_selector.core.index.shapes import Tier
from lean_selector.core.selection.shapes import WorkerSpec
from lean_selector.http.connections import Connections
from lean_selector.http.protocol import HttpProtocol
from lean_selector.http.response import date_header
from lean_selector.service.gate import Gate
from loadtest.http_client import http
from tests.support.gates import selection_service

CONNECTIONS = 32
LIVE = 512  # reservations at a time
PREFILL_LAG = 192  # of them in prefill
STEPS = 1024  # lives in a round
HELD = 500  # prompts that a worker holds, whole


class NullTransport(asyncio.Transport):
    """Takes every write and keeps the last."""

    def __init__(self) -> None:
        super().__init__()
        self.written: object = b""

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written = data


class Service:
    """The selection service with `workers` workers, and what is asked of it."""

    def __init__(self, workers: int, blocks: int) -> None:
        service = selection_service(use_kv_events=True)
        for worker_id in range(workers):
            spec = WorkerSpec(
                worker_id=worker_id,
                endpoint=f"http://10.0.0.{worker_id}:8000",
                block_size=16,
                kv_events_endpoints={0: "tcp://127.0.0.1:1"},
            )
            service.selector.upsert_worker(spec, 0.0)
        (self.partition,) = service.selector.catalog.partitions.values()
        connections = Connections(call_soon=lambda callback: None)
        gate = Gate(service.routes())
        self.connections = [HttpProtocol(gate, connections) for _ in range(CONNECTIONS)]
        self.transports = [NullTransport() for _ in range(CONNECTIONS)]
        for protocol, transport in zip(self.connections, self.transports, strict=True):
            protocol.connection_made(transport)
        self.blocks = blocks
        self.draws = random.Random(2)
        self.held = [self.draws.randbytes(8 * blocks) for _ in range(HELD)]
        for number, local in enumerate(self.held):
            names = [self.draws.randrange(2**64) for _ in range(blocks)]
            worker_id = number % workers
            self.partition.index.store(worker_id, 0, Tier.DEVICE, None, names, local)

    def fields(self, number: int) -> dict[str, object]:
        """A prompt; every second one begins with half of one that a worker holds."""
        local = self.draws.randbytes(8 * self.blocks)
        if number % 2:
            half = self.blocks // 2 * 8
            local = self.held[number // 2 % HELD][:half] + local[half:]
        layout = f"<{self.blocks}q"
        return {
            "model_name": "default",
            "block_hashes": struct.unpack(layout, local),
            "sequence_hashes": struct.unpack(layout, self.draws.randbytes(8 * self.blocks)),
            "isl_tokens": 16 * self.blocks,
        }

    def rounds(self, name: str) -> dict[str, list[bytes]]:
        """Requests by kind, each of STEPS steps; a later list needs the answers to the former."""
        reserve, complete, free, select = [], [], [], []
        for step in range(STEPS):
            fields = self.fields(step)
            key = f"{name}-{step}"
            body = json.dumps({"reservation_id": key, **fields}, separators=(",", ":")).encode()
            reserve.append(http("POST", "/select_and_reserve", body))
            complete.append(http("POST", f"/reservations/{key}/prefill_complete"))
            free.append(http("DELETE", f"/reservations/{key}"))
            body = json.dumps(self.fields(step), separators=(",", ":")).encode()
            select.append(http("POST", "/select", body))
        return {"reserve": reserve, "complete": complete, "free": free, "select": select}

    def send(self, requests: list[bytes], first: int) -> float:
        """CPU seconds for these, over the connections in turn."""
        receive = [protocol.data_received for protocol in self.connections]
        started = time.process_time()
        for at, request in enumerate(requests, first):
            receive[at % CONNECTIONS](request)
        return time.process_time() - started

    def check(self, what: str) -> None:
        for transport in self.transports:
            answer = bytes(transport.written)  # type: ignore[call-overload] # bytes they are
            assert answer.startswith(b"HTTP/1.1 200 "), (what, answer)


PART = 64
KINDS = ("select", "reserve", "complete", "free")


def life(service: Service, name: str, least: dict[str, list[float]]) -> None:
    """One round: prompts are booked, completed and freed as much later as in a real load."""
    asked = service.rounds(name)
    order = []
    for at in range(0, STEPS + LIVE, PART):
        order.append(("select", at))
        order.append(("reserve", at))
        order.append(("complete", at - PREFILL_LAG))
        order.append(("free", at - LIVE))
    for kind, at in order:
        if 0 <= at < STEPS:
            requests = asked[kind][at : at + PART]
            least[kind].append(service.send(requests, at) / PART)
            service.check(kind)
    assert not service.partition.slots.reservations


def count_calls(service: Service) -> None:
    """Which Python functions one warm request of each kind calls."""
    asked = service.rounds("calls")
    for kind in KINDS:
        service.send(asked[kind][:-1], 0)
        calls: Counter[str] = Counter()

        def called(frame: FrameType, event: str, arg: object, calls: Counter[str] = calls) -> None:
            if event == "call":
                code = frame.f_code
                calls[f"{code.co_filename.rpartition('lean_selector/')[2]} {code.co_qualname}"] += 1
            elif event == "c_call":
                calls[f"  {getattr(arg, '__qualname__', arg)}"] += 1

        receive = service.connections[0].data_received
        request = asked[kind][-1]
        sys.setprofile(called)
        receive(request)
        sys.setprofile(None)
        del calls["  setprofile"]
        ours = sum(count for name, count in calls.items() if not name.startswith(" "))
        print(f"\n{kind}: {ours} calls of Python functions, {calls.total() - ours} of others")
        for name, count in calls.items():
            print(f"  {count:3}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=10)
    args = parser.parse_args()
    date_header.set(1_700_000_000.0)
    service = Service(args.workers, args.blocks)
    if args.calls:
        count_calls(service)
        return
    gc.collect()
    gc.freeze()
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for number in range(args.rounds):
        life(service, f"r{number}", times)
    for kind in KINDS:
        fast = sorted(times[kind])
        least, middle = fast[len(fast) // 20], fast[len(fast) // 2]
        print(f"{kind:9} {least * 1e6:6.2f} us, median {middle * 1e6:6.2f}")


if __name__ == "__main__":
    main()
