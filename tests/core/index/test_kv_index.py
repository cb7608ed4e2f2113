"""The rules of the index by example: spec indexer.md sections 3.2 to 3.5, 4.1 and 7.

Prompts are lists of small numbers, which stand for local hashes; a rank's hash for block n is
100 + n where nothing else is said.
"""

import random
from struct import pack

import pytest

from lean_selector.core.index import device_tier
from lean_selector.core.index import device_tier as device_ranks
from lean_selector.core.index import engine_hashes as hashes_in_dicts
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Matched, StoredRun, StoreResult, Tier

A, B, C = (1, 0), (2, 0), (3, 7)
TIERS = {"gpu": Tier.DEVICE, "cpu": Tier.HOST_PINNED, "disk": Tier.DISK, "ext": Tier.EXTERNAL}


def as_bytes(local: list[int]) -> bytes:
    return pack(f"<{len(local)}Q", *local)


def store(
    index: KvIndex,
    rank: tuple[int, int],
    local: list[int],
    parent: int | None = None,
    names: list[int] | None = None,
    tier: Tier = Tier.DEVICE,
) -> StoreResult:
    names = [100 + block for block in local] if names is None else names
    return index.store(*rank, tier, parent, names, as_bytes(local))


def match(index: KvIndex, local: list[int]) -> dict[tuple[int, int], Matched]:
    return index.match(as_bytes(local))


def device(index: KvIndex, local: list[int]) -> dict[tuple[int, int], int]:
    return {rank: hit.device for rank, hit in match(index, local).items()}


def assert_pristine(index: KvIndex) -> None:
    trie = index._device.trie
    assert (index._ranks, index._lower, index._device.ranks.in_use, trie.strands) == ({}, {}, 0, {})
    assert trie.root.children is None
    assert index.is_empty
    assert (index.total_blocks, index.ranks()) == (0, [])


# Matching


def test_a_rank_matches_the_leading_blocks_that_it_holds() -> None:
    index = KvIndex(16)
    store(index, A, [1, 2, 3, 4])
    store(index, B, [1, 2, 5])
    store(index, C, [9])
    assert device(index, [1, 2, 3, 4, 5]) == {A: 4, B: 2}
    assert device(index, [1, 2, 3]) == {A: 3, B: 2}
    assert device(index, [1]) == {A: 1, B: 1}
    assert device(index, [1, 2, 5]) == {A: 2, B: 3}
    assert device(index, [2]) == device(index, []) == {}
    assert index.ranks() == [A, B, C]
    assert index.total_blocks == 8


def test_the_same_tokens_at_another_depth_are_another_block() -> None:
    index = KvIndex(16)
    store(index, A, [1, 1, 1, 2], names=[1, 2, 3, 4])
    assert device(index, [1, 2]) == {A: 1}
    assert device(index, [1, 1, 1, 1]) == {A: 3}


def test_a_chain_grows_event_by_event_across_strands() -> None:
    index = KvIndex(16)
    prompt = list(range(1, 2501))
    parent = None
    for block in prompt:
        assert store(index, A, [block], parent) is StoreResult.STORED
        parent = 100 + block
    assert device(index, prompt) == {A: 2500}
    assert store(index, B, prompt) is StoreResult.STORED
    assert device(index, [*prompt[:1500], 0]) == {A: 1500, B: 1500}
    assert index.remove(*A, Tier.DEVICE, [100 + block for block in reversed(prompt)]) == 2500
    assert device(index, prompt) == {B: 2500}
    assert index.clear(*B) == 2500
    assert_pristine(index)


def test_ranks_that_share_a_prefix_may_grow_it_in_turn() -> None:
    index = KvIndex(16)
    for rank in (A, B, C, (4, 0), (5, 0)):
        store(index, rank, [1, 2])
    for rank in (A, B, C):
        store(index, rank, [3, 4], 102)
    assert device(index, [1, 2, 3, 4]) == {A: 4, B: 4, C: 4, (4, 0): 2, (5, 0): 2}


