"""Times the index's match without a service around it; a program, run by the interpreter of a form.

    index_match.py HOLDINGS [--trace FILE]

prints CPU microseconds per match of a held prompt.
"""

import argparse
import gc
import struct
import sys
import time
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    # Last, and not first as the folder of a program: the package may be a checkout's there.
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Tier
from loadtest.duel.engines import EVENT_BLOCKS
from loadtest.duel.prompts import Prompts

PROMPTS = 600  # held ones whose match is timed, of 815 blocks in the mean
LOOPS = 5
_WORKERS = 16


def match_us(trace: Path | None, holdings: int) -> float:
    """CPU microseconds per match of prompts that are held, among so many block-holdings."""
    prompts = Prompts(trace, 16)
    index, names_held = KvIndex(16), [set[int]() for _ in range(_WORKERS)]
    held, used = 0, 0
    while held < holdings:
        prompt, worker = prompts.at(used), used % _WORKERS
        own = (worker + 1) * 0x9E3779B97F4A7C15 & (2**63 - 1)
        names = [name ^ own for name in struct.unpack(f"<{prompt.blocks}Q", prompt.sequence)]
        known = names_held[worker]
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
    asked = [bytes(bytearray(prompts.at(number).local)) for number in range(PROMPTS)]
    gc.disable()
    figures = []
    for _ in range(LOOPS):
        before = time.thread_time_ns()
        for local in asked:
            index.match(local)
        figures.append((time.thread_time_ns() - before) / 1e3 / len(asked))
    return median(figures)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("holdings", type=int)
    parser.add_argument("--trace", type=Path)
    args = parser.parse_args()
    print(match_us(args.trace, args.holdings))


if __name__ == "__main__":
    main()
