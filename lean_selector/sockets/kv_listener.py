"""One engine rank's KV events: a SUB socket feeding the index, and the replay of what was missed.

The cursor decides what each batch means, the ingest applies it; here are the sockets, the time-outs
and the log. The sockets are zmq.asyncio ones; messages are taken through the socket's plain shadow,
which costs a tenth, in bounded turns. The live socket's descriptor wakes the listener itself: a
future and two tasks' turns per wake-up would cost more than a small batch. The state of a source is
read from what arrives; a socket monitor would cost two more descriptors per engine.
Spec: indexer.md 1.
"""

import asyncio
import logging
import random
import time

import msgspec
import zmq
import zmq.asyncio

from lean_selector.core.index.kv_cursor import KvCursor, Verdict
from lean_selector.core.index.kv_ingest import KvIngest
from lean_selector.sockets.batch_work import BatchWork
from lean_selector.sockets.ingest_turns import IngestTurns
from lean_selector.sockets.kv_sockets import (
    live_frames,
    open_live,
    open_replay,
    received,
    replay_frames,
    replay_request,
)

logger = logging.getLogger("lean_selector.kv_events")

# Engines answer a replay between batches, about every 0.1 s (vLLM).
REPLAY_IDLE_S = 1.5
# Even a trickle ends: live batches wait while a replay answers. A full buffer takes seconds.
REPLAY_LIMIT_S = 60.0
# After a replay that failed; doubled each time up to the limit, with jitter.
RETRY_FIRST_S = 1.0
RETRY_LIMIT_S = 30.0
# A source gives way to the next after this many messages of its turn, whatever they cost.
MESSAGES_PER_TURN = 64
# The same kind of trouble is logged once in this time per source.
LOG_EVERY_S = 10.0


class SourceStatus(msgspec.Struct, frozen=True):
    """One source as `GET /kv_sources` shows it."""

    worker_id: int
    dp_rank: int
    endpoint: str
    replay_endpoint: str | None
    state: str  # connecting, live, replaying, degraded
    last_seq: int | None  # of the last live batch
    lag_batches: int  # known of and not applied, or not to the end
    lost_batches: int  # gone for good since the index last was what the engine held
    gaps: int
    replayed_batches: int
    restarts: int
    messages: int
    skipped: dict[str, int]  # "event_type:reason", and "message:reason" for what held no batch
    last_message_age_s: float | None
    last_error: str | None


