"""How much the fractional blocks of one rank weigh together (spec: selection.md section 6).

A rank's decode load is its number of distinct blocks, where some count as a fraction. The reference
adds the fractions one block after another in f64, and the rounding errors decide ties: 10 blocks at
0.85 print as 8. This module gives that result without the walk over the blocks. Knows nothing of
prompts.
"""

from math import floor, frexp


class BlockWeights:
    """Tally of the blocks whose weight is not 1: weight -> number of blocks."""

    __slots__ = ("_counted", "_missing", "counts")

    def __init__(self) -> None:
        self.counts: dict[float, int] = {}  # 0 <= weight < 1, count >= 1
        self._missing: float | None = (
            None  # about how much they fall short of weight 1; None: stale
        )
        self._counted = 0  # sum of counts, valid with _missing

    def move(self, old: float, new: float, blocks: int) -> None:
        """Change the weight of some blocks. A block enters the tally from 1.0, and leaves it to
        1.0."""
        if old == new or not blocks:
            return
        self._missing = None
        counts = self.counts
        if old != 1.0:
            left = counts[old] - blocks
            if left:
                counts[old] = left
            else:
                del counts[old]
        if new != 1.0:
            counts[new] = counts.get(new, 0) + blocks

    def rounded_total(self, distinct_blocks: int) -> int:
        """What a rank's blocks weigh, rounded half away from zero.

        `distinct_blocks` counts every block of the rank once, the fractional ones included. The
        blocks are added in the order of their weights; the reference leaves the order open.
        """
        missing = self._missing
        if missing is None:
            missing = self._missing = _shortfall(self.counts)
            self._counted = sum(self.counts.values())
        total = distinct_blocks - missing
        # Each block's two operations err by half an ulp of at most distinct_blocks, and `missing`
        # by less. Only a total that close to a half needs the very sum that the reference would
        # have got.
        doubt = (self._counted + 4) * distinct_blocks * 2.0**-51
        if abs(total - floor(total) - 0.5) <= doubt:
            total = float(distinct_blocks)
            for weight in sorted(self.counts):
                total = _weigh_one_by_one(total, weight, self.counts[weight])
        whole = floor(total)
        return whole + 1 if total - whole >= 0.5 else whole


def _shortfall(counts: dict[float, int]) -> float:
    missing = 0.0  # by hand: sum() of floats rounds differently since Python 3.12
    for weight, blocks in counts.items():
        missing += blocks * (1.0 - weight)
    return missing


def _weigh_one_by_one(total: float, weight: float, blocks: int) -> float:
    """The f64 that `total = total - 1.0 + weight` leaves when repeated `blocks` times.

    While the total stays between the same powers of two, every step moves it by the same amount (a
    tie is rounded to even, and 1 is an even number of ulps), so that all steps but the first few
    are one product, which is exact: a multiple of the ulp, and below 2**53 of them.
    """
    while blocks:
        total = total - 1.0 + weight
        blocks -= 1
        step = (total - 1.0 + weight) - total
        if step == 0.0:
            break
        power_below = 2.0 ** (frexp(total)[1] - 1)
        same = min(blocks, int((total - 1.0 - power_below) / -step))
        if same > 0:
            total += same * step
            blocks -= same
    return total
