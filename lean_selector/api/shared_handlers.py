"""Routes of the selector and the slot tracker for replicas and discovery.

Spec: slot_tracker.md, section 3.6. Dynamo lacks /replica_sync/snapshot and `?detail=true` (D22)."""

from collections.abc import Callable
from typing import Final, Protocol

from lean_selector.api.access import ADMIN, READ
from lean_selector.api.bodies import DETAIL, Query, wants_detail
from lean_selector.api.replies import Answer, Reply
from lean_selector.api.routes import Route
from lean_selector.core.errors import Conflict, NotFound
from lean_selector.wire.discovery_states import DiscoveryReport
from lean_selector.wire.replica_shapes import PeerRequest, SyncState
from lean_selector.wire.selection_bodies import Ok

OK: Final = Ok()


class ReplicationApi(Protocol):
    """Synchronisation with other replicas, as far as HTTP handlers use it."""

    def register_peer(self, endpoint: str) -> bool: ...

    def deregister_peer(self, endpoint: str) -> bool: ...

    def peers(self) -> list[str]: ...

    def state(self) -> SyncState: ...

    def snapshot(self) -> Answer: ...

    def session_list(self) -> Answer: ...


class ReplicaHandlers:
    """The handlers of /replica_sync routes. `replication` is None if replica sync is off."""

    def __init__(self, replication: ReplicationApi | None) -> None:
        self._replication = replication

    def replica_routes(self) -> tuple[Route, ...]:
        return (
            *self.peer_routes("/replica_sync", PeerRequest),
            Route("GET", "/replica_sync/snapshot", READ, "replicas",
                "Live reservations, for a replica that catches up",
                lambda: self._switched_on().snapshot(), gives=dict),
        )  # fmt: skip

    def peer_routes(self, prefix: str, body: type[PeerRequest]) -> tuple[Route, ...]:
        return (
            Route("POST", f"{prefix}/register_peer", ADMIN, "replicas",
                "Add a peer; 201 if it is new", self.register_peer, body=body, also=201),
            Route("POST", f"{prefix}/deregister_peer", ADMIN, "replicas", "Remove a peer",
                self.deregister_peer, body=body),
            Route("GET", f"{prefix}/peers", READ, "replicas", "List the peers",
                self.list_peers, query=DETAIL, gives=(list[str], SyncState, dict)),
        )  # fmt: skip

    def register_peer(self, body: PeerRequest) -> Reply:
        new = self._switched_on().register_peer(body.endpoint)
        return Reply(201 if new else 200, OK)

    def deregister_peer(self, body: PeerRequest) -> Ok:
        if not self._switched_on().deregister_peer(body.endpoint):
            raise NotFound("peer not found")
        return OK

    def list_peers(self, query: Query) -> object:
        """Return the endpoints of the peers (other replicas); with `?detail=true` also their
        states, and the number of dropped events by reason."""
        if wants_detail(query):
            return {} if self._replication is None else self._replication.state()
        return [] if self._replication is None else self._replication.peers()

    def _switched_on(self) -> ReplicationApi:
        if self._replication is None:
            raise Conflict("replica sync is disabled")
        return self._replication


# -- discovery routes ------------------------------------------------------------------------------
#
# GET /discovery, for both services (decision D22).

NOTHING = DiscoveryReport([], [], [])


def discovery_routes(report: Callable[[], DiscoveryReport] | None) -> tuple[Route, ...]:
    """Return the route GET /discovery. `report` is None if no discovery is configured."""
    return (
        Route("GET", "/discovery", READ, "discovery",
            "Discoveries, and the state of each discovered worker and peer",
            report or (lambda: NOTHING), gives=DiscoveryReport),
    )  # fmt: skip