def test_no_rank_is_credited_with_what_another_of_the_same_count_holds() -> None:
    # 7.1: the reference says that B holds three.
    index = KvIndex(16)
    store(index, A, [1, 2])
    store(index, A, [3], 102)
    store(index, A, [4], 102)
    store(index, B, [1, 2])
    index.remove(*A, Tier.DEVICE, [102])
    assert device(index, [1, 2, 3]) == {A: 1, B: 2}


def test_part_of_a_later_run_does_not_count_behind_a_hole() -> None:
    index = KvIndex(16)
    for rank in (A, B):
        store(index, rank, [1, 2])
        store(index, rank, [9], 101)  # so that 2, 3, 4 are a run of their own
        store(index, rank, [3, 4], 102)
    store(index, C, [1, 2])
    index.remove(*B, Tier.DEVICE, [101, 104])
    assert device(index, [1, 2, 3, 4]) == {A: 4, C: 2}
    store(index, B, [1])
    assert device(index, [1, 2, 3, 4]) == {A: 4, B: 3, C: 2}


# Events


@pytest.mark.parametrize(
    ("parent", "names", "local", "result"),
    [
        pytest.param(None, [], [], StoreResult.EMPTY, id="no block"),
        pytest.param(None, [11, 12], [], StoreResult.EMPTY, id="no complete block"),
        pytest.param(None, [11, 11], [1, 2], StoreResult.SELF_REFERENCE, id="hash twice"),
        pytest.param(12, [11, 12], [1, 2], StoreResult.SELF_REFERENCE, id="parent among them"),
        pytest.param(11, [11], [1], StoreResult.SELF_REFERENCE, id="its own parent"),
        pytest.param(None, [11, 12, 11], [1], StoreResult.SELF_REFERENCE, id="beyond the tokens"),
        pytest.param(77, [11, 12], [1, 2], StoreResult.UNKNOWN_PARENT, id="parent unknown"),
        pytest.param(0, [11], [1], StoreResult.UNKNOWN_PARENT, id="zero is a hash"),
    ],
)
def test_an_event_that_makes_no_sense_changes_nothing(
    parent: int | None, names: list[int], local: list[int], result: StoreResult
) -> None:
    index = KvIndex(16)
    assert index.store(1, 0, Tier.DEVICE, parent, names, as_bytes(local)) is result
    assert_pristine(index)


def test_a_parent_known_to_another_rank_alone_does_not_help() -> None:
    index = KvIndex(16)
    store(index, A, [1])
    store(index, B, [5])
    assert store(index, B, [2], 101) is StoreResult.UNKNOWN_PARENT
    assert store(index, (1, 1), [2], 101) is StoreResult.UNKNOWN_PARENT


def test_only_blocks_with_tokens_are_indexed() -> None:
    index = KvIndex(16)
    assert index.store(*A, Tier.DEVICE, None, [11, 12, 13], as_bytes([1, 2])) is StoreResult.STORED
    assert index.store(*B, Tier.DEVICE, None, [11], as_bytes([1, 2])) is StoreResult.STORED
    assert device(index, [1, 2, 3]) == {A: 2, B: 1}


def test_a_hole_closes_when_its_block_comes_back() -> None:
    # 7.18: store 1-3, remove 2, store 2.
    index = KvIndex(16)
    store(index, A, [1, 2, 3])
    assert index.remove(*A, Tier.DEVICE, [102]) == 1
    assert device(index, [1, 2, 3]) == {A: 1}
    assert index.blocks(*A, Tier.DEVICE) == 2
    store(index, A, [2], 101)
    assert device(index, [1, 2, 3]) == {A: 3}


def test_blocks_behind_a_removed_head_come_back_with_it() -> None:
    index = KvIndex(16)
    store(index, A, [1, 2], names=[11, 12])
    store(index, A, [3], 12, names=[13])
    index.remove(*A, Tier.DEVICE, [11])
    assert device(index, [1, 2, 3]) == {}
    store(index, A, [1], names=[11])
    assert device(index, [1, 2, 3]) == {A: 3}


def test_a_child_of_an_unreachable_block_is_stored() -> None:
    index = KvIndex(16)
    store(index, A, [1, 2, 3])
    index.remove(*A, Tier.DEVICE, [101])
    assert store(index, A, [4], 103) is StoreResult.STORED
    store(index, A, [1])
    assert device(index, [1, 2, 3, 4]) == {A: 4}


