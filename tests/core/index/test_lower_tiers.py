"""A lower tier's edges, and which ranks a prompt's next block could be found on at all."""

from collections import Counter
from struct import pack

from hypothesis import given
from hypothesis import strategies as st

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.lower_tiers import ROOT, Continuations, Edges, LowerTier
from lean_selector.core.index.shapes import Matched, Tier
from tests.support.operations import lines_run

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
            kept = [it.get(asked & (1 << 56) - 1, 0) for it in continuations._ranks]
            assert (min(kept, default=0) < 0) is (ranks.bit_count() == 1)
    assert continuations.of(prompt, 0) == 0
    assert continuations.of(prompt, len(prompt)) == 0  # the prompt has no next block
    for (bit, block), times in held.items():
        for _ in range(times):
            continuations.discard(bit, hashes(block))
    assert not any((*continuations._ranks, continuations._again))


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


def tier_of(bit: int) -> tuple[LowerTier, Edges, Continuations]:
    continuations = Continuations()
    edges = Edges(continuations)
    return LowerTier(edges, bit), edges, continuations


def chain(tier: LowerTier, parent: bytes, local: list[int]) -> None:
    tier.store(parent, hashes(*(100 + block for block in local)), hashes(*local))


def test_the_oldest_blocks_go_first_and_those_behind_them_stay() -> None:
    tier, edges, continuations = tier_of(2)
    chain(tier, ROOT, [1, 2, 3])
    tier.drop_oldest(2)
    assert len(tier) == 1
    assert list(tier.chains()) == [(hashes(102), hashes(103), hashes(3))]
    assert [continuations.of(hashes(block), 0) for block in (1, 2, 3)] == [0, 0, 1 << 2]
    assert edges.follow(1 << 2, hashes(1)) == (b"", 0)
    chain(tier, ROOT, [1, 2])
    assert edges.follow(1 << 2, hashes(1)) == (hashes(101), 1 << 2)
    assert edges.follow(1 << 2, hashes(102, 3)) == (hashes(103), 1 << 2)


def test_a_tier_tells_the_edge_of_each_block_and_passes_over_what_goes_meanwhile() -> None:
    tier, _, _ = tier_of(0)
    chain(tier, ROOT, [1, 2, 3])
    edges = tier.chains()
    assert next(edges) == (ROOT, hashes(101), hashes(1))
    assert tier.remove(hashes(102))
    assert not tier.remove(hashes(102))
    assert list(edges) == [(hashes(102), hashes(103), hashes(3))]


def test_a_walk_ends_with_the_prompt_whatever_the_last_block_is_called() -> None:
    index = KvIndex(16)
    index.store(*A, Tier.HOST_PINNED, None, [5], hashes(5))  # as the tokens of a first block
    assert index.match(hashes(5)) == {A: Matched(0, 1)}


# The edges of all ranks


def test_ranks_that_call_a_block_alike_share_its_edge_and_the_objects_that_name_it() -> None:
    _, edges, continuations = tier_of(9)
    tiers = [LowerTier(edges, bit) for bit in range(3)]
    for tier in tiers:
        chain(tier, ROOT, [1, 2])
    assert edges.follow(0b1110, hashes(101, 2)) == (hashes(102), 0b110)
    assert edges.others(0b1000, hashes(101, 2)) == {}
    for one, other in zip(tiers[0]._edge.items(), tiers[2]._edge.items(), strict=True):
        assert one[0] is other[0]
        assert one[1] is other[1]
    for tier in tiers:
        tier.drop_oldest(2)
    assert not any((*edges._edges, edges._odd, *continuations._ranks))


def test_an_edge_that_leads_elsewhere_for_some_is_told_by_what_they_call_its_end() -> None:
    _, edges, _ = tier_of(9)
    tiers = [LowerTier(edges, bit) for bit in range(4)]
    for tier, name in zip(tiers, (101, 201, 201, 301), strict=True):
        tier.store(ROOT, hashes(name), hashes(1))
        tier.store(ROOT, hashes(777), hashes(1))  # the first one wins
    assert edges.follow(0b1111, hashes(1)) == (hashes(101), 0b1)
    assert edges.others(0b1110, hashes(1)) == {hashes(201): 0b110, hashes(301): 0b1000}
    assert tiers[2].remove(hashes(201))
    assert edges.others(0b1110, hashes(1)) == {hashes(201): 0b10, hashes(301): 0b1000}
    # Without the one that came first the others are what they were.
    assert tiers[0].remove(hashes(101))
    assert edges.follow(0b1111, hashes(1)) == (b"", 0)
    assert edges.others(0b1111, hashes(1)) == {hashes(201): 0b10, hashes(301): 0b1000}
    tiers[0].store(ROOT, hashes(301), hashes(1))
    tiers[3].store(ROOT, hashes(302), hashes(1))
    assert edges.follow(0b1111, hashes(1)) == (hashes(301), 0b1)
    assert edges.others(0b1110, hashes(1)) == {hashes(201): 0b10, hashes(301): 0b1000}
    for tier in tiers:
        tier.drop_oldest(len(tier))
    assert not any((*edges._edges, edges._odd))


def chains(tier: LowerTier, *edges: tuple[int, int]) -> None:
    """First blocks of prompts: local hash, name."""
    for local, name in edges:
        tier.store(ROOT, hashes(name), hashes(local))


