"""Catch-up: copy the live reservations of other replicas (with `core.replication.catch_up`).

A catch-up is due at the start, when a connection to a peer was made or restored, when events of a
peer were missed, and when a rank was registered here, because events about unregistered ranks are
dropped. All peers are asked, because only the replica that admitted a request knows exactly whether
the request is live (D24). We subscribe to peers before we fetch snapshots, so that no later release
is missed. Dynamo's own service has no snapshots (404) and is skipped. Reservations are read and
added to our load in time slices."""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TypeVar

from lean_selector.core.load.slots import Slots
from lean_selector.core.replication.catch_up import CatchUp, Fate, ended_meanwhile
from lean_selector.core.replication.ledger import ReplicaTarget
from lean_selector.core.replication.shapes import LiveReservation, ReplicaEvent
from lean_selector.core.selection.peer_sessions import PeerSessions
from lean_selector.http.outbound import OutboundClient
from lean_selector.links.turns import Pauses
from lean_selector.replicas.mesh import ReplicaSync
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
LOOK_S = 0.1  # between checks whether a catch-up is due
AGAIN_S = 2.0  # minimum seconds from a catch-up to the next, in case a peer reconnects often
# Catch-ups cost both replicas loop time. They may take at most a fifth of the time.
COST_PAUSE = 5
RETRY_S = 30.0  # if a connected peer did not answer, or events are still missing
_LOOKS = 100
_LOGGED_PROBLEMS = 10

T = TypeVar("T")


