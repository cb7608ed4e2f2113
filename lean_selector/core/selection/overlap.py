"""Which ranks of a partition hold which part of a prompt, as sets of ranks.

A set is an int, in which each rank is a bit (`RankBits`). The index has the blocks that are known
from KV events. Predicted blocks, from recently routed prompts, are added. Spec selection.md 3.1."""

from typing import TypeVar

from lean_selector.core.index.shapes import Matched
from lean_selector.core.rank_bits import bits_of
from lean_selector.core.selection.partition import Partition

MatchSets = list[tuple[Matched, int]]  # (match, the ranks with this match), disjoint
RankSets = list[tuple[int, int]]  # (blocks, the ranks that hold this many), disjoint
Matches = dict[tuple[int, int], Matched]
Value = TypeVar("Value")
Numbers = dict[int, int]  # rank (bit) -> number of the set that contains it

NOTHING = Matched(0)
_LOOKS_PER_RANK = 8  # a table look-up of a rank costs as much as looking at this many sets


def match_sets(partition: Partition, local_hashes: bytes) -> MatchSets:
    """Return how many blocks of a prompt the ranks hold, those with most device blocks first."""
    sets, extended = partition.index.match_sets(local_hashes)
    found: MatchSets = []
    for blocks, ranks in reversed(sets):
        found.append((Matched(blocks), ranks))
    if extended:
        found = [*extended, *found]
    if partition.predicted is not None:
        found = _raised(found, partition.predicted.match_sets(local_hashes)[0])
    return found


def match_by_rank(partition: Partition, local_hashes: bytes) -> Matches:
    """Return the match of each rank with a hit, even of ranks without a worker."""
    matches = partition.index.match(local_hashes)
    if partition.predicted is not None:
        for key, predicted in partition.predicted.match(local_hashes).items():
            matches[key] = _with_device(matches.get(key, NOTHING), predicted.device)
    return matches


def _raised(found: MatchSets, predicted: RankSets) -> MatchSets:
    """Add predicted device blocks to the matches that are known from events."""
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
    raised.sort(key=lambda of: of[0].device, reverse=True)
    return raised


def _with_device(match: Matched, blocks: int) -> Matched:
    """Return the match with at least this many device blocks. Lower-tier blocks among these do not
    count again."""
    if blocks <= match.device:
        return match
    reach = match.device + match.host
    end = reach + match.disk
    return Matched(blocks, max(0, reach - blocks), max(0, end - max(reach, blocks)))


def as_sets(partition: Partition, matches: Matches, serial: int | None = None) -> MatchSets:
    """Convert matches by rank to sets. Omits ranks that were removed, and ranks added after the
    request with this serial was queued, because the key may now belong to a new rank."""
    sets: dict[Matched, int] = {}
    ranks = partition.slots.ranks
    for key, match in matches.items():
        load = ranks.get(key)
        if load is not None and (serial is None or load.came_after < serial):
            sets[match] = sets.get(match, 0) | load.mask
    return list(sets.items())


def match_of(matches: MatchSets, mask: int) -> Matched:
    """Return the match of one rank, which is given as a set (`mask`)."""
    for match, ranks in matches:
        if ranks & mask:
            return match
    return NOTHING


def by_bit(sets: list[tuple[Value, int]], ranks: int) -> dict[int, Value]:
    """Return each rank's value (bit -> value), from the set that contains the rank."""
    return {bit: value for value, alike in sets for bit in bits_of(alike & ranks)}


def set_numbers(sets: list[tuple[Value, int]], ranks: int, times: int) -> Numbers | None:
    """Return, for each rank, the number of the set that contains it. Returns None if it is cheaper
    to visit every set `times` times. The sets are disjoint."""
    if times * len(sets) <= _LOOKS_PER_RANK * ranks.bit_count():
        return None
    return by_bit([(number, alike) for number, (_, alike) in enumerate(sets)], ranks)


def met(sets: list[tuple[Value, int]], numbers: Numbers, ranks: int) -> list[tuple[Value, int]]:
    """Return the sets, in order, that may contain some of these ranks. Omits sets that are known to
    contain none of the ranks."""
    if ranks.bit_count() >= len(sets):
        return sets
    found = {numbers[bit] for bit in bits_of(ranks) if bit in numbers}
    return [sets[number] for number in sorted(found)]
