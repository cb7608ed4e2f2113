"""Hints where more of a prompt's blocks could be fetched from than the chosen rank holds."""

from collections.abc import Callable
from typing import Any

import pytest

from lean_selector.core.index.shapes import Tier
from lean_selector.core.selection.queue import Waiting
from lean_selector.core.selection.shapes import HINT, OUTLOOK, FetchHint, Placement, RankOutlook
from tests.support.blocks import remove_blocks, store_blocks
from tests.support.driven_selector import DrivenSelector, pack

PROMPT = [11, 12, 13, 14]


def holding(held: dict[int, int], **settings: Any) -> DrivenSelector:
    """Each worker holds so many of the prompt's blocks.

    They register in this order, and name a block 100 times their own id and its place.
    """
    driven = DrivenSelector(**settings)
    for worker_id, blocks in held.items():
        register(driven, worker_id)
        names = [100 * worker_id + at for at in range(blocks)]
        store_blocks(
            driven.partition.index, (worker_id, 0), Tier.DEVICE, None, names, pack(PROMPT[:blocks])
        )
    return driven


def register(driven: DrivenSelector, worker_id: int) -> None:
    where = {0: f"http://control{worker_id}"}
    driven.register(
        worker_id,
        router_hint_worker_type="decode",
        router_hint_source_control_endpoints=where,
        kv_events_endpoint=f"tcp://w{worker_id}:5557",
    )


def hint_of(answer: object) -> FetchHint | None:
    assert isinstance(answer, Placement)
    assert isinstance(answer.outlook, RankOutlook)
    return answer.outlook.hint


def hint(held: dict[int, int], chosen: int = 1) -> FetchHint | None:
    """The hint of a request to worker `chosen`."""
    driven = holding(held)
    request = driven.request(PROMPT, 16, pin=(chosen, 0), adds=OUTLOOK | HINT)
    return hint_of(driven.submit("r", request))


def test_who_holds_most_is_named_with_its_own_hashes() -> None:
    assert hint({1: 1, 2: 2, 3: 4, 4: 3}) == FetchHint((300, 301, 302, 303), "http://control3")


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1)])
def test_of_those_that_hold_equally_much_the_first_by_worker_is_named(
    order: tuple[int, ...],
) -> None:
    blocks = {1: 0, 2: 2, 3: 2}
    found = hint({worker_id: blocks[worker_id] for worker_id in order})
    assert found == FetchHint((200, 201), "http://control2")


@pytest.mark.parametrize("held", [{1: 3, 2: 3, 3: 1}, {1: 0, 2: 0}])
def test_nobody_is_named_where_nobody_holds_more(held: dict[int, int]) -> None:
    assert hint(held) is None


def test_nobody_is_named_for_blocks_that_another_source_reported() -> None:
    driven = holding({1: 0, 2: 0})
    names, local = [1, 2], pack(PROMPT[:2])
    store_blocks(driven.partition.index.of_strays(1), (2, 0), Tier.DEVICE, None, names, local)
    request = driven.request(PROMPT, 16, pin=(1, 0), adds=OUTLOOK | HINT)
    assert hint_of(driven.submit("r", request)) is None


@pytest.mark.parametrize("held", [{1: 0, 2: 0}, {1: 0, 2: 2}])
def test_beside_a_predicted_index_there_are_no_hints(held: dict[int, int]) -> None:
    driven = holding(held, use_kv_events=True, predicted_ttl_s=60.0)
    driven.book("there", hashes=PROMPT, pin=(2, 0))
    request = driven.request(PROMPT, 16, pin=(1, 0), adds=OUTLOOK | HINT)
    answer = driven.submit("r", request)
    assert isinstance(answer, Placement)
    assert answer.overlap.gpu == 0
    assert hint_of(answer) is None


def test_where_bookings_are_believed_to_be_cached_there_are_no_hints() -> None:
    driven = holding({1: 0, 2: 0}, ttl_s=60.0)
    driven.book("there", hashes=PROMPT, pin=(2, 0))
    assert hint_of(driven.book("r", hashes=PROMPT, pin=(1, 0), adds=OUTLOOK | HINT)) is None


def waiting_while_2_holds(blocks: int) -> DrivenSelector:
    """The request `r` to worker 1 waits in the queue."""
    driven = holding({1: 0, 2: blocks}, queue_threshold=1.0)
    driven.reserve("busy", (1, 0))
    waits = driven.book("r", hashes=PROMPT, pin=(1, 0), adds=OUTLOOK | HINT)
    assert isinstance(waits, Waiting)
    return driven


def test_who_waited_is_told_what_is_held_when_it_goes() -> None:
    driven = waiting_while_2_holds(3)
    remove_blocks(driven.partition.index, (2, 0), Tier.DEVICE, [202, 201])
    driven.selector.reservations.free("busy", driven.now)
    assert hint_of(driven.answers["r"]) == FetchHint((200,), "http://control2")


def clear(driven: DrivenSelector) -> None:
    driven.partition.index.clear(2, 0)


def restart(driven: DrivenSelector) -> None:
    driven.remove(2)
    register(driven, 2)


@pytest.mark.parametrize("lose", [clear, restart])
def test_a_worker_that_lost_its_cache_while_a_request_waited_is_not_named_to_it(
    lose: Callable[[DrivenSelector], None],
) -> None:
    driven = waiting_while_2_holds(2)
    lose(driven)
    driven.selector.reservations.free("busy", driven.now)
    assert hint_of(driven.answers["r"]) is None
