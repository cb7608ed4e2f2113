"""The replica plane of a service, wired: sockets, what hears them, and what speaks through them.

Both services have the same one; they differ in where a partition is looked up, and in what happens
after an event was applied. Knows no HTTP.
"""

import logging
import secrets
import time
from collections.abc import Callable

import msgspec
import zmq.asyncio

from lean_selector.config import ReplicaConfig
from lean_selector.core.replication import (
    EventKind,
    ReplicaApplier,
    ReplicaEvent,
    ReplicaEvents,
    ReplicaTarget,
    Verdict,
)
from lean_selector.sockets.replica import ReplicaSync

log = logging.getLogger("lean_selector.replica")

Lookup = Callable[[str, str], ReplicaTarget | None]
_KIND_NAMES = {kind: kind.name.lower() for kind in EventKind}
_REASONS = [verdict for verdict in Verdict if verdict is not Verdict.APPLIED]


class PeerState(msgspec.Struct, frozen=True):
    """One peer of GET /replica_sync/peers?detail=true."""

    endpoint: str
    state: str
    since_s: float  # how long it has been so
    retries: int  # attempts to reconnect meanwhile


class PlaneState(msgspec.Struct, frozen=True, omit_defaults=True):
    """GET /replica_sync/peers?detail=true."""

    router_id: int | None = None  # None while replica sync is off
    peers: list[PeerState] = []
    published: int = 0
    queue_overflows: int = 0  # times that the queue of a peer began to drop what is published
    received: int = 0
    applied: dict[str, int] = {}  # by kind of event
    dropped: dict[str, int] = {}  # by reason


class ReplicaPlane:
    """What a service has of its replicas. Raises ReplicaSyncError when it cannot be set up.

    `on_applied(event, now)` hears of each event of a peer that changed something here.
    """

    def __init__(
        self,
        context: zmq.asyncio.Context,
        config: ReplicaConfig,
        lookup: Lookup,
        on_applied: Callable[[ReplicaEvent, float], None],
    ) -> None:
        self.router_id = secrets.randbits(64) or 1
        self.applier = ReplicaApplier(self.router_id, lookup)
        self._on_applied = on_applied
        self.sync = ReplicaSync(
            context, config.bind, config.peers, self._on_event, advertise=config.advertise
        )
        self.events = ReplicaEvents(self.router_id, self.sync.publish)

    def start(self) -> None:
        """Begin to hear peers; call it in the running loop."""
        self.sync.start()
        log.info(
            "replica sync is on at %s, process_id=%d", self.sync.bound_endpoint, self.router_id
        )

    async def close(self) -> None:
        await self.sync.close()

    def _on_event(self, event: ReplicaEvent, now: float) -> Verdict:
        verdict = self.applier.apply(event, now)
        if verdict is Verdict.APPLIED:
            self._on_applied(event, now)
        return verdict

    def register_peer(self, endpoint: str) -> bool:
        return self.sync.register_peer(endpoint)

    def deregister_peer(self, endpoint: str) -> bool:
        return self.sync.deregister_peer(endpoint)

    def peers(self) -> list[str]:
        return self.sync.peers()

    def state(self) -> PlaneState:
        now = time.monotonic()
        counts = self.applier.counts
        dropped = {
            verdict.name.lower(): sum(counts[kind][verdict] for kind in EventKind)
            for verdict in _REASONS
        }
        dropped["undecodable"] = self.sync.undecodable
        return PlaneState(
            self.router_id,
            [
                PeerState(peer.endpoint, peer.state, round(now - peer.since, 3), peer.retries)
                for peer in self.sync.peer_states()
            ],
            self.sync.published,
            self.sync.overflows,
            self.sync.received,
            {name: counts[kind][Verdict.APPLIED] for kind, name in _KIND_NAMES.items()},
            dropped,
        )
