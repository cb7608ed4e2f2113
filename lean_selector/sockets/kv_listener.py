"""One engine rank's KV events: a SUB socket feeding the index, and the replay of what was missed.

The cursor decides what each batch means, the ingest applies it; here are the links, the time-outs
and the log. Messages wait in the links, whose bytes are bounded, and are taken in bounded turns.
What had to be dropped there is a gap like any other. Spec: indexer.md 1.
"""

import asyncio
import logging
import random
import time
from enum import Enum, auto

from lean_selector.core.index.kv_cursor import BatchVerdict, KvCursor, SourceState
from lean_selector.core.index.kv_ingest import KvIngest
from lean_selector.sockets.batch_work import BatchWork
from lean_selector.sockets.ingest_turns import IngestTurns
from lean_selector.sockets.kv_sockets import live_frames, open_live, open_replay, replay_frames
from lean_selector.sockets.link import Link, LinkState
from lean_selector.sockets.links import Links
from lean_selector.tasks import supervise
from lean_selector.wire.kv_sources import SourceStatus

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


class _ReplayEnd(Enum):
    COMPLETE = auto()  # the end marker came
    STOPPED = auto()
    OVERFLOWED = auto()  # more came than may wait; what did is applied, and the rest is there still


class KvListener:
    """Listens to one rank from start() to close(). Used from the loop's thread only.

    To resume behind a recovered index, call `cursor.resume_at(watermark)` before start().
    """

    def __init__(
        self,
        links: Links,
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
        self._links = links
        self._turns = turns
        self._replay_idle_s = replay_idle_s
        self._retry_first_s = retry_first_s
        self._held = links.waiting.backlog(self._shed_held)
        # from start() to close()
        self._live = open_live(links, endpoint, self._wake, self._note_link)
        self._is_draining = False  # waiting for a turn, or in it
        # while batches are missing that a replay may bring
        self._replaying: asyncio.Task[None] | None = None
        self._replay_link: Link | None = None
        # what was seen
        self._messages = 0
        self._last_message_at: float | None = None  # monotonic seconds
        self._last_error: str | None = None
        self._told_of: str | None = None  # why there is no connection, as logged last
        self._quiet_until: dict[str, float] = {}  # by kind of log line

    def start(self) -> None:
        """Connect and listen; an engine that is not there yet is connected to when it comes."""
        self._live.start()

    def stop(self) -> "asyncio.Future[list[BaseException | None]]":
        """Unsubscribe: nothing more is applied once this returns. The index keeps what it has.

        Returns what to await for the tasks to be gone.
        """
        self._work.drop()
        self._held.set(0)
        tasks = [self._live.close(), self._replaying]
        if self._replay_link is not None:
            tasks.append(self._replay_link.close())
        self._stop_replay()
        return asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)

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
            state=self._state(),
            connection=self._live.state.value,
            last_seq=cursor.last_live,
            lag_batches=cursor.lag + self._work.is_under_way + self._live.waiting,
            lost_batches=cursor.lost,
            gaps=cursor.gaps,
            replayed_batches=cursor.replayed_batches,
            restarts=cursor.restarts,
            backlog_bytes=self._backlog_bytes(),
            dropped_batches=self._live.dropped + cursor.dropped,
            messages=self._messages,
            skipped={f"{kind}:{reason}": n for (kind, reason), n in counts.skipped.items()},
            last_message_age_s=None if last is None else time.monotonic() - last,
            last_error=self._last_error if self._live.error is None else self._no_connection(),
        )

    def _state(self) -> str:
        state, live = self.cursor.state, self._live
        if state is not SourceState.CONNECTING or live.state is LinkState.CONNECTED:
            return state.value
        if live.error is not None:
            return "failed"
        return "resolving" if live.state is LinkState.RESOLVING else state.value

    def _backlog_bytes(self) -> int:
        replay = self._replay_link
        waiting = 0 if replay is None else replay.waiting_bytes
        return self._live.waiting_bytes + self._held.bytes + waiting

    # The connection

    def _note_link(self) -> None:
        """Log why there is no connection: once, until there was one or there is another reason."""
        error = self._live.error
        if self._live.state is LinkState.CONNECTED:
            self._told_of = None
        elif error is not None and error != self._told_of:
            self._told_of = error
            self._log(logging.WARNING, f"{self._no_connection()}; trying again")

    def _no_connection(self) -> str:
        return f"no connection: {self._live.error}"

    # Live batches

    def _wake(self) -> None:
        """Take what has arrived. The link tells only of the first: a drain goes to the end."""
        if not self._is_draining:
            self._is_draining = True
            self._turns.start(self._drain_live, self._drained)

    def _drained(self, error: Exception | None) -> None:
        self._is_draining = False
        if error is not None:
            # Our bug, not the engine's: no payload raises. Carry on with the next message.
            self.cursor.lose()
            self._report("bug", logging.ERROR, f"ingest failed: {error!r}")
            self._replay_if_due()
            asyncio.get_running_loop().call_later(self._retry_first_s, self._wake)

    def _drain_live(self, deadline: float) -> bool:
        for _ in range(MESSAGES_PER_TURN):
            if not self._has_applied(deadline):
                return True
            frames = self._live.take()
            if frames is None:
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
        self._account()
        if verdict is BatchVerdict.RESTART:
            self._stop_replay()  # it was asked of an engine that is gone
            self.ingest.clear()
            self._report("restart", logging.WARNING, f"engine restarted: {last_seq} then {seq}")
        if self.cursor.gaps > gaps:
            remedy = "replay" if self.cursor.can_replay else "batches lost"
            self._report("gap", logging.WARNING, f"gap: {last_seq} then {seq}, {remedy}")
        if verdict is BatchVerdict.APPLY or verdict is BatchVerdict.RESTART:
            self._work.take(payload)
        self._replay_if_due()

    def _replay_if_due(self) -> None:
        if self.cursor.is_settled:
            self._stop_replay()
        elif self._replaying is None:
            self._replaying = supervise("kv replay", self._replay_until_settled)

    def _has_applied(self, deadline: float) -> bool:
        """Whether the batch taken last is in to its end; works on it until the deadline."""
        if not self._work.is_under_way:
            return True
        if not self._work.go_on(deadline):
            return False
        if self.cursor.is_settled:  # it may have held a clear
            self._stop_replay()
            self._account()
        return True

    def _account(self) -> None:
        """For what the cursor keeps."""
        if self.cursor.held_bytes != self._held.bytes:
            self._held.set(self.cursor.held_bytes)

    def _shed_held(self, size: int) -> None:
        self.cursor.shed(size)
        self._account()

    # Replay

    def _stop_replay(self) -> None:
        if self._replaying is not None:
            self._replaying.cancel()
            self._replaying = None

    async def _replay_until_settled(self) -> None:
        pause_s = self._retry_first_s
        if self.cursor.replay_interrupted():  # a bug ended the run before this one
            self.cursor.lose()
            self._work.drop()
            await self._turns.run(self._drain_held)
        while (start := self.cursor.replay_from) is not None:
            self.cursor.replay_started()
            restarts = self.cursor.restarts
            end = await self._replay(start)
            if self.cursor.restarts > restarts:
                continue  # the replay showed that the engine is a new one: all of it is wanted
            if end is _ReplayEnd.COMPLETE:
                self.cursor.replay_finished()
            else:
                self.cursor.replay_failed()
                text = f"degraded: no full replay from {start} at {self.replay_endpoint}"
                self._report("degraded", logging.WARNING, text)
            await self._turns.run(self._drain_held)
            if self.cursor.replay_from is not None and end is not _ReplayEnd.OVERFLOWED:
                await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
                pause_s = min(2 * pause_s, RETRY_LIMIT_S)
        self._replaying = None
        if self.cursor.lost:
            text = f"degraded: {self.cursor.lost} batches are in no replay"
            self._report("degraded", logging.WARNING, text)
        else:
            self._report("recovered", logging.INFO, f"recovered at {self.cursor.watermark}")

    async def _replay(self, start: int) -> "_ReplayEnd":
        """Ask once, on a link of its own."""
        assert self.replay_endpoint is not None
        news = asyncio.Event()
        link = open_replay(self._links, self.replay_endpoint, start, news.set)
        has_ended = False

        def drain(deadline: float) -> bool:
            nonlocal has_ended
            for _ in range(MESSAGES_PER_TURN):
                if not self._has_applied(deadline):
                    return True
                frames = link.take()
                if frames is None:
                    return False
                has_ended = self._on_reply(frames)
                if has_ended or time.perf_counter() >= deadline:
                    break
            return not has_ended

        give_up_at = time.monotonic() + REPLAY_LIMIT_S
        self._replay_link = link
        link.start()
        try:
            while not has_ended and time.monotonic() < give_up_at:
                news.clear()
                if link.waiting:
                    await self._turns.run(drain)
                elif link.state is LinkState.CLOSED:
                    break
                else:
                    try:
                        await asyncio.wait_for(news.wait(), self._replay_idle_s)
                    except TimeoutError:
                        if link.state is not LinkState.RESOLVING:
                            break
        finally:
            link.close()
            if self._replay_link is link:
                self._replay_link = None
        if has_ended:
            return _ReplayEnd.COMPLETE
        if link.error is not None and not link.was_connected:
            self._report("connect", logging.WARNING, f"no connection for replay: {link.error}")
        return _ReplayEnd.OVERFLOWED if link.has_overflowed else _ReplayEnd.STOPPED

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
        if verdict is BatchVerdict.RESTART:
            self.ingest.clear()
            text = f"engine restarted: its batch {seq} is not the one that was applied"
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
        """Log, at most once in LOG_EVERY_S for each kind of line."""
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
