"""The index where a model does not look: bounds, limits, dumps, and what is done at once or later.

What prompts match after any events is in tests/properties/test_kv_index_model.py and
test_lower_tiers_model.py. Here prompts are lists of small numbers, which stand for local hashes; a
rank's hash for block n is 100 + n where nothing else is said.
"""

from collections.abc import Iterator, Sequence

import pytest

from lean_selector.core.index import device_tier, holes
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Matched, StoredRun, StoreResult, Tier
from tests.support.blocks import matches, remove_blocks, store_blocks
from tests.support.driven_selector import pack

A, B, C = (1, 0), (2, 0), (3, 7)


def store(
    index: KvIndex,
    rank: tuple[int, int],
    local: Sequence[int],
    parent: int | None = None,
    names: Sequence[int] | None = None,
    tier: Tier = Tier.DEVICE,
) -> StoreResult:
    names = [100 + block for block in local] if names is None else names
    return store_blocks(index, rank, tier, parent, names, pack(local))


def match(index: KvIndex, local: list[int]) -> dict[tuple[int, int], Matched]:
    return matches(index, pack(local))


def device(index: KvIndex, local: list[int]) -> dict[tuple[int, int], int]:
    return {rank: hit.device for rank, hit in match(index, local).items()}


def assert_pristine(index: KvIndex) -> None:
    trie = index._device.trie
    assert (index._ranks, index._lower, index._device.ranks.in_use, trie.strands) == ({}, {}, 0, {})
    assert trie.root.children is None
    assert index.is_empty
    assert (index.total_blocks, index.ranks()) == (0, [])


def give_back(index: KvIndex) -> None:
    for _ in range(10_000):
        if not index.sweep(1):
            return
    raise AssertionError("there is always more to do")


# Events


def test_an_index_with_as_many_runs_as_it_can_number_takes_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_tier, "MAX_STRANDS", 4)
    index = KvIndex(16)
    results = [store(index, A, [block]) for block in (1, 2, 3, 4)]
    assert results == [StoreResult.STORED] * 3 + [StoreResult.FULL]
    assert index.total_blocks == 3


def test_only_whole_names_are_removed_from_a_lower_tier() -> None:
    index = KvIndex(16)
    store(index, A, [1, 2, 3], names=[1, 256, 512], tier=Tier.DISK)
    assert remove_blocks(index, A, Tier.DISK, [256, 512]) == 2  # the bytes of 1 are among theirs
    assert index.blocks(*A, Tier.DISK) == 1


# Bounds


def test_beyond_its_bound_a_rank_loses_its_oldest_blocks() -> None:
    index = KvIndex(16)
    index.set_bound(A[0], 4, None)
    store(index, A, [1, 2, 3])
    store(index, A, [7, 8, 9])
    store(index, B, [1, 2, 3])
    store(index, B, [7, 8, 9])
    assert device(index, [1, 2, 3]) == {A: 1, B: 3}
    assert device(index, [7, 8, 9]) == {A: 3, B: 3}
    assert index.evicted == 2
    index.set_bound(A[0], 0, None)
    assert index.ranks() == [B]
    assert index.evicted == 6
    index.set_bound(A[0], None, None)
    store(index, A, [1, 2, 3, 4, 5, 6])
    assert index.blocks(*A, Tier.DEVICE) == 6


def test_lower_tiers_have_a_bound_each_and_a_default() -> None:
    index = KvIndex(16, device_bound=2, lower_tier_bound=2)
    store(index, A, [1, 2, 3])
    store(index, A, [1, 2, 3], tier=Tier.HOST_PINNED)
    store(index, A, [1, 2, 3], tier=Tier.DISK)
    assert [index.blocks(*A, tier) for tier in Tier] == [2, 2, 2, 0]
    assert index.evicted == 3
    index.set_bound(A[0], 0, 0)
    assert_pristine(index)
    store(index, A, [1], tier=Tier.DISK)
    assert_pristine(index)


def test_a_rank_that_is_cleared_while_it_is_brought_below_its_bound_holds_up_no_other() -> None:
    index = KvIndex(16)
    for dp_rank in (0, 1):
        for at in range(1_000):
            store_blocks(
                index, (1, dp_rank), Tier.DISK, None, [at + 1], (at + 1).to_bytes(8, "little")
            )
    index.set_bound(1, None, 5)
    assert index.total_blocks > 1_000, "it is not done at once"
    index.clear(1, 0)
    while index.sweep(100):
        pass
    assert [index.blocks(1, dp_rank, Tier.DISK) for dp_rank in (0, 1)] == [0, 5]


# Dump


def stored(rank: tuple[int, int], tier: Tier, parent: int | None, local: list[int]) -> StoredRun:
    return StoredRun(*rank, tier, parent, tuple(100 + n for n in local), tuple(local))


def test_a_dump_lists_runs_by_rank_parents_first() -> None:
    index = KvIndex(4)
    store(index, B, [1])
    store(index, A, [1, 2, 4])
    store(index, A, [3], 102)
    store(index, A, [6, 7], 104, tier=Tier.DISK)
    store(index, A, [8], 104, tier=Tier.DISK)
    assert list(index.dump()) == [
        [
            stored(A, Tier.DEVICE, None, [1, 2]),
            stored(A, Tier.DEVICE, 102, [4]),
            stored(A, Tier.DEVICE, 102, [3]),
            stored(A, Tier.DISK, 104, [6]),
            stored(A, Tier.DISK, 106, [7]),
            stored(A, Tier.DISK, 104, [8]),
        ],
        [stored(B, Tier.DEVICE, None, [1])],
    ]
    assert [[run.worker_id for run in runs] for runs in index.dump(worker_id=2)] == [[2]]


