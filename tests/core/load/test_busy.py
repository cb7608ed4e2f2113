"""Busy thresholds by example, and what the queue's sets of ranks keep.

Which requests wait, and which may go, is in tests/properties/test_queue_model.py.
"""

import math

import pytest

from lean_selector.core.errors import BadRequest, NotFound
from lean_selector.core.load.busy import MAX_REMEMBERED, BusyThresholds, Headroom
from lean_selector.core.load.shapes import OFF, BusyThreshold, RankLimits
from lean_selector.core.load.slots import Slots
from tests.support.reservations import book

LIMIT = BusyThreshold(active_prefill_tokens=10_000, active_decode_blocks=0.85)
SCOPE = ("model", "default")


@pytest.mark.parametrize(
    ("tokens", "blocks", "total", "busy"),
    [
        pytest.param(10_000, 0, 100, False, id="at the prefill limit"),
        pytest.param(10_001, 0, 100, True, id="above the prefill limit"),
        pytest.param(0, 87, 100, True, id="87 % of blocks against 85 %"),
        pytest.param(0, 85, 100, False, id="at the block limit"),
        pytest.param(0, 87, None, False, id="capacity unknown"),
        pytest.param(0, 87, 0, False, id="capacity 0"),
    ],
)
def test_a_rank_is_busy_only_above_a_limit(
    tokens: int, blocks: int, total: int | None, busy: bool
) -> None:
    assert LIMIT.limits(total, 10_000_000).exceeded_by(tokens, blocks) is busy


@pytest.mark.parametrize(
    ("frac", "batch", "limit"),
    [(0.35, 50, 17), (0.33, 50, 16), (0.0, 50, 0), (1e308, 2**64 - 1, float("inf"))],
)
def test_a_part_of_the_batch_is_rounded_down(frac: float, batch: int, limit: float) -> None:
    limits = BusyThreshold(active_prefill_tokens_frac=frac).limits(None, batch)
    assert limits.prefill_tokens == limit


@pytest.mark.parametrize("frac", [0.0, 0.5, 2.0])
@pytest.mark.parametrize("blocks", [0.0, 0.5, 1.0])
def test_limits_in_their_range_are_taken(frac: float, blocks: float) -> None:
    BusyThreshold(active_decode_blocks=blocks, active_prefill_tokens_frac=frac).check()


def test_the_lower_of_two_token_limits_counts() -> None:
    threshold = BusyThreshold(active_prefill_tokens=10, active_prefill_tokens_frac=0.5)
    assert threshold.limits(None, 100).prefill_tokens == 10
    assert threshold.limits(None, 10).prefill_tokens == 5


def test_models_without_thresholds_of_their_own_have_the_defaults() -> None:
    thresholds = BusyThresholds(LIMIT)
    assert thresholds.of(SCOPE) is LIMIT
    changed = thresholds.change(SCOPE, BusyThreshold(active_prefill_tokens=5), [SCOPE])
    assert changed == thresholds.of(SCOPE) == BusyThreshold(0.85, 5)
    assert thresholds.switch_off(SCOPE, [SCOPE]) == OFF
    assert not thresholds.of(SCOPE).is_set


def test_a_refused_change_leaves_everything_as_it_was() -> None:
    thresholds = BusyThresholds(LIMIT)
    with pytest.raises(BadRequest):
        thresholds.change(SCOPE, BusyThreshold(active_prefill_tokens_frac=float("nan")), [SCOPE])
    with pytest.raises(NotFound):
        thresholds.change(SCOPE, BusyThreshold(active_prefill_tokens=1), [])
    with pytest.raises(NotFound, match="'model'"):
        thresholds.switch_off(SCOPE, [])
    assert thresholds.of(SCOPE) is LIMIT


def test_thresholds_of_models_that_are_gone_are_remembered_up_to_a_bound() -> None:
    thresholds = BusyThresholds()
    for number in range(MAX_REMEMBERED + 2):
        scope = (f"model-{number}", "default")
        thresholds.change(scope, LIMIT, [scope])
    assert thresholds.of(("model-0", "default")) is OFF
    assert thresholds.of(("model-1", "default")) == LIMIT


# -- the ranks that the queue lets requests go to --------------------------------------------------


def headroom(threshold: float, batched: int, busy: RankLimits) -> tuple[Slots, Headroom]:
    """Of one rank."""
    room = Headroom(threshold)
    slots = Slots(room.changed)
    room.put(slots.add_rank(0, 0), batched, busy)
    return slots, room


def test_an_infinite_threshold_of_no_capacity_is_never_exceeded() -> None:
    slots, room = headroom(math.inf, 0, RankLimits())
    book(slots, "r", 0, 0, b"", 1, 0.0)
    assert room.free == 1


def test_a_rank_that_is_gone_is_in_no_set() -> None:
    slots, room = headroom(1.0, 10, RankLimits())
    room.came_free = 0
    book(slots, "r", 0, 0, b"", 20, 0.0)
    assert (room.below, room.idle, room.came_free) == (0, 1, 0)
    room.drop(slots.ranks[0, 0])
    room.changed(slots.ranks[0, 0])
    assert (room.below, room.idle, room.came_free) == (0, 0, 0)
