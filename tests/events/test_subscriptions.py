"""Subscriptions, and the load that engines publish: the newest report of each rank counts."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.load.shapes import EngineLoad
from lean_selector.core.load.slots import ENGINE_LOAD_HOLDS_S
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.shapes import Source
from lean_selector.events import subscriptions as module
from lean_selector.events.kv_listener import KvListener
from lean_selector.events.links import Links
from lean_selector.events.load_streams import engine_load
from lean_selector.events.subscriptions import KvSubscriptions
from tests.support.driven_selector import DrivenSelector
from tests.support.on_loop import faults, inside, on_loop, until
from tests.support.record_engine_events import DATA

RECORDED = bytes.fromhex(json.loads(DATA.read_text())["sglang 0.5.23, load"])


def packed(*values: object) -> bytes:
    return msgspec.msgpack.encode(values)


def test_a_report_is_read_as_the_engines_class_wrote_it() -> None:
    assert engine_load(RECORDED) == EngineLoad(3, 2, 1_000, 9_000, 700, 1_700, 48, 12_345, 0.000678)


def test_an_older_report_has_four_figures_and_a_newer_one_more() -> None:
    older = EngineLoad(3, 2, 1_000, None, None, None, None, None, None)
    assert engine_load(packed("LoadStat", 3, 2, 1_000, 0)) == older
    assert engine_load(packed("LoadStat", 3, 2, 1_000, 0, None)) == older
    assert engine_load(packed("LoadStat", 3, 2, 1_000, 0, 7, *([None] * 5), "more")) == older


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\x93",
        packed("LoadStat", 3, 2, 1_000),
        packed("LoadStat", -1, 2, 1_000, 0),
        packed("LoadStat", 2**64 - 1, 2, 1_000, 0),
        packed("LoadStat", 3, 2, "1000", 0),
        packed("EventBatch", 3, 2, 1_000, 0),
        packed(1.5, [], 0),
        b"\x91" * 100_000,
    ],
)
def test_what_is_no_report_is_refused(payload: bytes) -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError)):
        engine_load(payload)


# -- subscriptions --------------------------------------------------------------------------------


class Engine:
    """A worker of two ranks, the PUB socket of the first, and what is subscribed to."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        make: Any = context.socket
        self.pub: zmq.Socket[bytes] = make(zmq.XPUB, socket_class=zmq.Socket)
        self.endpoint = f"tcp://127.0.0.1:{self.pub.bind_to_random_port('tcp://127.0.0.1')}"
        self.subscriptions = KvSubscriptions(Links(context))
        self.driven = DrivenSelector(sources=self.subscriptions)
        self.driven.register(1, data_parallel_size=2, load_endpoint=self.endpoint)

    async def subscribed(self) -> None:
        await until(lambda: self.pub.poll(0) != 0)
        assert self.pub.recv() == b"\x01"

    def publish(self, seq: int, payload: bytes) -> None:
        self.pub.send_multipart([b"load", seq.to_bytes(8, "big"), payload])

    @property
    def reports(self) -> dict[str, int]:
        return dict(self.subscriptions.load_reports())

    def running(self, dp_rank: int = 0) -> int | None:
        slots = self.driven.partition.slots
        report = slots.reported_load((1, dp_rank), 0.0)  # however old it is
        return None if report is None else report.running_requests


@contextlib.asynccontextmanager
async def engine() -> AsyncIterator[Engine]:
    context = zmq.asyncio.Context()
    opened = Engine(context)
    try:
        await opened.subscribed()
        yield opened
    finally:
        await opened.subscriptions.close()
        context.destroy(linger=0)


@inside(engine)
async def test_the_newest_report_counts_whatever_its_number(engine: Engine) -> None:
    for seq, running in ((7, 1), (8, 2), (0, 5)):  # the engine started again
        engine.publish(seq, packed("LoadStat", running, 0, 0, 0, 0))
    await until(lambda: engine.running() == 5)
    assert engine.running(1) is None
    engine.publish(1, b"\xc1")
    engine.pub.send(b"one frame")
    await until(lambda: engine.reports["malformed"] == 2)
    assert (engine.running(), engine.reports["applied"]) == (5, 3)


@inside(engine)
async def test_a_stream_that_is_no_longer_registered_is_closed_and_its_report_dropped(
    engine: Engine,
) -> None:
    engine.publish(0, RECORDED)
    await until(lambda: engine.running() == 3)
    engine.driven.register(1, data_parallel_size=2, load_endpoint=engine.endpoint, taints=["a"])
    assert engine.running() == 3  # it is as it was, and goes on
    engine.driven.register(1, data_parallel_size=2)
    assert engine.running() is None
    await until(lambda: engine.pub.poll(0) != 0)
    assert engine.pub.recv() == b"\x00"
    engine.driven.register(1, data_parallel_size=2, load_endpoint=engine.endpoint)
    await engine.subscribed()
    engine.publish(1, RECORDED)
    await until(lambda: engine.running() == 3)
    engine.driven.remove(1)
    engine.publish(2, RECORDED)
    await asyncio.sleep(0)
    assert engine.reports == {"applied": 2, "malformed": 0}


def test_a_report_holds_for_a_stated_time() -> None:
    driven = DrivenSelector()
    driven.register(1)
    slots, rank, report = driven.partition.slots, (1, 0), engine_load(RECORDED)
    assert slots.reported_load(rank, 0.0) is None
    slots.report_load(rank, report, 10.0)
    held = slots.reported_load(rank, 10.0 + ENGINE_LOAD_HOLDS_S)
    assert held is not None
    assert (held.running_requests, held.age_s) == (3, ENGINE_LOAD_HOLDS_S)
    assert slots.reported_load(rank, 10.1 + ENGINE_LOAD_HOLDS_S) is None
    driven.remove(1)
    slots.report_load(rank, report, 20.0)
    assert slots.reported_load(rank, 20.0) is None


@on_loop
async def test_a_source_that_cannot_be_looked_at_keeps_no_other_from_being_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    failed = faults()
    looked_at: dict[int, int] = {1: 0, 2: 0}

    def look(listener: KvListener, now: float) -> None:
        worker_id = listener.ingest.worker_id
        looked_at[worker_id] += 1
        if worker_id == 1:
            raise RuntimeError("a bug")

    monkeypatch.setattr(KvListener, "look", look)
    monkeypatch.setattr(module, "LOOK_EVERY_S", 0.001)
    subscriptions = KvSubscriptions(Links())
    partition = Partition("m", "t", 4, False, KvIndex(4))
    for worker_id in looked_at:
        subscriptions.subscribe(partition, worker_id, 0, Source("tcp://127.0.0.1:1", None))
    await until(lambda: min(looked_at.values()) >= 3)
    await subscriptions.close()
    assert {str(error) for error in failed} == {"a bug"}
