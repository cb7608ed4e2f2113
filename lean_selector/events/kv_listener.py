"""`KvListener` subscribes to one rank's KV events; `KvReplay` requests missed batches of events.

A replay has its own connection (a `Link`). `KvReplay` reads replies up to the end marker, the
timeout or a size limit, and passes each batch to `on_reply`. Spec: indexer.md 1.1, 1.2, 1.5."""

import asyncio
import logging
import random
import struct
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from enum import Enum, auto
from typing import Final

import zmq

from lean_selector.core.index.kv_cursor import (
    LATE_FIRST_SEQ,
    BatchVerdict,
    KvCursor,
    SourceState,
)
from lean_selector.core.index.kv_ingest import KvIngest
from lean_selector.core.index.shapes import Watermark
from lean_selector.events.batch_work import BatchWork
from lean_selector.events.source_watch import GRACE_S, SourceWatch, condition
from lean_selector.links.link import Link, LinkState
from lean_selector.links.links import Links
from lean_selector.links.turns import Turns
from lean_selector.tasks import supervise
from lean_selector.wire.kv_events import MAX_BATCH_BYTES
from lean_selector.wire.selection_bodies import SourceCondition, SourceStatus

_SEQ: Final = struct.Struct(">Q")
# Engines answer a replay between batches, about every 0.1 s (vLLM).
REPLAY_IDLE_S = 1.5
# A slow replay is ended, because live batches wait meanwhile. To read a full buffer takes seconds.
REPLAY_LIMIT_S = 60.0
# A source yields to the next one after this many messages.
MESSAGES_PER_TURN = 64


def live_frames(frames: list[bytes]) -> tuple[int, bytes] | None:
    """Return (sequence number, payload) of a published message `[topic, u64 BE, payload]`; None for
    any other shape."""
    if len(frames) != 3 or len(frames[1]) != _SEQ.size:
        return None
    return _SEQ.unpack(frames[1])[0], frames[2]


def replay_frames(frames: list[bytes]) -> tuple[int, bytes] | None:
    """Return (sequence number, payload) of a reply from an engine's replay endpoint; None for other
    shapes. The last reply has an empty payload. Newer engines put a topic before the sequence
    number: `["", topic, sequence number, payload]`."""
    if len(frames) < 2 or len(frames[-2]) != _SEQ.size:
        return None
    return _SEQ.unpack(frames[-2])[0], frames[-1]


class ReplayEnd(Enum):
    COMPLETE = auto()  # the end marker arrived, or no further reply was needed
    STOPPED = auto()
    # Too many bytes wait. The received part is applied, and the rest is requested again.
    OVERFLOWED = auto()


