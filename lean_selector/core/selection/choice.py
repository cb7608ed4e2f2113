"""Choose a rank for a prompt without visiting each rank (spec selection.md 3.3).

A fleet may have 4 000 ranks, and the selector has some 100 us for a request. The cost of the prompt
differs from rank to rank, because each holds other blocks and has another load, and the loads
change with every request. To compute all costs takes milliseconds. It is of no use to
keep them sorted, since another prompt sorts them otherwise.

But most ranks are alike for a prompt: they hold nothing of it. So the ranks are divided into cells.
The ranks of a cell differ only in load; whatever else the cost depends on is equal. Within a cell,
the cheapest rank is the one with the least load, and the order of loads is the same for all prompts
(`load_order.py` keeps it). So each cell is walked in this order, until no further load can be
cheaper than the best rank so far: mostly one or two steps. With a temperature, the choice is
random, and cheaper ranks are more likely; then, too, a rank is mostly drawn without all costs.

What goes wrong is rounding, and terms that are not plain sums. A cost is computed in floats, so a
higher load may have the same cost, or a lower one: the walk goes on as long as the rounding error
allows. Where the order of loads does not tell the exact cost (a decay of the credit, a limit of
it), it gives bounds, and the walk stops at these. Ties are broken uniformly at random, or one rank
would get all new prompts. A term that differs by rank (taints, speeds, full caches) divides the
cells; so no option makes a choice visit each rank, unless it makes each rank differ. There is one
exception: where a weight per active request limits the credit, all ranks are visited whose credit
may reach the limit (`_crediting`). A property test compares every choice with that of a chooser
that visits all ranks."""

import math
import random

from lean_selector.core.index.shapes import Matched
from lean_selector.core.load.load_order import LoadOrder
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.speeds import ONE_SPEED
from lean_selector.core.rank_bits import bits_of, nth_bit
from lean_selector.core.selection.cost import (
    burden_blocks,
    cached_tokens,
    credit_blocks,
    credit_decay,
    evicted_blocks,
    favoured_blocks,
    softmax,
)
from lean_selector.core.selection.overlap import (
    EVERYONE,
    NOTHING,
    MatchSets,
    RankSets,
    met,
    set_numbers,
)
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.router_settings import CostTerms
from lean_selector.core.selection.scheduler import NO_PREFERENCE, cost_factors
from lean_selector.core.selection.shapes import SelectionRequest

# -- cells -----------------------------------------------------------------------------------------
# A set of ranks is an int (each rank is a bit, `RankBits`), so a few `&` make the cells. How many
# there are depends on how many different matches, active prefixes and taints there are.

_NO_SHARES: RankSets = []


class Cell:
    """A set of ranks on which a prompt costs the same if their loads are equal."""

    __slots__ = ("blocks", "credit", "factor", "floor", "match", "ranks", "rest", "tokens")

    def __init__(
        self,
        pricing: "Pricing",
        ranks: int,
        match: Matched,
        tokens: int,
        credit: float,
        blocks: float,
        factor: float,
        floor: float = -math.inf,
    ) -> None:
        self.ranks = ranks
        self.match = match
        self.tokens = tokens  # prompt tokens that the rank would have to prefill, before the credit
        self.credit = credit  # in blocks, before decay
        # Blocks that the prompt adds to the active ones; less the bonus, on a soft session's rank.
        self.blocks = blocks
        self.factor = factor  # for taints
        self.floor = floor  # with a credit, (standing load + blocks) is at least this
        # Lower bound of the cost of the prompt itself, before the factor.
        self.rest = pricing.scale * (tokens / pricing.block_size - credit) + blocks
        if pricing.credits_blocks:
            self.rest -= credit


