"""Which queued requests are refused because their first token would come too late."""

from collections.abc import Callable
from typing import Any

import pytest

from lean_selector.core.errors import TooLate, WaitedTooLong
from lean_selector.core.load.speeds import WINDOW
from lean_selector.core.selection.queue import Waiting
from lean_selector.core.selection.shapes import NEVER
from lean_selector.core.settings import SessionSettings
from tests.support.driven_selector import DrivenSelector, teach

FIRST, SECOND = (1, 0), (2, 0)


class Timer:
    def __init__(self, timers: list[tuple[float, Callable[[], None]]]) -> None:
        self._timers, self._timer = timers, timers[-1]

    def cancel(self) -> None:
        if self._timer in self._timers:
            self._timers.remove(self._timer)


class Fleet(DrivenSelector):
    """Two busy ranks. The first has 100 tokens to prefill, the second 40."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(queue_threshold=1.0, **settings)
        self.timers: list[tuple[float, Callable[[], None]]] = []
        self.selector._queues.call_later = self.call_later
        for worker_id, tokens in ((1, 100), (2, 40)):
            self.register(worker_id)
            prompt = self.request([], tokens).prompt
            self.selector.reservations.reserve(
                self.partition, f"{worker_id}", worker_id, 0, prompt, tokens, self.now
            )

    def call_later(self, delay_s: float, call: Callable[[], None]) -> Timer:
        self.timers.append((delay_s, call))
        return Timer(self.timers)

    def teach(self, rank: tuple[int, int], seconds: float, times: int = WINDOW) -> None:
        teach(self.partition, self.partition.slots.ranks[rank], seconds, times)

    def ask(self, left_s: float, **changes: Any) -> Waiting:
        """For 60 tokens: the first token takes 16 s behind the first rank's, 20 s behind the
        second's, and 6 s on the first alone, once both are taught."""
        request = self.request([], 60, deadline=self.now + left_s, **changes)
        found = self.selector.select(self.partition, request, self.now)
        assert isinstance(found, Waiting)
        return found


@pytest.fixture
def fleet() -> Fleet:
    fleet = Fleet()
    fleet.teach(FIRST, 0.1)
    fleet.teach(SECOND, 0.2)
    return fleet


def test_what_comes_too_late_behind_the_least_delayed_rank_is_refused_with_the_estimate(
    fleet: Fleet,
) -> None:
    with pytest.raises(TooLate, match=r"\b16 seconds.*\b15\.9\b") as refused:
        fleet.ask(15.9)
    assert (refused.value.status, len(fleet.partition.queue), fleet.timers) == (504, 0, [])
    with pytest.raises(TooLate, match=r"\b20 seconds"):
        fleet.ask(19.9, allowed=[2])


def test_what_waits_is_refused_when_even_an_idle_rank_would_be_too_late(fleet: Fleet) -> None:
    waiting = fleet.ask(16.5)
    ((delay_s, ring),) = fleet.timers
    assert delay_s == pytest.approx(16.5 - 6)
    ring()
    assert isinstance(waiting.answer, TooLate)
    assert len(fleet.partition.queue) == 0


def test_the_limit_of_all_waits_holds_beside_a_deadline() -> None:
    fleet = Fleet(queue_max_wait_s=5.0)
    for rank in (FIRST, SECOND):
        fleet.teach(rank, 0.1)
    waiting = fleet.ask(60.0)
    assert sorted(delay_s for delay_s, _ in fleet.timers) == pytest.approx([5.0, 54.0])
    min(fleet.timers)[1]()
    assert isinstance(waiting.answer, WaitedTooLong)
    assert fleet.timers == []  # they would keep the prompt


@pytest.mark.parametrize(
    "changes", [{"pin": FIRST}, {"disaggregate": "auto"}, {"required_taints": frozenset("x")}]
)
def test_whom_one_rank_or_a_pair_serves_or_nobody_yet_waits(
    fleet: Fleet, changes: dict[str, Any]
) -> None:
    fleet.ask(60.0)  # what no rank can serve waits only while others do
    fleet.timers.clear()
    fleet.ask(0.0, **changes)
    assert (len(fleet.partition.queue), fleet.timers) == (2, [])


@pytest.mark.parametrize("is_soft", [False, True])
def test_a_request_of_a_hard_session_waits(is_soft: bool) -> None:
    fleet = Fleet(sessions=SessionSettings(ttl_s=60.0, is_soft=is_soft))
    for rank in (FIRST, SECOND):
        fleet.teach(rank, 0.1)
    if is_soft:
        with pytest.raises(TooLate):
            fleet.ask(1.0, session_id="s")
    else:
        fleet.ask(1.0, session_id="s")


def test_without_enough_measurements_of_every_rank_nothing_is_refused() -> None:
    fleet = Fleet()
    fleet.teach(FIRST, 0.1)
    fleet.teach(SECOND, 0.1, WINDOW - 1)
    fleet.ask(0.0)
    assert fleet.timers == []
    fleet.teach(SECOND, 0.1, 1)
    with pytest.raises(TooLate):
        fleet.ask(0.0)


def test_a_request_without_a_deadline_has_no_limit(fleet: Fleet) -> None:
    request = fleet.request([], 60, disaggregate=NEVER)
    assert isinstance(fleet.selector.select(fleet.partition, request, fleet.now), Waiting)
    assert fleet.timers == []
