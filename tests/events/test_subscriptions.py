"""Subscriptions to the KV events of engines, all of them together."""

import pytest

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.shapes import Source
from lean_selector.events import subscriptions as module
from lean_selector.events.kv_listener import KvListener
from lean_selector.events.subscriptions import KvSubscriptions
from lean_selector.links.links import Links
from tests.support.on_loop import faults, on_loop, until


@on_loop
async def test_a_source_that_cannot_be_checked_keeps_no_other_from_being_checked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = faults()
    checked: dict[int, int] = {1: 0, 2: 0}

    def check(listener: KvListener, now: float) -> None:
        worker_id = listener.ingest.worker_id
        checked[worker_id] += 1
        if worker_id == 1:
            raise RuntimeError("a bug")

    monkeypatch.setattr(KvListener, "check_condition", check)
    monkeypatch.setattr(module, "CHECK_EVERY_S", 0.001)
    subscriptions = KvSubscriptions(Links())
    partition = Partition("m", "t", 4, False, KvIndex(4))
    for worker_id in checked:
        subscriptions.subscribe(partition, worker_id, 0, Source("tcp://127.0.0.1:1", None))
    await until(lambda: min(checked.values()) >= 3)
    await subscriptions.close()
    assert {str(error) for error in failed} == {"a bug"}
