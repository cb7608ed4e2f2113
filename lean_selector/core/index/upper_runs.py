"""The largest runs of the index's trie, from the root down: the prefixes that prompts share.

The web page shows these runs; no choice of a rank uses them. A limited number is visited. A run's
size is estimated: (blocks of the run that each rank holds, summed) * (1 + number of children)."""

import heapq
from collections.abc import Iterator
from itertools import islice
from typing import Final

from lean_selector.core.index.runs import Run
from lean_selector.core.index.shapes import UpperRun

MOST_CHILDREN: Final = 4096  # at most this many children of a run are visited, the oldest first
_MOST_LOOKED: Final = 20_000
_STEP: Final = 128  # children or partial holders per step

Hits = dict[Run, int]


def upper_runs(
    root: Run, in_use: int, most: int, hits: Hits | None = None
) -> Iterator[UpperRun | None]:
    """Yield at most `most` runs, parents before children. Only the ranks in the set `in_use` count.

    `hits`: how many prompts matched each run. Yields None where the caller may pause. The trie may
    change in a pause, so a run may be yielded although it was removed after the walk visited it."""
    # Ordered by weight. The serial number breaks ties.
    heap: list[tuple[int, int, int, int, int, int, Run]] = []
    above, depth, run = -1, 0, root
    number = serial = looked = step = 0
    while True:
        children = (
            [] if run.children is None else list(islice(run.children.values(), MOST_CHILDREN))
        )
        for child in children:
            if looked == _MOST_LOOKED:
                break
            looked += 1
            serial += 1
            holders, held = _held(child, in_use)
            if holders:
                weight = held * (1 + (len(child.children) if child.children else 0))
                heapq.heappush(heap, (-weight, serial, above, depth, holders, held, child))
            step += 1 + (len(child.partial) if child.partial else 0)
            if step >= _STEP:
                step = 0
                yield None
        if not heap or number == most:
            return
        _, _, parent, depth, holders, held, run = heapq.heappop(heap)
        blocks = len(run.label) >> 3
        yield UpperRun(
            parent,
            depth,
            blocks,
            holders,
            held,
            0 if run.children is None else len(run.children),
            bytes(run.label[:8])[::-1].hex(),
            None if hits is None else hits.get(run, 0),
        )
        above, depth = number, depth + blocks
        number += 1


def _held(run: Run, in_use: int) -> tuple[int, int]:
    """Return how many ranks of `in_use` hold blocks of a run, and the sum of their held blocks."""
    holders = (run.whole & in_use).bit_count()
    held = holders * (len(run.label) >> 3)
    for bit, positions in (run.partial or {}).items():
        if in_use >> bit & 1:
            holders += 1
            held += positions.bit_count()
    return holders, held
