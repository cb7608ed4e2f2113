"""What the ranks of a partition hold of a prompt, as sets of ranks.

A set is an int, and a rank is a bit of it (`RankBits`). The index says what is cached by KV events;
what was routed lately may be predicted to be cached, and is laid over it. Spec selection.md 3.1.
"""

from typing import TypeVar

from lean_selector.core.index.shapes import Matched
from lean_selector.core.rank_bits import bits_of
from lean_selector.core.selection.partition import Partition

MatchSets = list[tuple[Matched, int]]  # what ranks hold of a prompt; the sets are apart
RankSets = list[tuple[int, int]]  # (blocks, the ranks that have so many), apart from each other
Matches = dict[tuple[int, int], Matched]
Value = TypeVar("Value")
Numbers = dict[int, int]  # of the one of several sets that a rank is in, by its bit

NOTHING = Matched(0)
_LOOKS_PER_RANK = 8  # at a set; finding out which set a rank is in costs as much


def match_sets(partition: Partition, local_hashes: bytes) -> MatchSets:
    """What ranks hold of a prompt, those that hold most on the device first."""
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
    """Matches by rank, also of ranks that are of no worker; those without a hit are left out."""
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
    raised.sort(key=lambda of: of[0].device, reverse=True)
    return raised


def _with_device(match: Matched, blocks: int) -> Matched:
    """With so many blocks on the device at least; what they cover does not count once more."""
    if blocks <= match.device:
        return match
    reach = match.device + match.host
    end = reach + match.disk
    return Matched(blocks, max(0, reach - blocks), max(0, end - max(reach, blocks)))


def as_sets(partition: Partition, matches: Matches, serial: int | None = None) -> MatchSets:
    """Matches by rank as sets; those of ranks that are gone are left out, and of ranks that came
    after the request with this serial was parked: they are others under the same name."""
    sets: dict[Matched, int] = {}
    ranks = partition.slots.ranks
    for key, match in matches.items():
        load = ranks.get(key)
        if load is not None and (serial is None or load.came_after < serial):
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
    """The number of the set that each of these ranks is in; None if looking at each set `times`
    times is cheaper. The sets are disjoint."""
    if times * len(sets) <= _LOOKS_PER_RANK * ranks.bit_count():
        return None
    return by_bit([(number, alike) for number, (_, alike) in enumerate(sets)], ranks)


def met(sets: list[tuple[Value, int]], numbers: Numbers, ranks: int) -> list[tuple[Value, int]]:
    """The sets, in order, that may contain some of these ranks: a superset of those that do."""
    if ranks.bit_count() >= len(sets):
        return sets
    found = {numbers[bit] for bit in bits_of(ranks) if bit in numbers}
    return [sets[number] for number in sorted(found)]
