"""Engines of our publisher, and the lies that a fleet tells on its first day: each is seen in
`/kv_sources`, in `/workers?detail=true`, in the log and in `/metrics`."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from lean_selector.publisher import REPLAY_BATCHES, KvEventPublisher
from tests.support.prometheus_tools import parsed, scrape, value
from tests.support.running_service import RunningService, free_port, wait_until
from tests.support.tuned import TUNED

BLOCK = 16


def publisher(block_size: int = BLOCK, replays: bool = True) -> KvEventPublisher:
    anywhere = "tcp://127.0.0.1:*"
    return KvEventPublisher(
        kv_block_size=block_size, endpoint=anywhere, replay_endpoint=anywhere if replays else None
    )


def store(engine: KvEventPublisher, count: int) -> None:
    """One prompt of so many blocks, a batch each."""
    for block in range(1, count + 1):
        engine.publish_stored(
            token_ids=[block] * engine.kv_block_size,
            block_hashes=[block],
            parent_hash=block - 1 or None,
        )


def register_engine(service: RunningService, worker_id: int, engine: KvEventPublisher) -> None:
    where = {"kv_events_endpoint": engine.endpoint, "replay_endpoint": engine.replay_endpoint}
    service.add_worker(worker_id, **where)


def wait_for_state(service: RunningService, worker_id: int, state: str) -> dict[str, Any]:
    wait_until(lambda: service.kv_source(worker_id)["state"] == state, f"{worker_id} is {state}")
    return service.kv_source(worker_id)


# Worker, state, what is said of it as a pattern; it is logged as a warning but where INFO is said.
LIES = [
    (
        1,
        "mismatch",
        "the engine's blocks are of 32 tokens, .* 3 of 3 stored events were skipped; .*",
    ),
    (2, "unreachable", "never connected: Connection refused"),
    (3, "unreachable", "never connected: it speaks HTTP, not ZMQ"),
    (4, "silent", "connected, but no event received, and its replay is empty"),
    (5, "no_replay", "connected, but no event received, and no replay endpoint registered"),
    (6, "no_replay", r"no replay from tcp://127\.0\.0\.1:\d+: no connection: Connection refused"),
    (7, "partial", "its replay begins at batch 5, not at the first"),
]
WELL = 8  # the worker that does not lie
QUIET = 9  # as silent as 4, but without requests


@pytest.fixture(scope="module")
def fleet() -> Iterator[RunningService]:
    """Every lie at once."""
    with ExitStack() as stack:
        mismatched, silent, mute, lame, partial, well, quiet = (
            stack.enter_context(publisher(32 if lie == "mismatched" else BLOCK, lie != "mute"))
            for lie in ("mismatched", "silent", "mute", "lame", "partial", "well", "quiet")
        )
        service = stack.enter_context(RunningService(module=TUNED))
        store(mismatched, 3)
        store(partial, REPLAY_BATCHES + 5)
        store(well, 3)
        register_engine(service, 1, mismatched)
        service.add_worker(2, kv_events_endpoint=f"tcp://127.0.0.1:{free_port()}")
        service.add_worker(3, kv_events_endpoint=f"tcp://127.0.0.1:{service.port}")
        register_engine(service, 4, silent)
        register_engine(service, 5, mute)
        nobody = f"tcp://127.0.0.1:{free_port()}"
        service.add_worker(6, kv_events_endpoint=lame.endpoint, replay_endpoint=nobody)
        register_engine(service, 7, partial)
        register_engine(service, WELL, well)
        register_engine(service, QUIET, quiet)
        service.reserve("r", 4, 8)
        yield service


@pytest.mark.parametrize(("worker_id", "state", "problem"), LIES, ids=[lie[1] for lie in LIES])
def test_a_lie_is_seen_everywhere(
    fleet: RunningService, worker_id: int, state: str, problem: str
) -> None:
    def seen(row: dict[str, Any]) -> bool:
        assert row["dp_rank"] == 0
        said = re.fullmatch(problem, row["problem"] or "")
        return row["state"] == state and said is not None

    def seen_in_detail() -> bool:
        workers = fleet.get("/workers?detail=true")[1]
        (found,) = (each for each in workers if each["worker_id"] == worker_id)
        return seen(*found["kv_sources"])

    wait_until(lambda: seen(fleet.kv_source(worker_id)), f"/kv_sources says {problem}")
    wait_until(seen_in_detail, f"/workers says {problem}")
    # Of a listener that does not answer at once another reason comes first, and is logged.
    level = "INFO" if state == "partial" else "WARNING"
    line = re.compile(rf" {level} .*worker {worker_id} dp_rank 0: {state}: .")
    wait_until(lambda: bool(line.search(fleet.log())), "the log says so")
    labels = {"worker_id": str(worker_id), "dp_rank": "0", "state": state}
    assert value(parsed(scrape(fleet.port)), "lean_selector_kv_source_state", **labels) == 1


def test_nothing_is_said_of_a_source_that_is_well_or_quiet_without_requests(
    fleet: RunningService,
) -> None:
    assert wait_for_state(fleet, WELL, "live")["problem"] is None
    wait_for_state(fleet, QUIET, "silent")
    for worker_id, state, _ in LIES:
        wait_until(lambda: f"worker {worker_id} dp_rank 0: {state}" in fleet.log(), "a lie is told")  # noqa: B023
    assert not re.search(rf"WARNING .*worker ({WELL}|{QUIET}) ", fleet.log())
