"""Real sockets, an engine that speaks as vLLM, SGLang and TRT-LLM do, and what can go wrong.

After each story the index holds what the engine holds, or the source says that it is degraded.
"""

import asyncio
import contextlib
import gc
import logging
import os
import struct
from collections.abc import AsyncIterator, Callable
from typing import Any, Self

import msgspec
import pytest
import zmq
import zmq.asyncio

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.kv_ingest import KvIngest
from lean_selector.core.index.shapes import Watermark
from lean_selector.events import kv_listener as kv_replay
from lean_selector.events.kv_listener import KvListener
from lean_selector.links import link
from lean_selector.links.link import LinkState
from lean_selector.links.links import MAX_WAITING_BYTES, Backlogs, Links
from lean_selector.links.turns import Turns
from lean_selector.tasks import failures
from tests.support.on_loop import DEADLINE_S, on_loop, until
from tests.support.replaying_engine import BLOCK_SIZE, END, SERVED, SILENT, Engine


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing listens, the reason is soon looked for again."""
    monkeypatch.setattr(link, "LOOK_FIRST_S", 0.005)


class Service:
    """A listener and its index."""

    def __init__(
        self,
        engine: Engine,
        turns: Turns | None = None,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        **options: Any,
    ) -> None:
        self.links = Links(waiting=Backlogs(max_waiting_bytes))
        self.index = KvIndex(BLOCK_SIZE)
        options = {"replay_idle_s": 0.2, "retry_first_s": 0.02} | options
        self.listener = KvListener(
            self.links,
            KvIngest(self.index, 7, 0),
            engine.endpoint,
            engine.replay_endpoint,
            turns or Turns(),
            **options,
        )

    async def __aenter__(self) -> Self:
        self.listener.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.listener.close()

    @property
    def state(self) -> str:
        return self.listener.status().state

    @property
    def blocks(self) -> set[int]:
        runs = (run for runs in self.index.dump() for run in runs)
        return {block for run in runs for block in run.block_hashes}

    async def follows(self, engine: Engine, state: str = "live") -> None:
        """Until everything published is in, and the index is the engine's."""
        await until(
            lambda: (
                self.state == state
                and self.listener.cursor.watermark == engine.seq - 1
                and self.blocks == engine.blocks
            ),
            lambda: (self.listener.status(), self.blocks, engine.blocks),
        )


@contextlib.asynccontextmanager
async def heard(replays: str = "", **options: Any) -> AsyncIterator[tuple[Engine, Service]]:
    """An engine, and a service that has subscribed to it."""
    async with Engine(replays) as engine, Service(engine, **options) as service:
        await engine.subscribed()
        yield engine, service


@on_loop
async def test_live_events_are_followed() -> None:
    async with Engine() as engine, Service(engine) as service:
        assert service.state == "connecting"
        await engine.subscribed()
        await engine.store(1, 2, 3)
        await engine.remove(2)
        await service.follows(engine)
        status = service.listener.status()
        assert (status.messages, status.last_seq, status.gaps, status.lag_batches) == (4, 3, 0, 0)
        assert status.last_message_age_s is not None
        assert status.last_error is None


@pytest.mark.parametrize("with_topic", [True, False])
@on_loop
async def test_lost_messages_are_replayed(with_topic: bool) -> None:
    engine = Engine(SERVED)
    engine.with_topic = with_topic
    async with engine, Service(engine) as service:
        await until(lambda: service.state == "silent")
        await engine.subscribed()
        await engine.store(1, 2)
        await engine.store(3, lost=True)
        await engine.remove(1, lost=True)
        await engine.store(4)
        await service.follows(engine)
        assert engine.asked == [0, 1]
        status = service.listener.status()
        assert (status.gaps, status.replayed_batches, status.lost_batches) == (1, 3, 0)
        await engine.store(5)
        await service.follows(engine)


@on_loop
async def test_an_engine_that_never_answers_does_not_stop_live_events() -> None:
    async with heard(SILENT, replay_idle_s=0.05) as (engine, service):
        await engine.store(1)
        await engine.remove(1, lost=True)
        await engine.store(2)
        await until(lambda: service.state == "degraded")
        await engine.store(3)
        await until(lambda: service.blocks == {1, 2, 3})
        assert service.listener.status().lag_batches == 1
        engine.serve_replays()
        await service.follows(engine)


