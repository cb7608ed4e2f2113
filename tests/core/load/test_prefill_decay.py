import pytest

from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.slots import Slots
from tests.support import bookings


@pytest.fixture
def slots() -> Slots:
    slots = Slots()
    slots.add_rank(7, 0)
    return slots


@pytest.fixture
def rank(slots: Slots) -> RankLoad:
    return slots.ranks[7, 0]


def book(slots: Slots, name: str, tokens: int, duration_s: float | None, now: float) -> None:
    bookings.book(slots, name, 7, 0, b"", tokens, now, router_id=5, prefill_duration_s=duration_s)


def test_worked_example_of_the_specification(slots: Slots, rank: RankLoad) -> None:
    """slot_tracker.md 2.2; the recorded reads came a few milliseconds late."""
    book(slots, "a", 1000, 4.0, 0.0)
    reads = [rank.prefill_tokens_at(t) for t in (0.1, 0.6, 1.104, 1.608, 2.112)]
    assert reads == [975, 850, 724, 598, 472]
    book(slots, "b", 100, 2.0, 2.6)
    assert rank.prefill_tokens_at(2.717) == 421
    book(slots, "c", 50, None, 2.75)
    assert rank.prefill_tokens_at(2.8205) == 445
    assert rank.prefill_tokens_at(3.8205) == 195
    slots.prefill_complete("a", 4.0)
    assert rank.prefill_tokens_at(4.105) == 145
    assert rank.prefill_tokens_at(4.605) == 120
    assert rank.active_prefill_tokens == 150


def test_without_a_duration_nothing_decays(slots: Slots, rank: RankLoad) -> None:
    book(slots, "a", 1000, None, 0.0)
    assert rank.decay is None
    assert rank.prefill_tokens_at(100.0) == 1000


def test_a_duration_without_tokens_means_nothing(slots: Slots, rank: RankLoad) -> None:
    book(slots, "a", 0, 4.0, 0.0)
    assert rank.decay is None
    assert rank.prefill_tokens_at(100.0) == 0


def test_an_older_prefill_without_duration_holds_the_clock_back(
    slots: Slots, rank: RankLoad
) -> None:
    book(slots, "old", 30, None, 0.0)
    book(slots, "empty", 0, None, 0.0)
    book(slots, "timed", 100, 10.0, 0.0)
    assert rank.decay is not None
    assert rank.prefill_tokens_at(9.0) == 130
    slots.free("old", 9.0)
    assert rank.prefill_tokens_at(9.0) == 100
    assert rank.prefill_tokens_at(14.0) == 50


def test_a_late_anchor_eats_the_tokens_of_others_but_no_more(slots: Slots, rank: RankLoad) -> None:
    book(slots, "a", 100, 1.0, 0.0)
    book(slots, "b", 50, 1.0, 0.0)
    assert rank.prefill_tokens_at(1.2) == 30
    assert rank.prefill_tokens_at(9.0) == 0


def test_an_anchor_next_to_an_untimed_prefill_eats_only_its_own(
    slots: Slots, rank: RankLoad
) -> None:
    book(slots, "a", 100, 1.0, 0.0)
    book(slots, "b", 50, None, 0.0)
    assert rank.prefill_tokens_at(0.999) == 51
    assert rank.prefill_tokens_at(9.0) == 50


@pytest.mark.parametrize("other_duration_s", [None, 4.0])
def test_zero_duration_counts_as_done(
    slots: Slots, rank: RankLoad, other_duration_s: float | None
) -> None:
    book(slots, "a", 100, 0.0, 0.0)
    book(slots, "b", 50, other_duration_s, 0.0)
    assert rank.prefill_tokens_at(0.0) == 50


def test_ending_another_prefill_leaves_the_anchors_clock(slots: Slots, rank: RankLoad) -> None:
    book(slots, "a", 100, 10.0, 0.0)
    book(slots, "b", 50, 10.0, 0.0)
    slots.prefill_complete("b", 5.0)
    assert rank.prefill_tokens_at(5.0) == 50


def test_decay_ends_with_the_last_prefill_that_has_a_duration(slots: Slots, rank: RankLoad) -> None:
    book(slots, "a", 100, 10.0, 0.0)
    book(slots, "b", 50, None, 0.0)
    assert slots.decaying_ranks == 1
    slots.prefill_complete("a", 1.0)
    assert slots.decaying_ranks == 0
    assert rank.decay is None
    assert rank.prefill_tokens_at(100.0) == 50


def test_a_rank_that_goes_takes_its_decay_along(slots: Slots, rank: RankLoad) -> None:
    book(slots, "a", 100, 10.0, 0.0)
    slots.remove_rank(7, 0)
    assert slots.decaying_ranks == 0
    assert rank.prefill_tokens_at(1.0) == 0


def test_free_without_a_time_uses_the_last_one_heard(slots: Slots, rank: RankLoad) -> None:
    book(slots, "a", 100, 10.0, 0.0)
    book(slots, "b", 100, 10.0, 0.0)
    slots.expire(4.0, 300.0, 360.0, 10)
    slots.free("a")
    assert rank.prefill_tokens_at(9.0) == 50
