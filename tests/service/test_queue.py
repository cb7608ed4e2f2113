"""Requests that wait, as the service answers them: what breaks for one, and how long one may wait.

The queue itself is proved in `core/selection/test_selector.py` and against a model.
"""

import random
from collections.abc import Callable

import pytest

from tests.support.gates import InProcess, answer_of, selector

PROMPT = {"block_hashes": [1], "sequence_hashes": [1], "isl_tokens": 9}
WORKER = {"endpoint": "http://w", "block_size": 16, "max_num_batched_tokens": 16}


def fill(service: InProcess, worker_id: int) -> None:
    """Register a worker, and book above the threshold there."""
    assert service.post("/workers", {**WORKER, "worker_id": worker_id})[0] == 201
    rank = {"worker_id": worker_id, "effective_prefill_tokens": 9}
    booking = {**PROMPT, **rank, "reservation_id": f"full{worker_id}"}
    assert service.post("/reservations", booking)[0] == 201


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
        hashes = list(range(1, blocks + 1))
        prompt = {"block_hashes": hashes, "sequence_hashes": hashes, "isl_tokens": 16 * blocks}
        return service.later("/select", prompt).held_bytes

    assert held(1001) - held(1) == 16 * 1000


# -- `--queue-max-wait-secs` ----------------------------------------------------------------------


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
        assert service.request("DELETE", "/reservations/full1")[0] == 200
        assert answer_of(parked)[0] == 200
        assert timers.due == []
