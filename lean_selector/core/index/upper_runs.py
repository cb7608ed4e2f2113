"""The runs of a trie that weigh most, from the root down: which prefixes prompts share.

A bounded walk, for people who look at the index; no choice depends on it. What weighs is what is
held below a run as far as one look tells: its own holdings, by how many runs hang on it.
"""

import heapq
from collections.abc import Iterator
from itertools import islice
from typing import Final

from lean_selector.core.index.runs import Run
from lean_selector.core.index.shapes import UpperRun

MOST_CHILDREN: Final = 4096  # of one run that are looked at, those that came first
_MOST_LOOKED: Final = 20_000
_STEP: Final = 128  # children, and holders of a part of one

Hits = dict[Run, int]


def upper_runs(
    root: Run, in_use: int, most: int, hits: Hits | None = None
) -> Iterator[UpperRun | None]:
    """Yields at most `most` runs, parents before their children. `in_use`: the ranks that count.

    None is yielded for a step without a run. The trie may change between steps: a run that is gone
    by then is yielded as it was when it was visited.
    """
    # By weight; the serial number says which of equals came first.
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
    """How many ranks hold blocks of a run, and how many blocks they hold together."""
    holders = (run.whole & in_use).bit_count()
    held = holders * (len(run.label) >> 3)
    for bit, positions in (run.partial or {}).items():
        if in_use >> bit & 1:
            holders += 1
            held += positions.bit_count()
    return holders, held
