"""The queue of parked requests: order, leaving, and the sum of their tokens."""

import math
import random
from typing import get_args

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lean_selector.core.selection.partition import Parked, ParkedQueue
from lean_selector.core.selection.router_settings import CostTerms, QueuePolicy
from lean_selector.core.selection.shapes import Placement, SelectionRequest
from tests.support.driven_selector import prompt_of

TERMS = CostTerms(1.0, 0.0, 1.0, 0.0, True)


def never(_: Parked, outcome: Placement | Exception) -> None:
    raise AssertionError(f"a queue answers nobody: {outcome}")


def request(isl_tokens: int = 1, strict: int = 0, jump: float = 0.0) -> SelectionRequest:
    asked = SelectionRequest(prompt_of([], isl_tokens), TERMS)
    asked.strict_priority, asked.priority_jump = strict, jump
    return asked


# Whole seconds and jumps, so that scores collide.
arrivals = st.lists(
    st.tuples(st.integers(0, 2), st.integers(-2, 3), st.integers(0, 3), st.integers(1, 9)),
    max_size=12,
)


@pytest.mark.parametrize("policy", get_args(QueuePolicy))
def test_a_jump_that_is_no_number_is_none(policy: QueuePolicy) -> None:
    queue = ParkedQueue({}, policy)
    items = [queue.park(request(jump=jump), 0.0, never) for jump in (0.0, math.nan, 0.0, 1.0)]
    assert queue.in_order() == [items[3], *items[:3]]
    assert [queue.leave(item) for item in items] == [True] * 4
    assert (len(queue), queue.isl_tokens) == (0, 0)


@given(
    arrivals=arrivals,
    policy=st.sampled_from(get_args(QueuePolicy)),
    leave=st.randoms(use_true_random=False),
)
def test_order_is_priority_then_score_then_arrival(
    arrivals: list[tuple[int, int, int, int]], policy: QueuePolicy, leave: random.Random
) -> None:
    queue = ParkedQueue({}, policy)
    now, expected, items = 0.0, [], []
    for serial, (strict, jump, wait, isl_tokens) in enumerate(arrivals):
        now += wait
        parked = queue.park(request(isl_tokens, strict, float(jump)), now, never, isl_tokens - 1)
        raised = max(jump, 0)
        score = {
            "fcfs": raised - now,
            "lcfs": raised + now,
            "wspt": (1 + raised) / max(1, isl_tokens - 1),
        }[policy]
        expected.append(((-strict, -score, serial), parked))
        items.append(parked)
    expected.sort(key=lambda pair: pair[0])
    assert queue.in_order() == [parked for _, parked in expected]
    leave.shuffle(items)
    while items:
        assert (len(queue), queue.isl_tokens) == (
            len(items),
            sum(item.request.prompt.isl_tokens for item in items),
        )
        assert queue.leave(items[0])
        assert not queue.leave(items[0])
        del items[0]
        assert queue.in_order() == [parked for _, parked in expected if parked in items]
    assert (len(queue), queue.isl_tokens) == (0, 0)


def test_who_walks_the_queue_may_take_items_out_of_it() -> None:
    queue = ParkedQueue({})
    for _ in range(3):
        queue.park(request(), 0.0, never)
    assert [queue.leave(parked) for parked in queue.in_order()] == [True] * 3


def test_an_item_of_another_queue_is_not_taken_for_ones_own() -> None:
    one, other = ParkedQueue({}), ParkedQueue({})
    foreign = other.park(request(), 0.0, never)
    one.park(request(), 0.0, never)
    assert not one.leave(foreign)
    assert len(one) == 1
