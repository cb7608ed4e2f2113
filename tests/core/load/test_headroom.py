"""Ranks that the queue lets requests go to: the threshold, busy limits, load that wears off."""

import math

import pytest

from lean_selector.core.load.busy import Headroom
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.shapes import RankLimits
from lean_selector.core.load.slots import Slots
from tests.support.bookings import book

UNLIMITED = RankLimits()


class Ranks:
    """Ranks of one Slots that are put into a Headroom, and hear of every change."""

    def __init__(self, threshold: float, *batched: int, busy: RankLimits = UNLIMITED) -> None:
        self.room = Headroom(threshold)
        self.slots = Slots(lambda load: self.room.changed(load, self.slots.heard_at))
        self.loads: list[RankLoad] = []
        for worker_id, tokens in enumerate(batched):
            self.loads.append(self.slots.add_rank(worker_id, 0))
            self.room.put(self.loads[-1], tokens, busy, 0.0)

    def book(
        self, name: str, worker_id: int, tokens: int, now: float = 0.0, lasts: float | None = None
    ) -> None:
        book(
            self.slots, name, worker_id, 0, b"", tokens, now, router_id=7, prefill_duration_s=lasts
        )

    def taken(self) -> int:
        came_free, self.room.came_free = self.room.came_free, 0
        return came_free


def test_a_rank_is_over_the_threshold_above_it_only() -> None:
    for threshold, below in ((1.9, 0), (2.0, 1), (math.inf, 1)):
        ranks = Ranks(threshold, 8)
        ranks.book("r", 0, 16)
        assert ranks.room.below == below


def test_an_infinite_threshold_of_no_capacity_is_never_exceeded() -> None:
    ranks = Ranks(math.inf, 0)
    ranks.book("r", 0, 1)
    assert ranks.room.free == 1


def test_a_rank_comes_free_when_it_comes_below_and_not_while_it_is() -> None:
    ranks = Ranks(1.0, 10, 10)
    assert ranks.taken() == 0b11  # new
    for name, tokens in (("a", 5), ("b", 5), ("c", 5), ("d", 5)):
        ranks.book(name, 0, tokens)
    assert ranks.taken() == 0
    for name, came_free in (("a", 0), ("b", 0b01), ("c", 0)):
        ranks.slots.free(name)
        assert ranks.taken() == came_free


def test_a_rank_that_is_put_again_counts_as_having_come_free() -> None:
    """Other limits, or other taints: those who wait must be asked again."""
    ranks = Ranks(1.0, 10, 10)
    ranks.book("r", 1, 20)
    ranks.taken()
    ranks.room.put(ranks.loads[1], 20, UNLIMITED, 0.0)
    assert (ranks.taken(), ranks.room.below) == (0b10, 0b11)


def test_a_rank_that_is_gone_is_in_no_set() -> None:
    ranks = Ranks(1.0, 10, 10)
    ranks.book("r", 0, 20, lasts=1.0)
    for load in ranks.loads:
        ranks.room.drop(load)
    ranks.room.advance(9.0)
    ranks.room.changed(ranks.loads[0], 9.0)
    assert (ranks.room.below, ranks.room.idle, ranks.room.came_free) == (0, 0, 0)


@pytest.mark.parametrize(
    ("untimed", "at"),
    [pytest.param(0, 0.75, id="the anchor alone"), pytest.param(4, 0.875, id="and one untimed")],
)
def test_load_falls_below_when_it_has_worn_off_and_not_before(untimed: int, at: float) -> None:
    ranks = Ranks(1.0, 8)
    ranks.book("timed", 0, 32, lasts=1.0)
    if untimed:
        ranks.book("untimed", 0, untimed)
    ranks.taken()
    for now in (0.5, at - 1e-3, at - 1e-7):
        ranks.room.advance(now)
        assert (ranks.room.below, ranks.taken()) == (0, 0)
    ranks.room.advance(at)
    assert (ranks.room.below, ranks.taken()) == (1, 1)


def test_a_rank_that_blocks_keep_busy_is_not_looked_at_in_vain() -> None:
    ranks = Ranks(1.0, 100, busy=RankLimits(decode_blocks=0))
    book(ranks.slots, "r", 0, 0, bytes(8), 32, 0.0, prefill_duration_s=1.0)
    assert ranks.room._falling == {}
    assert (ranks.room.below, ranks.room.idle) == (1, 0)


def test_falls_that_are_out_of_date_are_not_kept() -> None:
    ranks = Ranks(1.0, 8)
    for n in range(1_000):
        ranks.book(f"r{n}", 0, 32, lasts=1000.0)
    assert len(ranks.room._falling) == 1
    assert len(ranks.room._falls) <= 70