@dataclass(eq=False)
class CatchingUp:
    """Copies the live reservations of peers while `run` is running. If a peer's snapshot shows that
    we missed an event, calls `tell(event, now)` to apply the event.

    `client(url)` returns the HTTP client for a peer. The caller may change `urls` later.
    `targets()` returns this replica's partitions."""

    catch_up: CatchUp
    sync: ReplicaSync
    urls: Sequence[str]
    targets: Callable[[], Iterable[ReplicaTarget]]
    tell: Callable[[ReplicaEvent, float], object]
    sessions: PeerSessions | None = None
    _: KW_ONLY
    client: Callable[[str], OutboundClient]

    def __post_init__(self) -> None:
        self.counts = self.catch_up.counts
        self.note = self.catch_up.note  # called with each event of ours, and each that was applied
        self._due_at = 0.0  # when the next catch-up is due; inf: when something happens
        self._ranks: list[tuple[Slots, int]] = []  # those added, at the last look

    def request(self) -> None:
        """Make a catch-up due: events were missed, or a connection was made."""
        self._due_at = 0.0

    def _is_due(self) -> bool:
        ranks = [(target.slots, target.slots.ranks_added) for target in self.targets()]
        if ranks != self._ranks:
            self._ranks, self._due_at = ranks, 0.0
        return time.monotonic() >= self._due_at

    async def run(self) -> None:
        """Copy peers' reservations now, and again whenever this is due."""
        self._due_at = 0.0  # also if this is called again after an error
        while True:
            if self._is_due():
                took_s = await self._run_once()
                await asyncio.sleep(max(AGAIN_S, COST_PAUSE * took_s))
            await asyncio.sleep(LOOK_S)

    async def _run_once(self) -> float:
        """Copy peers' reservations. Return how many seconds that took."""
        self.catch_up.begin()
        try:
            await _connected(self.sync)
            self._due_at, began = math.inf, time.monotonic()
            failed = await self._take_from_all()
        finally:
            self.catch_up.end()
        now = time.monotonic()
        connected = sum(peer.state == "connected" for peer in self.sync.peer_states())
        # A peer that is down needs no retry: its connection makes a catch-up due.
        if self.sync.heard.behind() or (failed and connected > len(self.urls) - failed):
            self._due_at = min(self._due_at, now + RETRY_S)
        return now - began

    async def _take_from_all(self) -> int:
        """Copy from each peer's snapshot the reservations that this peer admitted, and those of
        replicas that did not answer. Return how many peers did not answer."""
        heard = self.sync.heard
        others: list[LiveReservation] = []
        answered = set[int]()
        failed = 0
        async for url, asked_at, snapshot in self._answers("snapshot", PATH, split_snapshot):
            if snapshot is None:
                failed += 1
                continue
            router_id = snapshot.router_id
            live, whole = await self._read(url, asked_at, snapshot)
            await self._take(
                reservation for reservation in live if reservation.router_id == router_id
            )
            others += (reservation for reservation in live if reservation.router_id != router_id)
            answered.add(router_id)
            if whole:
                heard.mended(router_id, snapshot.sequence)
            counts = {fate.name.lower(): self.counts[fate] for fate in Fate}
            log.info("catch-up: %d reservations at %s: %s", len(live), url, counts)
        await self._take(
            reservation for reservation in others if reservation.router_id not in answered
        )
        for publisher in () if failed else heard.behind():
            if publisher.router_id not in answered:  # it has no snapshots
                heard.mended(publisher.router_id, publisher.sequence)
        if self.sessions is not None:
            await self._take_sessions(self.sessions)
        return failed

    async def _take_sessions(self, sessions: PeerSessions) -> None:
        """Copy all peers' bindings of sessions to ranks. A session's newest binding wins."""

        def take(line: bytes) -> None:
            listed = decode_session_line(line)
            sessions.apply(listed, time.monotonic(), listed.idle_s)

        async for url, _, lines in self._answers(
            "list of sessions", SESSIONS_PATH, split_session_list
        ):
            if lines is not None:
                await self._each("session", url, lines, take)
                log.info("catch-up: %d sessions at %s", len(lines), url)

    async def _answers(
        self, name: str, path: str, read: Callable[[bytes], T]
    ) -> AsyncIterator[tuple[str, float, T | None]]:
        """GET `path` from all peers. Yields (URL, request time, decoded answer) for each answer;
        None instead of an answer if there was none. Peers without `path` are skipped."""
        ends = time.monotonic() + TIMEOUT_S
        urls = list(self.urls)  # a copy, because peers may be added and removed meanwhile
        for at, url in enumerate(urls):
            asked_at = time.monotonic()
            left_s = ends - asked_at
            try:
                if left_s <= 0:
                    raise PeerFailed("no time left")
                at_path = url.rstrip("/") + path
                taken = await fetched(
                    self.client(url), at_path, left_s, len(urls) - at, MAX_SNAPSHOT_BYTES, read
                )
            except PeerFailed as error:
                if error.status == 404:
                    log.info("catch-up: %s has no %s, like the reference; skipped", url, name)
                else:
                    log.warning("catch-up: nothing from %s: %s", url, error)
                    yield url, asked_at, None
                continue
            yield url, asked_at, taken

    async def _read(
        self, url: str, asked_at: float, snapshot: SnapshotParts
    ) -> tuple[list[LiveReservation], bool]:
        """Return a snapshot's reservations, and whether all lines were valid. If all were valid,
        also apply the ends of the peer's reservations and prefills that we missed."""
        fetched_at = time.monotonic()
        live: list[LiveReservation] = []
        if await self._each(
            "reservation",
            url,
            snapshot.lines,
            lambda line: live.append(decode_line(line, fetched_at)),
        ):
            return live, False  # its line may be the one that could not be read
        pause = Pauses()
        ended = 0
        for event in ended_meanwhile(self.targets(), snapshot.router_id, live, asked_at):
            if event is not None:
                self.tell(event, time.monotonic())
                ended += 1
            await pause()
        if ended:
            log.info("catch-up: %d reservations of %s changed by missed events", ended, url)
        return live, True

    async def _each(
        self, what: str, url: str, lines: list[bytes], take: Callable[[bytes], object]
    ) -> int:
        """Call `take` with each line of an answer. Return how many lines could not be read."""
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

    async def _take(self, reservations: Iterable[LiveReservation]) -> None:
        pause = Pauses()
        for reservation in reservations:
            self.catch_up.take(reservation, time.monotonic())
            await pause()


async def _connected(sync: ReplicaSync) -> None:
    for _ in range(_LOOKS):
        if all(peer.state == "connected" for peer in sync.peer_states()):
            break
        await asyncio.sleep(CONNECT_S / _LOOKS)
    await asyncio.sleep(SETTLE_S)
