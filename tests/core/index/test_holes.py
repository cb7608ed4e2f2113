"""Memory kept for blocks that are gone: bounded by what is held, and only what lies behind holes is
given up for it."""

import pytest

from lean_selector.core.index import holes, sweeping
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Tier
from tests.support.blocks import matches, remove_blocks, store_blocks
from tests.support.driven_selector import pack
from tests.support.operations import lines_run

LENGTH = 64


def positions_kept(index: KvIndex) -> int:
    """8 bytes each: in the labels of runs, and in each rank's rows of names."""
    trie = index._device.trie
    labels = sum(len(run.label) for strand in trie.strands for run in trie.pieces(strand))
    ranks = [rank.device.hashes for rank in index._ranks.values()]
    return labels + sum(len(row) for names in ranks for row in names.rows.values()) >> 3


def store(index: KvIndex, worker: int, local: list[int], parent: int | None = None) -> None:
    store_blocks(index, (worker, 0), Tier.DEVICE, parent, local, pack(local))


def prompt(number: int, blocks: int = LENGTH) -> list[int]:
    return list(range(number * 10_000 + 1, number * 10_000 + 1 + blocks))


def matched(index: KvIndex, local: list[int]) -> dict[int, int]:
    return {worker: hit.device for (worker, _), hit in matches(index, pack(local)).items()}


def review(index: KvIndex) -> None:
    index._start_review()
    while index.sweep(10):
        pass