def test_removing_unknown_blocks_is_nothing() -> None:
    index = KvIndex(16)
    store(index, A, [1])
    assert index.remove(*A, Tier.DEVICE, [5, 6]) == 0
    assert index.remove(*B, Tier.DEVICE, [101]) == 0
    assert index.remove(*A, Tier.DISK, [101]) == 0
    assert index.remove(*A, Tier.DEVICE, [101, 101]) == 1
    assert_pristine(index)


def test_ranks_with_hashes_of_their_own_do_not_disturb_each_other() -> None:
    # 7.4: the reference books the second one under the first one's hashes.
    index = KvIndex(16)
    store(index, A, [1, 2], names=[11, 12])
    store(index, B, [1, 2], names=[21, 22])
    store(index, B, [3], 22, names=[23])
    assert store(index, B, [3], 12, names=[24]) is StoreResult.UNKNOWN_PARENT
    assert index.remove(*B, Tier.DEVICE, [12]) == 0
    assert device(index, [1, 2, 3]) == {A: 2, B: 3}
    assert index.remove(*B, Tier.DEVICE, [22]) == 1
    assert device(index, [1, 2, 3]) == {A: 2, B: 1}


def test_a_second_hash_for_the_same_tokens_is_a_second_name() -> None:
    index = KvIndex(16)
    store(index, A, [1, 2], names=[11, 12])
    store(index, A, [1, 2], names=[21, 22])
    assert index.blocks(*A, Tier.DEVICE) == 2
    assert store(index, A, [3], 22, names=[13]) is StoreResult.STORED
    assert device(index, [1, 2, 3]) == {A: 3}
    assert index.remove(*A, Tier.DEVICE, [22]) == 1
    assert device(index, [1, 2, 3]) == {A: 1}
    assert index.remove(*A, Tier.DEVICE, [12]) == 0
    assert index.remove(*A, Tier.DEVICE, [11, 21, 13]) == 2
    assert_pristine(index)


def test_only_the_newest_second_name_is_remembered() -> None:
    index = KvIndex(16)
    for name in (11, 21, 31):
        store(index, A, [1], names=[name])
    assert index.remove(*A, Tier.DEVICE, [21]) == 0
    assert index.remove(*A, Tier.DEVICE, [31]) == 1
    assert_pristine(index)


def test_a_hash_stored_again_with_other_tokens_names_the_newer_block() -> None:
    index = KvIndex(16)
    store(index, A, [1, 2], names=[11, 12])
    store(index, A, [8, 9], names=[11, 12])
    assert device(index, [1, 2]) == device(index, [8, 9]) == {A: 2}
    assert store(index, A, [3], 12, names=[13]) is StoreResult.STORED
    assert device(index, [8, 9, 3]) == {A: 3}
    assert index.remove(*A, Tier.DEVICE, [13, 12]) == 2
    assert device(index, [1, 2]) == {A: 2}
    assert device(index, [8, 9]) == {A: 1}
    assert index.remove(*A, Tier.DEVICE, [12, 11, 11]) == 3
    assert_pristine(index)


def test_clear_is_for_one_rank_and_all_its_tiers() -> None:
    index = KvIndex(16)
    for rank in (A, (1, 1), B):
        store(index, rank, [1, 2])
        store(index, rank, [3], 102, tier=Tier.DISK)
    assert index.clear(*A) == 3
    assert index.clear(*A) == 0
    assert device(index, [1, 2, 3]) == {(1, 1): 2, B: 2}


def test_a_dropped_worker_leaves_with_all_its_ranks() -> None:
    index = KvIndex(16)
    for rank in (A, (1, 4294967295), B):
        store(index, rank, [1, 2])
    index.set_bound(1, 5, 5)
    assert index.drop_worker(1) == 4
    assert index.ranks() == [B]
    assert index.drop_worker(2) == 2
    assert_pristine(index)
    assert not index.bounds


def test_a_freed_place_among_the_ranks_goes_to_another() -> None:
    index = KvIndex(16)
    store(index, A, [1])
    store(index, B, [1])
    assert device(index, [1]) == {A: 1, B: 1}
    index.clear(*A)
    store(index, C, [1])
    assert device(index, [1]) == {B: 1, C: 1}


