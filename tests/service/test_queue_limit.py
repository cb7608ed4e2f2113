"""`--queue-max-wait-secs`: a timer for each request that waits, and none for one that does not."""

import json
import random
from collections.abc import Callable

from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.selector import Selector
from lean_selector.http.response import PendingReply, encode_response
from lean_selector.service.gate import Gate
from lean_selector.service.selection import SelectionService
from lean_selector.service.worker_handlers import ServiceState
from tests.support.gates import NOW, NoEngines, answered, request


class Timers:
    """The loop's `call_later`, run by hand."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_later(self, _: float, callback: Callable[[], None]) -> "Timer":
        self.due.append(callback)
        return Timer(self, callback)


class Timer:
    def __init__(self, timers: Timers, callback: Callable[[], None]) -> None:
        self._timers, self._callback = timers, callback

    def cancel(self) -> None:
        if self._callback in self._timers.due:
            self._timers.due.remove(self._callback)


def waiting(timers: Timers) -> tuple[Gate, PendingReply]:
    """A service whose one rank is full, and a request that is parked there."""
    engines = NoEngines()
    settings = RouterSettings(use_kv_events=False, queue_threshold=0.5, queue_max_wait_s=60.0)
    service = SelectionService(
        Selector(settings, engines, random.Random(7)),
        dump=lambda: encode_response(200, b"{}"),
        sources=engines,
        state=ServiceState(),
        call_later=timers.call_later,
        clock=lambda: NOW,
    )
    gate = Gate(service.routes())
    worker = {"worker_id": 1, "endpoint": "http://w", "block_size": 16, "max_num_batched_tokens": 9}
    assert answered(gate, request("POST", "/workers", json.dumps(worker).encode()))[0] == 201
    prompt = {"block_hashes": [1], "sequence_hashes": [1], "isl_tokens": 16}
    first = json.dumps({**prompt, "reservation_id": "first"}).encode()
    assert answered(gate, request("POST", "/select_and_reserve", first))[0] == 200
    parked = gate(request("POST", "/select", json.dumps(prompt).encode()))
    assert isinstance(parked, PendingReply)
    assert len(timers.due) == 1
    return gate, parked


def test_a_request_that_is_answered_leaves_no_timer_behind() -> None:
    """It would keep the request and its prompt for the whole of the limit."""
    timers = Timers()
    gate, parked = waiting(timers)
    assert answered(gate, request("DELETE", "/reservations/first"))[0] == 200
    assert parked.response is not None
    assert timers.due == []


def test_a_request_that_waits_too_long_is_answered_by_its_timer() -> None:
    timers = Timers()
    _, parked = waiting(timers)
    timers.due[0]()
    assert parked.response is not None
    assert b"no worker became free within 60 seconds" in bytes(parked.response)
