"""The device tier against a model that keeps, for each rank, the set of paths that it holds."""

from collections.abc import Iterator
from struct import pack

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
from lean_selector.core.index.matched import Matched
from lean_selector.core.index.own_hashes import engine_hashes
from lean_selector.core.index.runs import POSITION_BITS, POSITION_MASK
from lean_selector.core.rank_bits import RankBits, RankKey

Path = tuple[int, ...]
KEYS: list[RankKey] = [(1, 0), (1, 1), (2, 0)]
DEPTH = 6
PROMPTS = [tuple(1 + (bits >> at & 1) for at in range(DEPTH)) for bits in range(1 << DEPTH)]


def as_bytes(hashes: list[int] | Path) -> bytes:
    return pack(f"<{len(hashes)}Q", *hashes)


def name_of(key: RankKey, path: Path) -> int:
    """What the rank's engine calls the last block of a path."""
    return int("".join(map(str, (key[0], key[1], 9, *path))))


class DeviceTierMachine(RuleBasedStateMachine):
    """Few short prompts, so that ranks share runs, split them and grow them all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.bits = RankBits()
        self.tier = DeviceTier(self.bits, engine_hashes)
        self.ranks: dict[RankKey, DeviceRank] = {}
        self.held: dict[RankKey, set[Path]] = {key: set() for key in KEYS}
        self.sweeps: list[Iterator[None]] = []

    @rule(
        key=st.sampled_from(KEYS),
        prompt=st.sampled_from(PROMPTS),
        start=st.sampled_from([0, 0, 1, 2, 4]),
        blocks=st.integers(1, DEPTH),
    )
    def store(self, key: RankKey, prompt: Path, start: int, blocks: int) -> None:
        if start and prompt[:start] not in self.held[key]:
            return
        rank = self.ranks.get(key)
        if rank is None:
            rank = self.ranks[key] = self.tier.admit(key)
        place = rank.names.find(name_of(key, prompt[:start])) if start else NOWHERE
        paths = [prompt[: at + 1] for at in range(start, min(DEPTH, start + blocks))]
        names = [name_of(key, path) for path in paths]
        local = as_bytes(prompt[start : start + blocks])
        self.tier.store(rank, place, as_bytes(names), local)
        self.held[key].update(paths)

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def remove(self, data: st.DataObject, key: RankKey) -> None:
        if key in self.ranks:
            held = sorted(self.held[key])
            gone = data.draw(st.lists(st.sampled_from(held), min_size=1, unique=True))
            names = [name_of(key, path) for path in gone]
            assert self.tier.remove(self.ranks[key], as_bytes([*names, 7])) == len(gone)
            self.held[key].difference_update(gone)
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
            place = rank.names.find(name_of(key, path))
            strand, position = place >> POSITION_BITS, place & POSITION_MASK
            assert self.tier.held_in(rank, strand) >> position & 1
            self.tier.drop(rank, strand, 1 << position)
            self.held[key].remove(path)
            self.release_if_empty(key)

    @rule()
    def cut_all_ends(self) -> None:
        for strand in list(self.tier.trie.strands):
            for rank in self.ranks.values():
                if strand in rank.names.rows:
                    self.tier.cut_row(rank, strand)
                    held = self.tier.held_in(rank, strand)
                    assert len(rank.names.rows[strand]) >> 3 == held.bit_length()
            self.tier.cut_label(strand)

    @rule(key=st.sampled_from(KEYS))
    def retire(self, key: RankKey) -> None:
        if key in self.ranks:
            self.sweeps.append(self.tier.retire(self.ranks.pop(key)))
            self.held[key] = set()

    @precondition(lambda self: self.sweeps)
    @rule(steps=st.integers(1, 4))
    def sweep(self, steps: int) -> None:
        for _ in range(steps):
            if self.sweeps and next(self.sweeps[0], NOWHERE) == NOWHERE:
                self.sweeps.pop(0)

    def keep_what_is_named(self, key: RankKey) -> None:
        names = self.ranks[key].names
        self.held[key] = {
            path for path in self.held[key] if names.find(name_of(key, path)) != NOWHERE
        }

    def release_if_empty(self, key: RankKey) -> None:
        if not self.held[key]:
            self.tier.release(self.ranks.pop(key))

    @invariant()
    def a_prompt_matches_what_is_held_of_its_start(self) -> None:
        for prompt in PROMPTS:
            expected = {}
            for key, held in self.held.items():
                ends = (at for at in range(DEPTH) if prompt[: at + 1] not in held)
                if leading := next(ends, DEPTH):
                    expected[key] = Matched(leading)
            sets, path = self.tier.match_sets(as_bytes(prompt))
            assert self.tier.by_rank(sets) == expected
            masks = [mask for _, mask in sets]
            assert sum(masks) == sum(1 << self.ranks[key].bit for key in expected)
            for key, hit in expected.items():
                last = self.tier.last_name(self.ranks[key], path, hit.device)
                assert last == as_bytes([name_of(key, prompt[: hit.device])])

    @invariant()
    def each_block_is_in_its_place(self) -> None:
        for key, rank in self.ranks.items():
            assert rank.blocks == len(self.held[key])
            rows = sum(self.tier.held_in(rank, strand).bit_count() for strand in rank.names.rows)
            assert rows == rank.blocks
            for path in self.held[key]:
                name = name_of(key, path)
                place = rank.names.find(name)
                assert rank.names.name_at(place) == as_bytes([name])
                run, at = self.tier.trie.resolve(place)
                assert run.held_by(rank.bit) >> at & 1
                assert run.label[at << 3 : (at + 1) << 3] == as_bytes(path[-1:])

    def teardown(self) -> None:
        for sweep in self.sweeps:
            list(sweep)
        for key, rank in self.ranks.items():
            rank_blocks = len(self.held[key])
            self.tier.drop_oldest(rank, rank_blocks)
            self.tier.release(rank)
        assert not self.tier.trie.strands
        assert not self.tier.trie.root.children
        assert not self.bits.keys


@pytest.mark.parametrize("strand_blocks", [2, 1024])
def test_the_tier_does_what_the_model_does(
    strand_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_tier, "STRAND_BLOCKS", strand_blocks)
    monkeypatch.setattr(device_tier, "_TRIM_BLOCKS", 1)
    monkeypatch.setattr(device_tier, "_MAX_OTHERS_TO_GROW", 1)
    run_state_machine_as_test(
        DeviceTierMachine, settings=settings(max_examples=40, stateful_step_count=30, deadline=None)
    )
