"""Who is taken of the ranks of some cells: the cheapest, or drawn by cost.

Without a temperature the order of loads is walked from its beginning, and for each cell no farther
than something as cheap as the best so far can be. With one, the weight of a rank is a function of
its own cost, of the least and of the most. So where loads differ too much to cost them all, it is
drawn under an `Envelope`, which gives each the same chance. Pure: the random source and the time
are arguments. Spec selection.md 3.3.
"""

import math
import random

from lean_selector.core.load.load_order import LoadOrder
from lean_selector.core.rank_bits import bits_of, nth_bit
from lean_selector.core.selection.cells import Cell, Pricing
from lean_selector.core.selection.cost import softmax
from lean_selector.core.selection.envelope import Envelope

Costed = list[tuple[float, int]]  # (cost, the ranks that have it), apart from each other

# A set this small is costed rank by rank: cheaper than looking for it along the order.
_FEW_RANKS = 6
FEW_LOADS = 12  # so many are costed, whatever the temperature
TRIES = 16  # then all loads are costed: their bounds say too little of them


def drawn(
    order: LoadOrder,
    pricing: Pricing,
    cells: list[Cell],
    temperature: float,
    now: float,
    rng: random.Random,
) -> int:
    """The bit of the rank that is taken; there is one."""
    if temperature <= 0.0:
        return _of_equals(cheapest(order, pricing, cells, now)[1], rng)
    if len(order.loads) + len(order.by_standing) > FEW_LOADS:
        least, tied = cheapest(order, pricing, cells, now)
        spread = dearest(order, pricing, cells, now) - least
        if not 0.0 < spread < math.inf:
            return _of_equals(tied, rng)
        envelope = Envelope(order, pricing, cells, least, spread, temperature, now)
        bit = envelope.draw(rng, TRIES)
        if bit >= 0:
            return bit
    costed = all_costs(order, pricing, cells, now)
    weights = softmax([cost for cost, _ in costed], temperature)
    if weights is not None:
        return _by_weight(costed, weights, rng)
    least = min(cost for cost, _ in costed)
    return _of_equals([ranks for cost, ranks in costed if cost == least], rng)


def cheapest(
    order: LoadOrder, pricing: Pricing, cells: list[Cell], now: float
) -> tuple[float, list[int]]:
    """The least cost in these cells, and the sets of ranks that have it, apart from each other.

    Loads whose order is decided by rounding alone may cost the same, or compare the other way
    round: all within the rounding error of the least are costed.
    """
    least, tied = math.inf, list[int]()
    slope = pricing.slope
    for cell in cells:
        ranks = cell.ranks
        limit = pricing.beyond(cell, least) if tied else math.inf
        if ranks.bit_count() <= _FEW_RANKS:
            if order.loads and not order.falling and slope * order.loads[0].key > limit:
                continue
            for bit in bits_of(ranks):
                load = order.rank(bit)
                cost = pricing.cost(cell, load.prefill_tokens_at(now), load.standing)
                if cost < least:
                    least, tied = cost, [load.mask]
                elif cost == least:
                    tied.append(load.mask)
            continue
        for bucket in order.loads:
            if slope * bucket.key > limit:
                break
            found = bucket.ranks & ranks
            if found:
                cost = pricing.cost(cell, bucket.tokens, bucket.standing)
                if cost < least:
                    least, tied = cost, [found]
                    limit = pricing.beyond(cell, least)
                elif cost == least:
                    tied.append(found)
        if not ranks & order.falling:
            continue
        for standing, bit in order.by_standing:
            if standing > limit:
                break
            if ranks >> bit & 1:
                load = order.rank(bit)
                cost = pricing.cost(cell, load.prefill_tokens_at(now), standing)
                if cost < least:
                    least, tied = cost, [load.mask]
                    limit = pricing.beyond(cell, least)
                elif cost == least:
                    tied.append(load.mask)
    return least, tied


def dearest(order: LoadOrder, pricing: Pricing, cells: list[Cell], now: float) -> float:
    """The greatest cost in these cells, exact as the least is."""
    most = -math.inf
    reach = pricing.reach
    for cell in cells:
        ranks = cell.ranks
        one_by_one = ranks
        if ranks.bit_count() > _FEW_RANKS:
            one_by_one = ranks & order.falling
            limit = pricing.below(cell, most)
            for bucket in reversed(order.loads):
                if reach * bucket.key < limit:
                    break
                if bucket.ranks & ranks:
                    cost = pricing.cost(cell, bucket.tokens, bucket.standing)
                    if cost > most:
                        most = cost
                        limit = pricing.below(cell, most)
        for bit in bits_of(one_by_one):
            load = order.rank(bit)
            cost = pricing.cost(cell, load.prefill_tokens_at(now), load.standing)
            if cost > most:
                most = cost
    return most


def all_costs(order: LoadOrder, pricing: Pricing, cells: list[Cell], now: float) -> Costed:
    """What every rank in these cells costs."""
    costed: Costed = []
    falling = order.falling
    for cell in cells:
        ranks = cell.ranks
        one_by_one = ranks
        if ranks.bit_count() > len(order.loads):
            one_by_one = ranks & falling
            for bucket in order.loads:
                if found := bucket.ranks & ranks:
                    costed.append((pricing.cost(cell, bucket.tokens, bucket.standing), found))
        for bit in bits_of(one_by_one):
            load = order.rank(bit)
            tokens = load.prefill_tokens_at(now) if falling else load.active_prefill_tokens
            costed.append((pricing.cost(cell, tokens, load.standing), load.mask))
    return costed


def _by_weight(costed: Costed, weights: list[float], rng: random.Random) -> int:
    """The bit of one rank; each is drawn in proportion to its weight, which those of one cost
    share."""
    sums = [weight * ranks.bit_count() for (_, ranks), weight in zip(costed, weights, strict=True)]
    at = rng.random() * sum(sums)
    last = 0
    for number, here in enumerate(sums):
        if here:
            last = number
            if at < here:
                break
            at -= here
    # Rounding may lead beyond the last by a hair.
    ranks = costed[last][1]
    count = ranks.bit_count()
    return nth_bit(ranks, min(count - 1, int(at / weights[last])))


def _of_equals(tied: list[int], rng: random.Random) -> int:
    """The bit of one rank of these sets, each as likely as any other."""
    if len(tied) == 1:
        ranks = tied[0]
        count = ranks.bit_count()
        return nth_bit(ranks, int(rng.random() * count)) if count > 1 else ranks.bit_length() - 1
    counts = [ranks.bit_count() for ranks in tied]
    at = int(rng.random() * sum(counts))
    for ranks, count in zip(tied, counts, strict=True):
        if at < count:
            return nth_bit(ranks, at)
        at -= count
    raise AssertionError("at is below the sum of the counts")