class SteppedTurns(Turns):
    """Turns that a test takes one by one, each over as soon as it begins."""

    def __init__(self) -> None:
        super().__init__(slice_s=0.0)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        pass

    async def step_until(self, holds: Callable[[], bool]) -> None:
        def steps() -> bool:
            if not holds():
                self._turn(asyncio.get_running_loop())
            return holds()

        await until(steps)


LARGE = range(1, 4001)  # blocks of a batch of many slices


@on_loop
async def test_batches_wait_until_the_large_one_before_them_is_in() -> None:
    turns = SteppedTurns()
    async with heard(turns=turns) as (engine, service):
        await engine.store_at_once(*LARGE)
        await engine.remove(1)
        await engine.remove(4000)
        await turns.step_until(lambda: service.index.total_blocks > 0)
        seen = set()
        while service.index.total_blocks < len(LARGE):
            status = service.listener.status()
            assert status.messages == 1
            assert 1 <= status.lag_batches <= 3  # the others, as soon as they have arrived
            assert service.listener.mark is None
            seen.add(service.index.total_blocks)
            await turns.step_until(lambda: service.index.total_blocks not in seen)
        assert len(seen) > 10
        await turns.step_until(lambda: service.listener.mark == Watermark(2, 2))
        assert service.blocks == engine.blocks
        assert service.listener.status().lag_batches == 0


@on_loop
async def test_a_source_that_ends_within_a_batch_applies_no_more_of_it() -> None:
    turns = SteppedTurns()
    async with heard(turns=turns) as (engine, service):
        await engine.store_at_once(*LARGE)
        await turns.step_until(lambda: service.index.total_blocks > 0)
        await service.listener.close()
        held = service.index.total_blocks
        for _ in range(100):
            turns._turn(asyncio.get_running_loop())
        assert 0 < held < len(LARGE)
        assert service.index.total_blocks == held


@on_loop
async def test_replayed_batches_wait_for_a_large_live_one_and_it_is_applied_again() -> None:
    turns = SteppedTurns()
    async with heard(SERVED, turns=turns) as (engine, service):
        await engine.store(1)
        await engine.store(2, lost=True)
        await engine.store_at_once(*LARGE)  # applied at once, and again from the replay
        await engine.remove(3)
        await engine.store_at_once(3, *LARGE[2000:])
        await engine.remove(4)
        await turns.step_until(lambda: service.state == "live" and service.blocks == engine.blocks)
        assert service.listener.mark == Watermark(engine.seq - 1, engine.seq - 1)
        assert service.listener.status().lag_batches == 0


@on_loop
async def test_messages_of_another_shape_are_ignored() -> None:
    async with heard() as (engine, service):
        payload = msgspec.msgpack.encode([1.5, [["AllBlocksCleared"]], None])
        await engine.store(1)
        for frames in ([b"", payload], [b"", b"12345678", payload, b""], [b"", b"1234", payload]):
            await engine.pub.send_multipart(frames)
        await engine.store(2)
        await service.follows(engine)
        assert service.listener.status().skipped == {"message:bad_frames": 3}


@on_loop
async def test_strange_replies_to_a_replay_are_ignored() -> None:
    async with heard(SILENT) as (engine, service):
        router = engine.router()
        await engine.store(1, lost=True)
        await engine.store(2)
        identity, _, _ = await router.recv_multipart()
        await router.send_multipart([identity, b"", b"1234", b"x"])
        await router.send_multipart([identity, b"x"])
        for seq, payload in engine.buffer:
            await router.send_multipart([identity, b"", struct.pack(">Q", seq), payload])
        await router.send_multipart([identity, b"", END, b""])
        await service.follows(engine)
        assert service.listener.status().skipped == {"message:bad_replay_frames": 2}


@on_loop
async def test_closing_unsubscribes_at_once() -> None:
    tasks = asyncio.all_tasks()
    async with heard(SILENT) as (engine, service):
        engine.router()
        await engine.store(1, lost=True)
        await engine.store(2)  # and a replay is under way
        await until(lambda: service.state == "replaying" and service.blocks == {2})
        ending = service.listener.stop()
        assert await asyncio.wait_for(engine.pub.recv(), DEADLINE_S) == b"\x00"
        await ending
        assert service.blocks == {2}
        assert asyncio.all_tasks() == tasks


