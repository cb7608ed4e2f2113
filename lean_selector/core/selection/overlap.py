"""Which ranks of a partition hold which part of a prompt, as sets of ranks.

A set is an int, in which each rank is a bit (`RankBits`). The index has the blocks that are known
from KV events. Predicted blocks, from recently routed prompts, are added. Spec selection.md 3.1."""

from typing import TypeVar

from lean_selector.core.index.shapes import Matched
from lean_selector.core.rank_bits import bits_of
from lean_selector.core.selection.partition import Partition

MatchSets = list[tuple[Matched, int]]  # (match, the ranks with this match), disjoint
RankSets = list[tuple[int, int]]  # (blocks, the ranks that hold this many), disjoint
Groups = list[tuple[float, int]]  # (weight of the ranks, or factor on their cost, ranks), disjoint
Matches = dict[tuple[int, int], Matched]
Value = TypeVar("Value")
Numbers = dict[int, int]  # rank (bit) -> number of the set that contains it

EVERYONE = -1  # as a set: all bits
NOTHING = Matched(0)
_LOOKS_PER_RANK = 8  # a table look-up of a rank costs as much as looking at this many sets


def match_sets(partition: Partition, local_hashes: bytes) -> MatchSets:
    """Group the ranks by how many blocks of the prompt they have on each tier."""
    sets, extended = partition.index.match_sets(local_hashes)
    found: MatchSets = []
    for blocks, ranks in reversed(sets):
        found.append((Matched(blocks), ranks))
    if extended:
        found = [*extended, *found]
    for strays in partition.index.strays.values():
        sets, extended = strays.match_sets(local_hashes)
        found = _raised(found, [*_on_device(sets), *extended])
    if partition.predicted is not None:
        found = _raised(found, _on_device(partition.predicted.match_sets(local_hashes)[0]))
    return found


def _on_device(sets: RankSets) -> MatchSets:
    return [(Matched(blocks), ranks) for blocks, ranks in sets]


def match_by_rank(partition: Partition, local_hashes: bytes) -> Matches:
    """Return how many blocks of the prompt each rank has. Includes unregistered workers' ranks."""
    matches: Matches = {}
    keys = partition.index.bits.keys
    for match, ranks in match_sets(partition, local_hashes):
        for bit in bits_of(ranks):
            if (key := keys[bit]) is not None:
                matches[key] = match
    return matches


def _raised(found: MatchSets, predicted: MatchSets) -> MatchSets:
    """Add blocks predicted from routed prompts, or reported by the source of another rank, to the
    matches found from KV events."""
    if not predicted:
        return found
    raised: MatchSets = []
    everyone = 0
    for _, believed in predicted:
        everyone |= believed
    numbers = set_numbers(predicted, everyone, len(found))
    for match, ranks in found:
        everyone &= ~ranks
        for more, believed in predicted if numbers is None else met(predicted, numbers, ranks):
            if both := ranks & believed:
                ranks ^= both
                raised.append((_with_device(match, more.device), both))
        if ranks:
            raised.append((match, ranks))
    for more, believed in predicted:
        if rest := believed & everyone:
            raised.append((more, rest))
    raised.sort(key=lambda of: of[0].device, reverse=True)
    return raised


def _with_device(match: Matched, blocks: int) -> Matched:
    """Return `match`, raised to at least `blocks` device blocks. Host and disk blocks at the
    positions of added device blocks no longer count."""
    if blocks <= match.device:
        return match
    reach = match.device + match.host
    end = reach + match.disk
    return Matched(blocks, max(0, reach - blocks), max(0, end - max(reach, blocks)))


def match_of(matches: MatchSets, mask: int) -> Matched:
    """Return how many blocks one rank, given as a bit mask, has on each tier."""
    for match, ranks in matches:
        if ranks & mask:
            return match
    return NOTHING


def by_bit(sets: list[tuple[Value, int]], ranks: int) -> dict[int, Value]:
    """Return, by bit number, each rank's value: the value of the set that contains the rank."""
    return {bit: value for value, alike in sets for bit in bits_of(alike & ranks)}


def set_numbers(sets: list[tuple[Value, int]], ranks: int, times: int) -> Numbers | None:
    """Return a table: for each rank, the position in `sets` of the set that contains the rank.
    Return None if `times` searches through `sets` cost less than building the table."""
    if times * len(sets) <= _LOOKS_PER_RANK * ranks.bit_count():
        return None
    return by_bit([(number, alike) for number, (_, alike) in enumerate(sets)], ranks)


def met(sets: list[tuple[Value, int]], numbers: Numbers, ranks: int) -> list[tuple[Value, int]]:
    """Return, in order, the sets that contain some of `ranks`. If there are many ranks, simply
    returns all `sets`. `numbers` is the table that `set_numbers` returned."""
    if ranks.bit_count() >= len(sets):
        return sets
    found = {numbers[bit] for bit in bits_of(ranks) if bit in numbers}
    return [sets[number] for number in sorted(found)]
