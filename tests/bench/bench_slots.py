"""CPU cost of the slots on prompts of a recorded trace. Run by hand:

    python tests/bench/bench_slots.py TRACE.jsonl.gz

TRACE: the Mooncake conversation trace, one JSON object a line whose `hash_ids` name 512-token
blocks; each is expanded to 32 blocks of 16 tokens with chained hashes. 16 ranks, 200 requests live
at a time.
"""

import gzip
import json
import random
import sys
import time
from collections import deque
from itertools import cycle

import xxhash

from lean_selector.core.load.shapes import Booking
from lean_selector.core.load.slots import Slots

RANKS = 16
LIVE = 200
EXPANSION = 32  # 512-token trace blocks to 16-token blocks


def trace_prompts(path: str, limit: int) -> list[bytes]:
    """Sequence hashes of the first prompts of the trace, 8 bytes per block."""
    prompts = []
    known: dict[tuple[bytes, int], list[bytes]] = {}  # one object per chain keeps memory small
    with gzip.open(path, "rt") as lines:
        for line in lines:
            parent = b""
            chain: list[bytes] = []
            for hash_id in json.loads(line)["hash_ids"]:
                blocks = known.get((parent, hash_id))
                if blocks is None:
                    blocks = known[parent, hash_id] = []
                    last = parent
                    for part in range(EXPANSION):
                        block = (hash_id * EXPANSION + part).to_bytes(8, "little")
                        last = xxhash.xxh3_64_intdigest(last + block, 1337).to_bytes(8, "little")
                        blocks.append(last)
                chain += blocks
                parent = blocks[-1]
            prompts.append(b"".join(chain))
            if len(prompts) == limit:
                break
    return prompts


def loaded_slots() -> Slots:
    slots = Slots()
    for worker_id in range(RANKS):
        slots.add_rank(worker_id, 0)
    return slots


def report(name: str, seconds: float, times: int) -> None:
    print(f"{name:44} {seconds / times * 1e6:8.2f} us")


def measure(prompts: list[bytes]) -> None:
    rng = random.Random(1)
    slots = loaded_slots()
    live: deque[str] = deque()
    steps = [(f"r{n}", rng.randrange(RANKS), hashes) for n, hashes in enumerate(prompts)]
    clock = time.perf_counter
    book_s = free_s = prefix_s = complete_s = output_s = 0.0
    for now, (request_id, worker_id, hashes) in enumerate(steps):
        t0 = clock()
        slots.active_prefix(hashes)
        t1 = clock()
        slots.book(Booking(request_id, worker_id, 0, prefill_tokens=1000), hashes, now)
        t2 = clock()
        slots.prefill_complete(request_id, now)
        t3 = clock()
        slots.output_block(request_id, now)
        t4 = clock()
        live.append(request_id)
        prefix_s, book_s, complete_s, output_s = (
            prefix_s + t1 - t0,
            book_s + t2 - t1,
            complete_s + t3 - t2,
            output_s + t4 - t3,
        )
        if len(live) > LIVE:
            oldest = live.popleft()
            t0 = clock()
            slots.free(oldest, now)
            free_s += clock() - t0
    count = len(steps)
    print(f"{count} prompts, {sum(map(len, prompts)) / 8 / count:.0f} blocks on average")
    report("active_prefix", prefix_s, count)
    report("book", book_s, count)
    report("prefill_complete", complete_s, count)
    report("output_block", output_s, count)
    report("free", free_s, count - LIVE)
    weigh(slots, live)


def weigh(slots: Slots, live: deque[str]) -> None:
    """The worst case for weights: every live request decays, each by its own fraction."""
    rng = random.Random(2)
    for request_id in live:
        slots.output_block(request_id, 0.0, rng.random())
    rounds = 10_000
    started = time.perf_counter()
    for request_id, _ in zip(cycle(live), range(rounds), strict=False):
        slots.output_block(request_id, 0.0, rng.random())
    report("output_block with a fraction", time.perf_counter() - started, rounds)
    started = time.perf_counter()
    for request_id, _ in zip(cycle(live), range(rounds), strict=False):
        slots.output_block(request_id, 0.0, 0.5)
    report("output_block, 0.5 everywhere", time.perf_counter() - started, rounds)


if __name__ == "__main__":
    measure(trace_prompts(sys.argv[1], 10_000))
