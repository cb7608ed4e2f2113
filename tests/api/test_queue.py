"""Requests that wait, as the service answers them: what breaks for one, and how long one may wait.

The queue itself is proved in `core/selection/test_selector.py` and against a model.
"""

import random
from collections.abc import Callable

import pytest

from tests.support.asked import prompt
from tests.support.gates import InProcess, answer_of, selector

PROMPT = {"block_hashes": [1], "sequence_hashes": [1], "isl_tokens": 9}


def fill(service: InProcess, worker_id: int) -> None:
    """Register a worker, and book above the threshold there."""
    service.add_worker(worker_id, max_num_batched_tokens=16)
    service.reserve(f"full{worker_id}", worker_id, 9)


class Dice(random.Random):
    """Raises while it `is_broken`."""

    is_broken = False

    def random(self) -> float:
        if self.is_broken:
            raise RuntimeError("a bug")
        return super().random()


def test_what_breaks_is_500_there_200_for_the_call_that_let_it_go_and_the_next_one_is_placed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    dice = Dice(7)
    service = selector(queue_threshold=0.5, temperature=1.0, dice=dice)  # which is taken is drawn
    for worker_id in (1, 2):
        fill(service, worker_id)
    asked = {**PROMPT, "reservation_id": "broken"}
    broken = service.later("/select_and_reserve", asked)
    dice.is_broken = True
    done = service.request("POST", "/reservations/full1/prefill_complete")
    assert done == (200, {"status": "ok"})
    assert answer_of(broken) == (500, {"error": "internal error"})
    assert [record.exc_text or "" for record in caplog.records if record.exc_info]
    dice.is_broken = False
    assert service.get("/loads")[1][0]["pending_count"] == 0
    assert service.post("/select_and_reserve", asked)[0] == 200


def test_what_a_request_holds_while_it_waits_is_told() -> None:
    service = selector(queue_threshold=0.5)
    fill(service, 1)

    def held(blocks: int) -> int:
        return service.later("/select", prompt(*range(1, blocks + 1))).held_bytes

    assert held(1001) - held(1) == 16 * 1000


class Timers:
    """The loop's `call_later`, run by hand."""

    def __init__(self) -> None:
        self.due: list[Timer] = []

    def call_later(self, _: float, callback: Callable[[], None]) -> "Timer":
        self.due.append(Timer(self, callback))
        return self.due[-1]


class Timer:
    def __init__(self, timers: Timers, callback: Callable[[], None]) -> None:
        self._timers, self.ring = timers, callback

    def cancel(self) -> None:
        self._timers.due.remove(self)


@pytest.mark.parametrize("waits_too_long", [False, True])
def test_a_request_that_waits_has_a_timer_and_one_that_is_answered_has_none(
    waits_too_long: bool,
) -> None:
    """It would keep the request and its prompt for the whole of the limit."""
    timers = Timers()
    service = selector(timers.call_later, queue_threshold=0.5, queue_max_wait_s=60.0)
    fill(service, 1)
    parked = service.later("/select", PROMPT)
    (timer,) = timers.due
    if waits_too_long:
        timer.ring()
        status, body = answer_of(parked)
        assert status == 503
        assert "60 seconds" in body["error"]
    else:
        assert service.end("full1") == 200
        assert answer_of(parked)[0] == 200
        assert timers.due == []
