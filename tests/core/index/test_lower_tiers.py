"""A lower tier's edges, and which ranks a prompt's next block could be found on at all."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.core.index import kv_index, sweeping
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.lower_tiers import ROOT, Continuations, Edges, LowerTier
from lean_selector.core.index.shapes import Matched, Tier
from tests.support.blocks import matches, store_blocks
from tests.support.driven_selector import pack
from tests.support.operations import lines_run

A = (1, 0)
# Hashes that agree in 7 of their bytes are taken for one.
BLOCKS = [1, 2, 1 | 5 << 56, 2**64 - 1]
STEPS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(BLOCKS), st.booleans()), max_size=40)


def store(index: KvIndex, rank: tuple[int, int], local: list[int], tier: Tier, parent: int) -> None:
    names = [100 + block for block in local]
    store_blocks(index, rank, tier, 100 + parent if parent else None, names, pack(local))


# Continuations


@given(STEPS)
def test_the_ranks_of_a_block_are_those_that_have_it_as_often_as_it_came_and_went(
    steps: list[tuple[int, int, bool]],
) -> None:
    continuations = Continuations()
    held: Counter[tuple[int, int]] = Counter()
    prompt = pack([7, *BLOCKS])
    for bit, block, is_new in steps:
        alike = bit, block & (1 << 56) - 1
        if is_new:
            continuations.add(bit, pack([block]))
            held[alike] += 1
        elif held[alike]:
            continuations.discard(bit, pack([block]))
            held[alike] -= 1
        for at, asked in enumerate(BLOCKS, 1):
            ranks = sum(1 << rank for rank in range(4) if held[rank, asked & (1 << 56) - 1])
            assert continuations.of(prompt, at << 3) == ranks
            # Alone it is told by an int that all its blocks share.
            kept = [it.get(asked & (1 << 56) - 1, 0) for it in continuations._ranks]
            assert (min(kept, default=0) < 0) is (ranks.bit_count() == 1)
    assert continuations.of(prompt, 0) == 0
    assert continuations.of(prompt, len(prompt)) == 0  # the prompt has no next block
    for (bit, block), times in held.items():
        for _ in range(times):
            continuations.discard(bit, pack([block]))
    assert not any((*continuations._ranks, continuations._again))


# One tier


def tier_of(bit: int) -> tuple[LowerTier, Edges, Continuations]:
    continuations = Continuations()
    edges = Edges(continuations)
    return LowerTier(edges, bit), edges, continuations


def chain(tier: LowerTier, parent: bytes, local: list[int]) -> None:
    tier.store(parent, pack(100 + block for block in local), pack(local))


def test_a_walk_ends_with_the_prompt_whatever_the_last_block_is_called() -> None:
    index = KvIndex(16)
    store_blocks(index, A, Tier.HOST_PINNED, None, [5], pack([5]))  # as the tokens of a first block
    assert matches(index, pack([5])) == {A: Matched(0, 1)}


def test_a_block_that_came_again_goes_with_its_last_copy_and_another_at_once() -> None:
    tier, edges, continuations = tier_of(3)
    for _ in range(3):
        tier.store(ROOT, pack([101]), pack([1]), counted=True)
    tier.store(ROOT, pack([102]), pack([2]), counted=True)
    assert tier.remove(pack([102]))
    assert [tier.remove(pack([101])) for _ in range(4)] == [False, False, True, False]
    assert not any((*edges._edges, *continuations._ranks))


# The edges of all ranks


def test_ranks_that_call_a_block_alike_share_its_edge_and_the_objects_that_name_it() -> None:
    _, edges, continuations = tier_of(9)
    tiers = [LowerTier(edges, bit) for bit in range(3)]
    for tier in tiers:
        chain(tier, ROOT, [1, 2])
    assert edges.follow(0b1110, pack([101, 2])) == (pack([102]), 0b110)
    assert edges.others(0b1000, pack([101, 2])) == {}
    for one, other in zip(tiers[0]._edge.items(), tiers[2]._edge.items(), strict=True):
        assert one[0] is other[0]
        assert one[1] is other[1]
    for tier in tiers:
        tier.drop_oldest(2)
    assert not any((*edges._edges, edges._odd, *continuations._ranks))


def test_a_chain_ends_before_a_block_to_which_another_edge_leads() -> None:
    tier, edges, _ = tier_of(0)
    chain(tier, ROOT, [1, 2])
    tier.store(ROOT, pack([103, 102, 104]), pack([3, 2, 4]))
    assert len(tier) == 3
    assert edges.follow(1, pack([102, 4])) == (b"", 0)


def test_an_edge_that_leads_elsewhere_for_some_is_told_by_what_they_call_its_end() -> None:
    _, edges, _ = tier_of(9)
    tiers = [LowerTier(edges, bit) for bit in range(4)]
    for tier, name in zip(tiers, (101, 201, 201, 301), strict=True):
        tier.store(ROOT, pack([name]), pack([1]))
        tier.store(ROOT, pack([777]), pack([1]))  # the first one wins
    assert edges.follow(0b1111, pack([1])) == (pack([101]), 0b1)
    assert edges.others(0b1110, pack([1])) == {pack([201]): 0b110, pack([301]): 0b1000}
    assert tiers[2].remove(pack([201]))
    assert edges.others(0b1110, pack([1])) == {pack([201]): 0b10, pack([301]): 0b1000}
    # Without the one that came first the others are what they were.
    assert tiers[0].remove(pack([101]))
    assert edges.follow(0b1111, pack([1])) == (b"", 0)
    assert edges.others(0b1111, pack([1])) == {pack([201]): 0b10, pack([301]): 0b1000}
    tiers[0].store(ROOT, pack([301]), pack([1]))
    tiers[3].store(ROOT, pack([302]), pack([1]))
    assert edges.follow(0b1111, pack([1])) == (pack([301]), 0b1)
    assert edges.others(0b1110, pack([1])) == {pack([201]): 0b10, pack([301]): 0b1000}
    for tier in tiers:
        tier.drop_oldest(len(tier))
    assert not any((*edges._edges, edges._odd))


# All ranks' tiers


def test_a_match_walks_once_for_all_ranks_that_go_on_alike() -> None:
    prompt = pack([1, 2, 3, 4, 5, 6, 7, 8])
    lines = {}
    for ranks in (40, 400):
        index = KvIndex(16)
        for number in range(ranks):
            store(index, (number, 0), [1, 2, 3, 4], Tier.DEVICE, 0)
            store(index, (number, 0), [5, 6, 7, 8][: 1 + number % 3], Tier.HOST_PINNED, 4)
            store(index, (number, 0), [7], Tier.DISK, 6)
        assert len(index.match_sets(prompt)[1]) == 3
        lines[ranks] = lines_run(index.match_sets, prompt)
    assert lines[400] == lines[40]


def test_a_rank_is_in_doubt_for_as_long_as_what_it_held_before_is_taken_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sweeping, "_STEPS_AT_ONCE", 0)
    monkeypatch.setattr(kv_index, "_STEPS_PER_EVENT", 0)
    index = KvIndex(16)
    ranks = [(1, 0), (2, 0)]
    for rank in ranks:
        store(index, rank, [1, 2], Tier.HOST_PINNED, 0)
    for rank in ranks:
        index.clear(rank[0], rank[1])
        store(index, rank, [1], Tier.HOST_PINNED, 0)
    tiers = index._lower_matches._tiers
    doubtful = [tiers[0].doubtful]
    while index.sweep(1):
        assert matches(index, pack([1, 2])) == {rank: Matched(0, 1) for rank in ranks}
        doubtful.append(tiers[0].doubtful)
    doubtful.append(tiers[0].doubtful)
    assert sorted(set(doubtful), reverse=True) == [0b11, 0b10, 0]
    assert {edges.doubtful for edges in tiers} == {0}