class Pricing:
    """Computes a request's cost on a rank. `LoadOrder` sorts the ranks' loads by a key. What a
    load adds to the cost is between `slope` * key and `reach` * key, times the cell's factor."""

    __slots__ = (
        "_decays",
        "_is_plain",
        "_isl",
        "_least_tokens",
        "_leaves_standing",
        "_terms",
        "block_size",
        "credits_blocks",
        "reach",
        "scale",
        "slope",
    )

    def __init__(self, partition: Partition, request: SelectionRequest, ranks: int) -> None:
        """`ranks`: the candidates for the request, as a bit mask."""
        terms, order = request.terms, partition.order
        self._terms = terms
        self._isl = request.prompt.isl_tokens
        self._decays = terms.decay > 0.0 and terms.track_prefill
        self._least_tokens = order.least_tokens(ranks) if self._decays else 0
        self.block_size = partition.block_size
        # If prefill is not tracked, it costs nothing: max(0, 0 - credit) is 0, whatever the scale.
        self.scale = scale = terms.scale if terms.track_prefill else 0.0
        self.credits_blocks = terms.credits_untracked and not terms.track_prefill
        self._leaves_standing = not terms.counts_decode
        self._is_plain = not self._decays and not self.credits_blocks and terms.counts_decode
        # On a rank with this `key` in the load order, the load costs at least slope * key and at
        # most reach * key.
        self.slope = self.reach = 1.0
        if scale < order.scale:
            self.slope = scale / order.scale
        elif scale > order.scale:
            self.reach = scale / order.scale if order.scale else math.inf
        if self._leaves_standing:
            if ranks & ~order.prefill_only:
                self.slope = 0.0
        elif scale == 0.0 and order.knows_prefilling and not ranks & order.prefilling:
            self.slope = 1.0  # all of the load is standing

    def cost(self, cell: Cell, tokens: int, standing: float) -> float:
        """Return the cost on a rank of the cell. `tokens`: the rank's prefill tokens; `standing`:
        the rank's active blocks plus a weight per active request."""
        credit, block_size = cell.credit, self.block_size
        if not self._is_plain:
            if self._leaves_standing:
                standing = 0.0
            if self.credits_blocks:
                load = standing + cell.blocks - credit
                return (cell.floor if load < cell.floor else load) * cell.factor
            if cell.match.device:
                waiting = tokens - self._least_tokens
                decay = credit_decay(self._terms, waiting, self._isl, block_size)
                credit = credit_blocks(self._terms, decay, cell.match)
        prefill = (tokens + cell.tokens) / block_size - credit
        if prefill < 0.0:
            prefill = 0.0
        return (self.scale * prefill + (standing + cell.blocks)) * cell.factor

    def beyond(self, cell: Cell, least: float) -> float:
        """Return a threshold. If a rank's load costs more than the threshold (before the cell's
        factor), the prompt costs more than `least` on the rank. NaN: the threshold is unknown."""
        least /= cell.factor
        return least - cell.rest + 1e-9 * (1.0 + abs(least) + abs(cell.rest))

    def below(self, cell: Cell, most: float) -> float:
        """Return a threshold. If a rank's load costs less than the threshold (before the cell's
        factor), the prompt costs less than `most` on the rank. NaN: the threshold is unknown."""
        if most < cell.floor * cell.factor:
            return -math.inf  # a rank may cost that much at any load
        most /= cell.factor
        credit = cell.credit
        if self._decays:
            # Decay may remove the whole device credit.
            credit -= self._terms.credit * cell.match.device
        prefill = max(0.0, cell.tokens / self.block_size - credit)
        rest = self.scale * prefill + cell.blocks
        if self.credits_blocks:
            rest -= credit
        return most - rest - 1e-9 * (1.0 + abs(most) + abs(rest))

    def at_least(self, cell: Cell, load: float) -> float:
        """Return a lower bound of the prompt's cost on ranks of this cell whose load costs at least
        `load`. The bound allows for rounding errors. Return NaN if the bound is unknown."""
        cost = cell.rest + load
        return (cost - 1e-9 * (1.0 + abs(cell.rest) + abs(load))) * cell.factor

    def is_tight(self, cell: Cell) -> bool:
        """Whether the number by which `LoadOrder` sorts ranks gives the exact cost of a rank of
        this cell. If not, it only gives a lower bound."""
        return self.slope == self.reach and not (self._decays and cell.match.device)


