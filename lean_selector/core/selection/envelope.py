"""A draw by weight that does not cost every rank: rejection sampling under an envelope.

The weight of a rank is exp(-x / T), where x is its cost scaled to 0..1 over the candidates. The
envelope is made of parts, each some ranks of a cell and a bound that none of them outweighs: the
least load among them, as the order has it, gives one. A part is drawn by how many ranks it has
times its bound, then one of them evenly, and that one is kept with the chance weight / bound. So
each rank is as likely as its weight says, however loose the bounds are; they decide how often one
is kept. Where a rank is drawn that weighs far less than its part's bound, as most do at a low
temperature, the part is divided along the order of loads, until what is left of it cannot weigh
much. Each draw is fair by itself, so that does not change the chances. Spec selection.md 3.3.
"""

import math
import random

from lean_selector.core.load.load_order import LoadOrder
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.rank_bits import bits_of, nth_bit
from lean_selector.core.selection.cells import Cell, Pricing

FAR = 0.1  # of its bound: who weighs less shows that the bound is too loose
_STEP = 1.0  # from part to part of a divided one bounds fall by so much, as exponents
_LEFT = 0.01  # of the mass of all other parts: so much of a part is not worth dividing
_FEW_RANKS = 6  # so many are costed one by one
_WHOLE = 0  # the place in its order where a part begins that was not divided
_DIVIDED = -1  # in place of one: nothing is to be gained by dividing it


class Part:
    """Ranks of a cell, and what none of them outweighs."""

    __slots__ = ("bound", "cell", "mass", "place", "ranks")

    def __init__(self, cell: Cell, ranks: int, bound: float, place: int) -> None:
        self.cell = cell
        self.ranks = ranks
        self.bound = bound
        self.place = place  # where the order goes on with them, or _DIVIDED
        self.mass = ranks.bit_count() * bound


class Envelope:
    """The candidates in parts, finer with each draw that shows a loose one."""

    __slots__ = (
        "_least",
        "_now",
        "_order",
        "_pricing",
        "_spread",
        "_temperature",
        "parts",
    )

    def __init__(
        self,
        order: LoadOrder,
        pricing: Pricing,
        cells: list[Cell],
        least: float,
        spread: float,
        temperature: float,
        now: float,
    ) -> None:
        """`least` is the lowest cost in these cells, and `spread` how much more the highest is;
        positive and finite."""
        self._order = order
        self._pricing = pricing
        self._least = least
        self._spread = spread
        self._temperature = temperature
        self._now = now
        self.parts: list[Part] = []
        falling = order.falling
        for cell in cells:
            ranks = cell.ranks
            wearing_off = ranks & falling
            if wearing_off:
                ranks ^= wearing_off
                bound = self._bound(cell, order.by_standing[0][0])
                self.parts.append(Part(cell, wearing_off, bound, _WHOLE))
            if ranks:
                bound = self._bound(cell, pricing.slope * order.loads[0].key)
                self.parts.append(Part(cell, ranks, bound, _WHOLE))

    def draw(self, rng: random.Random, tries: int) -> int:
        """The bit of a rank; -1 if of so many none was kept."""
        order, pricing, now, parts = self._order, self._pricing, self._now, self.parts
        total = sum([part.mass for part in parts])
        for _ in range(tries):
            at = rng.random() * total
            for part in parts:
                if at < part.mass:
                    break
                at -= part.mass
            else:
                continue  # rounding led beyond the last, by a hair
            ranks, bound = part.ranks, part.bound
            bit = nth_bit(ranks, min(ranks.bit_count() - 1, int(at / bound)))
            load = order.rank(bit)
            cost = pricing.cost(part.cell, load.prefill_tokens_at(now), load.standing)
            weight = self._weight(cost)
            if rng.random() * bound < weight:
                return bit
            if weight < FAR * bound and part.place != _DIVIDED:
                number = parts.index(part)
                parts[number : number + 1] = self._divided(part, total - part.mass)
                total = sum([part.mass for part in parts])
        return -1

    def _weight(self, cost: float) -> float:
        return math.exp(-((cost - self._least) / self._spread) / self._temperature)

    def _weight_of(self, cell: Cell, load: RankLoad) -> float:
        tokens = load.prefill_tokens_at(self._now)
        return self._weight(self._pricing.cost(cell, tokens, load.standing))

    def _bound(self, cell: Cell, load: float) -> float:
        """What no rank of the cell outweighs whose load costs so much or more."""
        above = (self._pricing.at_least(cell, load) - self._least) / self._spread
        above /= self._temperature
        return math.exp(-above) if above > 0.0 else 1.0  # also if that cannot be told

    def _divided(self, part: Part, others: float) -> list[Part]:
        """The same ranks in parts with closer bounds; `others` is the mass of all other parts."""
        if part.ranks.bit_count() <= _FEW_RANKS:
            return self._one_by_one(part)
        enough = others * _LEFT  # or as much as was cut off
        if part.ranks & self._order.falling:
            return self._by_standing(part, enough)
        return self._by_load(part, enough)

    def _one_by_one(self, part: Part) -> list[Part]:
        order, cell = self._order, part.cell
        loads = [order.rank(bit) for bit in bits_of(part.ranks)]
        return [Part(cell, load.mask, self._weight_of(cell, load), _DIVIDED) for load in loads]

    def _by_load(self, part: Part, enough: float) -> list[Part]:
        """Cut where the bound has fallen by a step; or, where a load says too little of the cost,
        load by load."""
        cell, pricing, ranks, place = part.cell, self._pricing, part.ranks, part.place
        order = self._order
        loads = order.loads
        is_tight = pricing.is_tight(cell)
        step = _STEP * self._temperature * self._spread / cell.factor
        found: list[Part] = []
        while ranks:
            bucket = loads[place]
            here = bucket.ranks & ranks
            place += 1
            if not here:
                continue
            bound = self._bound(cell, pricing.slope * bucket.key)
            if ranks.bit_count() * bound <= enough:
                found.append(Part(cell, ranks, bound, place - 1))
                break
            if is_tight:
                end = order.place_of(bucket.key + step, place)
                for other in loads[place:end]:
                    here |= other.ranks
                here &= ranks
                place = end
            else:
                bound = self._weight(pricing.cost(cell, bucket.tokens, bucket.standing))
            found.append(Part(cell, here, bound, _DIVIDED))
            enough += found[-1].mass
            ranks ^= here
        return found

    def _by_standing(self, part: Part, enough: float) -> list[Part]:
        """Rank by rank, since what wears off says nothing of what is left of it."""
        order, cell, ranks = self._order, part.cell, part.ranks
        found: list[Part] = []
        for place, (standing, bit) in enumerate(order.by_standing[part.place :], part.place):
            if not ranks >> bit & 1:
                continue
            bound = self._bound(cell, standing)
            if ranks.bit_count() * bound <= enough:
                found.append(Part(cell, ranks, bound, place))
                break
            load = order.rank(bit)
            found.append(Part(cell, load.mask, self._weight_of(cell, load), _DIVIDED))
            enough += found[-1].mass
            ranks ^= load.mask
        return found