def test_blocks_in_a_ring_are_dumped_once() -> None:
    index = KvIndex(4)
    store(index, A, [1], 12, names=[11], tier=Tier.DISK)
    store(index, A, [2], 11, names=[12], tier=Tier.DISK)
    (runs,) = index.dump()
    assert sorted(run.block_hashes for run in runs) == [(11,), (12,)]


# -- seen from outside -----------------------------------------------------------------------------


def test_the_leading_names_are_the_engines_own_across_runs_and_forks() -> None:
    index = KvIndex(4)
    store(index, A, [1, 2, 3, 4])
    store(index, A, [1, 2, 7, 8], names=[101, 102, 207, 208])  # a run that forks
    store(index, B, [1, 2, 3], names=[11, 12, 13])
    assert index.leading_hashes(A, pack([1, 2, 7, 8]), 4) == (101, 102, 207, 208)
    assert index.leading_hashes(A, pack([1, 2, 3, 4]), 3) == (101, 102, 103)
    assert index.leading_hashes(B, pack([1, 2, 3, 4]), 4) == (11, 12, 13)  # those that it holds
    assert index.leading_hashes(C, pack([1]), 1) == ()
    assert index.leading_hashes(B, pack([1, 2, 3, 4]), 0) == ()


def test_a_worker_that_goes_takes_along_what_a_rank_without_blocks_has_shown() -> None:
    index = KvIndex(4)
    index.learn(A)
    index.drop_worker(A[0])
    assert index.learned(A) is None


# What is done at once, and what later


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.DISK])
def test_a_stored_event_does_two_steps_of_what_waits_and_one_for_32_blocks(tier: Tier) -> None:
    index = KvIndex(16)
    taken = 0

    def endless() -> Iterator[None]:
        nonlocal taken
        while True:
            taken += 1
            yield

    index.do_in_steps(endless())
    before = taken
    store(index, A, range(320), tier=tier)
    assert taken == before + 2 + 10
    store(index, A, [0], tier=tier)
    assert taken == before + 2 + 10 + 2


def test_who_asked_hears_once_that_there_is_something_to_give_back() -> None:
    heard: list[KvIndex] = []
    index = KvIndex(16, 5_000, 6_000, on_sweep=heard.append)
    store(index, A, range(2_000), tier=Tier.DISK)
    index.clear(*A)
    index.do_in_steps(iter([None] * 100))
    assert heard == [index]
    beside = index.empty_copy()
    assert beside.bits is index.bits
    assert (beside.on_sweep, beside.bounds.default) == (index.on_sweep, index.bounds.default)
    give_back(index)
    index.do_in_steps(iter([None] * 10_000))
    assert heard == [index, index]


def test_a_rank_that_has_nothing_on_lower_tiers_is_not_asked_for_them() -> None:
    index = KvIndex(16)
    store(index, A, [1, 2])
    assert index.blocks(*A, Tier.DISK) == 0
    store(index, A, [1, 2], tier=Tier.DISK)
    assert set(index._lower) == {0}
    remove_blocks(index, A, Tier.DISK, [101, 102])
    assert index._lower == {}
    assert index.ranks() == [A]


def test_the_next_review_counts_from_when_the_last_one_began_and_from_half_of_what_it_saw() -> None:
    index = KvIndex(16)
    for block in range(100):
        store(index, A, [block])
    index._start_review()
    remove_blocks(index, A, Tier.DEVICE, range(100, 105))  # seen, and gone before it ends
    assert len(index._sweeps) == 1
    give_back(index)
    assert index._until_review == holes.REVIEW_AFTER + 50 - 5


def test_blocks_that_are_told_by_their_names_alone_are_those_that_are_known() -> None:
    index = KvIndex(1)
    names = pack([999, 101, 102, 103])
    assert index.store_known(A, Tier.DEVICE, names, True) == 0
    store(index, A, [1, 2, 3])
    store(index, A, [1, 4])  # which splits the run
    assert index.store_known(A, Tier.HOST_PINNED, names, True) == 3
    assert index.store_known(A, Tier.DEVICE, names, True) == 3
    assert [remove_blocks(index, A, Tier.DEVICE, [101, 102, 103]) for _ in range(2)] == [0, 3]
    assert index.store_known(A, Tier.DISK, names, True) == 3  # as the lower tier has them
    assert matches(index, pack([1, 2, 3])) == {A: Matched(0, 3)}
    assert [index.knows(A, tier, 102) for tier in Tier] == [False, True, True, False]
    assert not any(index.knows(each, tier, 999) for each in (A, B) for tier in Tier)


def test_further_names_beyond_the_bound_go_first_come_first() -> None:
    index = KvIndex(1, 4)
    for name in range(200, 219):
        store(index, A, [1], names=[name])
    assert device(index, [1]) == {A: 1}
    known = [name for name in range(200, 219) if index.knows(A, Tier.DEVICE, name)]
    assert (len(known), known[-1]) == (4, 218)
    for name in known:
        assert device(index, [1]) == {A: 1}
        remove_blocks(index, A, Tier.DEVICE, [name])
    assert index.is_empty