def test_many_ranks_with_one_prefix_all_match() -> None:
    index = KvIndex(16)
    ranks = [(worker_id, 0) for worker_id in range(300)]
    for rank in ranks:
        store(index, rank, [1, 2, 3, 1000 + rank[0]])
    assert device(index, [1, 2, 3, 1007]) == {rank: 4 if rank[0] == 7 else 3 for rank in ranks}
    for worker_id in range(300):
        index.drop_worker(worker_id)
    assert_pristine(index)


@pytest.mark.parametrize("shift", [0, 40], ids=["spread hashes", "hashes with equal low bits"])
def test_any_order_of_removal_ends_at_nothing(shift: int) -> None:
    rng = random.Random(5)
    index, names = KvIndex(16), []
    for start in range(0, 200 if shift else 6_000, 10):
        chain = [rng.getrandbits(64 - shift) << shift for _ in range(10)]
        store(index, A, list(range(start, start + 10)), names=chain)
        names += chain
    rng.shuffle(names)
    for count, name in enumerate(names):
        assert index.blocks(*A, Tier.DEVICE) == len(names) - count
        assert index.remove(*A, Tier.DEVICE, [name]) == 1
    assert_pristine(index)


@pytest.mark.parametrize("front", [hashes_in_dicts._FRONT_BLOCKS, 1_000], ids=["one dict", "many"])
def test_events_about_any_stretches_of_long_prompts_remove_just_those(
    front: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hashes_in_dicts, "_FRONT_BLOCKS", front)
    # Long enough for several strands and many segments of their rows.
    rng = random.Random(6)
    index = KvIndex(16)
    prompts = []
    for start in (0, 10_000, 20_000):
        names = [rng.getrandbits(64) for _ in range(2_600)]
        local = list(range(start, start + 2_600))
        at = 0
        while at < 2_600:
            end = at + rng.choice([1, 1, 8, 64, 700])
            parent = names[at - 1] if at else None
            store(index, A, local[at:end], parent, names[at:end])
            at = end
        prompts.append((local, names))
    held = {name for _, names in prompts for name in names}
    while held:
        local, names = rng.choice(prompts)
        start, length = rng.randrange(2_600), rng.choice([1, 2, 8, 64, 700])
        some = names[start : start + length][:: rng.choice([1, -1, -1, 2])]
        some += rng.choice([[], [0], some[:1], rng.choice(prompts)[1][-5:]])
        if rng.random() < 0.2:
            rng.shuffle(some)
        assert index.remove(*A, Tier.DEVICE, some) == len(held.intersection(some))
        held.difference_update(some)
        leading = next((at for at, name in enumerate(names) if name not in held), len(names))
        assert device(index, local) == ({A: leading} if leading else {})
    assert_pristine(index)


def test_a_block_may_be_named_0() -> None:
    index = KvIndex(16)
    assert index.remove(*A, Tier.DEVICE, [0]) == 0
    store(index, A, [1, 2, 3], names=[101, 0, 103])
    store(index, A, [4, 5], 0, names=[104, 105])
    assert device(index, [1, 2, 4, 5]) == {A: 4}
    store(index, A, [6], None, names=[0])
    assert index.remove(*A, Tier.DEVICE, [0, 101, 7]) == 2
    assert device(index, [6]) == {}
    assert index.remove(*A, Tier.DEVICE, [0, 0]) == 1
    assert index.remove(*A, Tier.DEVICE, [103, 0, 104, 105]) == 3
    assert_pristine(index)


def test_a_run_gives_back_the_end_that_nobody_holds() -> None:
    index = KvIndex(16)
    store(index, A, list(range(1, 1001)))
    index.remove(*A, Tier.DEVICE, [100 + block for block in range(1000, 10, -1)])
    (run,) = index._device.trie.strands.values()
    assert len(run.label) < 100 * 8
    assert len(index._ranks[A].device.names.rows[run.strand]) == len(run.label)
    assert device(index, list(range(1, 1001))) == {A: 10}


