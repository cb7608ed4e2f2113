"""Times the index's match of held prompts, of 815 blocks in the mean of the published trace.

    python -m tests.bench.bench_match [--trace FILE] [HOLDINGS ...]

Prints CPU microseconds per match among so many block-holdings, the median of five loops.
"""

import argparse
import gc
import time
from pathlib import Path
from statistics import median

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Tier
from loadtest.duel.engines import EVENT_BLOCKS, names_of
from loadtest.duel.prompts import Prompts

WORKERS = 16
MATCHES, LOOPS = 600, 5


def match_us(holdings: int, trace: Path | None) -> float:
    prompts = Prompts(trace, 16)
    index, names_held = KvIndex(16), [set[int]() for _ in range(WORKERS)]
    held, used = 0, 0
    while held < holdings:
        prompt, worker = prompts.at(used), used % WORKERS
        names, known = names_of(worker, prompt), names_held[worker]
        first = next((at for at, name in enumerate(names) if name not in known), len(names))
        for at in range(first, len(names), EVENT_BLOCKS):
            to = min(at + EVENT_BLOCKS, len(names))
            parent = names[at - 1] if at else None
            local = prompt.local[8 * at : 8 * to]
            index.store(worker, 0, Tier.DEVICE, parent, names[at:to], local)
        known.update(names)
        held += len(names) - first
        used += 1
    # The same prompts whatever is held, so that only the size of the index differs. Copies, as a
    # request's hashes are new bytes each time.
    asked = [bytes(bytearray(prompts.at(number).local)) for number in range(MATCHES)]
    gc.disable()
    figures = []
    for _ in range(LOOPS):
        before = time.thread_time_ns()
        for local in asked:
            index.match(local)
        figures.append((time.thread_time_ns() - before) / 1e3 / len(asked))
    return median(figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("holdings", type=int, nargs="*", default=[10_000, 500_000, 1_000_000])
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    for count in args.holdings:
        print(f"{count:9,} holdings: {match_us(count, args.trace):.2f} us")
