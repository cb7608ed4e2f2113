"""The approximate index is made to forget a little after it is due, and not after a stop."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from lean_selector.core.selection.shapes import PartitionKey
from lean_selector.server.selector_process import RoutedExpiry
from tests.support.driven_selector import DrivenSelector


class Loop:
    """`call_later` by hand."""

    def __init__(self) -> None:
        self.due: list[tuple[float, Callable[[], None]]] = []

    def call_later(self, delay: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        entry = (delay, callback)
        self.due.append(entry)
        handle: Any = type("Handle", (), {"cancel": lambda _: self.due.remove(entry)})()
        return handle  # type: ignore[no-any-return]

    def turn(self) -> None:
        (entry,) = self.due
        self.due.remove(entry)
        entry[1]()


@pytest.mark.parametrize(
    ("ttl_s", "interval_s"),
    [
        pytest.param(120.0, 0.5, id="never later than half a second"),
        pytest.param(2.0, 0.05, id="a fortieth of what is short"),
        pytest.param(0.001, 0.01, id="and no busy loop"),
    ],
)
def test_it_is_asked_for_often_enough(ttl_s: float, interval_s: float) -> None:
    loop = Loop()
    RoutedExpiry({}, ttl_s, loop.call_later).start()
    assert [delay for delay, _ in loop.due] == [interval_s]


def test_every_partition_forgets_until_it_is_stopped() -> None:
    driven = DrivenSelector(ttl_s=10.0)
    driven.register(1)
    driven.register(2, model_name="other")
    driven.book("a", hashes=[1, 2], isl_tokens=8)
    partitions = driven.selector.catalog.partitions
    key: PartitionKey = ("other", "default")
    driven.reserve("b", (2, 0), hashes=[1], key=key)
    loop = Loop()
    expiry = RoutedExpiry(partitions, 10.0, loop.call_later, lambda: driven.now)
    expiry.start()
    driven.now = 9.9
    loop.turn()
    assert [each.index.total_blocks for each in partitions.values()] == [2, 1]
    driven.now = 10.0
    loop.turn()
    assert [each.index.total_blocks for each in partitions.values()] == [0, 0]
    expiry.stop()
    expiry.stop()
    assert loop.due == []