@dataclass(eq=False)
class KvReplay:
    """One request for missed batches of KV events, sent to an engine. Not thread-safe.

    `on_reply(frames)` starts to apply a reply; returns True if no more replies are needed.
    `may_go_on(deadline)` continues to do so; returns True if all of the reply is applied."""

    links: Links
    turns: Turns
    endpoint: str
    start: int
    _: KW_ONLY
    may_go_on: Callable[[float], bool]
    on_reply: Callable[[list[bytes]], bool]

    def __post_init__(self) -> None:
        self._news = asyncio.Event()
        self._has_ended = False
        self.has_answered = False
        request = [b"", _SEQ.pack(self.start)]
        # If too many received bytes wait, it ends, and the rest must be requested again.
        self.link = Link(
            self.links,
            self.endpoint,
            zmq.DEALER,
            lambda socket: socket.send_multipart(request, zmq.NOBLOCK),
            self._news.set,
            self._news.set,
            max_message_bytes=MAX_BATCH_BYTES,
            once=True,
        )

    async def run(self, idle_s: float) -> ReplayEnd:
        """Send the request, and handle the replies up to the last one. Give up if no reply comes
        for `idle_s` seconds."""
        link = self.link
        give_up_at = time.monotonic() + REPLAY_LIMIT_S
        link.start()
        try:
            while not self._has_ended and time.monotonic() < give_up_at:
                self._news.clear()
                if link.waiting:
                    await self.turns.run(self._drain)
                elif link.state is LinkState.CLOSED:
                    break
                else:
                    try:
                        async with asyncio.timeout(idle_s):
                            await self._news.wait()
                    except TimeoutError:
                        if link.state is not LinkState.RESOLVING:
                            break
        finally:
            link.close()
        if self._has_ended:
            return ReplayEnd.COMPLETE
        return ReplayEnd.OVERFLOWED if link.has_overflowed else ReplayEnd.STOPPED

    def why_not(self) -> str:
        """Return a short reason why the engine did not send all batches that were requested."""
        if self.link.was_connected:
            return "no end of it" if self.has_answered else "no answer"
        return "no answer" if self.link.error is None else f"no connection: {self.link.error}"

    def _drain(self, deadline: float) -> bool:
        for _ in range(MESSAGES_PER_TURN):
            if not self.may_go_on(deadline):
                return True
            frames = self.link.take()
            if frames is None:
                return False
            self.has_answered = True
            self._has_ended = self.on_reply(frames)
            if self._has_ended or time.perf_counter() >= deadline:
                break
        return not self._has_ended


# -- kv listener -----------------------------------------------------------------------------------
#
# The KV events of one engine rank: a SUB socket feeds the index, and replays bring missed batches.
# The cursor decides what each batch means, and the ingest applies it. This class has the links, the
# timeouts and the log. Messages wait in the links, which bound their bytes, and are handled in
# bounded turns. Messages that a link drops cause a gap like any other. Spec: indexer.md 1.

logger = logging.getLogger("lean_selector.kv_events")

# Pause after a failed replay; doubled up to the limit, with jitter.
RETRY_FIRST_S = 1.0
RETRY_LIMIT_S = 30.0
# A source logs lines of one kind at this interval at most.
LOG_EVERY_S = 10.0


