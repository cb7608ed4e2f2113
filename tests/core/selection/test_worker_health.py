"""Ejected workers in the choice: avoided while there are others, and followed when tied to."""

import pytest

from lean_selector.core.errors import NotFound
from lean_selector.core.health.ejections import FAILED, OK
from lean_selector.core.settings import EjectionSettings
from tests.support.driven_selector import DrivenSelector

EJECTION = EjectionSettings(failures=3, base_s=10.0, most_percent=100.0)


def fleet(*worker_ids: int, **settings: object) -> DrivenSelector:
    driven = DrivenSelector(ejection=EJECTION, **settings)
    for worker_id in worker_ids:
        driven.register(worker_id)
    return driven


def fail(driven: DrivenSelector, worker_id: int, dp_rank: int | None = None) -> None:
    for _ in range(3):
        driven.selector.health.record_outcome(worker_id, dp_rank, FAILED, driven.now)


def test_a_poll_of_a_worker_that_is_gone_meanwhile_changes_nothing() -> None:
    driven = fleet(1, 2)
    driven.remove(2)
    for _ in range(10):
        driven.selector.health.polled(2, "connection refused", driven.now)
    assert driven.chosen() == {1}
    driven.register(2)
    assert driven.chosen() == {1, 2}


def test_when_all_are_ejected_all_are_tried() -> None:
    driven = fleet(1, 2)
    fail(driven, 1)
    fail(driven, 2)
    assert driven.chosen() == {1, 2}
    driven.selector.health.record_outcome(2, None, OK, driven.now)
    assert driven.chosen() == {2}


def test_a_worker_with_another_endpoint_is_another_and_the_same_record_changes_nothing() -> None:
    driven = fleet(1, 2)
    fail(driven, 1)
    driven.register(1)
    assert driven.chosen() == {2}
    driven.register(1, endpoint="http://elsewhere")
    assert driven.chosen() == {1, 2}


def test_a_worker_that_is_removed_leaves_no_ejection_behind() -> None:
    driven = fleet(1, 2, 3)
    fail(driven, 2)
    driven.remove(2)
    driven.register(4)  # takes its number
    driven.register(2)
    assert driven.chosen() == {1, 2, 3, 4}


def test_a_report_on_who_is_not_there_is_not_found_and_one_on_an_incomplete_worker_is_taken() -> (
    None
):
    driven = fleet(1)
    report = driven.selector.health.record_outcome
    with pytest.raises(NotFound, match=r"^worker 9 not found$"):
        report(9, None, OK, 0.0)
    with pytest.raises(NotFound, match="dp_rank: 1"):
        report(1, 1, OK, 0.0)
    driven.register(2, endpoint=None)
    report(2, None, FAILED, 0.0)
