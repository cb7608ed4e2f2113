"""Ranks that are alike to a prompt, as sets: the cells that a choice is made of.

What a rank costs depends on its load, on how much of the prompt it holds on each tier, on how much
of it is active there, and on its taints. Ranks that agree in all but the load are one cell. There
are as many cells as the prompt has depths, however many ranks there are; a set is an int (a rank is
a bit, `RankBits`), so making them is a few `&`. Who is cheapest is `choice`'s.
"""

import math
from typing import TypeVar

from lean_selector.core.index.shapes import Matched
from lean_selector.core.rank_bits import bits_of
from lean_selector.core.selection.cost import (
    cached_tokens,
    credit_blocks,
    credit_decay,
    favoured_blocks,
    preferences,
    taint_factor,
)
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.records import SelectionRequest
from lean_selector.core.selection.settings import Terms

MatchSets = list[tuple[Matched, int]]  # what ranks hold of a prompt; the sets are apart
RankSets = list[tuple[int, int]]  # (blocks, the ranks that have so many), apart from each other
Matches = dict[tuple[int, int], Matched]
Value = TypeVar("Value")
Numbers = dict[int, int]  # of the one of several sets that a rank is in, by its bit

NOTHING = Matched(0)
_EVERYONE = -1  # as a set: all bits
_NO_PREFERENCE = [(1.0, _EVERYONE)]
_LOOKS_PER_RANK = 8  # at a set; finding out which set a rank is in costs as much


class Cell:
    """Ranks for which a prompt costs the same at the same load."""

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
        self.tokens = tokens  # that the prompt adds to a rank's, before what is cached is credited
        self.credit = credit  # blocks, before any decay
        # That become active with the prompt; less what the rank of a soft session is favoured by.
        self.blocks = blocks
        self.factor = factor  # of the taints
        self.floor = floor  # to which a credit may lower the standing load and the blocks
        # What the prompt alone costs there, or less; without the factor.
        self.rest = pricing.scale * (tokens / pricing.block_size - credit) + blocks
        if pricing.credits_blocks:
            self.rest -= credit


class Pricing:
    """The cost of one request on a rank of a cell, by its load: the last line of `cost`."""

    __slots__ = (
        "_decays",
        "_is_plain",
        "_isl",
        "_least_tokens",
        "_terms",
        "block_size",
        "credits_blocks",
        "reach",
        "scale",
        "slope",
    )

    def __init__(
        self, partition: Partition, request: SelectionRequest, ranks: int, now: float
    ) -> None:
        """`ranks` are the candidates."""
        terms, order = request.terms, partition.order
        self._terms = terms
        self._isl = request.prompt.isl_tokens
        self._decays = terms.decay > 0.0 and terms.track_prefill
        self._least_tokens = order.least_tokens(ranks, now) if self._decays else 0
        self.block_size = partition.block_size
        # Prefill that is not tracked is none: max(0, 0 - credit) is 0, whatever the scale.
        self.scale = scale = terms.scale if terms.track_prefill else 0.0
        self.credits_blocks = terms.credits_untracked and not terms.track_prefill
        self._is_plain = not self._decays and not self.credits_blocks
        # A load that has `key` in the order costs slope * key or more, and reach * key or less.
        self.slope = self.reach = 1.0
        if scale < order.scale:
            self.slope = scale / order.scale
        elif scale > order.scale:
            self.reach = scale / order.scale if order.scale else math.inf

    def cost(self, cell: Cell, tokens: int, standing: float) -> float:
        """On a rank with so many prefill tokens and such a standing load."""
        credit, block_size = cell.credit, self.block_size
        if not self._is_plain:
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
        """What slope * key of a rank must not exceed if the rank is to cost `least` at most, with
        room for rounding. Not a number where that cannot be told."""
        least /= cell.factor
        return least - cell.rest + 1e-9 * (1.0 + abs(least) + abs(cell.rest))

    def below(self, cell: Cell, most: float) -> float:
        """What reach * key of a rank must not fall short of if the rank is to cost `most` at least.
        Not a number where that cannot be told."""
        if most < cell.floor * cell.factor:
            return -math.inf  # whatever the load
        most /= cell.factor
        credit = cell.credit
        if self._decays:
            credit -= self._terms.credit * cell.match.device  # all of it may have decayed
        prefill = max(0.0, cell.tokens / self.block_size - credit)
        rest = self.scale * prefill + cell.blocks
        if self.credits_blocks:
            rest -= credit
        return most - rest - 1e-9 * (1.0 + abs(most) + abs(rest))

    def at_least(self, cell: Cell, load: float) -> float:
        """What a rank costs at least whose slope * key is `load` or more, with room for rounding.
        Not a number where that cannot be told."""
        cost = cell.rest + load
        return (cost - 1e-9 * (1.0 + abs(cell.rest) + abs(load))) * cell.factor

    def is_tight(self, cell: Cell) -> bool:
        """Whether keys say what ranks of the cell cost, not just how little it can be."""
        return self.slope == self.reach and not (self._decays and cell.match.device)


