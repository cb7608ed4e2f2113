"""Hints where more of a prompt's blocks could be fetched from than the chosen rank holds."""

import pytest

from lean_selector.core.index.kv_index import Tier
from lean_selector.core.selection.records import HINT, OUTLOOK, FetchHint, Placement, RankOutlook
from tests.driven_selector import DrivenSelector, pack

PROMPT = [11, 12, 13, 14]


def hint(held: dict[int, int], chosen: int = 1) -> FetchHint | None:
    """The hint of a request to worker `chosen`, where each worker holds so many of its blocks.

    They register in this order, and name a block 100 times their own id and its place.
    """
    driven = DrivenSelector()
    for worker_id, blocks in held.items():
        where = {0: f"http://control{worker_id}"}
        driven.register(
            worker_id,
            router_hint_worker_type="decode",
            router_hint_source_control_endpoints=where,
        )
        names = [100 * worker_id + at for at in range(blocks)]
        driven.partition.index.store(worker_id, 0, Tier.DEVICE, None, names, pack(PROMPT[:blocks]))
    request = driven.request(PROMPT, 16, pin=(chosen, 0), adds=OUTLOOK | HINT)
    placement = driven.submit("r", request)
    assert isinstance(placement, Placement)
    assert isinstance(placement.outlook, RankOutlook)
    return placement.outlook.hint


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