@dataclass(eq=False)
class KvListener:
    """Subscribes to the KV events of one rank, from start() to close(). Used only on the thread of
    the event loop.

    `replays` limits the simultaneous replays of all ranks. `has_work()` returns whether the rank
    has requests now. `on_lost()` is called when the connection is lost. No warning is logged if the
    rank is unreachable or silent for less than `grace_s` seconds."""

    links: Links
    ingest: KvIngest
    endpoint: str
    replay_endpoint: str | None
    turns: Turns
    _: KW_ONLY
    replays: asyncio.Semaphore = field(default_factory=asyncio.Semaphore)
    has_work: Callable[[], bool] = lambda: True
    on_lost: Callable[[], None] = lambda: None
    replay_idle_s: float = REPLAY_IDLE_S
    retry_first_s: float = RETRY_FIRST_S
    grace_s: float = GRACE_S

    def __post_init__(self) -> None:
        self.cursor = KvCursor(can_replay=self.replay_endpoint is not None)
        self._work = BatchWork(self.ingest, self.cursor, self._report)
        self._held = self.links.waiting.backlog(self._shed_held)
        # Used from start() to close().
        self._live = Link(
            self.links,
            self.endpoint,
            zmq.SUB,
            lambda socket: socket.setsockopt(zmq.SUBSCRIBE, b""),
            self._wake,
            self._note_link,
            max_message_bytes=MAX_BATCH_BYTES,
        )
        # Set while batches are missing that a replay may bring.
        self._replaying: asyncio.Task[None] | None = None
        self._replay: KvReplay | None = None
        # How many messages of the previous connection still wait; -1: the cursor was told of the
        # new connection.
        self._old_messages = -1
        # State when `check_condition` was last called.
        self._messages = 0
        self._last_message_at: float | None = None  # monotonic seconds
        self._last_error: str | None = None
        self._told_of: str | None = None  # reason for the missing connection, as last logged
        self._no_replay = ""  # why the last replay failed
        self._watch = SourceWatch(self._log, self.has_work, self.grace_s)
        self._quiet_until: dict[str, float] = {}  # kind of line -> earliest time of the next

    def start(self) -> None:
        """Connect and subscribe. The engine may start later than this call."""
        self._live.start()

    def stop(self) -> "asyncio.Future[list[BaseException | None]]":
        """Unsubscribe. After this call, no further event is applied, and the index keeps the rank's
        blocks. Return an awaitable that completes when the listener's tasks have ended."""
        self._work.drop()
        self._old_messages = -1
        self._held.set(0)
        tasks = [self._live.close(), self._replaying]
        if self._replay is not None:
            tasks.append(self._replay.link.close())
        self._stop_replay()
        return asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)

    async def close(self) -> None:
        """Unsubscribe, and wait until the listener's background tasks have ended."""
        await self.stop()

    @property
    def mark(self) -> Watermark | None:
        """Which batches are in the rank's blocks. None while a batch is being applied or is
        missing, or if blocks may be of batches that a peer does not know."""
        seq = self.cursor.complete_to
        if seq is None or self._work.is_under_way or not self.ingest.is_alone:
            return None
        return Watermark(seq, max(seq, self.cursor.copied_to), self.cursor.unknown)

    def status(self) -> SourceStatus:
        cursor, counts = self.cursor, self.ingest.counts
        last, now = self._last_message_at, time.monotonic()
        seen = self.check_condition(now)
        return SourceStatus(
            worker_id=self.ingest.worker_id,
            dp_rank=self.ingest.dp_rank,
            endpoint=self.endpoint,
            replay_endpoint=self.replay_endpoint,
            state=seen.state,
            state_age_s=seen.state_age_s,
            problem=seen.problem,
            connection=self._live.state.value,
            last_seq=cursor.last_live,
            lag_batches=cursor.lag + self._work.is_under_way + self._live.waiting,
            lost_batches=cursor.lost + cursor.unknown,
            gaps=cursor.gaps,
            replayed_batches=cursor.replayed_batches,
            restarts=cursor.restarts,
            backlog_bytes=self._backlog_bytes(),
            dropped_batches=self._live.dropped + cursor.dropped,
            messages=self._messages,
            skipped={f"{kind}:{reason}": n for (kind, reason), n in counts.skipped.items()},
            last_message_age_s=None if last is None else now - last,
            last_error=self._last_error if self._live.error is None else self._no_connection(),
        )

    def check_condition(self, now: float) -> SourceCondition:
        """Return the condition of the rank's KV events, and log new faults. Call this regularly."""
        live, ingest, cursor = self._live, self.ingest, self.cursor
        state, what = condition(live, ingest, cursor, self.replay_endpoint, self._no_replay)
        self._watch.record(state, what, now)
        return SourceCondition(ingest.dp_rank, state, now - self._watch.since, what or None)

    def _backlog_bytes(self) -> int:
        replay = self._replay
        waiting = 0 if replay is None else replay.link.waiting_bytes
        return self._live.waiting_bytes + self._held.bytes + waiting

    # the connection

    def _note_link(self) -> None:
        """Handle a new state of the connection to the engine: after a connect, request missed
        batches of events; after the loss of a connection, log the reason."""
        live = self._live
        if live.state is LinkState.CONNECTED:
            self._told_of = None
            self._old_messages = live.waiting
            if not live.waiting:
                self._connected()
        elif live.error is not None and live.was_connected and live.error != self._told_of:
            if self._told_of is None:
                self.on_lost()
            self._told_of = live.error
            self._log(logging.WARNING, f"{self._no_connection()}; trying again")
        self.check_condition(time.monotonic())

    def _connected(self) -> None:
        self._old_messages = -1
        self.cursor.connected()
        self._replay_if_due()

    def _no_connection(self) -> str:
        return f"no connection: {self._live.error}"

    # live batches

    def _wake(self) -> None:
        self.turns.start(self._drain_live, self._failed_to_drain)

    def _failed_to_drain(self, error: Exception) -> None:
        # An internal error, since no payload raises. Continue with the next message.
        self.cursor.lose(is_missing=True)
        self._report("bug", logging.ERROR, f"ingest failed: {error!r}")
        self._replay_if_due()
        asyncio.get_running_loop().call_later(self.retry_first_s, self._wake)

    def _drain_live(self, deadline: float) -> bool:
        for _ in range(MESSAGES_PER_TURN):
            if not self._has_applied(deadline):
                return True
            if not self._old_messages:
                self._connected()
            frames = self._live.take()
            if frames is None:
                if self._old_messages > 0:  # the link dropped the oldest messages
                    self._connected()
                return False
            if self._old_messages > 0:
                self._old_messages -= 1
            self._on_live(frames)
            if time.perf_counter() >= deadline:
                break
        return True

    def _on_live(self, frames: list[bytes]) -> None:
        if not self._messages:
            self._report("live", logging.INFO, "first message")
        self._messages += 1
        self._last_message_at = time.monotonic()
        message = live_frames(frames)
        if message is None:
            self.ingest.counts.skip("message", "bad_frames")
            self._report("frames", logging.WARNING, f"message of {len(frames)} frames ignored")
            return
        seq, payload = message
        gaps, last_seq = self.cursor.gaps, self.cursor.last_live
        verdict = self.cursor.live(seq, payload)
        self._account()
        if verdict is BatchVerdict.RESTART:
            self._stop_replay()  # the replay was requested from an engine that is gone
            self.ingest.clear()
            self._report("restart", logging.WARNING, f"engine restarted: {last_seq} then {seq}")
        if self.cursor.gaps > gaps:
            remedy = "replay" if self.cursor.can_replay else "batches lost"
            level = logging.INFO if last_seq is None else logging.WARNING  # the first batch
            self._report("gap", level, f"gap: {last_seq} then {seq}, {remedy}")
        if verdict is BatchVerdict.APPLY and not seq and self.ingest.is_tentative:
            self.ingest.clear()  # the engine has just begun: what a peer knew is of another one
        if verdict is BatchVerdict.APPLY or verdict is BatchVerdict.RESTART:
            self._work.take(payload)
        self._replay_if_due()

    def _replay_if_due(self) -> None:
        if self.cursor.is_settled:
            self._stop_replay()
        elif self._replaying is None:
            self._replaying = supervise("kv replay", self._replay_until_settled)

    def _has_applied(self, deadline: float) -> bool:
        """Apply the current batch until the deadline. Return True at the end of the batch."""
        if not self._work.is_under_way:
            return True
        if not self._work.go_on(deadline):
            return False
        if self.cursor.is_settled:  # the batch may have contained a clear
            self._stop_replay()
            self._account()
        return True

    def _account(self) -> None:
        """Record how many bytes of new batches wait until the missed batches are applied."""
        if self.cursor.held_bytes != self._held.bytes:
            self._held.set(self.cursor.held_bytes)

    def _shed_held(self, size: int) -> None:
        self.cursor.shed(size)
        self._account()

    # replay

    def _stop_replay(self) -> None:
        if self._replaying is not None:
            self._replaying.cancel()
            self._replaying = None

    async def _replay_until_settled(self) -> None:
        pause_s = self.retry_first_s
        if self.cursor.replay_interrupted():  # an internal error ended the last drain
            self.cursor.lose()
            self._work.drop()
            await self.turns.run(self._drain_held)
        while self.cursor.replay_from is not None:
            restarts = self.cursor.restarts
            async with self.replays:
                end = await self._ask()
            if self.cursor.restarts > restarts:
                continue  # the replay revealed a new engine: request everything
            if end is ReplayEnd.COMPLETE:
                if self.cursor.replay_finished() is BatchVerdict.RESTART:
                    self._work.drop()
                    self.ingest.clear()
                    text = "engine restarted: it lacks the last batch that was applied"
                    self._report("restart", logging.WARNING, text)
                    continue
            else:
                self.cursor.replay_failed()
                self._report_failure()
            await self.turns.run(self._drain_held)
            if self.cursor.replay_from is not None and end is not ReplayEnd.OVERFLOWED:
                await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
                pause_s = min(2 * pause_s, RETRY_LIMIT_S)
        self._replaying = None
        if self.cursor.lost:
            text = f"degraded: {self.cursor.lost} batches are in no replay"
            self._report("degraded", logging.WARNING, text)
        elif self.cursor.has_told:
            self._report("recovered", logging.INFO, f"recovered at {self.cursor.watermark}")

    async def _ask(self) -> ReplayEnd:
        assert self.replay_endpoint is not None
        start = self.cursor.replay_from
        assert start is not None, "what settles the cursor ends this task"
        self.cursor.replay_started()
        replay = self._replay = KvReplay(
            self.links,
            self.turns,
            self.replay_endpoint,
            start,
            may_go_on=self._has_applied,
            on_reply=self._on_reply,
        )
        try:
            end = await replay.run(self.replay_idle_s)
        finally:
            if self._replay is replay:
                self._replay = None
        if end is ReplayEnd.STOPPED:
            self._no_replay = replay.why_not()
        return end

    def _report_failure(self) -> None:
        if self.cursor.state is SourceState.DEGRADED:
            text = f"no full replay from {self.replay_endpoint}: {self._no_replay}"
            self._report("degraded", logging.WARNING, f"degraded: {text}")

    def _on_reply(self, frames: list[bytes]) -> bool:
        """Handle one reply of the replay endpoint. Return True if no further reply is needed."""
        reply = replay_frames(frames)
        if reply is None:
            self.ingest.counts.skip("message", "bad_replay_frames")
            self._report("frames", logging.WARNING, f"reply of {len(frames)} frames ignored")
            return False
        seq, payload = reply
        if not payload:
            if self.cursor.watermark is None and self.ingest.is_tentative:
                self.ingest.clear()  # the engine has cached nothing
            return True
        if seq <= LATE_FIRST_SEQ and self.ingest.is_tentative:
            self.ingest.clear()  # all that the engine holds is in this replay
            self.cursor.supersede()
        verdict = self.cursor.replayed(seq, payload)
        if verdict is BatchVerdict.RESTART:
            self.ingest.clear()
            text = f"engine restarted: its batch {seq} differs from the one that was applied"
            self._report("restart", logging.WARNING, text)
            return True
        if verdict is BatchVerdict.APPLY:
            self._work.take(payload)
        return False

    def _drain_held(self, deadline: float) -> bool:
        while self._has_applied(deadline):
            payload = self.cursor.next_held()
            self._account()
            if payload is None:
                return False
            self._work.take(payload)
            if time.perf_counter() >= deadline:
                break
        return True

    def _report(self, kind: str, level: int, text: str) -> None:
        """Log a line, but at most one line per `kind` in LOG_EVERY_S seconds."""
        if level >= logging.WARNING:
            self._last_error = text
        now = time.monotonic()
        if now < self._quiet_until.get(kind, now):
            return
        self._quiet_until[kind] = now + LOG_EVERY_S
        self._log(level, text)

    def _log(self, level: int, text: str) -> None:
        worker_id, dp_rank = self.ingest.worker_id, self.ingest.dp_rank
        fields = {"worker_id": worker_id, "dp_rank": dp_rank, "endpoint": self.endpoint}
        logger.log(level, "worker %d dp_rank %d: %s", worker_id, dp_rank, text, extra=fields)
