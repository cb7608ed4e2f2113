"""Catch-up: copy the live reservations of other replicas (with `core.replication.catch_up`).

At the start, peers are queried until one returns a snapshot of all reservations. When a connection
to a peer was made or restored, or events of a peer were missed, all peers are queried, because only
the replica that admitted a request knows exactly whether the request is live (D24). We subscribe to
peers before we fetch snapshots, so that no later release is missed. Dynamo's own service has no
snapshots (404) and is skipped. Reservations are read and added to our load in time slices. If a
reservation's rank is not registered here yet, adding is retried until the catch-up ends."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from enum import Enum
from typing import TypeVar

from lean_selector.core.replication.catch_up import CatchUp, Fate, ended_meanwhile
from lean_selector.core.replication.events import ReplicaTarget, Verdict
from lean_selector.core.replication.shapes import LiveBooking, ReplicaEvent
from lean_selector.core.selection.peer_sessions import PeerSessions
from lean_selector.events.ingest_turns import Pauses
from lean_selector.http.outbound import OutboundClient
from lean_selector.replicas.mesh import HEARTBEAT_S, ReplicaSync
from lean_selector.replicas.recovery import PeerFailed, fetched
from lean_selector.wire.replica_snapshot import (
    BadSnapshot,
    SnapshotParts,
    decode_line,
    decode_session_line,
    split_session_list,
    split_snapshot,
)

log = logging.getLogger("lean_selector.replica")

PATH = "/replica_sync/snapshot"
SESSIONS_PATH = "/replica_sync/sessions"
MAX_SNAPSHOT_BYTES = 256 << 20  # 200 000 reservations of 64 blocks
TIMEOUT_S = 10.0  # for all peers together, as in start-up recovery
CONNECT_S = 2.0  # for the subscriptions; a peer that is down must not delay the others
# Wait after the last handshake: the subscription may still be in flight, and libzmq polls about
# every millisecond.
SETTLE_S = 0.25
STEPS = 16  # bookings between checks of the clock
LOOK_AGAIN_S = 0.1
AGAIN_S = 2.0  # minimum seconds between two catch-ups, in case a peer reconnects often
# Catch-ups cost both replicas loop time. They may take at most a fifth of the time.
COST_PAUSE = 5
# Maximum pause before another attempt to close a gap that no peer could close.
MEND_PAUSE_MAX_S = 60.0
# A replica counts as connected if it was heard within this time: three heartbeats.
FOLLOWED_S = 3 * HEARTBEAT_S
_LOOKS = 100
_LOGGED_PROBLEMS = 10


T = TypeVar("T")


class Occasion(Enum):
    """Why snapshots of the reservations are requested from peers."""

    START = 0
    CONNECTED = 1  # a subscription was made or restored
    MISSED = 2  # events of a connected peer were missed


class CatchingUp:
    """Copies the live reservations of peers while `run` is running. If a peer's snapshot shows that
    we missed an event, calls `tell(event, now)` to apply the event."""

    def __init__(
        self,
        catch_up: CatchUp,
        sync: ReplicaSync,
        urls: Sequence[str],
        targets: Callable[[], Iterable[ReplicaTarget]],
        tell: Callable[[ReplicaEvent, float], object],
        sessions: PeerSessions | None = None,
        *,
        client: Callable[[str], OutboundClient],
    ) -> None:
        """`client(url)` returns the HTTP client for a peer. The caller may change `urls` later.
        `targets()` returns this replica's partitions."""
        self._client = client
        self._catch_up = catch_up
        self._sync = sync
        self._urls = urls
        self._targets = targets
        self._tell = tell
        self._sessions = sessions
        self.fates = catch_up.fates
        self._is_recording = True  # events are recorded while a catch-up is running or due
        self._again = asyncio.Event()
        self._occasion = Occasion.START  # of the next catch-up
        self._took_s = 0.0  # seconds that the last catch-up spent on snapshots
        self._failed = False  # in the last catch-up, a peer that may have a snapshot returned none
        self._mending: asyncio.TimerHandle | None = None
        self._mend_not_before = 0.0
        self._mend_pause_s = 0.0
        self._is_mending = False  # the current or next catch-up is to close a gap

    def note(self, event: ReplicaEvent, verdict: Verdict | None, now: float) -> None:
        """Record an applied event, so that an older snapshot does not undo the event. For a peer's
        event, `verdict` is the result of applying the event; for our own event, None."""
        if self._is_recording:
            self._catch_up.note(event, verdict, now)

    def connected(self) -> None:
        """Request a catch-up, because a subscription to a peer was made or restored."""
        if self._occasion is Occasion.MISSED:
            self._occasion = Occasion.CONNECTED
        self._again.set()

    def missed(self) -> None:
        """Schedule a catch-up for missed events. The delay grows if catch-ups recover nothing."""
        if self._mending is None:
            left_s = self._mend_not_before - time.monotonic()
            self._mending = asyncio.get_running_loop().call_later(max(0.0, left_s), self._mend)

    def _mend(self) -> None:
        self._mending = None
        if self._sync.heard.behind():
            self._is_mending = True
            self._again.set()

    def _plan_to_mend(self, mended: bool) -> None:
        """If events are missing, catch up later. `mended`: whether the last catch-up got any."""
        if mended:
            self._mend_pause_s = 0.0
        elif self._is_mending:
            self._mend_pause_s = min(max(AGAIN_S, 2 * self._mend_pause_s), MEND_PAUSE_MAX_S)
        self._is_mending = False
        self._mend_not_before = time.monotonic() + self._mend_pause_s
        if self._sync.heard.behind():
            self.missed()

    def close(self) -> None:
        if self._mending is not None:
            self._mending.cancel()

    async def run(self) -> None:
        """Copy peers' reservations now, and again whenever `connected` or `missed` requests it."""
        self._occasion = Occasion.START
        while True:
            began = time.monotonic()
            try:
                await self._run_once()
            except Exception:
                log.exception("catch-up failed; continuing with the current state")
            if not self._again.is_set():
                self._is_recording = False
                await self._again.wait()
            self._is_recording = True
            self._catch_up.begin_again(time.monotonic())  # from now on, ends are recorded
            pause_s = max(AGAIN_S, COST_PAUSE * self._took_s)
            await asyncio.sleep(max(0.0, began + pause_s - time.monotonic()))

    async def _run_once(self) -> None:
        """Copy peers' reservations once. Then retry the reservations whose rank is not registered.
        Drop these at the catch-up's deadline; keep them if a new catch-up is requested first."""
        again = self._again
        self._failed = False
        is_restored = any(target.slots.live_counts()[1] for target in self._targets())
        try:
            await _connected(self._sync)
            occasion, self._occasion = self._occasion, Occasion.MISSED
            if occasion is Occasion.START and is_restored:
                occasion = Occasion.CONNECTED  # any peer's reservations may have ended
            again.clear()
            began = time.monotonic()
            mended = False
            if occasion is Occasion.START:
                await self._take_from_first()
            else:
                mended = await self._take_from_all(occasion)
            if self._sessions is not None:
                await self._take_sessions(self._sessions)
            self._took_s = time.monotonic() - began
            self._plan_to_mend(mended)
        finally:
            self._catch_up.snapshot_is_in()
        while not again.is_set() and time.monotonic() < self._catch_up.ends_at:
            await self._admit_waiting()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_AGAIN_S):
                    await again.wait()
        if not again.is_set():
            self._catch_up.give_up_waiting()
            if self._sessions is not None:
                self._sessions.give_up_waiting()
        if dropped := self._catch_up.counts[Fate.NOT_REGISTERED]:
            log.warning("catch-up: %d bookings dropped, their ranks were not registered", dropped)

    async def _admit_waiting(self) -> None:
        now = time.monotonic()
        pause = Pauses()
        while self._catch_up.admit_waiting(now, STEPS):
            await pause()
        while self._sessions is not None and self._sessions.admit_waiting(now, STEPS):
            await pause()

    async def _take_from_first(self) -> None:
        """Copy all reservations in the snapshot of the first peer that returns one. Used at the
        start, while this replica has no reservations."""
        async for url, asked_at, snapshot in self._answers("snapshot", PATH, split_snapshot):
            live, _ = await self._read(url, asked_at, snapshot)
            await self._take(live)
            self._log(url, snapshot)
            return
        log.warning("catch-up: no peer had a snapshot; continuing without")

    async def _take_from_all(self, occasion: Occasion) -> bool:
        """Copy from each peer's snapshot the reservations that this peer admitted. A reservation
        that another replica admitted is copied only if that replica did not answer, and we may
        have missed events of that replica. Returns True if missed events were recovered."""
        heard = self._sync.heard
        began = time.monotonic()
        told: list[tuple[int, int]] = []  # (router id, event number) of replicas that answered
        unasked: list[LiveBooking] = []
        answered = set()
        async for url, asked_at, snapshot in self._answers("snapshot", PATH, split_snapshot):
            router_id = snapshot.router_id
            live, whole = await self._read(url, asked_at, snapshot)
            await self._take(booking for booking in live if booking.router_id == router_id)
            unasked += (booking for booking in live if booking.router_id != router_id)
            answered.add(router_id)
            if whole:
                told.append((router_id, snapshot.sequence))
            self._log(url, snapshot)
        since = began - FOLLOWED_S
        await self._take(
            booking
            for booking in unasked
            if booking.router_id not in answered
            and (occasion is Occasion.CONNECTED or heard.is_numbered(booking.router_id))
            and not heard.is_followed(booking.router_id, since)
        )
        closed = [heard.mended(router_id, sequence) for router_id, sequence in told]
        if not self._failed:  # every peer answered or has no snapshots
            for publisher in heard.behind():
                if publisher.router_id not in answered:
                    heard.mended(publisher.router_id, publisher.sequence)
        if not answered:
            log.warning("catch-up: no peer had a snapshot; continuing without")
        return any(closed)

    async def _take_sessions(self, sessions: PeerSessions) -> None:
        """Copy all peers' bindings of sessions to ranks. A session's newest binding wins."""
        async for url, _, lines in self._answers(
            "list of sessions", SESSIONS_PATH, split_session_list
        ):
            await self._each(
                "session",
                url,
                lines,
                lambda line: sessions.take(decode_session_line(line), time.monotonic()),
            )
            log.info("catch-up: %d sessions at %s", len(lines), url)

    async def _answers(
        self, name: str, path: str, read: Callable[[bytes], T]
    ) -> AsyncIterator[tuple[str, float, T]]:
        """GET `path` from all peers. Yields (URL, request time, decoded answer) for each answer."""
        ends = time.monotonic() + TIMEOUT_S
        urls = list(self._urls)  # a copy, because peers may be added and removed meanwhile
        for at, url in enumerate(urls):
            asked_at = time.monotonic()
            left_s = ends - asked_at
            try:
                if left_s <= 0:
                    raise PeerFailed("no time left")
                at_path = url.rstrip("/") + path
                taken = await fetched(
                    self._client(url), at_path, left_s, len(urls) - at, MAX_SNAPSHOT_BYTES, read
                )
            except PeerFailed as error:
                if error.status == 404:
                    log.info("catch-up: %s has no %s, like the reference; skipped", url, name)
                else:
                    self._failed = True
                    log.warning("catch-up: nothing from %s: %s", url, error)
                continue
            yield url, asked_at, taken

    async def _read(
        self, url: str, asked_at: float, snapshot: SnapshotParts
    ) -> tuple[list[LiveBooking], bool]:
        """Return a snapshot's reservations, and whether all lines were valid. If all were valid,
        also apply the ends of the peer's reservations and prefills that we missed."""
        fetched_at = time.monotonic()
        live: list[LiveBooking] = []
        if await self._each(
            "reservation",
            url,
            snapshot.lines,
            lambda line: live.append(decode_line(line, fetched_at)),
        ):
            return live, False  # its line may be the one that could not be read
        pause = Pauses()
        ended = 0
        for event in ended_meanwhile(self._targets(), snapshot.router_id, live, asked_at):
            if event is not None:
                self._tell(event, time.monotonic())
                ended += 1
            await pause()
        if ended:
            log.info("catch-up: %d reservations of %s changed by missed events", ended, url)
        return live, True

    async def _each(
        self, what: str, url: str, lines: list[bytes], take: Callable[[bytes], object]
    ) -> int:
        """Call `take` with each line of an answer. Returns how many lines could not be read."""
        pause = Pauses()
        problems = 0
        for line in lines:
            try:
                take(line)
            except BadSnapshot as error:
                problems += 1
                if problems <= _LOGGED_PROBLEMS:
                    log.warning("catch-up: a %s of %s skipped: %s", what, url, error)
            await pause()
        return problems

    async def _take(self, bookings: Iterable[LiveBooking]) -> None:
        pause = Pauses()
        for booking in bookings:
            self._catch_up.take(booking, time.monotonic())
            await pause()

    def _log(self, url: str, snapshot: SnapshotParts) -> None:
        counts = {fate.name.lower(): count for fate, count in self._catch_up.fates()}
        log.info("catch-up: %d reservations at %s: %s", len(snapshot.lines), url, counts)


async def _connected(sync: ReplicaSync) -> None:
    for _ in range(_LOOKS):
        if all(peer.state == "connected" for peer in sync.peer_states()):
            break
        await asyncio.sleep(CONNECT_S / _LOOKS)
    await asyncio.sleep(SETTLE_S)
