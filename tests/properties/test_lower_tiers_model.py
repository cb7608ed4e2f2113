"""The lower tiers of many ranks against the naive model of each: some alike, some not.

Ranks are drawn by kinds that hold the same, under names that depend on an engine's seed; then some
of them change, go, and come back before what they held is taken apart.
"""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_selector.core.index import kv_index, sweeping
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Tier
from tests.properties.test_kv_index_model import (
    Path,
    RankModel,
    chained_name,
    check_matches,
    is_pristine,
)
from tests.support.blocks import remove_blocks, store_blocks
from tests.support.driven_selector import pack

PATHS = [(1, 2, 3, 4, 5, 6), (1, 2, 3, 7, 8, 9), (1, 2, 1, 2, 1, 2)]
LOWER = [Tier.HOST_PINNED, Tier.DISK, Tier.EXTERNAL]

PATH = st.sampled_from(PATHS)
SEED = st.sampled_from([0, 0, 0, 1, 2])
START = st.just(0) | st.integers(0, 5)  # often 0, so that ranks part at the start of a prompt
STRETCH = st.tuples(st.sampled_from([*LOWER, Tier.DEVICE]), PATH, START, SEED)
NUMBER = st.integers(0, 9)
# What ranks of a kind hold: so many device blocks, then stretches from a block on, of 1 to 4.
KIND = st.tuples(
    PATH, st.integers(0, 5), SEED, st.lists(st.tuples(STRETCH, st.integers(1, 4)), max_size=4)
)
CHANGE = st.one_of(
    st.tuples(st.just("store"), st.integers(0, 99), st.tuples(STRETCH, st.integers(1, 4))),
    st.tuples(st.just("remove"), st.integers(0, 99), st.tuples(STRETCH, st.integers(1, 4))),
    st.tuples(st.just("become"), st.integers(0, 99), st.integers(0, 9)),
    st.tuples(st.just("become"), st.integers(0, 99), st.integers(0, 9)),
    st.tuples(st.just("clear"), st.integers(0, 99), st.none()),
    st.tuples(st.just("sweep"), st.integers(1, 9), st.none()),
)


class Fleet:
    """The index and the model of each rank."""

    def __init__(self, ranks: int) -> None:
        self.index = KvIndex(16)
        self.models = {(number, 0): RankModel() for number in range(ranks)}
        self.keys = list(self.models)

    def store(self, key: tuple[int, int], stretch: tuple[Any, ...], blocks: int) -> None:
        tier, path, start, seed = stretch
        local = path[start : start + blocks]
        parent = chained_name(path[:start], seed)
        names = [chained_name(path[: at + 1], seed) for at in range(start, start + len(local))]
        assert None not in names
        told: list[int] = [name for name in names if name is not None]
        store_blocks(self.index, key, tier, parent, told, pack(local))
        if tier == Tier.DEVICE:
            self.models[key].store(parent, told, local)
        else:
            self.models[key].store_lower(tier - 1, parent, told, local)

    def remove(self, key: tuple[int, int], stretch: tuple[Any, ...], blocks: int) -> None:
        tier, path, start, seed = stretch
        for at in range(start, min(len(path), start + blocks)):
            name = chained_name(path[: at + 1], seed)
            assert name is not None
            removed = remove_blocks(self.index, key, tier, [name])
            model = self.models[key]
            if tier == Tier.DEVICE:
                assert removed == model.remove(name)
            else:
                assert removed == model.remove_lower(tier - 1, name)

    def clear(self, key: tuple[int, int]) -> None:
        assert self.index.clear(*key) == self.models[key].blocks()
        self.models[key] = RankModel()

    def become(self, key: tuple[int, int], kind: tuple[Any, ...]) -> None:
        path, device, seed, stretches = kind
        if device:
            self.store(key, (Tier.DEVICE, path, 0, seed), device)
        for stretch, blocks in stretches:
            self.store(key, stretch, blocks)

    def check(self) -> None:
        prompts: set[Path] = {path[:end] for path in PATHS for end in range(len(path) + 1)}
        check_matches(self.index, self.models, prompts)


@settings(max_examples=100)
@given(
    kinds=st.lists(KIND, min_size=1, max_size=4),
    ranks=st.lists(NUMBER, min_size=1, max_size=6) | st.lists(NUMBER, min_size=66, max_size=80),
    changes=st.lists(CHANGE, max_size=4) | st.lists(CHANGE, min_size=12, max_size=30),
    swept_later=st.booleans(),
)
def test_many_ranks_go_on_as_each_of_them_alone_would(
    kinds: list[tuple[Any, ...]],
    ranks: list[int],
    changes: list[tuple[Any, ...]],
    swept_later: bool,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if swept_later:
            patch.setattr(sweeping, "_STEPS_AT_ONCE", 0)
            patch.setattr(kv_index, "_STEPS_PER_EVENT", 0)
        fleet = Fleet(len(ranks))
        for key, number in zip(fleet.keys, ranks, strict=True):
            fleet.become(key, kinds[number % len(kinds)])
        fleet.check()
        for change, number, argument in changes:
            key = fleet.keys[number % len(ranks)]
            if change == "sweep":
                fleet.index.sweep(number)
            elif change == "clear":
                fleet.clear(key)
            elif change == "become":
                fleet.clear(key)
                fleet.become(key, kinds[argument % len(kinds)])
            elif change == "store":
                fleet.store(key, *argument)
            else:
                fleet.remove(key, *argument)
        fleet.check()
        while fleet.index.sweep(100):
            pass
        fleet.check()
        for key in fleet.keys:
            fleet.clear(key)
        while fleet.index.sweep(100):
            pass
        assert is_pristine(fleet.index)
