"""The slot tracker: routes and handlers, metrics and log lines.

A handler gets a struct, makes one call into the core, and returns a struct. The rules are in
`core.trackers`; `bodies` has the checks common to all routes. API: slot_tracker.md 1.3. Routes for
peers exist with and without the prefix /replica_sync (decision D18)."""

import logging
import time
from collections.abc import Callable

import msgspec

from lean_selector.api.access import ADMIN, OPEN, READ, WRITE
from lean_selector.api.bodies import SCOPE_FIELDS, Query
from lean_selector.api.metrics import WORKERS, load_families, scope_labels
from lean_selector.api.routes import Route
from lean_selector.api.shared_handlers import OK, ReplicaHandlers, ReplicationApi
from lean_selector.core.load.shapes import LoadRow, PotentialLoadRow, WorkerRow
from lean_selector.core.trackers import Trackers
from lean_selector.http.response import encode_response
from lean_selector.wire.exposition import Families, Sample, table
from lean_selector.wire.replica_shapes import PeerUrlRequest
from lean_selector.wire.selection_bodies import Ok
from lean_selector.wire.slot_tracker_bodies import (
    AddRequest,
    LifecycleRequest,
    PotentialLoadsRequest,
    RegisterRequest,
    UnregisterRequest,
)

_log = logging.getLogger("lean_selector.lifecycle")


class SlotTrackerService(ReplicaHandlers):
    """The handlers of the slot tracker's routes, and their state."""

    def __init__(
        self,
        trackers: Trackers,
        *,
        replication: ReplicationApi | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(replication)
        self.trackers = trackers
        self._clock = clock

    def routes(self) -> tuple[Route, ...]:
        return (
            Route("GET", "/health", OPEN, "service", "Liveness",
                lambda: encode_response(200, b"", b""), gives=()),
            Route("POST", "/register", ADMIN, "workers", "Register a worker's ranks",
                self.register, body=RegisterRequest, status=201),
            Route("POST", "/unregister", ADMIN, "workers", "Remove a worker and its requests",
                self.unregister, body=UnregisterRequest),
            Route("GET", "/workers", READ, "workers", "List workers",
                self.workers, query=SCOPE_FIELDS, gives=list[WorkerRow]),
            Route("POST", "/add", WRITE, "requests", "Book a request on a rank",
                self.add, body=AddRequest, status=201),
            Route("POST", "/prefill_complete", WRITE, "requests",
                "Report the first token of a request",
                self.prefill_complete, body=LifecycleRequest),
            Route("POST", "/free", WRITE, "requests", "Free a request; an unknown id is no error",
                self.free, body=LifecycleRequest),
            Route("GET", "/loads", READ, "loads", "The load of each rank",
                self.loads, query=SCOPE_FIELDS, gives=list[LoadRow]),
            Route("POST", "/potential_loads", READ, "loads",
                "The load of each rank with this prompt on it",
                self.potential_loads, body=PotentialLoadsRequest, gives=list[PotentialLoadRow]),
            *self.replica_routes(),
            *self.peer_routes("", PeerUrlRequest),
        )  # fmt: skip

    def register(self, body: RegisterRequest) -> Ok:
        self.trackers.register(body.row())
        return OK

    def unregister(self, body: UnregisterRequest) -> Ok:
        self.trackers.unregister(body.model_name, body.group(), body.worker_id)
        return OK

    def workers(self, query: Query) -> list[WorkerRow]:
        return self.trackers.workers(query.get("model_name"), query.get("tenant_id"))

    def add(self, body: AddRequest) -> Ok:
        hashes = body.hashes()  # a wrong shape is reported before other errors
        self.trackers.add(
            body.model_name,
            body.group(),
            body.request_id,
            body.worker_id,
            body.dp_rank,
            hashes,
            body.new_isl_tokens,
            self._clock(),
        )
        return OK

    def prefill_complete(self, body: LifecycleRequest) -> Ok:
        self.trackers.prefill_complete(
            body.model_name, body.group(), body.request_id, self._clock()
        )
        return OK

    def free(self, body: LifecycleRequest) -> Ok:
        self.trackers.free(body.model_name, body.group(), body.request_id, self._clock())
        return OK

    def loads(self, query: Query) -> list[LoadRow]:
        return self.trackers.loads(query.get("model_name"), query.get("tenant_id"))

    def potential_loads(self, body: PotentialLoadsRequest) -> list[PotentialLoadRow]:
        hashes = body.hashes()
        return self.trackers.potential_loads(
            body.model_name, body.group(), hashes, body.new_isl_tokens
        )


# -- metrics and log lines -------------------------------------------------------------------------


def tracker_families(trackers: Trackers) -> Families:
    """Return the metrics of workers and load for the slot tracker."""

    def workers() -> list[Sample]:
        return [
            (scope_labels(tracker, lifecycle="registered"), len(tracker.workers))
            for tracker in trackers.in_order()
        ]

    return [*table({
        "workers": (workers, WORKERS),
    }), *load_families(trackers.in_order)]  # fmt: skip


class TrackerLog:
    """Logs workers added or removed, and expirations. Call method `log_changes` about every
    second."""

    def __init__(self, trackers: Trackers) -> None:
        self._trackers = trackers
        self._workers: set[WorkerRow] = set()
        self._expired = 0

    def expired(self, count: int) -> None:
        """Adds `count` to the number of expired requests that the next call of `log_changes`
        logs."""
        self._expired += count

    def log_changes(self) -> None:
        workers = set(self._trackers.workers())
        if workers != self._workers:
            for row in workers - self._workers:
                _log.info("worker registered", extra=msgspec.structs.asdict(row))
            for row in self._workers - workers:
                _log.info("worker removed", extra=msgspec.structs.asdict(row))
            self._workers = workers
        if self._expired:
            _log.info("reservations expired", extra={"count": self._expired})
            self._expired = 0
