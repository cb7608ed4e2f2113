"""What ranks call the blocks of the device tier, asked once for all that call them alike.

What they hold of which prompt is in tests/properties/test_kv_index_model.py.
"""

from collections.abc import Iterator

import pytest

from lean_selector.core.index import device_tier
from lean_selector.core.index.device_tier import DeviceTier
from lean_selector.core.index.engine_hashes import NOWHERE
from lean_selector.core.index.kv_index import engine_hashes
from lean_selector.core.rank_bits import RankBits
from tests.support.driven_selector import pack
from tests.support.operations import lines_run

Path = tuple[int, ...]


def name_of(seed: int, path: Path) -> int:
    """What engines with this seed call the last block of a path."""
    return int("".join(map(str, (seed, 9, *path))))


SIX = (1, 2, 3, 4, 5, 6)


class Fleet:
    """Ranks that store the beginning of one prompt."""

    def __init__(self, ranks: int) -> None:
        self.tier = DeviceTier(RankBits(), engine_hashes)
        self.ranks = [self.tier.ranks.admit((number, 0)) for number in range(ranks)]

    def store(self, number: int, end: int, seed: int = 1) -> None:
        names = [name_of(seed, SIX[: at + 1]) for at in range(end)]
        self.tier.store(self.ranks[number], NOWHERE, pack(names), pack(SIX[:end]))

    def remove(self, number: int, start: int, seed: int = 1) -> None:
        names = [name_of(seed, SIX[: at + 1]) for at in range(start, 6)]
        self.tier.remove(self.ranks[number], pack(names))

    def come_back(self, number: int) -> Iterator[None]:
        """A rank is retired and admitted again; what it held is not swept."""
        sweep = self.tier.retire(self.ranks[number])
        self.ranks[number] = self.tier.ranks.admit((number, 0))
        return sweep

    @property
    def odd(self) -> int:
        (run,) = self.tier.trie.strands.values()
        return self.tier._odd.of(run.strand)

    def names(self, blocks: int) -> dict[bytes, int]:
        sets, path = self.tier.match_sets(pack(SIX[:blocks]))
        ranks = sum(mask for there, mask in sets if there == blocks)
        return dict(self.tier.last_names(ranks, path, blocks))


def called(blocks: int, seed: int = 1) -> bytes:
    return pack([name_of(seed, SIX[:blocks])])


def test_ranks_whose_engines_hash_alike_are_asked_once_for_a_name() -> None:
    lines = {}
    for ranks in (40, 400):
        fleet = Fleet(ranks)
        for number in range(ranks):
            fleet.store(number, 6)
        assert fleet.odd == 0
        assert fleet.names(6) == {called(6): (1 << ranks) - 1}
        sets, path = fleet.tier.match_sets(pack(SIX))
        lines[ranks] = lines_run(fleet.tier.last_names, sets[0][1], path, 6)
    assert lines[400] == lines[40]


def test_ranks_that_call_a_block_otherwise_are_odd_until_they_hold_nothing_there() -> None:
    fleet = Fleet(4)
    for number, seed in enumerate((1, 2, 1, 3)):
        fleet.store(number, 6, seed)
    assert fleet.odd == 0b1010
    fleet.store(1, 6, 1)  # it stays what it was called first
    assert fleet.names(6) == {called(6): 0b101, called(6, 2): 0b10, called(6, 3): 0b1000}
    fleet.remove(1, 3, 2)
    assert fleet.odd == 0b1010
    fleet.remove(1, 0, 2)
    assert fleet.odd == 0b1000
    fleet.store(1, 6, 1)
    assert fleet.odd == 0b1000
    for _ in fleet.tier.retire(fleet.ranks[3]):
        pass
    assert fleet.odd == 0
    assert not len(fleet.tier._odd)


@pytest.mark.parametrize("most", [2, 64])
def test_who_holds_blocks_behind_a_hole_is_told_by_who_holds_more_before_it(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_tier, "_MAX_PARTS", most)
    fleet = Fleet(4)
    for number in range(4):
        fleet.store(number, 6)
    for number in range(4):
        fleet.remove(number, 5)
        if number < 3:
            fleet.tier.remove(fleet.ranks[number], called(4))
    fleet.remove(3, 2)
    fleet.store(3, 3)
    assert fleet.odd == 0
    fleet.store(3, 4)  # of the others nobody holds this one
    assert fleet.odd == (0 if most == 64 else 0b1000)
    fleet.store(3, 6)  # and some of these
    assert fleet.odd == 0b1000
    assert fleet.names(3) == {called(3): 0b1111}


def test_a_rank_is_taken_for_odd_where_it_cannot_soon_be_told() -> None:
    fleet = Fleet(20)
    for number in range(20):
        fleet.store(number, 6)
    sweeps = [fleet.come_back(number) for number in range(18)]
    for number in (18, 19):
        fleet.remove(number, 0)
    fleet.store(18, 6)
    assert fleet.odd == 1 << 18
    assert fleet.names(6) == {called(6): 1 << 18}
    for sweep in sweeps:
        list(sweep)
    fleet.store(19, 6)
    assert fleet.odd == 1 << 18
    assert fleet.names(6) == {called(6): 0b11 << 18}
