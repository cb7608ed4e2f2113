"""The load terms of 1.6 and its approximate index, beside 1.6.1 itself: the same choices.

Both are told the same environment and the same bookings, without KV events; then each is asked
where prompts go. Where ranks cost the same, both draw, and nothing is compared but the loads.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from loadtest.child_service import JSON, asked
from tests.support.running_service import RunningService, wait_until
from tests.support.side_by_side import running

pytestmark = pytest.mark.reference

BLOCK_SIZE = 4
WORKERS = (1, 2, 3)
TERMS = {
    "DYN_USE_KV_EVENTS": "false",
    "DYN_ROUTER_TTL_SECS": "3600",
    "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT": "2.5",
    "DYN_ROUTER_PREFILL_LOAD_SCALE": "0.7",
    "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY": "0.3",
}


class Side:
    """One of the two, and what it calls the id of a booking."""

    def __init__(self, port: int, id_field: str) -> None:
        self._port = port
        self._id_field = id_field

    def call(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        status, answer = asked(self._port, method, path, data, JSON)
        return status, json.loads(answer) if answer else None

    def ask(self, path: str, name: str | None = None, **fields: object) -> dict[str, Any]:
        given = {} if name is None else {self._id_field: name}
        status, answer = self.call("POST", path, {**fields, **given})
        assert status in (200, 201), answer
        return dict(answer)

    def register(self, worker_id: int) -> None:
        self.ask(
            "/workers",
            worker_id=worker_id,
            endpoint="http://w",
            block_size=BLOCK_SIZE,
            max_num_batched_tokens=1,
        )

    def loads(self) -> dict[int, dict[str, Any]]:
        partitions = self.call("GET", "/loads")[1]
        return {row["worker_id"]: row for part in partitions for row in part["loads"]}

    def pending(self) -> int:
        return sum(part["pending_count"] for part in self.call("GET", "/loads")[1])


@contextmanager
def both(python: Path, **environment: str) -> Iterator[tuple[Side, Side]]:
    """Ours and the reference, with the same workers."""
    with ExitStack() as stack:
        ours = stack.enter_context(RunningService(env=environment))
        theirs = stack.enter_context(
            running([str(python), "-m", "dynamo.select_service"], environment)
        )
        sides = Side(ours.port, "reservation_id"), Side(theirs.port, "selection_id")
        for side in sides:
            for worker_id in WORKERS:
                side.register(worker_id)
            wait_until(lambda side=side: len(side.loads()) == len(WORKERS), "all have loads")  # type: ignore[misc]
        yield sides


@pytest.mark.parametrize("policy", ["fcfs", "lcfs", "wspt"])
def test_both_let_those_who_wait_go_in_the_same_order(reference_161: Path, policy: str) -> None:
    waiting: list[tuple[str, dict[str, object]]] = [
        ("long", {"token_ids": list(range(500, 560))}),
        ("cached", {"token_ids": list(range(100, 140))}),  # 32 of them where it may go
        ("raised", {"token_ids": list(range(600, 660)), "priority_jump": 9.5}),
        ("short", {"token_ids": list(range(700, 705))}),
        ("strict", {"token_ids": list(range(800, 890)), "strict_priority": 1}),
        ("cached elsewhere", {"token_ids": list(range(300, 330))}),
    ]
    environment = {
        **TERMS,
        "DYN_ROUTER_QUEUE_THRESHOLD": "0",
        "DYN_ROUTER_QUEUE_POLICY": policy,
    }
    with both(reference_161, **environment) as sides:
        orders = [order_of(side, waiting) for side in sides]
    assert orders[0] == orders[1]


def order_of(side: Side, waiting: list[tuple[str, dict[str, object]]]) -> list[str]:
    """All of them wait for worker 1, which is full; then it comes free, again and again."""
    for name, worker_id, first, last in (("a", 1, 100, 132), ("b", 2, 300, 328)):
        tokens = list(range(first, last))
        side.ask("/reservations", name, worker_id=worker_id, token_ids=tokens)
    full = {"worker_id": 1, "sequence_hashes": [], "isl_tokens": 9, "effective_prefill_tokens": 9}
    side.ask("/reservations", "full", **full)
    gone: list[str] = []

    def wait(name: str, fields: dict[str, object]) -> None:
        side.ask("/select_and_reserve", name, allowed_worker_ids=[1], **fields)
        gone.append(name)

    threads = []
    for count, (name, fields) in enumerate(waiting, 1):
        threads.append(threading.Thread(target=wait, args=(name, fields)))
        threads[-1].start()
        wait_until(lambda count=count: side.pending() == count, f"{name} waits")  # type: ignore[misc]
        time.sleep(0.01)  # so that no two arrive at once
    leaving = "full"
    for count in range(1, len(waiting) + 1):
        assert (
            side.call("POST", f"/reservations/{leaving.replace(' ', '%20')}/prefill_complete")[0]
            == 200
        )
        wait_until(lambda count=count: len(gone) == count, "the next one goes")  # type: ignore[misc]
        leaving = gone[-1]
    for thread in threads:
        thread.join()
    return gone