def test_a_rank_that_is_back_has_what_it_has_stored_since_and_nothing_from_before() -> None:
    _, edges, continuations = tier_of(9)
    old, other, third = (LowerTier(edges, bit) for bit in range(3))
    for tier in (other, third):
        chains(tier, (1, 101), (2, 102))
    chains(old, (1, 201), (2, 102), (3, 103), (4, 104))
    edges.release(0)
    new = LowerTier(edges, 0)
    edges.doubtful = 0b1
    for local, name, having in ((1, 101, 0b110), (2, 102, 0b110), (3, 103, 0), (4, 104, 0)):
        assert edges.follow(0b111, hashes(local)) == (hashes(name), having)
        assert edges.others(0b1, hashes(local)) == {}

    # One under another name, one as before, one for a while, and one that others have.
    chains(new, (1, 301), (3, 103), (4, 104), (2, 102))
    assert new.remove(hashes(104))
    assert new.remove(hashes(102))
    assert len(new) == 2
    for _ in range(2):
        assert edges.others(0b1, hashes(1)) == {hashes(301): 0b1}
        assert edges.follow(0b111, hashes(2)) == (hashes(102), 0b110)
        assert edges.follow(0b111, hashes(3)) == (hashes(103), 0b1)
        assert edges.follow(0b111, hashes(4)) == (b"", 0)
        for _ in old.dismantled():
            pass
        edges.doubtful = 0
    for tier in (new, other, third):
        tier.drop_oldest(len(tier))
    assert not any((*edges._edges, edges._odd, *continuations._ranks))


def test_what_a_rank_held_before_is_dropped_whatever_others_hold_by_then() -> None:
    _, edges, continuations = tier_of(9)
    old, other, third = (LowerTier(edges, bit) for bit in range(3))
    chains(old, (1, 201), (2, 102))
    chains(other, (2, 102))
    edges.release(0)
    new = LowerTier(edges, 0)
    edges.doubtful = 0b1
    chains(new, (2, 102), (1, 301))
    assert edges.others(0b1, hashes(1)) == {hashes(301): 0b1}
    assert new.remove(hashes(102))
    assert edges.follow(0b11, hashes(2)) == (hashes(102), 0b10)  # of one rank alone
    for _ in old.dismantled():
        pass
    assert edges.follow(0b11, hashes(1)) == (b"", 0)
    assert edges.others(0b1, hashes(1)) == {hashes(301): 0b1}
    chains(third, (1, 301))  # by now the first that has it
    assert edges.follow(0b111, hashes(1)) == (hashes(301), 0b100)
    assert new.remove(hashes(301))
    assert edges.others(0b1, hashes(1)) == {}
    for tier in (other, third):
        tier.drop_oldest(len(tier))
    assert not any((*edges._edges, edges._odd, *continuations._ranks))


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
    assert (blocks, ranks.bit_count(), going_on) == (1, 1, [])


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


def test_a_rank_that_is_cleared_twice_is_looked_up_until_all_of_it_is_taken_apart() -> None:
    index = KvIndex(16)
    local = list(range(1, 2_000))
    for first in (1, 2):
        for rank in (A, B):
            store(index, rank, local[first:], Tier.HOST_PINNED, 0)
        index.clear(*A)
    store(index, A, [3, 4], Tier.HOST_PINNED, 0)
    edges = index._lower_matches._tiers
    seen = []
    for _ in range(2):
        assert index.match(hashes(3, 4)) == {A: Matched(0, 2)}
        assert index.match(hashes(2, 3)) == {B: Matched(0, 2)}
        seen.append([held.doubtful for held in edges])
        while index.sweep(1):
            pass
    assert seen == [[1, 1, 1], [0, 0, 0]]
    store(index, A, local, Tier.DISK, 0)
    index.clear(*A)
    store(index, A, [3], Tier.HOST_PINNED, 0)
    assert edges[0].doubtful == 1
    index.remove(*A, Tier.HOST_PINNED, [103])
    assert edges[0].doubtful == 0
    while index.sweep(1):
        pass
    assert index._lower_matches._dismantled == {}


def test_ranks_part_where_their_continuations_do() -> None:
    index = KvIndex(16)
    ranks = [(number, 0) for number in range(80)]
    for number, rank in enumerate(ranks):
        store(index, rank, [1, 2], Tier.DEVICE, 0)
        if number % 2:
            store(index, rank, [3, 4] if number % 4 == 1 else [3], Tier.HOST_PINNED, 2)
        if number % 8 == 7:
            store(index, rank, [4, 5], Tier.DISK, 3)
        if number % 16 == 6:
            store(index, rank, [3, 4], Tier.EXTERNAL, 2)
    sets, going_on = index.match_sets(hashes(1, 2, 3, 4, 5, 6))

    def those(*of_sixteen: int) -> int:
        return sum(1 << number for number in range(80) if number % 16 in of_sixteen)

    assert sets == [(2, those(0, 2, 4, 8, 10, 12, 14))]
    assert len(going_on) == 4
    assert dict(going_on) == {
        Matched(2, 2, 0): those(1, 5, 9, 13),
        Matched(2, 1, 0): those(3, 11),
        Matched(2, 1, 2): those(7, 15),
        Matched(2, 0, 2): those(6),
    }


def test_a_match_walks_once_for_all_ranks_that_go_on_alike() -> None:
    prompt = hashes(1, 2, 3, 4, 5, 6, 7, 8)
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


def test_ranks_with_names_of_their_own_go_on_as_one_set() -> None:
    index = KvIndex(16)
    for number in range(70):
        for tier, blocks, parent in (
            (Tier.DEVICE, (1, 2), None),
            (Tier.HOST_PINNED, (3, 4), 2),
            (Tier.DISK, (9,), None),
        ):
            names = [1_000 * number + block for block in blocks]
            above = None if parent is None else 1_000 * number + parent
            index.store(number, 0, tier, above, names, hashes(*blocks))
    everyone = (1 << 70) - 1
    assert index.match_sets(hashes(1, 2, 3, 4)) == ([], [(Matched(2, 2), everyone)])
    assert index.match_sets(hashes(9)) == ([], [(Matched(0, 0, 1), everyone)])