def active_prefix_sets(partition: Partition, request: SelectionRequest) -> RankSets:
    """Return pairs (number of blocks, set of ranks): running requests on these ranks use exactly
    this many of the prompt's leading blocks. The highest number comes first. Ranks where the number
    is 0 are in no pair."""
    prompt, slots = request.prompt, partition.slots
    if not prompt.sequence_count or slots.starts_no_prompt(prompt.first_sequence_hash):
        return []
    return slots.active_prefix_sets(prompt.sequence_hashes())


def cells(
    partition: Partition,
    request: SelectionRequest,
    pricing: Pricing,
    ranks: int,
    matches: MatchSets,
) -> list[Cell]:
    """Divide `ranks` into cells (ranks that differ only in load), in the order of `matches`."""
    prompt, terms, block_size = request.prompt, request.terms, partition.block_size
    isl, new_blocks, shares = prompt.isl_tokens, 0, _NO_SHARES
    if terms.counts_decode:
        new_blocks, shares = prompt.sequence_count, active_prefix_sets(partition, request)
    groups = NO_PREFERENCE
    differ = terms.knows_speeds and partition.speeds.sets is not ONE_SPEED
    if differ or request.preferred_taints or request.liked:
        groups = cost_factors(partition, request, ranks)
    sharers = members = None
    full = partition.fullness.full() if terms.eviction else 0
    owed = partition.fullness.owed_tokens(ranks, request.role) if full else 0
    if shares:
        sharers = set_numbers(shares, ranks, len(matches) + 1)
    if len(groups) > 1:
        times = min(ranks.bit_count(), (len(matches) + 1) * (len(shares) + 1))
        members = set_numbers(groups, ranks, times)
    found: list[Cell] = []
    for match, holding in [*matches, (NOTHING, EVERYONE)]:
        alike = ranks & holding
        if not alike:
            continue
        ranks ^= alike
        tokens, credit = isl, 0.0
        cached = 0
        if match is not NOTHING:
            cached = cached_tokens(terms, match, block_size)
            if cached > isl:
                tokens = cached
            credit = credit_blocks(terms, 1.0, match)
        burden = 0.0
        if terms.eviction and cached < isl:
            burden = burden_blocks(terms, isl - cached, block_size)
        added, rest = burden, 0
        if full and cached < isl and (evicting := alike & full):
            rest, alike = alike ^ evicting, evicting
            added += evicted_blocks(terms, isl, cached, owed, block_size)
        if not shares and not rest and groups is NO_PREFERENCE:  # nearly always
            found.append(Cell(pricing, alike, match, tokens, credit, new_blocks + added, 1.0))
            continue
        for part in (alike, rest) if rest else (alike,):
            sharing_sets = shares if sharers is None else met(shares, sharers, part)
            for shared, sharing in [*sharing_sets, (0, EVERYONE)]:
                if both := part & sharing:
                    part ^= both
                    blocks = new_blocks - shared + added
                    for factor, having in groups if members is None else met(groups, members, both):
                        if here := both & having:
                            found.append(Cell(pricing, here, match, tokens, credit, blocks, factor))
            added = burden
    if pricing.credits_blocks:
        found = _crediting(found, pricing, partition, terms)
    return _favouring(found, pricing, request) if request.favoured else found


def _crediting(
    found: list[Cell], pricing: Pricing, partition: Partition, terms: CostTerms
) -> list[Cell]:
    """Limit the credit for cached blocks: a cost is at least request weight * active requests. If a
    cell's credit is too high, split the cell by active requests. `floor` is each part's minimum."""
    order, weight = partition.order, terms.request_weight
    divided: list[Cell] = []
    for cell in found:
        if cell.credit <= cell.blocks:
            divided.append(cell)
            continue
        alike = {0: cell.ranks}
        if weight:
            alike = {}
            for bit in bits_of(cell.ranks):
                requests = order.ranks[bit].active_requests
                alike[requests] = alike.get(requests, 0) | 1 << bit
        match, tokens, credit, blocks = cell.match, cell.tokens, cell.credit, cell.blocks
        for requests, ranks in alike.items():
            floor = weight * requests
            divided.append(Cell(pricing, ranks, match, tokens, credit, blocks, cell.factor, floor))
    return divided


