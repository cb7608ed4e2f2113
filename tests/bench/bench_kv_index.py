"""The index alone, fed with a request trace: time per block, memory, and the longest single call.

    python tests/bench/bench_kv_index.py TRACE.jsonl.gz [--blocks 500000] [--workers 16]

The trace is in the Mooncake format: `hash_ids` are 512-token blocks, expanded here to 32 blocks of
16 tokens. Requests go to the workers in turn; a worker's hashes are its own. Times per block are
CPU time; so are pauses, without the collector, which would mostly visit the lists of this program:
it has a line of its own. Run by hand, never pass or fail.
"""

import argparse
import gc
import gzip
import json
import os
import struct
import time
from collections.abc import Iterator
from operator import sub
from pathlib import Path

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Tier

EXPAND = 32  # 16-token blocks in a block of the trace
EVENT_BLOCKS = 64  # blocks per stored event: a prefill chunk of 1024 tokens
CHURN_EVENT_BLOCKS = 8

clock = time.thread_time


def mixed(value: int) -> int:
    """A well spread u64 for a number (splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & (2**64 - 1)
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    value = (value ^ value >> 27) * 0x94D049BB133111EB & (2**64 - 1)
    return value ^ value >> 31


def prompts_of(trace: Path) -> Iterator[bytes]:
    """Local hashes of each request of the trace, over and over, later rounds as new prompts."""
    with gzip.open(trace, "rt") as lines:
        requests = [json.loads(line)["hash_ids"] for line in lines if line.strip()]
    for shift in range(0, 1 << 60, 1 << 40):
        for hash_ids in requests:
            blocks = [
                mixed(shift + hash_id * EXPAND + at) for hash_id in hash_ids for at in range(EXPAND)
            ]
            yield struct.pack(f"<{len(blocks)}Q", *blocks)


def names_of(worker: int, local: bytes) -> list[int]:
    """The worker's own hashes of a chain of blocks."""
    names, name = [], worker + 1
    for (block,) in struct.iter_unpack("<Q", local):
        name = (name * 0x9E3779B97F4A7C15 + block * 0xBF58476D1CE4E5B9 + 1) & (2**64 - 1)
        names.append(name ^ name >> 29)
    return names


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class Load:
    """An index, the engines' events to fill and empty it, and the time spent inside its calls."""

    def __init__(self, trace: Path, workers: int) -> None:
        self.index = KvIndex(16)
        self.prompts = prompts_of(trace)
        self.workers = workers
        self.turn = 0
        self.seconds = 0.0
        self.done = 0  # blocks
        self.pauses: list[float] = []
        self.held: list[list[list[int]]] = [[] for _ in range(workers)]

    def reset(self) -> None:
        self.seconds, self.done, self.pauses = 0.0, 0, []

    def line(self, what: str) -> str:
        pauses = sorted(self.pauses)
        worst, high = pauses[-1] * 1e3, pauses[int(len(pauses) * 0.999)] * 1e3
        return (
            f"{what:34} {self.seconds / self.done * 1e6:8.3f} us/block {len(pauses):8} calls"
            f"  p99.9 {high:7.3f} ms  worst {worst:7.3f} ms"
        )

    def _store(self, worker: int, events: list[tuple[int | None, list[int], bytes]]) -> None:
        store, times, cpu = self.index.store, [clock()], time.thread_time()
        for parent, names, local in events:
            store(worker, 0, Tier.DEVICE, parent, names, local)
            times.append(clock())
        self.seconds += time.thread_time() - cpu
        self.pauses += map(sub, times[1:], times)

    def _remove(self, worker: int, events: list[list[int]]) -> None:
        remove, times, cpu = self.index.remove, [clock()], time.thread_time()
        for names in events:
            self.done += remove(worker, 0, Tier.DEVICE, names)
            times.append(clock())
        self.seconds += time.thread_time() - cpu
        self.pauses += map(sub, times[1:], times)

    def add_prompt(self, keep: bool, event_blocks: int = EVENT_BLOCKS) -> int:
        """One worker prefills one prompt: events for the blocks it does not hold yet."""
        local = next(self.prompts)
        worker = self.turn % self.workers
        self.turn += 1
        hit = self.index.match(local).get((worker, 0))
        held = hit.device if hit else 0
        names = names_of(worker, local)
        total = len(names)
        events = []
        for at in range(held, total, event_blocks):
            parent = names[at - 1] if at else None
            end = min(total, at + event_blocks)
            events.append((parent, names[at:end], local[at * 8 : end * 8]))
        self._store(worker, events)
        self.done += total - held
        if keep:
            self.held[worker].append(names[held:])
        return total - held

    def fill(self, blocks: int, keep: bool = False, event_blocks: int = EVENT_BLOCKS) -> None:
        while self.index.total_blocks < blocks:
            self.add_prompt(keep, event_blocks)

    def evict(self, worker: int, blocks: int, event_blocks: int) -> None:
        """The worker drops its oldest prompts, each from its end."""
        gone = 0
        while gone < blocks and self.held[worker]:
            names = self.held[worker].pop(0)
            starts = range(len(names), 0, -event_blocks)
            self._remove(worker, [names[max(0, at - event_blocks) : at][::-1] for at in starts])
            gone += len(names)


