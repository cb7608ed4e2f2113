"""A partition's sets of ranks, and what was recovered for workers that may never come."""

from itertools import combinations, islice

from lean_selector.core.index.shapes import Tier, Watermark
from lean_selector.core.selection.prompt import Prompt
from tests.support.blocks import store_blocks
from tests.support.driven_selector import DrivenSelector, pack

WORKERS = range(1, 13)


def fleet() -> DrivenSelector:
    driven = DrivenSelector()
    for worker_id in WORKERS:
        driven.register(worker_id)
    return driven


def masks(driven: DrivenSelector, worker_ids: frozenset[int]) -> int:
    workers = driven.partition.workers
    return sum(workers[worker_id].mask for worker_id in worker_ids if worker_id in workers)


def test_the_ranks_of_many_workers_are_theirs_however_often_asked_for_and_whoever_goes() -> None:
    driven = fleet()
    sets = [frozenset([*some, 99]) for some in islice(combinations(WORKERS, 9), 40)]

    def check() -> None:
        for some in sets * 2:
            assert [driven.partition.ranks_of(some) for _ in range(2)] == [masks(driven, some)] * 2

    check()
    driven.remove(5)
    check()
    driven.register(99)
    check()


def test_a_rank_that_is_gone_is_emptied_without_effect() -> None:
    partition = fleet().partition
    before = partition.order.moved
    partition.emptied(99, 0)
    assert partition.order.moved == before


def test_what_events_have_reported_of_a_prompt_is_not_assumed() -> None:
    """Also where its other blocks are unknown."""
    for known, assumed in ((2, 0), (3, 4)):
        driven = DrivenSelector(use_kv_events=True, predicted_ttl_s=100.0)
        for worker_id in (1, 2):
            driven.register(worker_id, kv_events_endpoint="tcp://w:1")
        partition, hashes = driven.partition, pack([1, 2, 8, 9])
        store_blocks(partition.index, (1, 0), Tier.DEVICE, None, [11, 12], hashes[:16])
        prompt = Prompt(16, hashes, 4, hashes[:8], hashes, None, known)
        for worker_id in (1, 2):
            partition.assume_cached((worker_id, 0), prompt, driven.now)
        assert partition.predicted is not None
        assert partition.predicted.blocks(1, 0, Tier.DEVICE) == assumed
        assert partition.predicted.blocks(2, 0, Tier.DEVICE) == 4


def test_what_was_recovered_is_dropped_unless_its_worker_is_here() -> None:
    driven = DrivenSelector()
    driven.register(1)
    partition = driven.partition
    for worker_id in (1, 2):
        store_blocks(partition.index, (worker_id, 0), Tier.DEVICE, None, [1, 2], pack([1, 2]))
        partition.watermarks[worker_id, 0] = Watermark(7, 7)
    assert partition.unclaimed() == [2]
    assert [partition.forget_unclaimed(worker_id) for worker_id in (1, 2)] == [0, 2]
    assert partition.index.ranks() == [(1, 0)]
    assert partition.watermarks == {(1, 0): Watermark(7, 7)}