def _favouring(found: list[Cell], pricing: Pricing, request: SelectionRequest) -> list[Cell]:
    """Split cells that contain ranks of the request's soft session: these ranks cost less."""
    favoured, bonus = request.favoured, request.bonus_blocks
    divided: list[Cell] = []
    for cell in found:
        inside = cell.ranks & favoured
        if inside:
            factor = cell.factor
            blocks = favoured_blocks(cell.blocks, bonus, factor)
            floor = favoured_blocks(cell.floor, bonus, factor)
            divided.append(
                Cell(pricing, inside, cell.match, cell.tokens, cell.credit, blocks, factor, floor)
            )
        cell.ranks ^= inside
        if cell.ranks:
            divided.append(cell)
    return divided


# -- drawing a rank by weight ----------------------------------------------------------------------
# Draw a rank by weight without computing every cost: rejection sampling under an envelope.
#
# A rank's weight is exp(-x / T), where x is its cost scaled to 0..1 over the candidates. The
# envelope consists of parts. A part has some ranks of a cell, and an upper bound of their weights,
# computed from the least load among them. A draw picks a part with probability proportional to its
# number of ranks times its bound, then one of its ranks uniformly, and accepts that rank with
# probability weight / bound. So each rank's probability is proportional to its weight, however
# loose the bounds are; loose bounds only cost more draws. If the drawn rank weighs far less than
# the bound, as is usual at a low temperature, the part is divided along the order of loads until
# what remains has little weight. Division does not change probabilities.

FAR = 0.1  # a bound is too loose if the drawn rank's weight is below this fraction of it
_STEP = 1.0  # from piece to piece of a divided part, the bound falls by this exponent
_LEFT = 0.01  # a part with less than this share of the other parts' mass is not divided
_FEW_RANKS = 6  # up to this many ranks, compute each cost: walking the order of loads costs more
_WHOLE = 0  # start of a part that was never divided
_DIVIDED = -1  # start of a part that need not be divided further


class DrawPart:
    """Some ranks of a cell. Each rank's weight in the random draw is at most `bound`."""

    __slots__ = ("bound", "cell", "mass", "ranks", "start")

    def __init__(self, cell: Cell, ranks: int, bound: float, start: int) -> None:
        self.cell = cell
        self.ranks = ranks
        self.bound = bound
        self.start = start  # where the ranks start in the order of loads, or _WHOLE or _DIVIDED
        self.mass = ranks.bit_count() * bound