def match_sets(partition: Partition, local_hashes: bytes) -> MatchSets:
    """What ranks hold of a prompt, those that hold most on the device first."""
    sets, extended = partition.index.match_sets(local_hashes)
    found = [(Matched(blocks), ranks) for blocks, ranks in sets]
    found.reverse()
    if extended:
        found = [*extended, *found]
    if partition.predicted is not None:
        found = _raised(found, partition.predicted.match_sets(local_hashes)[0])
    return found


def match_by_rank(partition: Partition, local_hashes: bytes) -> Matches:
    """The same by rank, also of ranks that are of no worker; those without a hit are left out."""
    matches = partition.index.match(local_hashes)
    if partition.predicted is not None:
        for key, predicted in partition.predicted.match(local_hashes).items():
            matches[key] = _with_device(matches.get(key, NOTHING), predicted.device)
    return matches


def _raised(found: MatchSets, predicted: RankSets) -> MatchSets:
    """What is believed to be on devices put beside what events say is there."""
    if not predicted:
        return found
    raised: MatchSets = []
    everyone = 0
    for _, believed in predicted:
        everyone |= believed
    numbers = set_numbers(predicted, everyone, len(found))
    for match, ranks in found:
        everyone &= ~ranks
        for blocks, believed in predicted if numbers is None else met(predicted, numbers, ranks):
            if both := ranks & believed:
                ranks ^= both
                raised.append((_with_device(match, blocks), both))
        if ranks:
            raised.append((match, ranks))
    for blocks, believed in predicted:
        if rest := believed & everyone:
            raised.append((Matched(blocks), rest))
    raised.sort(key=_device_blocks, reverse=True)
    return raised


def _device_blocks(of: tuple[Matched, int]) -> int:
    return of[0].device


def _with_device(match: Matched, blocks: int) -> Matched:
    """With so many blocks on the device at least; what they cover does not count once more."""
    if blocks <= match.device:
        return match
    reach = match.device + match.host
    end = reach + match.disk
    return Matched(blocks, max(0, reach - blocks), max(0, end - max(reach, blocks)))


def as_sets(partition: Partition, matches: Matches) -> MatchSets:
    """The same for matches by rank; those of ranks that are gone are left out."""
    sets: dict[Matched, int] = {}
    ranks = partition.slots.ranks
    for key, match in matches.items():
        load = ranks.get(key)
        if load is not None:
            sets[match] = sets.get(match, 0) | load.mask
    return list(sets.items())


def match_of(matches: MatchSets, mask: int) -> Matched:
    """What one rank holds."""
    for match, ranks in matches:
        if ranks & mask:
            return match
    return NOTHING


def by_bit(sets: list[tuple[Value, int]], ranks: int) -> dict[int, Value]:
    """What is said of the set that a rank is in, by its bit; of these ranks, if they are in any."""
    return {bit: value for value, alike in sets for bit in bits_of(alike & ranks)}


def set_numbers(sets: list[tuple[Value, int]], ranks: int, times: int) -> Numbers | None:
    """Which of the sets each of these ranks is in, if so many times each set would be looked at
    otherwise that it pays; the sets are apart."""
    if times * len(sets) <= _LOOKS_PER_RANK * ranks.bit_count():
        return None
    return by_bit([(number, alike) for number, (_, alike) in enumerate(sets)], ranks)


