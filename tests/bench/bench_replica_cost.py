"""What replica sync costs: CPU per published and per applied event, ours beside the reference's.

    python -m tests.bench.bench_replica_cost [--reference PYTHON] [--requests N]

Publishing: the CPU of a selector per /select_and_reserve and DELETE, without replica sync and with
it on and one peer reading, divided by the events. Applying: the CPU per event that a peer sends,
beside that of accepting the same bookings over HTTP. CPU is that of all threads, from the kernel.
"""

import argparse
import json
import statistics
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import zmq

from lean_selector.core.replication.shapes import EventKind
from lean_selector.wire.replica_frames import TOPIC, encode_event
from loadtest.child_service import cpu_ns
from loadtest.http_client import Connection, http
from tests.support.bookings import replica_event
from tests.support.replica_member import MODEL, SCOPE, Member

BLOCKS = 64  # a prompt of 1 024 tokens
PIPELINED = 16


def request(method: str, path: str, body: object = None) -> bytes:
    return http(method, path, b"" if body is None else json.dumps(body).encode())


def hashes_of(number: int) -> list[int]:
    return [(number % 500) * 1_000_003 + block * 7_919 for block in range(BLOCKS)]


def bookings(path: str, round_: int, count: int) -> list[bytes]:
    """Each request booked, and freed 32 requests later."""
    sent = []
    for number in range(count):
        hashes = hashes_of(number)
        name = f"{round_}-{number}"
        body: dict[str, object] = {**SCOPE, "reservation_id": name, "selection_id": name}
        body |= {"block_hashes": hashes, "sequence_hashes": hashes, "isl_tokens": BLOCKS * 16}
        if path == "/reservations":
            body |= {"worker_id": 7, "dp_rank": 0, "effective_prefill_tokens": BLOCKS * 16}
            del body["block_hashes"]
        sent.append(request("POST", path, body))
        if number >= 32:
            sent.append(request("DELETE", f"/reservations/{round_}-{number - 32}"))
    sent += [request("DELETE", f"/reservations/{round_}-{n}") for n in range(count - 32, count)]
    return sent


@contextmanager
def running(python: Path | None, *, sync: bool, peers: list[str]) -> Iterator[Member]:
    flags = [] if python else ["--log-level", "error"]
    member = Member("selector", *flags, python=python, peers=peers)
    if not sync:
        at = member.words.index("--replica-sync-port")
        del member.words[at : at + 2]
    with member:
        member.register()
        yield member


def per_event_us(member: Member, work: Callable[[], None], events: int) -> float:
    before = cpu_ns(member.process.pid)
    work()
    return (cpu_ns(member.process.pid) - before) / events / 1e3


def http_cost(member: Member, path: str, round_: int, count: int) -> float:
    """CPU us per request, a booking or its end."""
    requests = bookings(path, round_, count)
    with closing(Connection(member.port)) as connection:

        def send_all() -> None:
            for at in range(0, len(requests), PIPELINED):
                statuses = connection.ask(*requests[at : at + PIPELINED])
                assert all(status in (200, 201) for status in statuses), statuses

        return per_event_us(member, send_all, len(requests))


def published(python: Path | None, count: int, rounds: int) -> tuple[float, float]:
    """CPU us per request without replica sync, and what it adds per published event."""
    context = zmq.Context()
    with running(python, sync=False, peers=[]) as off, running(python, sync=True, peers=[]) as on:
        sub = context.socket(zmq.SUB)
        sub.linger, sub.rcvhwm, sub.rcvtimeo = 0, 0, 2000
        sub.subscribe(TOPIC)
        sub.connect(on.endpoint)
        time.sleep(0.5)
        base, grown = [], []
        for round_ in range(rounds + 1):
            base.append(http_cost(off, "/select_and_reserve", round_, count))
            grown.append(http_cost(on, "/select_and_reserve", round_, count))
            received = 0
            while received < 2 * count:
                sub.recv_multipart()
                received += 1
        sub.close()
    context.term()
    return statistics.median(base[1:]), statistics.median(grown[1:]) - statistics.median(base[1:])


def applied(python: Path | None, count: int, rounds: int) -> tuple[float, float]:
    """CPU us per applied event, and per /reservations booking or end over HTTP."""
    context = zmq.Context()
    pub = context.socket(zmq.PUB)
    pub.linger, pub.sndhwm = 0, 0
    endpoint = f"tcp://127.0.0.1:{pub.bind_to_random_port('tcp://127.0.0.1')}"
    events_us, http_us = [], []
    with running(python, sync=True, peers=[endpoint]) as member:

        def event(kind: EventKind, request_id: str, number: int = 0) -> bytes:
            tokens, hashes = None, b""
            if kind is EventKind.ADD:
                tokens, hashes = BLOCKS * 16, struct.pack(f"<{BLOCKS}q", *hashes_of(number))
            where = (MODEL, "t1", 16, request_id, 7, 0, 4242, None)
            return encode_event(replica_event(kind, *where, hashes, True, tokens))

        def load() -> int:
            return member.loads()[0][0]

        tries = 0
        while not load():
            pub.send_multipart([TOPIC, event(EventKind.ADD, f"there-{tries}")])
            tries += 1
            time.sleep(0.05)
        for n in range(tries):
            pub.send_multipart([TOPIC, event(EventKind.FREE, f"there-{n}")])
        for round_ in range(rounds + 1):
            payloads = []
            for number in range(count):
                payloads.append(event(EventKind.ADD, f"e{round_}-{number}", number))
                if number >= 32:
                    payloads.append(event(EventKind.FREE, f"e{round_}-{number - 32}"))
            payloads += [event(EventKind.FREE, f"e{round_}-{n}") for n in range(count - 32, count)]
            payloads.append(event(EventKind.ADD, f"last-{round_}"))

            def work(payloads: list[bytes] = payloads) -> None:
                for at in range(0, len(payloads), 200):  # as a peer would: not all at once
                    for payload in payloads[at : at + 200]:
                        pub.send_multipart([TOPIC, payload])
                    time.sleep(0.02)
                while load() != BLOCKS * 16:
                    time.sleep(0.05)

            events_us.append(per_event_us(member, work, len(payloads)))
            pub.send_multipart([TOPIC, event(EventKind.FREE, f"last-{round_}")])
            while load():
                time.sleep(0.02)
            http_us.append(http_cost(member, "/reservations", round_, count))
    pub.close()
    context.term()
    return statistics.median(events_us[1:]), statistics.median(http_us[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--reference", type=Path, help="python of an environment with the reference"
    )
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    names: dict[str, Path | None] = {"ours": None}
    if args.reference is not None:
        names["reference"] = args.reference
    grows: dict[str, float] = {}
    for name, python in names.items():
        base, grows[name] = published(python, args.requests, args.rounds)
        print(
            f"{name}: {base:.1f} us CPU per request without replica sync; "
            f"{grows[name]:.1f} us more per published event ({grows[name] / base:.2f} of a request)"
        )
        event_us, http_us = applied(python, args.requests, args.rounds)
        print(
            f"{name}: {event_us:.1f} us CPU per applied event, {http_us:.1f} us for the same over "
            f"HTTP ({event_us / http_us:.2f})"
        )
    if "reference" in grows:
        print(f"published event, ours / reference: {grows['ours'] / grows['reference']:.2f}")


if __name__ == "__main__":
    main()