def time_matches(index: KvIndex, prompts: list[bytes]) -> str:
    """Best of five rounds over prompts of the trace, per call."""
    rounds = []
    for _ in range(5):
        start = time.thread_time()
        for prompt in prompts:
            index.match(prompt)
        rounds.append((time.thread_time() - start) / len(prompts))
    blocks = sum(map(len, prompts)) // 8 // len(prompts)
    hits = [max((hit.device for hit in index.match(p).values()), default=0) for p in prompts]
    return (
        f"{min(rounds) * 1e6:8.2f} us/match (first round {rounds[0] * 1e6:.2f}), "
        f"{blocks} blocks a prompt, {sum(hits) / len(hits):.0f} of them held"
    )


def run(trace: Path, blocks: int, workers: int) -> None:
    gc.disable()
    recent = 2000
    load = Load(trace, workers)
    sample = [next(load.prompts) for _ in range(recent)]
    load.prompts = prompts_of(trace)
    load.fill(10_000)
    print(f"{'match at 10 000 holdings':34}", time_matches(load.index, sample))

    load = Load(trace, workers)
    next(load.prompts)
    gc.collect()
    before = resident_bytes()
    load.fill(blocks)
    gc.collect()
    held = load.index.total_blocks
    print(load.line(f"ingest, {EVENT_BLOCKS} blocks an event"))
    trie = load.index._device.trie
    runs = sum(len(trie.pieces(strand)) for strand in trie.strands)
    per_block = (resident_bytes() - before - 8 * len(load.pauses)) / held
    print(f"{'memory':34} {per_block:8.1f} bytes/block at {held} holdings in {runs} runs")
    print(f"{'match':34}", time_matches(load.index, sample))
    start = clock()
    gc.collect()
    print(f"{'full collection':34} {(clock() - start) * 1e3:8.3f} ms, modules included")
    start, events = clock(), 0
    for slice_ in load.index.dump():
        events += len(slice_)
    print(f"{'dump':34} {(clock() - start) * 1e3:8.1f} ms, {events} events")

    for event_blocks in (1, 8):
        load = Load(trace, workers)
        load.fill(blocks // 5, keep=True, event_blocks=event_blocks)
        print(load.line(f"ingest, {event_blocks} blocks an event"))
        load.reset()
        for worker in range(workers):
            load.evict(worker, blocks, event_blocks)
        print(load.line(f"removal, {event_blocks} blocks an event"))

    load = Load(trace, workers)
    load.fill(1_000_000, keep=True)
    print(load.line("ingest up to 1 000 000"))
    print(f"{'match at 1 000 000 holdings':34}", time_matches(load.index, sample))
    load.reset()
    churned = 0
    while churned < 250_000:  # five seconds of 50 000 blocks a second
        worker = load.turn % workers
        added = load.add_prompt(True, CHURN_EVENT_BLOCKS)
        load.evict(worker, load.index.total_blocks - 1_000_000, CHURN_EVENT_BLOCKS)
        churned += added
    print(load.line(f"churn at {load.index.total_blocks} holdings"))
    start = clock()
    load.index.clear(0, 0)
    print(f"{'clear of one rank':34} {(clock() - start) * 1e3:8.3f} ms")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", nargs="?", default=os.environ.get("KV_TRACE"), type=Path)
    parser.add_argument("--blocks", type=int, default=500_000)
    parser.add_argument("--workers", type=int, default=16)
    options = parser.parse_args()
    if options.trace is None:
        parser.error("a trace is needed, as an argument or in KV_TRACE")
    run(options.trace, options.blocks, options.workers)
