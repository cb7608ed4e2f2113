"""What the queue costs, in steps of the interpreter: of a selection, and of an event."""

from typing import Any

import pytest

from lean_selector.core.selection.queue import Waiting
from lean_selector.core.selection.shapes import Placement
from tests.support.driven_selector import DrivenSelector
from tests.support.operations import lines_run as steps


def fleet(workers: int, **settings: Any) -> DrivenSelector:
    driven = DrivenSelector(**settings)
    for worker_id in range(workers):
        driven.register(worker_id, max_num_batched_tokens=10, taints=frozenset("a"))
    return driven


def full_fleet(workers: int) -> DrivenSelector:
    """Every worker over the threshold, with one token that may be freed, and one big booking."""
    driven = fleet(workers, queue_threshold=1.0)
    for worker_id in range(workers):
        driven.reserve(f"hog{worker_id}", (worker_id, 0), isl_tokens=99, prefill=99)
        driven.reserve(f"small{worker_id}", (worker_id, 0), isl_tokens=1, prefill=1)
    return driven


def park(driven: DrivenSelector, count: int, workers: int, ties: str) -> None:
    for number in range(count):
        kinds: dict[str, dict[str, Any]] = {
            "any": {},
            "pinned": {"pin": (number % workers, 0)},
            "allowed": {"allowed": {number % workers, (number * 7 + 1) % workers}},
            "taint": {"required_taints": frozenset("a")},
        }
        changes = kinds[ties]
        assert isinstance(driven.book(f"p{number}", isl_tokens=99, **changes), Waiting)


TIES = pytest.mark.parametrize("ties", ["any", "pinned", "allowed", "taint"])


@pytest.mark.parametrize("workers", [40, 400])
def test_a_selection_with_a_queue_that_is_empty_goes_as_without_one(workers: int) -> None:
    def cost(driven: DrivenSelector) -> int:
        request = driven.request([1, 2], 8)
        partition = driven.partition
        return steps(lambda: driven.selector.select(partition, request, 0.0))

    assert cost(fleet(workers, queue_threshold=1.0)) <= 1.3 * cost(fleet(workers))


def test_a_selection_costs_the_same_however_large_the_fleet_and_whoever_waits() -> None:
    def cost(workers: int, waits: bool) -> int:
        driven = fleet(workers, queue_threshold=1.0)
        if waits:
            driven.reserve("hog", (1, 0), isl_tokens=99, prefill=99)
            assert isinstance(driven.book("pinned", pin=(1, 0)), Waiting)
        request = driven.request([1, 2], 8)
        partition = driven.partition
        return steps(lambda: driven.selector.select(partition, request, 0.0))

    for waits in (False, True):
        assert cost(400, waits) <= cost(40, waits) + 40  # the draw is by halves


def test_parking_costs_the_same_however_large_the_fleet() -> None:
    def cost(workers: int) -> int:
        driven = full_fleet(workers)
        request = driven.request([1, 2], 8)
        partition = driven.partition
        park(driven, 1, workers, "any")
        return steps(lambda: driven.selector.select(partition, request, 0.0))

    assert cost(400) == cost(40)


@TIES
def test_an_event_that_frees_no_rank_costs_the_same_whoever_waits(ties: str) -> None:
    def cost(workers: int, parked: int) -> int:
        driven = full_fleet(workers)
        park(driven, parked, workers, ties)
        spent = steps(lambda: driven.selector.reservations.free("small1", 1.0))
        assert not driven.answers
        return spent

    assert cost(400, 1000) == cost(40, 100) == cost(40, 1)


@TIES
def test_a_rank_that_comes_free_costs_who_goes_and_one_look_at_every_other_line(ties: str) -> None:
    def cost(parked: int) -> int:
        driven = full_fleet(40)
        park(driven, parked, 40, ties)
        driven.selector.reservations.free("small1", 1.0)
        spent = steps(lambda: driven.selector.reservations.free("hog1", 1.0))
        assert len(driven.answers) == 1
        return spent

    few, many = cost(100), cost(1000)
    # Lines: one of all, 40 by pins, and 40 pairs of workers; a hundred requests make them all.
    assert many <= 1.1 * few + 20


def test_those_who_may_go_elsewhere_only_are_looked_at_line_by_line() -> None:
    """Not request by request, and not against every worker."""
    driven = full_fleet(400)
    park(driven, 1000, 400, "pinned")
    driven.selector.reservations.free("small1", 1.0)
    spent = steps(lambda: driven.selector.reservations.free("hog1", 1.0))
    assert list(driven.answers) == ["p1"]
    assert spent <= 10 * 400


def test_expired_bookings_that_free_no_rank_cost_no_look_at_the_queue() -> None:
    def cost(parked: int) -> int:
        driven = DrivenSelector(queue_threshold=1.0, reservation_expiry_s=10.0)
        driven.register(1, max_num_batched_tokens=10)
        for number in range(50):
            driven.reserve(f"r{number}", (1, 0), isl_tokens=1, prefill=1)
        driven.now = 9.0
        driven.reserve("hog", (1, 0), isl_tokens=99, prefill=99)
        park(driven, parked, 1, "any")
        return steps(lambda: driven.selector.reservations.expire(11.0, 50))

    assert cost(1000) == cost(1)


def test_a_whole_queue_that_may_go_is_one_walk() -> None:
    def cost(parked: int) -> int:
        driven = full_fleet(1)
        for number in range(parked):
            request = driven.request([], 9)
            assert isinstance(driven.submit(f"s{number}", request), Waiting)
        driven.selector.reservations.free("small0", 1.0)
        spent = steps(lambda: driven.selector.reservations.free("hog0", 1.0))
        assert len(driven.answers) == parked
        assert all(isinstance(answer, Placement) for answer in driven.answers.values())
        return spent

    assert cost(800) <= 9 * cost(100)


def test_who_waits_is_looked_at_once_for_all_ranks_of_a_new_worker() -> None:
    def cost(parked: int, ranks: int) -> int:
        driven = full_fleet(4)
        park(driven, parked, 4, "pinned")
        return steps(lambda: driven.register(9, data_parallel_size=ranks))

    assert cost(1000, 16) - cost(0, 16) <= 1.1 * (cost(1000, 1) - cost(0, 1))
