"""The device tier against a model that keeps, for each rank, the set of paths that it holds."""

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from lean_selector.core.index import device_tier
from lean_selector.core.index.device_tier import DeviceRank, DeviceTier
from lean_selector.core.index.engine_hashes import NOWHERE
from lean_selector.core.index.kv_index import engine_hashes
from lean_selector.core.index.runs import POSITION_BITS, POSITION_MASK
from lean_selector.core.rank_bits import RankBits, RankKey, bits_of
from tests.support.driven_selector import pack
from tests.support.operations import lines_run

Path = tuple[int, ...]
KEYS: list[RankKey] = [(1, 0), (1, 1), (2, 0)]
DEPTH = 6
PROMPTS = [tuple(1 + (bits >> at & 1) for at in range(DEPTH)) for bits in range(1 << DEPTH)]


def name_of(seed: int, path: Path) -> int:
    """What engines with this seed call the last block of a path."""
    return int("".join(map(str, (seed, 9, *path))))


class DeviceTierMachine(RuleBasedStateMachine):
    """Few short prompts, so that ranks share runs, split them and grow them all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.bits = RankBits()
        self.tier = DeviceTier(self.bits, engine_hashes)
        self.ranks: dict[RankKey, DeviceRank] = {}
        self.held: dict[RankKey, dict[Path, int]] = {key: {} for key in KEYS}  # its first name
        self.sweeps: list[Iterator[None]] = []

    @rule(
        key=st.sampled_from(KEYS),
        prompt=st.sampled_from(PROMPTS),
        start=st.sampled_from([0, 0, 1, 2, 4]),
        blocks=st.integers(1, DEPTH),
        seed=st.sampled_from([1, 1, 1, 1, 2]),
    )
    def store(self, key: RankKey, prompt: Path, start: int, blocks: int, seed: int) -> None:
        if start and prompt[:start] not in self.held[key]:
            return
        rank = self.ranks.get(key)
        if rank is None:
            rank = self.ranks[key] = self.tier.ranks.admit(key)
        address = rank.hashes.find(self.held[key][prompt[:start]]) if start else NOWHERE
        paths = [prompt[: at + 1] for at in range(start, min(DEPTH, start + blocks))]
        names = [name_of(seed, path) for path in paths]
        local = pack(prompt[start : start + blocks])
        self.tier.store(rank, address, pack(names), local)
        for path, name in zip(paths, names, strict=True):
            self.held[key].setdefault(path, name)

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def remove(self, data: st.DataObject, key: RankKey) -> None:
        if key in self.ranks:
            held = sorted(self.held[key])
            gone = data.draw(st.lists(st.sampled_from(held), min_size=1, unique=True))
            for path in gone:
                del self.held[key][path]
            names = [name_of(seed, path) for path in gone for seed in (1, 2)]  # all that it has
            assert self.tier.remove(self.ranks[key], pack([*names, 7])) == len(gone)
            self.release_if_empty(key)

    @rule(key=st.sampled_from(KEYS), blocks=st.integers(1, 5))
    def drop_oldest(self, key: RankKey, blocks: int) -> None:
        if len(self.held[key]) >= blocks:
            before = len(self.held[key])
            self.tier.drop_oldest(self.ranks[key], blocks)
            self.keep_what_is_named(key)
            assert len(self.held[key]) == before - blocks
            self.release_if_empty(key)

    @rule(key=st.sampled_from(KEYS), data=st.data())
    def drop_a_place(self, key: RankKey, data: st.DataObject) -> None:
        if key in self.ranks:
            rank, path = self.ranks[key], data.draw(st.sampled_from(sorted(self.held[key])))
            address = rank.hashes.find(self.held[key].pop(path))
            strand, position = address >> POSITION_BITS, address & POSITION_MASK
            assert self.tier.held_in(rank, strand) >> position & 1
            self.tier.drop(rank, strand, 1 << position)
            self.release_if_empty(key)

    @rule()
    def cut_all_ends(self) -> None:
        for strand in list(self.tier.trie.strands):
            for rank in self.ranks.values():
                if strand in rank.hashes.rows:
                    self.tier.cut_row(rank, strand)
                    held = self.tier.held_in(rank, strand)
                    assert len(rank.hashes.rows[strand]) >> 3 == held.bit_length()
            self.tier.cut_label(strand)

    @rule(key=st.sampled_from(KEYS))
    def retire(self, key: RankKey) -> None:
        if key in self.ranks:
            self.sweeps.append(self.tier.retire(self.ranks.pop(key)))
            self.held[key] = {}

    @precondition(lambda self: self.sweeps)
    @rule(steps=st.integers(1, 4))
    def sweep(self, steps: int) -> None:
        for _ in range(steps):
            if self.sweeps and next(self.sweeps[0], NOWHERE) == NOWHERE:
                self.sweeps.pop(0)

    def keep_what_is_named(self, key: RankKey) -> None:
        names = self.ranks[key].hashes
        self.held[key] = {
            path: name for path, name in self.held[key].items() if names.find(name) != NOWHERE
        }

    def release_if_empty(self, key: RankKey) -> None:
        if not self.held[key]:
            self.tier.ranks.release(self.ranks.pop(key))

    @invariant()
    def a_prompt_matches_what_is_held_of_its_start(self) -> None:
        for prompt in PROMPTS:
            expected = {}
            for key, held in self.held.items():
                ends = (at for at in range(DEPTH) if prompt[: at + 1] not in held)
                if leading := next(ends, DEPTH):
                    expected[key] = leading
            sets, path = self.tier.match_sets(pack(prompt))
            keys = self.bits.keys
            found = {keys[bit]: blocks for blocks, mask in sets for bit in bits_of(mask)}
            assert found == expected
            masks = [mask for _, mask in sets]
            assert sum(masks) == sum(1 << self.ranks[key].bit for key in expected)
            for blocks, ranks in sets:
                alike: dict[bytes, int] = {}
                for key in expected:
                    if mine := ranks & 1 << self.ranks[key].bit:
                        name = pack([self.held[key][prompt[:blocks]]])
                        alike[name] = alike.get(name, 0) | mine
                assert dict(self.tier.last_hashes(ranks, path, blocks)) == alike

    @invariant()
    def each_block_is_in_its_place(self) -> None:
        for key, rank in self.ranks.items():
            assert rank.blocks == len(self.held[key])
            rows = sum(self.tier.held_in(rank, strand).bit_count() for strand in rank.hashes.rows)
            assert rows == rank.blocks
            for path, name in self.held[key].items():
                address = rank.hashes.find(name)
                assert rank.hashes.hash_at(address) == pack([name])
                run, at = self.tier.trie.resolve(address)
                assert run.held_by(rank.bit) >> at & 1
                assert run.label[at << 3 : (at + 1) << 3] == pack(path[-1:])

    def teardown(self) -> None:
        for sweep in self.sweeps:
            list(sweep)
        for key, rank in self.ranks.items():
            rank_blocks = len(self.held[key])
            self.tier.drop_oldest(rank, rank_blocks)
            self.tier.ranks.release(rank)
        assert not self.tier.trie.strands
        assert not self.tier.trie.root.children
        assert not self.bits.keys
        assert not len(self.tier._odd)


@pytest.mark.parametrize("strand_blocks", [2, 1024])
def test_the_tier_does_what_the_model_does(
    strand_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_tier, "STRAND_BLOCKS", strand_blocks)
    monkeypatch.setattr(device_tier, "_TRIM_BLOCKS", 1)
    monkeypatch.setattr(device_tier, "_MAX_OTHERS_TO_GROW", 1)
    run_state_machine_as_test(
        DeviceTierMachine, settings=settings(max_examples=40, stateful_step_count=30)
    )


# What ranks call their blocks

SIX = (1, 2, 3, 4, 5, 6)


class Fleet:
    """Ranks that store the beginning of one prompt."""

    def __init__(self, ranks: int) -> None:
        self.tier = DeviceTier(RankBits(), engine_hashes)
        self.ranks = [self.tier.ranks.admit((number, 0)) for number in range(ranks)]

    def store(self, number: int, end: int, seed: int = 1, start: int = 0) -> None:
        """What comes before `start` the rank has under the names of seed 1."""
        names = [name_of(seed, SIX[: at + 1]) for at in range(start, end)]
        parent = self.ranks[number].hashes.find(name_of(1, SIX[:start])) if start else NOWHERE
        self.tier.store(self.ranks[number], parent, pack(names), pack(SIX[start:end]))

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
        return dict(self.tier.last_hashes(ranks, path, blocks))


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
        lines[ranks] = lines_run(fleet.tier.last_hashes, sets[0][1], path, 6)
    assert lines[400] == lines[40]


def test_blocks_that_are_removed_under_all_their_names_at_once_leave_nothing_behind() -> None:
    fleet = Fleet(1)
    fleet.store(0, 2)
    fleet.store(0, 2, seed=2)
    names = [name_of(seed, SIX[:blocks]) for seed in (1, 2) for blocks in (1, 2)]
    assert fleet.tier.remove(fleet.ranks[0], pack(names)) == 2
    assert not len(fleet.tier._odd)


def test_ranks_that_call_a_block_otherwise_are_odd_until_they_hold_nothing_there() -> None:
    fleet = Fleet(4)
    for number, seed in enumerate((1, 2, 1, 3)):
        fleet.store(number, 6, seed)
    assert fleet.odd == 0b1010
    fleet.store(1, 6, 1)  # it stays what it was called first
    assert fleet.names(6) == {called(6): 0b101, called(6, 2): 0b10, called(6, 3): 0b1000}
    fleet.remove(1, 3, 2)
    assert fleet.odd == 0b1010
    fleet.remove(1, 0, 2)  # it has them under the names of the others still
    assert fleet.names(6) == {called(6): 0b111, called(6, 3): 0b1000}
    fleet.remove(1, 0, 1)
    assert fleet.odd == 0b1000
    fleet.store(1, 6, 1)
    assert fleet.odd == 0b1000
    for _ in fleet.tier.retire(fleet.ranks[3]):
        pass
    assert fleet.odd == 0
    assert not len(fleet.tier._odd)


def test_the_names_of_a_span_are_compared_where_they_stand() -> None:
    fleet = Fleet(2)
    fleet.store(0, 6)
    fleet.store(1, 3)
    fleet.store(1, 6, seed=2, start=3)
    assert fleet.odd == 0b10


def test_the_names_of_a_part_are_compared_with_any_rank_that_holds_them() -> None:
    fleet = Fleet(2)
    fleet.store(1, 6, seed=2)
    fleet.remove(1, 3, seed=2)
    fleet.store(0, 3)
    assert fleet.odd == 0b01


@pytest.mark.parametrize(("ranks", "runs"), [(3, 1), (4, 2)])
def test_a_run_grows_only_where_few_others_hold_it(ranks: int, runs: int) -> None:
    fleet = Fleet(ranks)
    for number in range(ranks):
        fleet.store(number, 3)
    fleet.store(0, 6)
    assert len(fleet.tier.match_sets(pack(SIX))[1]) == runs


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


@pytest.mark.parametrize(("reborn", "odd"), [(7, 0), (8, 1 << 18), (18, 1 << 18)])
def test_a_rank_is_taken_for_odd_where_it_cannot_soon_be_told(reborn: int, odd: int) -> None:
    fleet = Fleet(20)
    for number in range(20):
        fleet.store(number, 6)
    sweeps = [fleet.come_back(number) for number in range(18 - reborn, 18)]
    for number in (18, 19):
        fleet.remove(number, 0)
    fleet.store(18, 6)
    assert fleet.odd == odd
    holding = (1 << 18 - reborn) - 1 | 1 << 18
    assert fleet.names(6) == {called(6): holding}
    for sweep in sweeps:
        list(sweep)
    fleet.store(19, 6)
    assert fleet.odd == odd
    assert fleet.names(6) == {called(6): holding | 1 << 19}
