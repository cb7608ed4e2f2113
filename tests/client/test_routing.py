"""The flows, driven by hand: what is sent, and when, with no I/O."""

import contextlib
import random
from typing import Any

import pytest

from lean_selector.client import calls
from lean_selector.client.calls import Overlap, Scope, Selected, Worker
from lean_selector.client.client_settings import Backoff
from lean_selector.client.errors import (
    ClientError,
    InvalidRequest,
    ServiceRefused,
    ServiceUnreachable,
    service_refusal,
)
from lean_selector.client.reservation import Reservation
from lean_selector.client.routing import Ask, Flow, Pause, Prompt, Release, Routing, Step, Terms


def routing(**fields: Any) -> Routing:
    settings: dict[str, Any] = {"block_size": 4, "model_name": "m", "backoff": Backoff(), **fields}
    return Routing(
        None,
        settings["block_size"],
        settings["model_name"],
        "default",
        None,
        settings["backoff"],
        random.Random(1),
    )


def selected(worker_id: int = 1) -> Selected:
    overlap = Overlap(0, 0, {"0": 0}, 0, 0)
    return Selected(worker_id, 0, "http://w", 4, overlap, 10)


def play(flow: Flow[Any], *outcomes: object) -> list[Step]:
    """The steps of a flow that meets these outcomes; its error, if it ends with one, is raised."""
    steps = [next(flow)]
    for outcome in outcomes:
        try:
            if isinstance(outcome, BaseException):
                steps.append(flow.throw(outcome))
            else:
                steps.append(flow.send(outcome))
        except StopIteration:
            return steps
    with contextlib.suppress(ClientError):  # a flow is always brought to its end
        flow.throw(service_refusal(400, "the play is over"))
    return steps


def busy(retry_after_s: float | None = None) -> ServiceRefused:
    return service_refusal(503, "busy", retry_after_s)


def test_a_busy_service_is_asked_again_after_what_it_says() -> None:
    flow = routing().place(Prompt([1] * 8), Terms())
    steps = play(flow, busy(retry_after_s=9.0), None)
    assert isinstance(steps[1], Pause)
    assert steps[1].seconds == 9.0
    first, again = steps[0], steps[2]
    assert isinstance(first, Ask)
    assert isinstance(again, Ask)
    assert first.books is not None
    assert again.books is not None
    assert first.books.id != again.books.id


def test_a_booking_whose_answer_is_lost_is_released_and_tried_under_another_id() -> None:
    lost = ServiceUnreachable("s", "reset")
    steps = play(routing().place(Prompt([1] * 8), Terms()), lost, None, None)
    assert [type(step) for step in steps] == [Ask, Release, Pause, Ask]
    assert isinstance(steps[1], Release)
    assert steps[1].reservation.ambiguous


def test_a_booking_that_was_never_sent_needs_no_release() -> None:
    refused = ServiceUnreachable("s", "refused", never_sent=True)
    steps = play(routing().place(Prompt([1] * 8), Terms()), refused, None)
    assert [type(step) for step in steps] == [Ask, Pause, Ask]


def test_other_refusals_are_not_tried_again() -> None:
    flow = routing().place(Prompt([1] * 8), Terms())
    next(flow)
    with pytest.raises(InvalidRequest):
        flow.throw(service_refusal(400, "no"))


@pytest.mark.parametrize("ambiguous", [False, True])
def test_a_release_looks_twice_when_the_booking_may_still_arrive(ambiguous: bool) -> None:
    reservation = Reservation(4, reservation_id="r")
    reservation.ambiguous = ambiguous
    missing = service_refusal(404, "not found")
    steps = play(routing().release(reservation), missing, None, missing)
    assert [type(step) for step in steps] == ([Ask, Pause, Ask] if ambiguous else [Ask])


def test_a_release_outlasts_a_restart_of_the_service_and_then_gives_up() -> None:
    lost: list[object] = [ServiceUnreachable("s", "refused"), None]
    steps = play(routing().release(Reservation(4)), *lost * 20)
    pauses = [step.seconds for step in steps if isinstance(step, Pause)]
    assert 5.0 < sum(pauses) < 10.0
    assert isinstance(steps[-1], Ask)


def test_reports_give_up_where_the_next_one_makes_up_for_them() -> None:
    reservation = Reservation(4)
    reservation.output(1)
    lost: list[object] = [ServiceUnreachable("s", "refused"), None]
    steps = play(routing().report(reservation), *lost * 20)
    assert [type(step) for step in steps] == [Ask, Pause, Ask, Pause, Ask]
    steps = play(routing().report(reservation), service_refusal(404, "not found"))
    assert len(steps) == 1
    assert reservation.next_report() is not None


def test_discovery_asks_once_it_has_found_workers() -> None:
    knows_nothing = routing(block_size=None, model_name=None)
    flow = knows_nothing.scope("m")
    assert play(flow, [])
    worker = Worker(1, "base", "schedulable", 16, True)
    for _ in range(2):
        flow = knows_nothing.scope("m")
        try:
            next(flow)
            flow.send([worker, Worker(2, "half", "incomplete")])
        except StopIteration as end:
            scope = end.value
        assert scope == Scope("base", "default", 16, True)
    assert isinstance(scope, Scope)
    fields = calls.prompt_fields([1] * 17, scope, None, None)
    assert fields["isl_tokens"] == 17
    assert len(fields["block_hashes"]) == 8  # type: ignore[arg-type] # bytes of one hash
