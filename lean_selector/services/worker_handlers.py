"""Workers, as both dialects of the selection service have them: registered, changed, listed, and
reported on; and whether the service is ready for requests.

Handlers translate: struct in, one call into the core, struct out. Rules live in `core.selection`.
Spec: selection.md, selection_16.md.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from msgspec import UNSET, UnsetType

from lean_selector.access.roles import ADMIN, OPEN, READ, WRITE
from lean_selector.core.selection.catalog import Worker
from lean_selector.core.selection.selector import Selector
from lean_selector.services.bodies import Query, wants_detail, worker_id_param
from lean_selector.services.gate import (
    Route,
    plain,
    with_param,
    with_param_and_body,
    with_query,
)
from lean_selector.services.helpful_headers import BODY_FIELDS, warning_of_fields
from lean_selector.services.peer_routes import OK, Plane, ReplicaHandlers
from lean_selector.services.registration_warnings import Sources, registration_warnings
from lean_selector.services.replies import Reply, Standing
from lean_selector.services.routes import Abridged
from lean_selector.services.service_state import ServiceState
from lean_selector.services.worker_health import WORKERS_FIELDS, ejected_workers
from lean_selector.services.worker_records import WorkerRecords
from lean_selector.wire.answer_forms import JsonText
from lean_selector.wire.selection import Change, Readiness, Registration
from lean_selector.wire.worker_details import SourceCondition
from lean_selector.wire.worker_health import EjectedWorker, WorkerReport


class KvSources(Sources, Protocol):
    """Where the KV events come from."""

    def statuses(self, model_name: str | None, tenant_id: str | None) -> Sequence[object]: ...

    def conditions(self, worker_id: int, dp_ranks: Iterable[int]) -> Sequence[SourceCondition]: ...


class WorkerHandlers(ReplicaHandlers):
    """The handlers, and what they act on."""

    def __init__(
        self,
        selector: Selector,
        sources: KvSources,
        state: ServiceState,
        plane: Plane | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(plane)
        self.selector = selector
        self._records = WorkerRecords(selector.catalog, self.record)
        self._state = state
        self._sources = sources
        self._clock = clock

    def worker_routes(self) -> tuple[Route, ...]:
        """The routes whose bodies and answers are the same in every dialect."""
        report = warning_of_fields(
            BODY_FIELDS["/workers/{worker_id}/report"],
            with_param_and_body(worker_id_param, WorkerReport, self.report),
        )
        return (
            ("GET", "/health", OPEN, plain(lambda: OK)),
            ("GET", "/ready", OPEN, Abridged(plain(self.ready), plain(self.ready_in_brief))),
            ("GET", "/workers", READ, with_query(self.workers, WORKERS_FIELDS)),
            ("DELETE", "/workers/{worker_id}", ADMIN, with_param(worker_id_param, self.remove)),
            ("POST", "/workers/{worker_id}/report", WRITE, report),
        )

    # -- what a dialect says otherwise ---------------------------------------------------------

    def record(self, worker: Worker) -> object:
        """A worker as the API shows it."""
        raise NotImplementedError

    def detail(self, worker: Worker, sources: Sequence[SourceCondition], now: float) -> object:
        """The same with how it is at this moment."""
        raise NotImplementedError

    # -- the handlers --------------------------------------------------------------------------

    def ready(self) -> Reply:
        return self._ready(self._records.all(), ejected_workers(self.selector.catalog))

    def ready_in_brief(self) -> Reply:
        """Without a word on any worker."""
        return self._ready(UNSET, UNSET)

    def _ready(
        self, workers: JsonText | UnsetType, ejected: list[EjectedWorker] | UnsetType
    ) -> Reply:
        schedulable = self.selector.catalog.schedulable_count()
        ready = schedulable > 0 and not self._state.is_draining
        recovering = True if self._state.is_recovering else UNSET
        fault = UNSET if self._state.state_fault is None else self._state.state_fault
        body = Readiness(ready, schedulable, workers, recovering, ejected, fault)
        return Reply(200 if ready else 503, body)

    def register(self, body: Registration) -> JsonText | Reply:
        return self._shown(201, self.selector.upsert_worker(body.spec(), self._clock()))

    def patch(self, worker_id: int, body: Change) -> JsonText | Reply:
        worker = self.selector.patch_worker(worker_id, body.changes(), self._clock())
        return self._shown(200, worker)

    def _shown(self, status: int, worker: Worker) -> JsonText | Reply:
        """A worker as it stands now, and what is probably wrong with it."""
        record = self._records.one(worker)
        selector = self.selector
        listens = selector.settings.use_kv_events
        warnings = registration_warnings(
            worker, selector.catalog.places, self._sources, listens=listens
        )
        return Reply(status, record, warnings) if warnings else record

    def remove(self, worker_id: int) -> object:
        return self.record(self.selector.remove_worker(worker_id, self._clock()))

    def workers(self, query: Query) -> JsonText | list[object]:
        model_name, tenant_id = query.get("model_name"), query.get("tenant_id")
        if not wants_detail(query):
            return self._records.matching(model_name, tenant_id)
        now = self._clock()
        return [
            self.detail(each, self._sources.conditions(each.spec.worker_id, each.sources), now)
            for each in self.selector.catalog.matching(model_name, tenant_id)
        ]

    def report(self, worker_id: int, body: WorkerReport) -> Standing:
        ttft_s = None if body.ttft_ms is None else body.ttft_ms / 1000.0
        self.selector.health.report(
            worker_id, body.dp_rank, body.outcome, self._clock(), ttft_s, body.cached_tokens
        )
        return OK
