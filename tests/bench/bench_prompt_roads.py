"""What reading a prompt costs, from bytes to bytes: its forms, and with and without simdjson.

    python tests/bench/bench_prompt_roads.py TRACE.jsonl.gz [--blocks 500000] [--workers 16]

The trace is in the Mooncake format. Its first requests fill the index of a fleet, the next ones are
asked: no prompt twice in a round, so that what only a request touches is cold, as in a service.
Requests pass the protocol, the gate and the core in process, without system calls. CPU time, the
best round of several. Run by hand, never pass or fail.
"""

import argparse
import gc
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import msgspec

from lean_selector.core.hashing import sequence_hashes_bytes
from lean_selector.core.selection.shapes import WorkerSpec
from lean_selector.http.connections import Connections
from lean_selector.http.protocol import HttpProtocol
from lean_selector.http.response import date_header
from lean_selector.service.gate import Gate
from lean_selector.service.selection import SelectionService
from lean_selector.wire.scalars import HAS_SIMDJSON, unpack_signed
from loadtest.duel.prompts import http
from tests.bench.bench_http import NullTransport
from tests.bench.bench_kv_index import Load
from tests.support.gates import selection_service

PROMPTS = 300  # of a round
ROUNDS = 7
LENGTHS = (8, 64, 512, 4096)

Encode = Callable[[bytes], bytes]
_json = msgspec.json.Encoder().encode
_msgpack = msgspec.msgpack.Encoder().encode


class Fleet:
    """A service whose workers hold blocks of the trace, and the prompts that come next."""

    def __init__(self, trace: Path, blocks: int, workers: int) -> None:
        date_header.set(1_700_000_000.0)
        self.service: SelectionService = selection_service()
        selector = self.service.selector
        for worker_id in range(workers):
            spec = WorkerSpec(worker_id=worker_id, endpoint="http://w", block_size=16)
            selector.upsert_worker(spec, 0.0)
        self.partition = selector.ready_partition("default", "default")
        load = Load(trace, workers)
        load.index = self.partition.index
        load.fill(blocks)
        self.prompts = list(islice(load.prompts, 2 * PROMPTS))
        self._protocol = HttpProtocol(
            Gate(self.service.routes()), Connections(call_soon=lambda callback: None)
        )
        self._protocol.connection_made(NullTransport())

    def microseconds(self, requests: list[bytes], free: list[bytes] | None = None) -> float:
        """CPU of one request of these, the best round; `free` undoes a round."""
        receive, best = self._protocol.data_received, float("inf")
        for _ in range(ROUNDS):
            gc.collect()
            gc.disable()
            started = time.thread_time()
            for request in requests:
                receive(request)
            best = min(best, time.thread_time() - started)
            for request in free or ():
                receive(request)
            gc.enable()
        return best / len(requests) * 1e6


def fields(local: bytes, as_list: Callable[[bytes], object]) -> dict[str, object]:
    return {
        "block_hashes": as_list(local),
        "sequence_hashes": as_list(sequence_hashes_bytes(local)),
        "isl_tokens": 2 * len(local),
    }


def json_select(local: bytes) -> bytes:
    return http("POST", "/select", _json(fields(local, unpack_signed)))


def packed_select(local: bytes) -> bytes:
    body = _msgpack(fields(local, bytes))
    return http("POST", "/select", body, "application/msgpack")


def listed_select(local: bytes) -> bytes:
    body = _msgpack(fields(local, unpack_signed))
    return http("POST", "/select", body, "application/msgpack")


def tokens_select(local: bytes) -> bytes:
    """Tokens of many sizes in place of hashes: as many, matching nothing."""
    tokens = [value % 128_000 for value in memoryview(local * 2).cast("I")] * 4
    return http("POST", "/select", _json({"token_ids": tokens}))


def reserve(number: int, local: bytes) -> bytes:
    body = {"reservation_id": f"r{number}", **fields(local, unpack_signed)}
    return http("POST", "/select_and_reserve", _json(body))


def report(fleet: Fleet) -> None:
    prompts = fleet.prompts[:PROMPTS]
    blocks = sum(map(len, prompts)) // 8 // len(prompts)
    for name, encode in (("JSON", json_select), ("tokens", tokens_select)):
        took = fleet.microseconds([encode(local) for local in prompts])
        print(f"  select, trace prompts ({blocks} blocks), {name:14} {took:8.1f} us")
    frees = [http("DELETE", f"/reservations/r{number}") for number in range(PROMPTS)]
    took = fleet.microseconds([reserve(*item) for item in enumerate(prompts)], frees)
    print(f"  select_and_reserve, trace prompts, JSON     {took:8.1f} us")
    long = max(fleet.prompts, key=len)
    long *= -(-8 * max(LENGTHS) // len(long))
    for length in LENGTHS:
        took = fleet.microseconds([json_select(long[: 8 * length])] * 200)
        print(f"  select, {length:4} blocks, JSON                     {took:8.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--blocks", type=int, default=500_000)
    parser.add_argument("--workers", type=int, default=16)
    args = parser.parse_args()
    fleet = Fleet(args.trace, args.blocks, args.workers)
    prompts = fleet.prompts[:PROMPTS]
    started = time.thread_time()
    for local in prompts:
        fleet.partition.index.match_sets(local)
    print(f"match of a prompt, first round {(time.thread_time() - started) / PROMPTS * 1e6:.1f} us")
    for name, encode in (("bin", packed_select), ("arrays", listed_select)):
        took = fleet.microseconds([encode(local) for local in prompts])
        print(f"  select, trace prompts, MessagePack {name:8} {took:8.1f} us")
    print("JSON read with simdjson" if HAS_SIMDJSON else "JSON read with msgspec alone")
    report(fleet)


if __name__ == "__main__":
    main()