def test_a_run_that_diverges_where_its_end_is_dead_loses_that_end() -> None:
    index = KvIndex(16)
    store(index, A, [1, 2, 3])
    index.remove(*A, Tier.DEVICE, [103])
    store(index, A, [4], 102)
    index.remove(*A, Tier.DEVICE, [104, 102, 101])
    assert_pristine(index)


def test_a_run_splits_again_and_again_and_goes_piece_by_piece() -> None:
    index = KvIndex(16)
    store(index, A, [1, 2, 3, 4, 5, 6, 7, 8])
    store(index, B, [1, 2, 3, 4, 5, 6, 7, 8])
    for cut in (6, 4, 2, 7):
        store(index, A, [50 + cut], 100 + cut)
    assert index._device.trie.strands[0].after is not None
    assert index.remove(*B, Tier.DEVICE, [103, 106, 108]) == 3
    assert device(index, [1, 2, 3, 4, 5, 6, 7, 8]) == {A: 8, B: 2}
    assert index.remove(*A, Tier.DEVICE, [152, 108, 103, 104, 107, 101, 156, 157]) == 8
    assert device(index, [1, 2, 3]) == {B: 2}
    index.remove(*B, Tier.DEVICE, [101, 102, 104, 105, 107])
    assert index.remove(*A, Tier.DEVICE, [106, 105, 154, 102]) == 4
    assert_pristine(index)


def test_parents_are_found_among_hashes_that_differ_in_high_bits_alone() -> None:
    index = KvIndex(16)
    names = [block << 40 for block in range(1, 9)]
    store(index, A, [1, 2, 3, 4], names=names[:4])
    store(index, A, [8], names[1], names=names[7:])
    assert device(index, [1, 2, 8]) == {A: 3}
    assert store(index, A, [9], 9 << 40, names=[5]) is StoreResult.UNKNOWN_PARENT


def test_an_index_with_as_many_runs_as_it_can_number_takes_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_tier, "MAX_STRANDS", 4)
    index = KvIndex(16)
    results = [store(index, A, [block]) for block in (1, 2, 3, 4)]
    assert results == [StoreResult.STORED] * 3 + [StoreResult.FULL]
    assert index.total_blocks == 3


def test_a_store_fills_the_holes_and_leaves_what_is_held() -> None:
    index = KvIndex(16)
    store(index, A, [1, 2, 3, 4])
    index.remove(*A, Tier.DEVICE, [102, 104])
    store(index, A, [1, 2, 3, 4, 5])
    assert device(index, [1, 2, 3, 4, 5]) == {A: 5}
    assert index.remove(*A, Tier.DEVICE, [101, 102, 103, 104, 105, 101]) == 5
    assert_pristine(index)


def test_more_sets_of_ranks_than_are_remembered_still_match(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_ranks, "_MAX_CACHED_MASKS", 2)
    index = KvIndex(16)
    for worker_id, block in enumerate([1, 2, 3, 4, 5]):
        store(index, (worker_id, 0), [block])
    for worker_id, block in enumerate([1, 2, 3, 4, 5]):
        assert device(index, [block]) == {(worker_id, 0): 1}
    assert len(index._device.ranks._keys) <= 2


# Lower tiers

# (resident, in order: tier, blocks, evicted afterwards; query; device, host, disk)
EXAMPLES = {
    1: ([("gpu", [1, 2]), ("cpu", [3]), ("disk", [4]), ("ext", [5])], 6, (2, 1, 2)),
    2: ([("gpu", [1, 2]), ("cpu", [1, 2])], 3, (2, 0, 0)),
    3: ([("gpu", [1]), ("cpu", [1, 2, 3])], 4, (1, 2, 0)),
    4: ([("cpu", [1, 2, 3])], 4, (0, 3, 0)),
    5: ([("disk", [1, 2, 3])], 4, (0, 0, 3)),
    6: ([("disk", [1, 2]), ("cpu", [3])], 4, (0, 0, 2)),
    7: ([("gpu", [1]), ("disk", [2]), ("cpu", [3])], 4, (1, 0, 1)),
    10: ([("ext", [1, 2])], 3, (0, 0, 2)),
}