class KvListener:
    """Listens to one rank from start() to close(). Used from the loop's thread only.

    To resume behind a recovered index, call `cursor.resume_at(watermark)` before start().
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        ingest: KvIngest,
        endpoint: str,
        replay_endpoint: str | None,
        turns: IngestTurns,
        *,
        replay_idle_s: float = REPLAY_IDLE_S,
        retry_first_s: float = RETRY_FIRST_S,
    ) -> None:
        # for good
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self.ingest = ingest
        self.cursor = KvCursor(can_replay=replay_endpoint is not None)
        self._work = BatchWork(ingest, self.cursor, self._report)
        self._context = context
        self._turns = turns
        self._replay_idle_s = replay_idle_s
        self._retry_first_s = retry_first_s
        # from start() to close()
        self._sub: zmq.asyncio.Socket | None = None
        self._live: zmq.Socket[bytes] | None = None  # the shadow of _sub
        self._is_draining = False  # waiting for a turn, or in it
        # while batches are missing that a replay may bring
        self._replaying: asyncio.Task[None] | None = None
        # what was seen
        self._messages = 0
        self._last_message_at: float | None = None  # monotonic seconds
        self._last_error: str | None = None
        self._quiet_until: dict[str, float] = {}  # by kind of log line

    def start(self) -> None:
        """Connect and listen. An endpoint that libzmq refuses is logged and stays silent."""
        assert self._sub is None
        try:
            self._sub = open_live(self._context, self.endpoint)
        except zmq.ZMQError as error:
            self._report("connect", logging.ERROR, f"cannot connect: {error}")
            return
        self._live = zmq.Socket.shadow(self._sub)
        # zmq.asyncio reads the descriptor only of sockets that are awaited.
        asyncio.get_running_loop().add_reader(self._sub.fileno(), self._wake)
        self._wake()

    def stop(self) -> "asyncio.Future[list[BaseException | None]]":
        """Unsubscribe: nothing more is applied once this returns. The index keeps what it has.

        Returns what to await for the tasks to be gone.
        """
        if self._sub is not None and not self._sub.closed:
            asyncio.get_running_loop().remove_reader(self._sub.fileno())
            self._sub.close()
            self._live = None
        self._work.drop()
        tasks = [task for task in (self._replaying,) if task is not None]
        self._replaying = None
        for task in tasks:
            task.cancel()
        return asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Unsubscribe at once, then wait for the tasks."""
        await self.stop()

    @property
    def watermark(self) -> int | None:
        """The last batch that the index holds with all before it; None if there is none such."""
        cursor = self.cursor
        if not cursor.is_settled or cursor.lost or self._work.is_under_way:
            return None
        return cursor.watermark

    def status(self) -> SourceStatus:
        cursor, counts = self.cursor, self.ingest.counts
        last = self._last_message_at
        return SourceStatus(
            worker_id=self.ingest.worker_id,
            dp_rank=self.ingest.dp_rank,
            endpoint=self.endpoint,
            replay_endpoint=self.replay_endpoint,
            state=cursor.state.value,
            last_seq=cursor.last_live,
            lag_batches=cursor.lag + self._work.is_under_way,
            lost_batches=cursor.lost,
            gaps=cursor.gaps,
            replayed_batches=cursor.replayed_batches,
            restarts=cursor.restarts,
            messages=self._messages,
            skipped={f"{kind}:{reason}": n for (kind, reason), n in counts.skipped.items()},
            last_message_age_s=None if last is None else time.monotonic() - last,
            last_error=self._last_error,
        )

    # Live batches

    def _wake(self) -> None:
        """Take what has arrived. The descriptor tells only of changes: a drain goes to the end."""
        if self._live is not None and not self._is_draining:
            self._is_draining = True
            self._turns.start(self._drain_live, self._drained)

    def _drained(self, error: Exception | None) -> None:
        self._is_draining = False
        if error is not None:
            # Our bug, not the engine's: no payload raises. Carry on with the next message.
            self._report("bug", logging.ERROR, f"ingest failed: {error!r}")
            asyncio.get_running_loop().call_later(self._retry_first_s, self._wake)

    def _drain_live(self, deadline: float) -> bool:
        live = self._live
        if live is None:
            return False
        for _ in range(MESSAGES_PER_TURN):
            if not self._has_applied(deadline):
                return True
            try:
                frames = received(live)
            except zmq.Again:
                return False
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
        if verdict is Verdict.RESTART:
            self._stop_replay()  # it was asked of an engine that is gone
            self.ingest.clear()
            self._report("restart", logging.WARNING, f"engine restarted: {last_seq} then {seq}")
        if self.cursor.gaps > gaps:
            remedy = "replay" if self.cursor.can_replay else "batches lost"
            self._report("gap", logging.WARNING, f"gap: {last_seq} then {seq}, {remedy}")
        if verdict is Verdict.APPLY or verdict is Verdict.RESTART:
            self._work.take(payload)
        if self.cursor.is_settled:
            self._stop_replay()
        elif self._replaying is None:
            task = self._replay_until_settled()
            self._replaying = asyncio.get_running_loop().create_task(task)

    def _has_applied(self, deadline: float) -> bool:
        """Whether the batch taken last is in to its end; works on it until the deadline."""
        if not self._work.is_under_way:
            return True
        if not self._work.go_on(deadline):
            return False
        if self.cursor.is_settled:  # it may have held a clear
            self._stop_replay()
        return True

    # Replay

    def _stop_replay(self) -> None:
        if self._replaying is not None:
            self._replaying.cancel()
            self._replaying = None

    async def _replay_until_settled(self) -> None:
        pause_s = self._retry_first_s
        while (start := self.cursor.replay_from) is not None:
            self.cursor.replay_started()
            restarts = self.cursor.restarts
            has_ended = await self._replay(start)
            if self.cursor.restarts > restarts:
                continue  # the replay showed that the engine is a new one: all of it is wanted
            if has_ended:
                self.cursor.replay_finished()
            else:
                self.cursor.replay_failed()
                text = f"degraded: no full replay from {start} at {self.replay_endpoint}"
                self._report("degraded", logging.WARNING, text)
            await self._turns.run(self._drain_held)
            if self.cursor.replay_from is not None:
                await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
                pause_s = min(2 * pause_s, RETRY_LIMIT_S)
        self._replaying = None
        if self.cursor.lost:
            text = f"degraded: {self.cursor.lost} batches are in no replay"
            self._report("degraded", logging.WARNING, text)
        else:
            self._report("recovered", logging.INFO, f"recovered at {self.cursor.watermark}")

    async def _replay(self, start: int) -> bool:
        """Ask once, on a socket of its own; True when the end marker came."""
        assert self.replay_endpoint is not None
        try:
            dealer = open_replay(self._context, self.replay_endpoint)
        except zmq.ZMQError as error:
            self._report("connect", logging.ERROR, f"cannot connect for replay: {error}")
            return False
        replies: zmq.Socket[bytes] = zmq.Socket.shadow(dealer)
        has_ended = False

        def drain(deadline: float) -> bool:
            nonlocal has_ended
            for _ in range(MESSAGES_PER_TURN):
                if not self._has_applied(deadline):
                    return True
                try:
                    frames = received(replies)
                except zmq.Again:
                    return False
                has_ended = self._on_reply(frames)
                if has_ended or time.perf_counter() >= deadline:
                    break
            return not has_ended

        give_up_at = time.monotonic() + REPLAY_LIMIT_S
        idle_ms = int(self._replay_idle_s * 1000)
        try:
            replies.send_multipart(replay_request(start), zmq.NOBLOCK)
            while not has_ended and time.monotonic() < give_up_at and await dealer.poll(idle_ms):
                await self._turns.run(drain)
        finally:
            dealer.close()
        return has_ended

    def _on_reply(self, frames: list[bytes]) -> bool:
        """Take in one frame list of a replay; True if no more of it is wanted."""
        reply = replay_frames(frames)
        if reply is None:
            self.ingest.counts.skip("message", "bad_replay_frames")
            self._report("frames", logging.WARNING, f"reply of {len(frames)} frames ignored")
            return False
        seq, payload = reply
        if not payload:
            return True
        verdict = self.cursor.replayed(seq, payload)
        if verdict is Verdict.RESTART:
            self.ingest.clear()
            text = f"engine restarted: its batch {seq} is not the one that was applied"
            self._report("restart", logging.WARNING, text)
            return True
        if verdict is Verdict.APPLY:
            self._work.take(payload)
        return False

    def _drain_held(self, deadline: float) -> bool:
        while self._has_applied(deadline):
            payload = self.cursor.next_held()
            if payload is None:
                return False
            self._work.take(payload)
            if time.perf_counter() >= deadline:
                break
        return True

    def _report(self, kind: str, level: int, text: str) -> None:
        """Log, at most once in LOG_EVERY_S for each kind of line."""
        if level >= logging.WARNING:
            self._last_error = text
        now = time.monotonic()
        if now < self._quiet_until.get(kind, now):
            return
        self._quiet_until[kind] = now + LOG_EVERY_S
        worker_id, dp_rank = self.ingest.worker_id, self.ingest.dp_rank
        fields = {"worker_id": worker_id, "dp_rank": dp_rank, "endpoint": self.endpoint}
        logger.log(level, "worker %d dp_rank %d: %s", worker_id, dp_rank, text, extra=fields)
