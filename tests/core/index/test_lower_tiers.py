"""A lower tier's edges, and which ranks a prompt's next block could be found on at all."""

from collections import Counter
from struct import pack

from hypothesis import given
from hypothesis import strategies as st

from lean_selector.core.index.kv_index import KvIndex, Matched, Tier
from lean_selector.core.index.lower_tiers import ROOT, Continuations, LowerTier

A, B, C = (1, 0), (2, 0), (3, 7)
# Hashes that agree in 7 of their bytes are taken for one.
BLOCKS = [1, 2, 1 | 5 << 56, 2**64 - 1]
STEPS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from(BLOCKS), st.booleans()), max_size=40)


def hashes(*local: int) -> bytes:
    return pack(f"<{len(local)}Q", *local)


def store(index: KvIndex, rank: tuple[int, int], local: list[int], tier: Tier, parent: int) -> None:
    names = [100 + block for block in local]
    index.store(*rank, tier, 100 + parent if parent else None, names, hashes(*local))


# Continuations


@given(STEPS)
def test_the_ranks_of_a_block_are_those_that_have_it_as_often_as_it_came_and_went(
    steps: list[tuple[int, int, bool]],
) -> None:
    continuations = Continuations()
    held: Counter[tuple[int, int]] = Counter()
    prompt = hashes(7, *BLOCKS)
    for bit, block, is_new in steps:
        alike = bit, block & (1 << 56) - 1
        if is_new:
            continuations.add(bit, hashes(block))
            held[alike] += 1
        elif held[alike]:
            continuations.discard(bit, hashes(block))
            held[alike] -= 1
        for at, asked in enumerate(BLOCKS, 1):
            ranks = sum(1 << rank for rank in range(4) if held[rank, asked & (1 << 56) - 1])
            assert continuations.of(prompt, at << 3) == ranks
            # Alone it is told by an int that all its blocks share.
            kept = continuations._ranks.get(asked & (1 << 56) - 1, 0)
            assert (kept < 0) is (ranks.bit_count() == 1)
    assert continuations.of(prompt, 0) == 0
    assert continuations.of(prompt, len(prompt)) == 0  # the prompt has no next block
    for (bit, block), times in held.items():
        for _ in range(times):
            continuations.discard(bit, hashes(block))
    assert (continuations._ranks, continuations._again) == ({}, {})


def test_the_last_rank_that_has_a_block_is_told_whichever_it_is() -> None:
    for left in range(4):
        continuations = Continuations()
        for bit in range(4):
            continuations.add(bit, hashes(1))
        for bit in range(4):
            if bit != left:
                continuations.discard(bit, hashes(1))
        assert continuations.of(hashes(1), 0) == 1 << left
        continuations.discard(left, hashes(1))
        assert continuations.of(hashes(1), 0) == 0


# One tier


def chain(tier: LowerTier, parent: bytes, local: list[int]) -> None:
    tier.store(parent, hashes(*(100 + block for block in local)), hashes(*local))


def test_the_oldest_blocks_go_first_and_those_behind_them_stay() -> None:
    continuations = Continuations()
    tier = LowerTier(continuations, 2)
    chain(tier, ROOT, [1, 2, 3])
    tier.drop_oldest(2)
    assert len(tier) == 1
    assert list(tier.chains()) == [(hashes(102), hashes(103), hashes(3))]
    assert [continuations.of(hashes(block), 0) for block in (1, 2, 3)] == [0, 0, 1 << 2]
    chain(tier, ROOT, [1, 2])
    assert tier.walk(ROOT, hashes(1, 2, 3, 4), 0) == (hashes(103), 24)


def test_a_tier_tells_the_edge_of_each_block_and_passes_over_what_goes_meanwhile() -> None:
    tier = LowerTier(Continuations(), 0)
    chain(tier, ROOT, [1, 2, 3])
    edges = tier.chains()
    assert next(edges) == (ROOT, hashes(101), hashes(1))
    assert tier.remove(hashes(102))
    assert not tier.remove(hashes(102))
    assert list(edges) == [(hashes(102), hashes(103), hashes(3))]


def test_a_walk_ends_with_the_prompt_whatever_the_last_block_is_called() -> None:
    tier = LowerTier(Continuations(), 0)
    tier.store(ROOT, hashes(5), hashes(5))  # named as the tokens of a first block
    assert tier.walk(ROOT, hashes(5), 0) == (hashes(5), 8)


# All ranks' tiers


def test_ranks_go_on_from_where_each_of_them_ends_on_the_device() -> None:
    index = KvIndex(16)
    store(index, A, [1], Tier.DEVICE, 0)
    store(index, A, [2], Tier.HOST_PINNED, 1)
    store(index, B, [1, 2], Tier.DEVICE, 0)
    store(index, B, [3], Tier.DISK, 2)
    store(index, C, [1, 2, 3], Tier.HOST_PINNED, 0)
    assert index.match(hashes(1, 2, 3)) == {
        A: Matched(1, 1, 0),
        B: Matched(2, 0, 1),
        C: Matched(0, 3, 0),
    }


def test_a_rank_that_has_the_next_block_below_another_one_does_not_go_on() -> None:
    index = KvIndex(16)
    store(index, A, [1], Tier.DEVICE, 0)
    for rank in (A, B):
        store(index, rank, [2], Tier.HOST_PINNED, 9)
    assert index.match(hashes(2)) == {}
    ((blocks, ranks),), going_on = index.match_sets(hashes(1, 2))
    assert (blocks, ranks.bit_count(), going_on) == (1, 1, {})


def test_a_rank_that_is_dropped_does_not_go_on_while_its_many_blocks_are_given_back() -> None:
    index = KvIndex(16)
    local = list(range(1, 2_000))
    for rank in (A, B, C):
        store(index, rank, local, Tier.HOST_PINNED, 0)
        store(index, rank, [8_001, 8_002], Tier.HOST_PINNED, 0)  # the last to be given back
    index.clear(*B)
    assert index.sweep(1)
    assert index.match(hashes(8_001, 8_002)) == {A: Matched(0, 2), C: Matched(0, 2)}
    while index.sweep(1):
        pass
    assert index.match(hashes(8_001, 8_002)) == {A: Matched(0, 2), C: Matched(0, 2)}
    store(index, B, [8_001], Tier.DISK, 0)
    assert index.match(hashes(8_001))[B] == Matched(0, 0, 1)
