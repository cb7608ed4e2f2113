"""Handlers for readiness and for workers: registration, changes, lists and reports of outcomes. The
APIs of Dynamo 1.3 and 1.6 share them.

A handler gets a struct, makes one call into the core, and returns a struct. Rules are in
`core.selection`. Spec: selection.md, selection_16.md."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from lean_selector.api.access import ADMIN, OPEN, READ, WRITE
from lean_selector.api.bodies import DETAIL, SCOPE_FIELDS, Query, wants_detail
from lean_selector.api.replies import Reply
from lean_selector.api.routes import Route
from lean_selector.api.shared_handlers import OK, ReplicaHandlers, ReplicationApi
from lean_selector.core.health.ejections import EJECTED, IN_SERVICE, PROBATION
from lean_selector.core.rank_bits import RankKey
from lean_selector.core.selection.catalog import Catalog, Worker
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import WorkerRecord
from lean_selector.wire.scalars import JsonText, json_form
from lean_selector.wire.selection_bodies import (
    EjectedWorker,
    KvSource,
    Ok,
    RankHealthRow,
    Readiness,
    SourceCondition,
    WorkerDetail,
    WorkerHealthDetail,
    WorkerPatch,
    WorkerReport,
    WorkerRequest,
)


class ServiceState:
    """What GET /ready tells about the service. `is_recovering`: the index is being copied from a
    peer. `is_draining`: the service shuts down, but still answers. `state_fault`: why the state
    directory cannot be written."""

    def __init__(self) -> None:
        self.is_recovering = self.is_draining = False
        self.state_fault: str | None = None


# -- health ----------------------------------------------------------------------------------------

DETAILED_FIELDS: Final = SCOPE_FIELDS | DETAIL


def health_of(worker: Worker, catalog: Catalog, now: float) -> WorkerHealthDetail:
    """Return the current health of a worker and of each of its ranks, for answers of the API."""
    partition = catalog.partitions.get(worker.spec.key)
    rows: list[RankHealthRow] = []
    if partition is None:
        return WorkerHealthDetail(IN_SERVICE, rows)
    for dp_rank in worker.spec.ranks:
        health = partition.health.ranks.get((worker.spec.worker_id, dp_rank))
        if health is None:
            continue
        state = health.state
        waits = health.is_out and not health.is_down
        rows.append(
            RankHealthRow(
                dp_rank,
                state,
                health.reason or None,
                None if state == IN_SERVICE else round(max(0.0, now - health.since), 3),
                round(max(0.0, health.returns_at - now), 3) if waits else None,
                health.failures,
                health.failed_polls,
                health.ejections,
            )
        )
    states = {row.state for row in rows}
    worst = next((state for state in (EJECTED, PROBATION) if state in states), IN_SERVICE)
    return WorkerHealthDetail(worst, rows)


def ejected_workers(catalog: Catalog) -> list[EjectedWorker] | msgspec.UnsetType:
    """Return the workers with an ejected rank, in order of id, or UNSET if no rank is ejected."""
    found: dict[int, EjectedWorker] = {}
    for partition in catalog.partitions.values():
        for worker_id, dp_rank in sorted(partition.health.out):
            row = found.get(worker_id)
            if row is None:
                reason = partition.health.ranks[worker_id, dp_rank].reason
                row = found[worker_id] = EjectedWorker(worker_id, [], reason)
            row.dp_ranks.append(dp_rank)
    return [found[worker_id] for worker_id in sorted(found)] or msgspec.UNSET


# -- handlers --------------------------------------------------------------------------------------


class KvSources(Protocol):
    """The sources of KV events, one per rank: their states; and the ranks whose events
    (`listeners`) or replays (`askers`) an endpoint sends."""

    def statuses(self, model_name: str | None, tenant_id: str | None) -> Sequence[object]: ...

    def conditions(self, worker_id: int, dp_ranks: Iterable[int]) -> Sequence[SourceCondition]: ...

    def each_source(self) -> Iterator[KvSource]: ...

    def listeners(self, key: str) -> Sequence[RankKey]: ...

    def askers(self, key: str) -> Sequence[RankKey]: ...


class WorkerHandlers(ReplicaHandlers):
    """The handlers of the routes for workers, and their state."""

    def __init__(
        self,
        selector: Selector,
        sources: KvSources,
        state: ServiceState,
        replication: ReplicationApi | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(replication)
        self.selector = selector
        self._listed = JsonText(b"[]")  # all workers, as of this revision of the catalog
        self._listed_revision = -1
        self._state = state
        self._sources = sources
        self._clock = clock

    def worker_routes(self) -> tuple[Route, ...]:
        """Return the routes that are the same in `--api 1.3` and `--api 1.6`."""
        return (
            Route("GET", "/health", OPEN, "service", "Liveness", lambda: OK),
            Route("GET", "/ready", OPEN, "service", "Readiness: 200 if a worker can be chosen",
                self.ready, brief=self.ready_in_brief, gives=Readiness, also=503),
            Route("GET", "/workers", READ, "workers",
                "List workers; `detail` adds health and event sources",
                self.workers, query=DETAILED_FIELDS,
                gives=(list[WorkerRecord], list[WorkerDetail])),
            Route("DELETE", "/workers/{worker_id}", ADMIN, "workers",
                "Remove a worker, its index and its reservations",
                self.remove, gives=WorkerRecord),
            Route("POST", "/workers/{worker_id}/report", WRITE, "workers",
                "Report the outcome of a request to a worker",
                self.record_outcome, body=WorkerReport, warns=True),
        )  # fmt: skip

    def record(self, worker: Worker) -> WorkerRecord:
        return WorkerRecord(**worker.shown(self.selector.settings.dialect))

    def detail(
        self, worker: Worker, sources: Sequence[SourceCondition], now: float
    ) -> WorkerDetail:
        """Return a worker's record with its health and the state of its KV-event sources."""
        settings = self.selector.settings
        return WorkerDetail(
            **worker.shown(settings.dialect),
            health=health_of(worker, self.selector.catalog, now),
            kv_sources=[*sources],
            uses_kv_events=settings.use_kv_events,
            routed_ttl_secs=settings.routed_ttl_s,
        )

    def _all_workers(self) -> JsonText:
        """Return the records of all workers, which are encoded again only after a change, since
        probes poll /ready."""
        catalog = self.selector.catalog
        if self._listed_revision != catalog.revision:
            records = [self.record(worker) for worker in catalog.matching(None, None)]
            self._listed, self._listed_revision = JsonText(json_form(records)), catalog.revision
        return self._listed

    # -- the handlers ------------------------------------------------------------------------------

    def ready(self) -> Reply:
        return self._ready(self._all_workers(), ejected_workers(self.selector.catalog))

    def ready_in_brief(self) -> Reply:
        """Return the answer to a GET /ready without a token. This answer does not list workers."""
        return self._ready(UNSET, UNSET)

    def _ready(
        self, workers: JsonText | UnsetType, ejected: list[EjectedWorker] | UnsetType
    ) -> Reply:
        catalog = self.selector.catalog
        schedulable, missing = catalog.schedulable_count(), catalog.missing_roles()
        ready = catalog.can_serve() and not self._state.is_draining
        recovering = True if self._state.is_recovering else UNSET
        fault = UNSET if self._state.state_fault is None else self._state.state_fault
        body = Readiness(ready, schedulable, workers, recovering, ejected, fault, missing or UNSET)
        return Reply(200 if ready else 503, body)

    def register(self, body: WorkerRequest) -> WorkerRecord | Reply:
        return self._shown(201, self.selector.upsert_worker(body.spec(), self._clock()))

    def patch(self, worker_id: int, body: WorkerPatch) -> WorkerRecord | Reply:
        worker = self.selector.patch_worker(worker_id, body.changes(), self._clock())
        return self._shown(200, worker)

    def _shown(self, status: int, worker: Worker) -> WorkerRecord | Reply:
        """Return a worker's current record, with warnings about its endpoints."""
        from lean_selector.api.header_warnings import registration_warnings

        record = self.record(worker)
        warnings = registration_warnings(worker, self._sources, self.selector.settings)
        return Reply(status, record, warnings) if warnings else record

    def remove(self, worker_id: int) -> object:
        return self.record(self.selector.remove_worker(worker_id, self._clock()))

    def workers(self, query: Query) -> object:
        model_name, tenant_id = query.get("model_name"), query.get("tenant_id")
        if not wants_detail(query):
            if model_name is None and tenant_id is None:
                return self._all_workers()
            return [
                self.record(each) for each in self.selector.catalog.matching(model_name, tenant_id)
            ]
        now = self._clock()
        return [
            self.detail(each, self._sources.conditions(each.spec.worker_id, each.sources), now)
            for each in self.selector.catalog.matching(model_name, tenant_id)
        ]

    def record_outcome(self, worker_id: int, body: WorkerReport) -> Ok:
        ttft_s = None if body.ttft_ms is None else body.ttft_ms / 1000.0
        self.selector.health.record_outcome(
            worker_id, body.dp_rank, body.outcome, self._clock(), ttft_s, body.cached_tokens
        )
        return OK