class DrawBounds:
    """Draws a rank by weight. `parts` has sets of ranks with upper bounds of their weights."""

    __slots__ = ("_least", "_order", "_pricing", "_spread", "_temperature", "parts")

    def __init__(
        self,
        order: LoadOrder,
        pricing: Pricing,
        cells: list[Cell],
        least: float,
        spread: float,
        temperature: float,
    ) -> None:
        """`least` is the lowest cost in these cells. `spread`, the highest cost minus `least`, is
        positive and finite."""
        self._order = order
        self._pricing = pricing
        self._least = least
        self._spread = spread
        self._temperature = temperature
        self.parts: list[DrawPart] = []
        for cell in cells:
            bound = self._bound(cell, pricing.slope * order.loads[0].key)
            self.parts.append(DrawPart(cell, cell.ranks, bound, _WHOLE))

    def draw(self, rng: random.Random, tries: int) -> int:
        """Draw a rank, and return its bit number; -1 if each of `tries` draws was rejected."""
        order, pricing, parts = self._order, self._pricing, self.parts
        total = sum([part.mass for part in parts])
        for _ in range(tries):
            at = rng.random() * total
            for part in parts:
                if at < part.mass:
                    break
                at -= part.mass
            else:
                continue  # rounding led beyond the last part
            ranks, bound = part.ranks, part.bound
            bit = nth_bit(ranks, min(ranks.bit_count() - 1, int(at / bound)))
            load = order.ranks[bit]
            cost = pricing.cost(part.cell, load.active_prefill_tokens, load.standing)
            weight = self._weight(cost)
            if rng.random() * bound < weight:
                return bit
            if weight < FAR * bound and part.start != _DIVIDED:
                number, others = parts.index(part), total - part.mass
                few = ranks.bit_count() <= _FEW_RANKS
                parts[number : number + 1] = (
                    self._one_by_one(part) if few else self._by_load(part, others * _LEFT)
                )
                total = sum([part.mass for part in parts])
        return -1

    def _weight(self, cost: float) -> float:
        return math.exp(-((cost - self._least) / self._spread) / self._temperature)

    def _bound(self, cell: Cell, load: float) -> float:
        """Return an upper bound of the weights of `cell`'s ranks with a load cost >= `load`."""
        above = (self._pricing.at_least(cell, load) - self._least) / self._spread
        above /= self._temperature
        return math.exp(-above) if above > 0.0 else 1.0  # 1.0 also for NaN

    def _one_by_one(self, part: DrawPart) -> list[DrawPart]:
        found: list[DrawPart] = []
        for bit in bits_of(part.ranks):
            load = self._order.ranks[bit]
            cost = self._pricing.cost(part.cell, load.active_prefill_tokens, load.standing)
            found.append(DrawPart(part.cell, load.mask, self._weight(cost), _DIVIDED))
        return found

    def _by_load(self, part: DrawPart, enough: float) -> list[DrawPart]:
        """Split off ranges of loads, or single loads if a load's sort key does not determine the
        cost. Stops when the mass (ranks * bound) left is at most `enough` + the mass split off."""
        cell, pricing, ranks, start = part.cell, self._pricing, part.ranks, part.start
        order = self._order
        loads = order.loads
        is_tight = pricing.is_tight(cell)
        step = _STEP * self._temperature * self._spread / cell.factor
        found: list[DrawPart] = []
        while ranks:
            bucket = loads[start]
            here = bucket.ranks & ranks
            start += 1
            if not here:
                continue
            bound = self._bound(cell, pricing.slope * bucket.key)
            if ranks.bit_count() * bound <= enough:
                found.append(DrawPart(cell, ranks, bound, start - 1))
                break
            if is_tight:
                end = order.position_of(bucket.key + step, start)
                for other in loads[start:end]:
                    here |= other.ranks
                here &= ranks
                start = end
            else:
                bound = self._weight(pricing.cost(cell, bucket.tokens, bucket.standing))
            found.append(DrawPart(cell, here, bound, _DIVIDED))
            enough += found[-1].mass
            ranks ^= here
        return found


# -- choosing without visiting every rank ----------------------------------------------------------
# Without a temperature, each cell's loads are walked in order until no further load can be cheaper
# than the best so far. With a temperature, the weight of a rank depends on its own cost and on the
# least and the highest cost. If there are many different loads, the envelope above is used.

Costed = list[tuple[float, int]]  # (cost, set of ranks with this cost), disjoint

FEW_LOADS = 12  # if there are at most this many loads, all costs are computed
TRIES = 16  # if so many draws fail (a low temperature), all costs are computed


def choose(
    partition: Partition,
    request: SelectionRequest,
    ranks: int,
    matches: MatchSets,
    rng: random.Random,
) -> RankLoad:
    """Choose a rank for the request among `ranks`. Raises Unavailable if the set is empty."""
    if not ranks:
        raise partition.nobody()
    order = partition.order
    if not ranks & (ranks - 1):
        return order.ranks[ranks.bit_length() - 1]
    pricing = Pricing(partition, request, ranks)
    found = cells(partition, request, pricing, ranks, matches)
    return order.ranks[drawn(order, pricing, found, request.terms.temperature, rng)]


def drawn(
    order: LoadOrder,
    pricing: Pricing,
    cells: list[Cell],
    temperature: float,
    rng: random.Random,
) -> int:
    """Choose a rank in these cells, and return its bit number. `cells` must not be empty."""
    if temperature <= 0.0:
        return _of_equals(cheapest(order, pricing, cells)[1], rng)
    if len(order.loads) > FEW_LOADS:
        least, tied = cheapest(order, pricing, cells)
        spread = dearest(order, pricing, cells) - least
        if not 0.0 < spread < math.inf:
            return _of_equals(tied, rng)
        envelope = DrawBounds(order, pricing, cells, least, spread, temperature)
        bit = envelope.draw(rng, TRIES)
        if bit >= 0:
            return bit
    costed = all_costs(order, pricing, cells)
    if (weights := softmax([cost for cost, _ in costed], temperature)) is not None:
        return _by_weight(costed, weights, rng)
    least = min(cost for cost, _ in costed)
    return _of_equals([ranks for cost, ranks in costed if cost == least], rng)


