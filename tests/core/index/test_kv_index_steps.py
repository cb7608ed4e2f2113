"""What an index does at once, what it leaves for later, and when somebody is told of that."""

from collections.abc import Iterator
from struct import pack

import pytest

from lean_selector.core.index import holes
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Matched, Tier

A = (1, 0)


def store(index: KvIndex, names: range, tier: Tier, local: range | None = None) -> None:
    of = names if local is None else local
    index.store(*A, tier, None, names, pack(f"<{len(of)}Q", *of))


def give_back(index: KvIndex) -> None:
    for _ in range(10_000):
        if not index.sweep(1):
            return
    raise AssertionError("there is always more to do")


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
    store(index, range(1, 321), tier)
    assert taken == before + 2 + 10
    store(index, range(1, 2), tier)
    assert taken == before + 2 + 10 + 2


def test_who_asked_hears_once_that_there_is_something_to_give_back() -> None:
    heard: list[KvIndex] = []
    index = KvIndex(16, 5_000, 6_000, on_sweep=heard.append)
    store(index, range(1, 2_000), Tier.DISK)
    index.clear(*A)
    index.do_in_steps(iter([None] * 100))
    assert heard == [index]
    beside = index.beside()
    assert beside.bits is index.bits
    assert (beside.on_sweep, beside.bounds.default) == (index.on_sweep, index.bounds.default)


@pytest.mark.parametrize("over", [Tier.DEVICE, Tier.HOST_PINNED, Tier.EXTERNAL])
def test_a_new_bound_is_kept_on_each_tier_whatever_the_others_hold(over: Tier) -> None:
    index = KvIndex(16)
    for tier in (Tier.DEVICE, Tier.HOST_PINNED, Tier.EXTERNAL):
        store(index, range(1, 1_001 if tier == over else 6), tier)
    index.set_bound(1, 10, 10)
    give_back(index)
    blocks = {tier: index.blocks(*A, tier) for tier in Tier}
    assert blocks == {tier: 0 if tier == Tier.DISK else 5 for tier in Tier} | {over: 10}
    index.set_bound(1, 10, 10)
    assert not index.sweep(1)  # nothing is beyond it


def test_a_long_event_leaves_no_more_than_the_bound_on_a_lower_tier() -> None:
    index = KvIndex(16, lower_tier_bound=10)
    store(index, range(1, 201), Tier.HOST_PINNED)
    assert index.blocks(*A, Tier.HOST_PINNED) == 10


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.DISK])
def test_blocks_without_a_name_or_without_tokens_are_left_out(tier: Tier) -> None:
    for names, blocks in ((5, 3), (3, 5)):
        index = KvIndex(16)
        store(index, range(1, names + 1), tier, local=range(1, blocks + 1))
        assert index.blocks(*A, tier) == 3
    index = KvIndex(16)
    store(index, range(1, 2), tier)
    index.store(*A, tier, 1, [2, 3], pack("<Q", 2) + b"\x03\x00")  # and a part of a third
    assert index.blocks(*A, tier) == 2
    assert index.remove(*A, tier, [3]) == 0


def test_a_rank_that_has_nothing_on_lower_tiers_is_not_asked_for_them() -> None:
    index = KvIndex(16)
    store(index, range(1, 3), Tier.DEVICE)
    assert index.blocks(*A, Tier.DISK) == 0
    store(index, range(1, 3), Tier.DISK)
    assert set(index._lower) == {0}
    index.remove(*A, Tier.DISK, [1, 2])
    assert index._lower == {}
    assert index.ranks() == [A]


def test_only_whole_names_are_removed_from_a_lower_tier() -> None:
    index = KvIndex(16)
    index.store(*A, Tier.DISK, None, [1, 256, 512], pack("<3Q", 1, 2, 3))
    assert index.remove(*A, Tier.DISK, [256, 512]) == 2  # the bytes of 1 are among theirs
    assert index.blocks(*A, Tier.DISK) == 1


def test_the_next_review_counts_from_when_the_last_one_began_and_from_half_of_what_it_saw() -> None:
    index = KvIndex(16)
    for block in range(1, 101):
        store(index, range(block, block + 1), Tier.DEVICE)
    index._start_review()
    index.remove(*A, Tier.DEVICE, [1, 2, 3, 4, 5])  # seen, and gone before it ends
    assert len(index._sweeps) == 1
    give_back(index)
    assert index._until_review == holes.REVIEW_AFTER + 50 - 5


def test_sets_of_ranks_leave_out_just_those_that_go_on_elsewhere() -> None:
    index = KvIndex(16)
    ranks = [(worker, 0) for worker in range(4)]
    for rank in ranks:
        index.store(*rank, Tier.DEVICE, None, [11], pack("<Q", 1))
    for rank in (ranks[1], ranks[3]):
        index.store(*rank, Tier.HOST_PINNED, 11, [12], pack("<Q", 2))
    sets, going_on = index.match_sets(pack("<2Q", 1, 2))
    assert sets == [(1, 0b0101)]
    assert going_on == [(Matched(1, 1), 0b1010)]
