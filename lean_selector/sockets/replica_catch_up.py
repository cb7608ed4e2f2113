"""Runs a catch-up: fetches peers' live reservations and hands them to `core.catch_up`.

At start from the first peer that has a snapshot; after a subscription came (back) from all of them,
for each knows best what has become of the requests that it admitted itself. Waits for the
subscriptions first, so that nothing ends unheard after a snapshot was taken. A peer that has none
(404: a reference) is passed over. Reads and books in slices of the loop's turns, and looks on for
ranks that are registered later, until the catch-up ends.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence

from lean_selector.core.replication.catch_up import CatchUp, Fate, ended_meanwhile
from lean_selector.core.replication.events import ReplicaEvent, ReplicaTarget
from lean_selector.sockets.peer_fetch import PeerFailed, PeerFetch, fetched
from lean_selector.sockets.replica_mesh import ReplicaSync
from lean_selector.wire.replica_snapshot import BadSnapshot, decode_line, split_snapshot

log = logging.getLogger("lean_selector.replica")

PATH = "/replica_sync/snapshot"
MAX_SNAPSHOT_BYTES = 256 << 20  # 200 000 reservations of 64 blocks
TIMEOUT_S = 10.0  # for all peers together, as start-up recovery
CONNECT_S = 2.0  # for the subscriptions; a peer that is down must not hold up the others
# After the last handshake: the subscription is on its way then, and libzmq looks at arrivals about
# every millisecond.
SETTLE_S = 0.25
SLICE_S = 0.001
STEPS = 16  # bookings between looks at the clock
LOOK_AGAIN_S = 0.1
AGAIN_S = 2.0  # at least between two: a peer that comes and goes must not cost more than that
_LOOKS = 100
_LOGGED_PROBLEMS = 10


class CatchingUp:
    """What runs it; `tell(event, now)` acts on what a peer would have told."""

    def __init__(
        self,
        catch_up: CatchUp,
        sync: ReplicaSync,
        urls: Sequence[str],
        targets: Callable[[], Iterable[ReplicaTarget]],
        tell: Callable[[ReplicaEvent, float], object],
    ) -> None:
        self._catch_up = catch_up
        self._sync = sync
        self._urls = urls
        self._targets = targets
        self._tell = tell

    async def run(self, again: asyncio.Event, *, from_all: bool) -> None:
        """Returns when the catch-up has ended, with everything booked or given up; or when it is
        to begin `again`.
        """
        try:
            await _connected(self._sync)
            again.clear()
            await self._take_from(self._urls, from_all)
        finally:
            self._catch_up.snapshot_is_in()
        while not again.is_set() and time.monotonic() < self._catch_up.ends_at:
            await self._admit_waiting()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(again.wait(), LOOK_AGAIN_S)
        if not again.is_set():
            self._catch_up.give_up_waiting()
        if dropped := self._catch_up.counts[Fate.NOT_REGISTERED]:
            log.warning("catch-up: %d bookings dropped, their ranks were not registered", dropped)

    async def _admit_waiting(self) -> None:
        now = time.monotonic()
        pause = _Pauses()
        while self._catch_up.admit_waiting(now, STEPS):
            await pause()

    async def _take_from(self, urls: Sequence[str], from_all: bool) -> None:
        ends = time.monotonic() + TIMEOUT_S
        taken = 0
        for at, url in enumerate(urls):
            asked_at = time.monotonic()
            left_s = ends - asked_at
            try:
                if left_s <= 0:
                    raise PeerFailed("no time left")
                fetch = PeerFetch(url, PATH, left_s, MAX_SNAPSHOT_BYTES, split_snapshot)
                router_id, lines = await fetched(fetch, left_s, len(urls) - at)
            except PeerFailed as error:
                if error.status == 404:
                    log.info("catch-up: %s has no snapshot, as the reference; passed over", url)
                else:
                    log.warning("catch-up: nothing from %s: %s", url, error)
                continue
            await self._take(url, lines, router_id, asked_at)
            taken += 1
            if not from_all:
                return
        if not taken:
            log.warning("catch-up: no peer had a snapshot; going on without")

    async def _take(self, url: str, lines: list[bytes], router_id: int, asked_at: float) -> None:
        fetched_at = time.monotonic()
        pause = _Pauses()
        live = []
        problems = 0
        for line in lines:
            try:
                live.append(decode_line(line, fetched_at))
            except BadSnapshot as error:
                problems += 1
                if problems <= _LOGGED_PROBLEMS:
                    log.warning("catch-up: a reservation of %s skipped: %s", url, error)
            else:
                self._catch_up.take(live[-1], time.monotonic())
            await pause()
        ended = 0
        if not problems:  # what could not be read may be what is missing
            for event in ended_meanwhile(self._targets(), router_id, live, asked_at):
                if event is not None:
                    self._tell(event, time.monotonic())
                    ended += 1
                await pause()
        counts = {fate.name.lower(): count for fate, count in self._catch_up.fates()}
        text = "catch-up: %d reservations from %s: %s; %d had changed unheard"
        log.info(text, len(lines), url, counts, ended)


class _Pauses:
    """Gives way when a slice of the loop's turn is over."""

    def __init__(self) -> None:
        self._slice_ends = time.monotonic() + SLICE_S

    async def __call__(self) -> None:
        if time.monotonic() >= self._slice_ends:
            await asyncio.sleep(0)
            self._slice_ends = time.monotonic() + SLICE_S


async def _connected(sync: ReplicaSync) -> None:
    for _ in range(_LOOKS):
        if all(peer.state == "connected" for peer in sync.peer_states()):
            break
        await asyncio.sleep(CONNECT_S / _LOOKS)
    await asyncio.sleep(SETTLE_S)