def cheapest(order: LoadOrder, pricing: Pricing, cells: list[Cell]) -> tuple[float, list[int]]:
    """Return the lowest cost in these cells, and disjoint sets of the ranks that have this cost.
    Because of rounding, a higher load may have the same or a lower cost. So the cost is computed
    for each load that may be the cheapest within the rounding error."""
    least, tied = math.inf, list[int]()
    slope = pricing.slope
    for cell in cells:
        ranks = cell.ranks
        limit = pricing.beyond(cell, least) if tied else math.inf
        if ranks.bit_count() <= _FEW_RANKS:
            if slope * order.loads[0].key > limit:
                continue
            while ranks:  # the loop of `bits_of`, without a list
                mask = ranks & -ranks
                ranks ^= mask
                load = order.ranks[mask.bit_length() - 1]
                cost = pricing.cost(cell, load.active_prefill_tokens, load.standing)
                if cost < least:
                    least, tied = cost, [mask]
                elif cost == least:
                    tied.append(mask)
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
    return least, tied


def dearest(order: LoadOrder, pricing: Pricing, cells: list[Cell]) -> float:
    """Return the highest cost in these cells, exact in spite of rounding errors."""
    most = -math.inf
    reach = pricing.reach
    for cell in cells:
        ranks = cell.ranks
        if ranks.bit_count() > _FEW_RANKS:
            limit = pricing.below(cell, most)
            for bucket in reversed(order.loads):
                if reach * bucket.key < limit:
                    break
                if bucket.ranks & ranks:
                    cost = pricing.cost(cell, bucket.tokens, bucket.standing)
                    if cost > most:
                        most = cost
                        limit = pricing.below(cell, most)
            continue
        for bit in bits_of(ranks):
            load = order.ranks[bit]
            cost = pricing.cost(cell, load.active_prefill_tokens, load.standing)
            if cost > most:
                most = cost
    return most


def all_costs(order: LoadOrder, pricing: Pricing, cells: list[Cell]) -> Costed:
    """Return the cost of every rank in these cells."""
    costed: Costed = []
    for cell in cells:
        ranks = cell.ranks
        if ranks.bit_count() > len(order.loads):
            for bucket in order.loads:
                if found := bucket.ranks & ranks:
                    costed.append((pricing.cost(cell, bucket.tokens, bucket.standing), found))
            continue
        for bit in bits_of(ranks):
            load = order.ranks[bit]
            cost = pricing.cost(cell, load.active_prefill_tokens, load.standing)
            costed.append((cost, load.mask))
    return costed


def _by_weight(costed: Costed, weights: list[float], rng: random.Random) -> int:
    """Draw a rank in proportion to its weight, and return its bit number. `weights` has the weight
    of each rank in the entry of `costed` at the same position."""
    sums = [weight * ranks.bit_count() for (_, ranks), weight in zip(costed, weights, strict=True)]
    at = rng.random() * sum(sums)
    last = 0
    for number, here in enumerate(sums):
        if here:
            last = number
            if at < here:
                break
            at -= here
    else:
        at = sums[last]  # rounding led beyond the last one
    ranks = costed[last][1]
    return nth_bit(ranks, min(ranks.bit_count() - 1, int(at / weights[last])))


def _of_equals(tied: list[int], rng: random.Random) -> int:
    """Draw one of the ranks in these sets, all equally likely, and return its bit number."""
    if len(tied) == 1:
        ranks = tied[0]
        count = ranks.bit_count()
        return nth_bit(ranks, int(rng.random() * count)) if count > 1 else ranks.bit_length() - 1
    counts = [ranks.bit_count() for ranks in tied]
    at = int(rng.random() * sum(counts))
    for ranks, count in zip(tied, counts, strict=True):
        if at < count:
            return nth_bit(ranks, at) if count > 1 else ranks.bit_length() - 1
        at -= count
    raise AssertionError("at is below the sum of the counts")