@pytest.mark.parametrize("turns", range(4))
@on_loop
async def test_closing_ends_a_replay_that_hears_something_shortly_before(turns: int) -> None:
    """So many turns of the loop before."""
    async with heard(SILENT) as (engine, service):
        silent = engine.router()
        await engine.store(1, lost=True)
        await engine.store(2)
        await asyncio.wait_for(silent.recv_multipart(), DEADLINE_S)
        replay = service.listener._replay
        assert replay is not None
        asked = replay.link
        await until(lambda: asked.state is LinkState.CONNECTED)
        await asyncio.sleep(0.01)
        asked.on_message()
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.wait_for(service.listener.stop(), DEADLINE_S)


class FailingOnce:
    """A reader of batches that leaves all to the next, with a bug that the first to store this
    block shows, once."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.has_failed = False

    def __call__(self, payload: bytes) -> None:
        event = msgspec.msgpack.decode(payload)[1][0]
        if not self.has_failed and event[1:2] == [[self.block]]:
            self.has_failed = True
            raise RuntimeError("a bug")


@on_loop
async def test_a_bug_in_the_index_does_not_end_the_listening() -> None:
    async with heard() as (engine, service):
        service.listener._work._reader = FailingOnce(1)
        await engine.store(1, 2)
        await until(lambda: service.blocks == {2})
        assert service.listener.status().last_error == "ingest failed: RuntimeError('a bug')"


@on_loop
async def test_a_source_that_cannot_be_opened_says_so_and_is_tried_again() -> None:
    engine = Engine()
    async with Service(engine) as service:
        await until(lambda: service.state == "unreachable")
        status = service.listener.status()
        assert status.last_error == "no connection: Connection refused"
        assert status.problem == "never connected: Connection refused"
        async with engine:
            await engine.subscribed()
            await until(lambda: service.state == "no_replay")  # nothing is known of it
            await engine.store(1)
            await service.follows(engine)
            status = service.listener.status()
            assert (status.connection, status.last_error) == ("connected", None)
            assert status.problem is None
        await until(lambda: service.state == "unreachable")
        status = service.listener.status()
        assert status.problem is not None
        assert status.problem.startswith("the connection was lost: ")
        assert status.last_error is not None
        assert status.last_error.startswith("no connection: ")


class Stalled(Turns):
    """Turns that nothing gets, until they are released."""

    def __init__(self) -> None:
        super().__init__()
        self.is_released = False

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        if self.is_released:
            super()._turn(loop)
        else:
            loop.call_later(0.001, self._turn, loop)


@on_loop
async def test_who_ended_before_old_messages_were_read_asks_for_no_replay() -> None:
    turns = Stalled()
    async with heard(SILENT, turns=turns) as (engine, service):
        listener = service.listener
        await engine.store(1, 2)
        await until(lambda: listener._live.waiting == 2)
        listener._note_link()  # as when the connection was lost and made again
        ended = listener.stop()
        turns.is_released = True
        await asyncio.wait_for(ended, DEADLINE_S)
        await turns.run(lambda deadline: False)  # behind what was put off
        assert listener._replaying is None


@on_loop
async def test_what_a_backlog_had_to_drop_is_replayed() -> None:
    turns = Stalled()
    async with heard(SERVED, turns=turns, max_waiting_bytes=50_000) as (engine, service):
        await engine.store(*range(500))
        await until(lambda: service.listener.status().dropped_batches > 0)
        live = service.listener._live
        await until(lambda: live.waiting + live.dropped == 500)
        status = service.listener.status()
        assert status.lag_batches == live.waiting > 0
        assert 0 < status.backlog_bytes <= 50_000
        turns.is_released = True
        await service.follows(engine)
        status = service.listener.status()
        assert status.gaps >= 1
        assert (status.lost_batches, status.lag_batches) == (0, 0)
        assert (status.backlog_bytes, service.links.waiting.bytes) == (0, 0)


@on_loop
async def test_a_replay_of_more_than_may_wait_is_asked_for_in_parts() -> None:
    turns = Stalled()
    limits: dict[str, Any] = {"max_waiting_bytes": 50_000, "replay_idle_s": DEADLINE_S}
    async with heard(SERVED, turns=turns, **limits) as (engine, service):
        turns.is_released = True
        await engine.store(1)
        await service.follows(engine)
        engine.may_answer.clear()
        await engine.store(*range(2, 900), lost=True)
        await engine.store(900)
        await until(lambda: service.listener._replay is not None and len(engine.requests) > 1)
        turns.is_released = False
        engine.may_answer.set()
        await until(
            lambda: (replay := service.listener._replay) is not None and replay.link.has_overflowed
        )
        turns.is_released = True
        await service.follows(engine)
        assert len(engine.asked) > 1
        assert engine.requests == sorted(engine.requests)  # each went on where one ended


@on_loop
async def test_a_bug_during_a_replay_does_not_end_the_following() -> None:
    engine = Engine(SERVED)
    service = Service(engine, replay_idle_s=DEADLINE_S)
    service.listener._work._reader = FailingOnce(5)
    before = failures["kv replay"]
    async with engine:
        await engine.store(*range(20), lost=True)
        engine.may_answer.clear()
        async with service:
            await engine.subscribed()
            await engine.store(20)
            await until(lambda: service.blocks == {20})
            engine.may_answer.set()
            await until(
                lambda: service.blocks == set(range(21)) - {5}, lambda: service.listener.status()
            )
            assert failures["kv replay"] == before + 1
            assert service.state == "degraded"  # a batch is lost, and nobody knows what it said
            await engine.clear()
            await engine.store(30)
            await service.follows(engine)


@on_loop
async def test_a_bug_in_the_batch_that_shows_a_gap_does_not_keep_it_from_being_mended() -> None:
    async with heard(SERVED) as (engine, service):
        service.listener._work._reader = FailingOnce(5)
        await engine.store(1)
        await service.follows(engine)  # no replay is under way that may bring it first
        await engine.store(2, lost=True)
        await engine.store(5)  # and nothing follows
        await until(lambda: service.blocks == {1, 2, 5}, lambda: service.listener.status())


@on_loop
async def test_a_replay_endpoint_that_libzmq_refuses_is_no_replay() -> None:
    engine = Engine(SILENT)
    engine.replay_endpoint = "tcp://127.0.0.1:+80"
    async with engine, Service(engine) as service:
        await engine.subscribed()
        await engine.store(1, lost=True)
        await engine.store(2)
        await until(lambda: service.state == "no_replay")
        await until(lambda: service.blocks == {2})


@on_loop
async def test_the_same_trouble_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "lean_selector.kv_events")
    async with heard() as (engine, service):
        for block in range(10):
            await engine.store(block)
            await engine.store(100 + block, lost=True)
        await engine.store(10)
        await until(lambda: service.listener.status().gaps == 10)
        status = service.listener.status()
        assert (status.state, status.lost_batches) == ("degraded", 10)
        assert status.last_error == "gap: 18 then 20, batches lost"
        await engine.clear()
        engine.copies.clear()
        await engine.store(3)
        await service.follows(engine)
    (record,) = caplog.records
    assert record.getMessage() == "worker 7 dp_rank 0: gap: 0 then 2, batches lost"
    assert (record.__dict__["worker_id"], record.__dict__["dp_rank"]) == (7, 0)


@on_loop
async def test_a_replay_that_never_ends_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_replay, "REPLAY_LIMIT_S", 0.0)
    async with heard(SERVED) as (engine, service):
        await engine.store(1, lost=True)
        await engine.store(2)
        await until(lambda: service.state == "no_replay")
        await until(lambda: service.blocks == {2})


@on_loop
async def test_a_listener_costs_four_descriptors() -> None:
    """Its connection, what wakes us, and those of the monitor's two ends."""

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    context = zmq.asyncio.Context()
    pub = context.socket(zmq.PUB)
    port = pub.bind_to_random_port("tcp://127.0.0.1")
    endpoint = f"tcp://127.0.0.1:{port}"
    links, index, turns = Links(context), KvIndex(2), Turns()
    first, *listeners = (
        KvListener(links, KvIngest(index, 1, rank), endpoint, "tcp://127.0.0.1:1", turns)
        for rank in range(21)
    )
    first.start()
    await until(lambda: first._live.state is LinkState.CONNECTED)
    gc.collect()  # what other tests left is gone
    before = descriptors()
    for listener in listeners:
        listener.start()
    connected = [listener._live for listener in listeners]
    await until(lambda: all(live.state is LinkState.CONNECTED for live in connected))
    await until(lambda: descriptors() == before + 20 * 5)  # the engine's end is here too
    for listener in (first, *listeners):
        await listener.close()
    context.destroy(linger=0)
