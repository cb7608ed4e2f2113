"""What the status of an answer says of the worker."""

import pytest

from lean_selector.core.health.ejections import outcome_of_status


@pytest.mark.parametrize(
    ("statuses", "outcome"),
    [
        ((200, 204, 302, 400, 401, 404, 413, 422, 499), "ok"),
        ((429, 503, 529), None),
        ((500, 501, 502, 504, 528, 530, 599), "failed"),
    ],
)
def test_who_answers_is_well_unless_it_says_that_it_failed_or_is_full(
    statuses: tuple[int, ...], outcome: str | None
) -> None:
    assert {outcome_of_status(each) for each in statuses} == {outcome}