def met(sets: list[tuple[Value, int]], numbers: Numbers, ranks: int) -> list[tuple[Value, int]]:
    """The sets, in their order, that some of these ranks may be in: no fewer than they are in."""
    if ranks.bit_count() >= len(sets):
        return sets
    found = {numbers[bit] for bit in bits_of(ranks) if bit in numbers}
    return [sets[number] for number in sorted(found)]


def active_prefix_sets(partition: Partition, request: SelectionRequest) -> RankSets:
    """Leading blocks of the prompt that are active already, longest first; who is in none of the
    sets has none.

    Those of tokens are chained only when some active prompt starts with the first of them.
    """
    prompt, slots = request.prompt, partition.slots
    if not prompt.sequence_count or slots.starts_no_prompt(prompt.first_sequence_hash):
        return []
    return slots.active_prefix_sets(prompt.sequence_hashes())


def taint_weights(partition: Partition, preferred: dict[str, float]) -> list[tuple[float, int]]:
    """The summed weights of the preferred taints that ranks have, and who has them."""
    groups = [(0.0, _EVERYONE)]
    for name, weight in preferred.items():
        having = partition.tainted.get(name)
        if having is not None:
            with_it = [(sum_ + weight, both) for sum_, ranks in groups if (both := ranks & having)]
            groups = [(sum_, rest) for sum_, ranks in groups if (rest := ranks & ~having)]
            groups += with_it
    return groups


def cells(
    partition: Partition,
    request: SelectionRequest,
    pricing: Pricing,
    ranks: int,
    matches: MatchSets,
) -> list[Cell]:
    """All cells of these ranks: apart, not empty, in the order of `matches`."""
    prompt, terms, block_size = request.prompt, request.terms, partition.block_size
    isl, new_blocks = prompt.isl_tokens, prompt.sequence_count
    shares = active_prefix_sets(partition, request)
    groups = _NO_PREFERENCE
    if preferred := preferences(request):
        weighed = taint_weights(partition, preferred)
        groups = [(taint_factor(weight), having) for weight, having in weighed]
    sharers = members = None
    if shares:
        sharers = set_numbers(shares, ranks, len(matches) + 1)
    if preferred:
        pieces = min(ranks.bit_count(), (len(matches) + 1) * (len(shares) + 1))
        members = set_numbers(groups, ranks, pieces)
    found: list[Cell] = []
    for match, holding in [*matches, (NOTHING, _EVERYONE)]:
        alike = ranks & holding
        if not alike:
            continue
        ranks ^= alike
        tokens, credit = isl, 0.0
        if match is not NOTHING:
            cached = cached_tokens(terms, match, block_size)
            if cached > isl:
                tokens = cached
            credit = credit_blocks(terms, 1.0, match)
        for shared, sharing in shares if sharers is None else met(shares, sharers, alike):
            if both := alike & sharing:
                alike ^= both
                for factor, having in groups if members is None else met(groups, members, both):
                    if here := both & having:
                        blocks = new_blocks - shared
                        found.append(Cell(pricing, here, match, tokens, credit, blocks, factor))
        if alike:
            for factor, having in groups if members is None else met(groups, members, alike):
                if here := alike & having:
                    found.append(Cell(pricing, here, match, tokens, credit, new_blocks, factor))
    if pricing.credits_blocks:
        found = _crediting(found, pricing, partition, terms)
    return _favouring(found, pricing, request) if request.favoured else found


def _crediting(
    found: list[Cell], pricing: Pricing, partition: Partition, terms: Terms
) -> list[Cell]:
    """The same, where a credit is taken off the blocks: down to none, but off no request's weight,
    so cells that it may lower to that are of ranks with equally many requests."""
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
                requests = order.rank(bit).active_requests
                alike[requests] = alike.get(requests, 0) | 1 << bit
        match, tokens, credit, blocks = cell.match, cell.tokens, cell.credit, cell.blocks
        for requests, ranks in alike.items():
            floor = weight * requests
            divided.append(Cell(pricing, ranks, match, tokens, credit, blocks, cell.factor, floor))
    return divided


def _favouring(found: list[Cell], pricing: Pricing, request: SelectionRequest) -> list[Cell]:
    """The same, with the favoured ranks in cells of their own, which cost that much less."""
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
