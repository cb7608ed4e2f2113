"""The queue of parked requests: order, leaving, and the sum of their tokens."""

import math
from typing import get_args

import hypothesis.strategies as st
import pytest
from hypothesis import given

from lean_selector.core.selection.queue import AGING_TOKENS_PER_S, Queue, Waiting
from lean_selector.core.selection.router_settings import CostTerms, QueuePolicy
from lean_selector.core.selection.shapes import SelectionRequest
from tests.support.driven_selector import prompt_of

TERMS = CostTerms(1.0, 0.0, 1.0, 0.0, True)


def request(isl_tokens: int = 1, strict: int = 0, jump: float = 0.0) -> SelectionRequest:
    asked = SelectionRequest(prompt_of([], isl_tokens), TERMS)
    asked.strict_priority, asked.priority_jump = strict, jump
    return asked


@pytest.mark.parametrize("policy", get_args(QueuePolicy))
def test_a_jump_that_is_no_number_is_none(policy: QueuePolicy) -> None:
    queue = Queue(policy=policy)
    items = [queue.add(request(jump=jump), 0.0) for jump in (0.0, math.nan, 0.0, 1.0)]
    assert queue.in_order() == [items[3], *items[:3]]
    assert [queue.leave(item) for item in queue.in_order()] == [True] * 4
    assert (len(queue), queue.isl_tokens) == (0, 0)


# Tokens of each, those that are cached where it may go, strict priority and jump, in the order in
# which they came to 1.6.1, a hundredth of a second apart.
CAME = {
    "long": (60, 0, 0, 0.0),
    "cached": (40, 32, 0, 0.0),
    "raised": (60, 0, 0, 9.5),
    "short": (5, 0, 0, 0.0),
    "strict": (90, 0, 1, 0.0),
    "cached elsewhere": (30, 0, 0, 0.0),
}
WENT: dict[QueuePolicy, list[str]] = {
    "fcfs": ["strict", "raised", "long", "cached", "short", "cached elsewhere"],
    "lcfs": ["strict", "raised", "cached elsewhere", "short", "cached", "long"],
    "wspt": ["strict", "short", "raised", "cached", "cached elsewhere", "long"],
}


@pytest.mark.parametrize("policy", WENT)
def test_those_who_wait_go_in_the_order_in_which_1_6_1_let_them_go(policy: QueuePolicy) -> None:
    queue, names = Queue(policy=policy), dict[Waiting, str]()
    for number, (name, (tokens, cached, strict, jump)) in enumerate(CAME.items()):
        asked = request(tokens, strict, jump)
        names[queue.add(asked, 0.01 * number, tokens - cached)] = name
    assert [names[each] for each in queue.in_order()] == WENT[policy]


def test_an_item_of_another_queue_is_not_taken_for_ones_own() -> None:
    one, other = Queue(), Queue()
    foreign = other.add(request(), 0.0)
    one.add(request(), 0.0)
    assert not one.leave(foreign)
    assert len(one) == 1


@given(st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(0, 100_000)), max_size=30))
def test_the_least_work_goes_first_and_nobody_starves(arrivals: list[tuple[float, int]]) -> None:
    """However many come: a request is passed only by those that have less to compute, and came so
    soon after it that its own work, at the rate of aging, takes longer."""
    queue = Queue(policy="least-work")
    now, work = 0.0, dict[Waiting, int]()
    for later_by, uncached in arrivals:
        now += later_by
        work[queue.add(request(), now, uncached)] = uncached
    in_order = queue.in_order()
    for place, first in enumerate(in_order):
        for second in in_order[place + 1 :]:
            if second.arrived_at < first.arrived_at:
                assert work[first] < work[second]
                within = work[second] / AGING_TOKENS_PER_S
                assert first.arrived_at - second.arrived_at <= within + 1e-9
            elif second.arrived_at == first.arrived_at:
                assert work[first] <= work[second]
