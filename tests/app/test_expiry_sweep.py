"""Expiry in slices: what is overdue goes, at any rate, and the loop has its turns in between."""

from collections.abc import Callable

import pytest

from lean_selector.app.host import SLICE_STEPS, ExpirySweep
from lean_selector.core.load.shapes import WorkerRow
from lean_selector.core.trackers import Trackers
from tests.support import reservations
from tests.support.gates import Turns

EXPIRY_S = 10.0
SCOPE = ("default", "default")


class Loop:
    """Turns of a loop that a test takes itself, and what each slice of them took."""

    def __init__(
        self, expire: Callable[[float, int], int], arrived: Callable[[], int], now: float
    ) -> None:
        self.now = now
        self.turns = Turns()
        self.slices: list[int] = []

        def counted(now: float, max_steps: int) -> int:
            self.slices.append(expire(now, max_steps))
            return self.slices[-1]

        self.sweep = ExpirySweep(counted, arrived, self.turns.call_soon, lambda: self.now)


def trackers_with(locals_: int, copies: int = 0) -> Trackers:
    trackers = Trackers(reservation_expiry_s=EXPIRY_S)
    trackers.register(WorkerRow(1, *SCOPE, 16, 0, 1))
    book(trackers, locals_, 0.0)
    slots = trackers.in_order()[0].slots
    for number in range(copies):
        reservations.book(slots, f"copy{number}", 1, 0, b"", 1, 0.0, router_id=7)
    return trackers


def book(trackers: Trackers, count: int, now: float) -> None:
    first = trackers.arrived()
    for number in range(first, first + count):
        trackers.add(*SCOPE, f"r{number}", 1, 0, b"", 1, now)


def live(trackers: Trackers) -> tuple[int, int]:
    return trackers.in_order()[0].slots.live_counts()


def loop_over(trackers: Trackers, now: float) -> Loop:
    return Loop(lambda now, steps: len(trackers.expire(now, steps)), trackers.arrived, now)


def test_a_backlog_goes_in_bounded_slices_of_turns_one_after_another() -> None:
    trackers = trackers_with(20 * SLICE_STEPS)
    loop = loop_over(trackers, 11.0)
    loop.sweep.begin()
    while loop.turns.due:
        assert len(loop.turns.due) == 1  # one slice a turn: the loop polls its sockets in between
        loop.turns.turn()
    assert loop.slices == [SLICE_STEPS] * 20 + [0]
    assert live(trackers) == (0, 0)


def test_a_tick_while_a_sweep_is_under_way_starts_no_other() -> None:
    loop = loop_over(trackers_with(3 * SLICE_STEPS), 11.0)
    for _ in range(3):
        loop.sweep.begin()
    assert (loop.slices, len(loop.turns.due)) == ([SLICE_STEPS], 1)


def test_nothing_overdue_takes_one_empty_slice_a_tick() -> None:
    loop = loop_over(trackers_with(5), 9.0)
    loop.sweep.begin()
    assert (loop.slices, len(loop.turns.due)) == ([0], 0)


@pytest.mark.parametrize("per_turn", [10, SLICE_STEPS, 4 * SLICE_STEPS])
def test_expiry_keeps_up_with_whatever_a_turn_can_book(per_turn: int) -> None:
    """Every turn books as much again, and all of it is overdue a tenth of a second later."""
    trackers = trackers_with(10 * per_turn)
    loop = loop_over(trackers, 11.0)
    loop.sweep.begin()
    most = 0
    for _ in range(60):
        book(trackers, per_turn, loop.now)
        loop.now += 11.0
        if not loop.turns.due:
            loop.sweep.begin()
        loop.turns.turn()
        most = max(most, live(trackers)[0])
    assert most <= 11 * per_turn + SLICE_STEPS
    assert live(trackers)[0] <= per_turn + SLICE_STEPS  # the backlog is gone, whatever the rate
    assert max(loop.slices) <= max(SLICE_STEPS, 2 * per_turn)


def test_a_long_pause_before_a_sweep_makes_its_first_slice_no_longer() -> None:
    trackers = trackers_with(0)
    loop = loop_over(trackers, 0.0)
    loop.sweep.begin()
    book(trackers, 40 * SLICE_STEPS, 0.0)
    loop.now = 11.0
    loop.sweep.begin()
    assert loop.slices == [0, SLICE_STEPS]


def test_copies_go_while_local_ones_are_booked_faster_than_a_slice_drops_them() -> None:
    trackers = trackers_with(0, copies=100)
    loop = loop_over(trackers, 0.0)
    for _ in range(40):
        book(trackers, 3 * SLICE_STEPS, loop.now)
        loop.now += 2.0
        loop.sweep.begin()
        loop.turns.turn()
    assert live(trackers)[1] == 0


def test_a_stop_ends_a_sweep() -> None:
    loop = loop_over(trackers_with(2 * SLICE_STEPS), 11.0)
    loop.sweep.begin()
    loop.sweep.stop()
    loop.turns.turn()
    assert (loop.slices, len(loop.turns.due)) == ([SLICE_STEPS], 0)


def test_a_removed_partition_takes_its_count_along() -> None:
    trackers = trackers_with(5)
    trackers.register(WorkerRow(1, "other", "default", 16, 0, 1))
    trackers.add("other", "default", "r", 1, 0, b"", 1, 0.0)
    loop = loop_over(trackers, 0.0)
    loop.sweep.begin()
    trackers.unregister(*SCOPE, 1)
    loop.now = 11.0
    loop.sweep.begin()
    assert loop.slices == [0, 1]