@pytest.mark.parametrize(
    ("resident", "query", "expected"), EXAMPLES.values(), ids=map(str, EXAMPLES)
)
def test_worked_examples_of_the_specification(
    resident: list[tuple[str, list[int]]], query: int, expected: tuple[int, int, int]
) -> None:
    index = KvIndex(4)
    for tier, local in resident:
        parent = None if local[0] == 1 else 99 + local[0]
        assert store(index, A, local, parent, tier=TIERS[tier]) is StoreResult.STORED
    assert match(index, list(range(1, query + 1))) == {A: Matched(*expected)}


def test_worked_example_8_a_device_block_moves_to_the_host() -> None:
    index = KvIndex(4)
    store(index, A, [1, 2, 3])
    index.remove(*A, Tier.DEVICE, [102])
    store(index, A, [2], 101, tier=Tier.HOST_PINNED)
    assert match(index, [1, 2, 3, 4]) == {A: Matched(1, 1, 0)}


def test_worked_example_9_two_ranks() -> None:
    index, other = KvIndex(4), (1, 1)
    store(index, A, [1, 2])
    store(index, A, [3], 102, tier=Tier.HOST_PINNED)
    store(index, A, [4, 5], 103, tier=Tier.DISK)
    store(index, other, [1])
    store(index, other, [2], 101, tier=Tier.DISK)
    expected = {A: Matched(2, 1, 2), other: Matched(1, 0, 1)}
    assert match(index, [1, 2, 3, 4, 5, 6]) == expected


def test_worked_example_11_an_edge_below_another_block() -> None:
    index = KvIndex(4)
    store(index, A, [1])
    store(index, A, [2], 555, tier=Tier.DISK)
    assert match(index, [1, 2]) == {A: Matched(1, 0, 0)}


def test_a_lower_tier_goes_on_from_the_middle_of_a_long_run() -> None:
    index = KvIndex(4)
    store(index, A, list(range(1, 1500)))
    store(index, A, [7001], 100 + 1200, tier=Tier.HOST_PINNED)
    assert match(index, [*range(1, 1201), 7001]) == {A: Matched(1200, 1, 0)}


def test_lower_tier_chains_close_when_a_middle_block_comes_back() -> None:
    index = KvIndex(4)
    store(index, A, [1, 2, 3], tier=Tier.DISK)
    assert index.remove(*A, Tier.HOST_PINNED, [102]) == 0
    assert index.remove(*A, Tier.DISK, [102, 102]) == 1
    assert match(index, [1, 2, 3]) == {A: Matched(0, 0, 1)}
    store(index, A, [2], 101, tier=Tier.DISK)
    assert match(index, [1, 2, 3]) == {A: Matched(0, 0, 3)}
    assert index.blocks(*A, Tier.DISK) == 3
    assert index.blocks(*A, Tier.HOST_PINNED) == index.blocks(*B, Tier.DISK) == 0
    index.remove(*A, Tier.DISK, [101, 102, 103])
    assert_pristine(index)


def test_in_a_lower_tier_the_first_of_a_rank_wins_and_ranks_are_apart() -> None:
    index = KvIndex(4)
    store(index, A, [1, 2], names=[11, 12], tier=Tier.DISK)
    store(index, A, [1, 3], names=[21, 23], tier=Tier.DISK)  # the edge leads to 11
    store(index, A, [4, 5], names=[14, 12], tier=Tier.DISK)  # 12 is reached from 11
    store(index, B, [1, 3], names=[21, 23], tier=Tier.DISK)
    assert index.blocks(*A, Tier.DISK) == 3
    assert match(index, [1, 3]) == {A: Matched(0, 0, 1), B: Matched(0, 0, 2)}
    assert match(index, [4, 5]) == {A: Matched(0, 0, 1)}


def test_a_device_removal_leaves_the_lower_tiers_alone() -> None:
    index = KvIndex(4)
    store(index, A, [1, 2])
    store(index, A, [1, 2], tier=Tier.HOST_PINNED)
    index.remove(*A, Tier.DEVICE, [101, 102])
    assert match(index, [1, 2]) == {A: Matched(0, 2, 0)}
    assert index.clear(*A) == 2
    assert_pristine(index)


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