@pytest.fixture
def spared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is spared, so that a few blocks are too much."""
    monkeypatch.setattr(holes, "SPARED_POSITIONS", 0)


def test_an_engine_that_keeps_only_the_ends_of_prompts_does_not_take_memory_for_their_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holes, "SPARED_POSITIONS", 4_000)
    monkeypatch.setattr(holes, "REVIEW_AFTER", 1_000)
    index = KvIndex(16)
    for number in range(2_000):
        local = prompt(number)
        store(index, 1, local)
        remove_blocks(index, (1, 0), Tier.DEVICE, local[:-1])
        held = index.total_blocks
        # Between two reviews: what one left, half of its blocks gone, and a thousand more.
        assert positions_kept(index) <= 8 * held + 2 * 4_000 + 2 * (1_000 + LENGTH)
    assert index.evicted + index.total_blocks == 2_000
    assert index.evicted > 1_500
    index.sweep(1_000_000)
    assert {(1, 0)} >= set(index.ranks())


@pytest.mark.usefixtures("spared")
def test_a_start_that_nobody_holds_goes_with_the_little_that_hangs_on_it() -> None:
    index = KvIndex(16)
    local = prompt(1, 5_000)  # several strands, of which all but the last lose all their blocks
    store(index, 1, local)
    store(index, 2, local)
    for worker in (1, 2):
        remove_blocks(index, (worker, 0), Tier.DEVICE, local[:4_900])
    assert len(index._device.trie.strands) == 5
    review(index)
    assert index.is_empty
    assert index.evicted == 200
    assert not index._device.trie.strands
    assert not index.bits.keys


@pytest.mark.usefixtures("spared")
def test_a_start_that_nobody_holds_stays_for_the_much_that_hangs_on_it() -> None:
    index = KvIndex(16)
    system = prompt(1)
    for number in range(2, 30):
        store(index, 1, system + prompt(number))
    remove_blocks(index, (1, 0), Tier.DEVICE, system)
    for number in range(30, 130):  # starts that are too much for what is left below them
        store(index, 1, prompt(number))
        remove_blocks(index, (1, 0), Tier.DEVICE, prompt(number)[:-1])
    review(index)
    assert index.evicted == 100
    store(index, 1, system)
    for number in range(2, 30):
        assert matched(index, system + prompt(number)) == {1: 2 * LENGTH}


@pytest.mark.usefixtures("spared")
def test_the_ends_of_rows_that_others_share_are_given_back_without_an_eviction() -> None:
    index = KvIndex(16)
    local = prompt(1)
    for worker in range(1, 20):
        store(index, worker, local)
        if worker > 1:
            remove_blocks(index, (worker, 0), Tier.DEVICE, local[2:])
    assert positions_kept(index) > 19 * LENGTH
    review(index)
    assert positions_kept(index) <= 2 * LENGTH + 18 * 2
    assert index.evicted == 0
    assert matched(index, local) == {1: LENGTH, **dict.fromkeys(range(2, 20), 2)}


@pytest.mark.usefixtures("spared")
@pytest.mark.parametrize("ranks", [1, 20])
def test_the_steps_of_a_review_do_not_grow_with_what_is_reviewed(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "_STEPS_AT_ONCE", 0)
    worst = {}
    for prompts in (5, 25):
        index = KvIndex(16)
        for number in range(prompts):
            for worker in range(ranks):
                store(index, worker, prompt(number, 400))
        for number in range(prompts):
            for worker in range(ranks):
                remove_blocks(index, (worker, 0), Tier.DEVICE, prompt(number, 400)[:300])
        index._start_review()
        lines = []
        while index.sweep(0):
            lines.append(lines_run(index.sweep, 1))
        assert len(lines) > prompts
        worst[prompts] = max(lines)
        assert index.is_empty
    assert worst[25] <= worst[5] + 20


def test_a_review_comes_after_many_blocks_were_dropped_by_whatever_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(holes, "SPARED_POSITIONS", 0)
    monkeypatch.setattr(holes, "REVIEW_AFTER", LENGTH)
    for way in ("remove", "clear", "bound"):
        index = KvIndex(16)
        store(index, 1, prompt(1))
        store(index, 2, prompt(1))
        remove_blocks(index, (2, 0), Tier.DEVICE, prompt(1)[:-1])  # one fewer than makes a review
        assert index.blocks(2, 0, Tier.DEVICE) == 1
        if way == "remove":
            remove_blocks(index, (1, 0), Tier.DEVICE, prompt(1))
        elif way == "clear":
            index.clear(1, 0)
        else:
            index.set_bound(1, 2, None)
            store(index, 1, prompt(2))
        while index.sweep(100):
            pass
        assert index.blocks(2, 0, Tier.DEVICE) == 0, way


@pytest.mark.usefixtures("spared")
def test_a_start_of_very_many_runs_that_nobody_holds_is_looked_at_for_a_bounded_time() -> None:
    index = KvIndex(16)
    depth = holes._MOST_RUNS_ABOVE + 50
    trunk = prompt(1, 4 * depth)
    for at in range(1, depth + 1):  # a leaf on each 4 blocks: these are a run
        store(index, 1, [*trunk[: 4 * at], 90_000_000 + at])
    store(index, 2, prompt(2))
    remove_blocks(index, (1, 0), Tier.DEVICE, trunk)
    review(index)
    # Each leaf had 4 blocks above it that nobody holds, in the label and in the row.
    assert (index.total_blocks, index.evicted) == (LENGTH, depth)
    assert index.ranks() == [(2, 0)]
    assert positions_kept(index) == 2 * LENGTH


def spoil(index: KvIndex, first: int, prompts: int = 100) -> None:
    """Prompts of which the last block is all that is left: what there is to evict."""
    for number in range(first, first + prompts):
        store(index, 90, prompt(number))
        remove_blocks(index, (90, 0), Tier.DEVICE, prompt(number)[:-1])


@pytest.mark.parametrize("positions_more", [0, 1])
def test_nothing_is_evicted_up_to_just_what_is_spared(
    positions_more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = KvIndex(16)
    spoil(index, 2, prompts=20)
    local, other = prompt(1), prompt(1)[:32] + prompt(80)  # a strand that is two runs
    for worker in (1, 2, 3):
        store(index, worker, local)
    store(index, 4, other)
    remove_blocks(index, (2, 0), Tier.DEVICE, local[40:])
    remove_blocks(index, (3, 0), Tier.DEVICE, local[:50])
    kept, held = positions_kept(index), index.total_blocks
    spared = kept - holes.MOST_POSITIONS * held - positions_more
    monkeypatch.setattr(holes, "SPARED_POSITIONS", spared)
    review(index)
    assert index.evicted == 20 * positions_more


@pytest.mark.usefixtures("spared")
@pytest.mark.parametrize(("blocks", "is_worth_it"), [(1024, True), (1023, False)])
def test_all_that_nobody_holds_above_a_strand_counts_for_it(blocks: int, is_worth_it: bool) -> None:
    index = KvIndex(16)
    spoil(index, 2)
    start, local = 5 * 1024, prompt(1, 6 * 1024)[: 5 * 1024 + blocks]
    for worker in (1, 2):
        store(index, worker, local)
    for worker in (1, 2):
        remove_blocks(index, (worker, 0), Tier.DEVICE, local[:start])
    # A label and two rows, and the labels above: of four positions for a block, or of a bit more.
    review(index)
    assert index.ranks() == ([(1, 0), (2, 0)] if is_worth_it else [])
    assert index.evicted == 100 + (0 if is_worth_it else 2 * blocks)


@pytest.mark.usefixtures("spared")
@pytest.mark.parametrize(("shared", "is_worth_it"), [(24, True), (25, False)])
def test_a_start_that_nobody_holds_is_shared_by_all_that_hang_on_it(
    shared: int, is_worth_it: bool
) -> None:
    index = KvIndex(16)
    spoil(index, 20)
    top = prompt(1, shared)
    for side in (2, 3):  # twice two ends below the same start, a short one and a long one
        start = top + prompt(side, 4)
        store(index, 1, start + prompt(side + 2, 100))
        store(index, side, start + prompt(side + 4, 4))
    for worker, side in ((1, 2), (1, 3), (2, 2), (3, 3)):
        remove_blocks(index, (worker, 0), Tier.DEVICE, top + prompt(side, 4))
    review(index)
    # A short end takes 8 positions, and half of 4 blocks and a quarter of the shared ones.
    assert index.blocks(1, 0, Tier.DEVICE) == 200
    assert index.ranks() == ([(1, 0), (2, 0), (3, 0)] if is_worth_it else [(1, 0)])


@pytest.mark.usefixtures("spared")
def test_a_rank_with_half_of_its_row_keeps_what_lies_behind_its_holes() -> None:
    index = KvIndex(16)
    local = prompt(1)
    spoil(index, 2)
    store(index, 1, local)
    for worker in range(2, 8):
        store(index, worker, local)
        remove_blocks(index, (worker, 0), Tier.DEVICE, local[1:-1])  # a strand that keeps too much
    remove_blocks(index, (1, 0), Tier.DEVICE, local[1:33])  # it holds just half
    store(index, 8, local)
    remove_blocks(index, (8, 0), Tier.DEVICE, local[1:34])  # and it one less
    review(index)
    assert index.blocks(1, 0, Tier.DEVICE) == LENGTH // 2
    assert [index.blocks(worker, 0, Tier.DEVICE) for worker in range(2, 9)] == [1] * 7


def steps_of_a_review(index: KvIndex) -> int:
    return sum(1 for _ in holes.review(index._device, lambda rank, blocks: None))


@pytest.mark.parametrize("ending", ["in a run", "at its end"])
def test_a_review_rests_within_a_strand_that_many_ranks_hold(ending: str) -> None:
    index = KvIndex(16)
    for worker in range(10 * holes._RANKS_PER_STEP):
        store(index, worker, prompt(1, 8))
        if ending == "in a run":
            remove_blocks(index, (worker, 0), Tier.DEVICE, prompt(1, 8)[4:])
    passes = 2 if ending == "in a run" else 1  # over the holders of parts, then over all
    assert steps_of_a_review(index) >= 9 * passes


def test_a_review_rests_within_a_strand_of_many_runs() -> None:
    index = KvIndex(16)
    runs = 10 * holes._RANKS_PER_STEP
    trunk = prompt(1, runs)
    store(index, 1, trunk)
    before = steps_of_a_review(index)
    for at in range(1, runs):
        store(index, 1, [*trunk[:at], 90_000_000 + at])
    strands = runs - 1
    assert steps_of_a_review(index) >= before + strands // holes._STRANDS_PER_STEP + 9


@pytest.mark.usefixtures("spared")
def test_a_review_rests_between_strands_that_are_worth_their_memory() -> None:
    index = KvIndex(16)
    spoil(index, 1000)
    before = steps_of_a_review(index)
    index = KvIndex(16)
    strands = 20 * holes._STRANDS_PER_STEP
    for number in range(1, strands + 1):
        store(index, 1, prompt(number, 4))
    spoil(index, 1000)
    assert steps_of_a_review(index) >= before + 2 * 20  # it measures them, and looks which to evict
