"""A partition's sets of ranks, and what was recovered for workers that may never come."""

from itertools import combinations, islice

from lean_selector.core.index.shapes import Tier
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


def test_the_ranks_of_many_workers_are_the_same_whenever_and_however_often_asked_for() -> None:
    driven = fleet()
    sets = [frozenset(some) for some in islice(combinations(WORKERS, 9), 40)]
    for _ in range(2):
        for some in sets:
            assert [driven.partition.ranks_of(some) for _ in range(2)] == [masks(driven, some)] * 2


def test_the_ranks_of_many_workers_follow_those_that_come_and_go() -> None:
    driven = fleet()
    some = frozenset([*WORKERS, 99])
    before = driven.partition.ranks_of(some)
    driven.remove(5)
    without = driven.partition.ranks_of(some)
    assert without == masks(driven, some)
    driven.register(99)
    assert driven.partition.ranks_of(some) == masks(driven, some)
    assert before.bit_count() - 1 == without.bit_count() == 11


def test_a_rank_that_is_gone_is_emptied_without_effect() -> None:
    partition = fleet().partition
    before = partition.order.moved
    partition.emptied(99, 0)
    assert partition.order.moved == before


def test_what_was_recovered_is_dropped_unless_its_worker_is_here() -> None:
    driven = DrivenSelector()
    driven.register(1)
    partition = driven.partition
    for worker_id in (1, 2):
        partition.index.store(worker_id, 0, Tier.DEVICE, None, [1, 2], pack([1, 2]))
        partition.watermarks[worker_id, 0] = 7
    assert partition.unclaimed() == [2]
    assert [partition.forget_unclaimed(worker_id) for worker_id in (1, 2)] == [0, 2]
    assert partition.index.ranks() == [(1, 0)]
    assert partition.watermarks == {(1, 0): 7}