def test_a_bound_frees_the_older_of_two_blocks_with_one_hash() -> None:
    index = KvIndex(16)
    store(index, A, [1], names=[11])
    store(index, A, [2], names=[11])
    index.set_bound(A[0], 1, None)
    assert device(index, [1]) == {}
    assert device(index, [2]) == {A: 1}


def test_a_bound_is_kept_where_the_oldest_run_was_split() -> None:
    index = KvIndex(16)
    store(index, A, [1, 2, 3, 4])
    store(index, A, [5], 102)
    index.set_bound(A[0], 4, None)  # of the split run's two pieces only the second is touched
    assert device(index, [1, 2, 3, 4]) == {A: 3}
    index.remove(*A, Tier.DEVICE, [103])
    index.set_bound(A[0], 1, None)  # now the rank holds nothing of the second
    assert index.blocks(*A, Tier.DEVICE) == 1
    assert index.evicted == 3


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
            index.store(1, dp_rank, Tier.DISK, None, [at + 1], (at + 1).to_bytes(8, "little"))
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


def test_a_dump_leaves_out_what_cannot_be_reached() -> None:
    index = KvIndex(4)
    store(index, A, [1, 2, 3])
    store(index, A, [4], 101)
    store(index, B, [1, 2, 3])
    index.remove(*A, Tier.DEVICE, [102])
    index.remove(*B, Tier.DEVICE, [101])
    assert list(index.dump()) == [
        [stored(A, Tier.DEVICE, None, [1]), stored(A, Tier.DEVICE, 101, [4])],
        [],
    ]


def test_a_dump_goes_on_while_ranks_leave() -> None:
    index = KvIndex(4)
    store(index, A, [1])
    store(index, B, [1])
    dump = index.dump()
    assert next(dump)
    index.clear(*B)
    assert list(dump) == []


def test_blocks_in_a_ring_are_dumped_once() -> None:
    index = KvIndex(4)
    store(index, A, [1], 12, names=[11], tier=Tier.DISK)
    store(index, A, [2], 11, names=[12], tier=Tier.DISK)
    (runs,) = index.dump()
    assert sorted(run.block_hashes for run in runs) == [(11,), (12,)]


# -- seen from outside ----------------------------------------------------------------------------


def test_the_workers_are_those_with_a_rank_that_holds_anything() -> None:
    index = KvIndex(4)
    store(index, A, [1])
    store(index, C, [2])
    assert index.workers() == {1, 3}
    index.clear(*A)
    assert index.workers() == {3}


def test_the_leading_names_are_the_engines_own_across_runs_and_forks() -> None:
    index = KvIndex(4)
    store(index, A, [1, 2, 3, 4])
    store(index, A, [1, 2, 7, 8], names=[101, 102, 207, 208])  # a run that forks
    store(index, B, [1, 2, 3], names=[11, 12, 13])
    assert index.leading_names(A, as_bytes([1, 2, 7, 8]), 4) == (101, 102, 207, 208)
    assert index.leading_names(A, as_bytes([1, 2, 3, 4]), 3) == (101, 102, 103)
    assert index.leading_names(B, as_bytes([1, 2, 3, 4]), 3) == (11, 12, 13)
    assert index.leading_names(B, as_bytes([1, 2, 3, 4]), 0) == ()


def test_an_abandoned_index_lets_go_of_every_rank() -> None:
    index = KvIndex(4)
    store(index, A, [1, 2])
    store(index, C, [3], tier=Tier.DISK)
    index.abandon()
    while index.sweep(10):
        pass
    assert (index.ranks(), index.total_blocks) == ([], 0)


def test_a_bound_that_is_set_for_a_worker_keeps_a_part_of_each_rank_or_nothing() -> None:
    index = KvIndex(4)
    store(index, A, [1, 2, 3])
    store(index, (1, 1), [1, 2])
    store(index, B, [1, 2, 3])
    index.set_bound(1, 1, 0)
    while index.sweep(10):
        pass
    assert device(index, [1, 2, 3]) == {A: 1, (1, 1): 1, B: 3}
    index.set_bound(1, 0, 0)
    while index.sweep(10):
        pass
    assert index.ranks() == [B]
