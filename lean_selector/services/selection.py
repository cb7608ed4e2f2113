"""The selection service: its route table and its handlers, nothing else.

Handlers translate: struct in, one call into the core, struct out. Rules live in `core`, the checks
that all routes share in `bodies`. API: the source document and spec selection.md.
"""

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import UNSET, UnsetType

from lean_selector.core.errors import SelectorError, Unavailable
from lean_selector.core.selection import inspection
from lean_selector.core.selection.parking import Parked
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.records import (
    Booked,
    OverlapScores,
    PartitionLoads,
    Placement,
    RankLoadRow,
    Selection,
    SelectionRequest,
)
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.settings import RouterOverride, Terms
from lean_selector.core.selection.terms import overridden
from lean_selector.core.selection.workers import WorkerRecord
from lean_selector.services.bodies import Query, reservation_id_param, worker_id_param
from lean_selector.services.gate import (
    Route,
    plain,
    with_body,
    with_param,
    with_param_and_body,
    with_query,
)
from lean_selector.services.peer_routes import OK, Plane, ReplicaHandlers
from lean_selector.services.replies import Answer, LaterReply, Reply
from lean_selector.services.service_state import ServiceState
from lean_selector.services.worker_records import WorkerRecords
from lean_selector.wire.answer_forms import JsonText
from lean_selector.wire.prompt import prompt_to_book, prompt_to_select
from lean_selector.wire.scalars import f32
from lean_selector.wire.selection import (
    ErrorBody,
    Ok,
    OutputBlockRequest,
    ProjectionRequest,
    Readiness,
    ReservationRequest,
    SelectAndReserveRequest,
    SelectRequest,
    WorkerPatch,
    WorkerRequest,
)

SHUTDOWN = "endpoint subscriber shutdown"  # the reference's words to requests that waited


class KvSources(Protocol):
    """Where the KV events come from."""

    def statuses(self, model_name: str | None, tenant_id: str | None) -> Sequence[object]: ...


class Timer(Protocol):
    """What is to happen later, and can be called off."""

    def cancel(self) -> None: ...


class SelectionService(ReplicaHandlers):
    """The handlers, and what they act on."""

    def __init__(
        self,
        selector: Selector,
        *,
        dump: Callable[[], Answer],
        sources: KvSources,
        state: ServiceState,
        plane: Plane | None = None,
        call_later: Callable[[float, Callable[[], None]], Timer] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`call_later` is needed only when waiting in the queue is limited."""
        super().__init__(plane)
        self.selector = selector
        self._records = WorkerRecords(selector.catalog)
        self._state = state
        self._dump = dump
        self._sources = sources
        self._clock = clock
        self._call_later = call_later
        self._default_terms: Terms = selector.terms

    def routes(self) -> tuple[Route, ...]:
        return (
            ("GET", "/health", plain(lambda: OK)),
            ("GET", "/ready", plain(self.ready)),
            ("POST", "/workers", with_body(WorkerRequest, self.register, 201)),
            ("GET", "/workers", with_query(self.workers)),
            (
                "PATCH",
                "/workers/{worker_id}",
                with_param_and_body(worker_id_param, WorkerPatch, self.patch),
            ),
            ("DELETE", "/workers/{worker_id}", with_param(worker_id_param, self.remove)),
            ("POST", "/select", with_body(SelectRequest, self.select)),
            (
                "POST",
                "/select_and_reserve",
                with_body(SelectAndReserveRequest, self.select_and_reserve),
            ),
            ("POST", "/reservations", with_body(ReservationRequest, self.reserve, 201)),
            (
                "DELETE",
                "/reservations/{reservation_id}",
                with_param(reservation_id_param, self.free),
            ),
            (
                "POST",
                "/reservations/{reservation_id}/prefill_complete",
                with_param(reservation_id_param, self.prefill_complete),
            ),
            (
                "POST",
                "/reservations/{reservation_id}/output_block",
                with_param_and_body(reservation_id_param, OutputBlockRequest, self.output_block),
            ),
            ("GET", "/loads", with_query(self.loads)),
            ("POST", "/potential_loads", with_body(ProjectionRequest, self.potential_loads)),
            ("POST", "/overlap_scores", with_body(ProjectionRequest, self.overlap_scores)),
            ("GET", "/dump", plain(self.dump)),
            ("GET", "/kv_sources", with_query(self.kv_sources)),
            *self.replica_routes(),
        )

    # -- workers -------------------------------------------------------------------------------

    def ready(self) -> Reply:
        schedulable = self.selector.catalog.schedulable_count()
        ready = schedulable > 0 and not self._state.is_draining
        recovering = True if self._state.is_recovering else UNSET
        body = Readiness(ready, schedulable, self._records.all(), recovering)
        return Reply(200 if ready else 503, body)

    def register(self, body: WorkerRequest) -> JsonText:
        return self._records.one(self.selector.upsert_worker(body.spec(), self._clock()))

    def patch(self, worker_id: int, body: WorkerPatch) -> JsonText:
        worker = self.selector.patch_worker(worker_id, body.changes(), self._clock())
        return self._records.one(worker)

    def remove(self, worker_id: int) -> WorkerRecord:
        return self.selector.remove_worker(worker_id, self._clock()).record()

    def workers(self, query: Query) -> JsonText:
        return self._records.matching(query.get("model_name"), query.get("tenant_id"))

    # -- selection -----------------------------------------------------------------------------

    def select(self, body: SelectRequest) -> Selection | LaterReply:
        return self._selected(body, None)

    def select_and_reserve(self, body: SelectAndReserveRequest) -> Selection | LaterReply:
        reservation_id = body.reservation_id
        return self._selected(body, str(uuid.uuid4()) if reservation_id is None else reservation_id)

    def _selected(self, body: SelectRequest, reservation_id: str | None) -> Selection | LaterReply:
        partition = self.selector.ready_partition(body.model_name, body.group())
        request = self._request(partition, body, books=reservation_id is not None)
        if reservation_id is not None:
            request.books = True
            request.reservation_id = reservation_id
        if not self.selector.parks:
            placement = self.selector.select_now(partition, request, self._clock())
            return _selection(partition, body.selection_id, reservation_id, placement)
        pending: LaterReply | None = None

        def on_answer(parked: Parked, outcome: Placement | SelectorError) -> None:
            assert pending is not None
            if isinstance(outcome, SelectorError):
                pending.answer(outcome.status, ErrorBody(outcome.message))
            else:
                selection = _selection(partition, body.selection_id, reservation_id, outcome)
                pending.answer(200, selection)

        outcome = self.selector.select(partition, request, self._clock(), on_answer)
        if not isinstance(outcome, Parked):
            return _selection(partition, body.selection_id, reservation_id, outcome)
        pending = LaterReply()
        pending.on_disconnect = lambda: self.selector.hung_up(partition, outcome, self._clock())
        self._limit_wait(partition, outcome, on_answer, pending)
        return pending

    def _limit_wait(
        self,
        partition: Partition,
        parked: Parked,
        on_answer: Callable[[Parked, Placement | SelectorError], None],
        pending: LaterReply,
    ) -> None:
        limit = self.selector.settings.queue_max_wait_s
        if limit is None:
            return
        assert self._call_later is not None

        def give_up() -> None:
            if partition.parked.leave(parked):
                on_answer(parked, Unavailable(f"no worker became free within {limit:g} seconds"))

        timer = self._call_later(limit, give_up)
        # Or the request, and its prompt, would be kept until the limit has passed.
        pending.observe(lambda _: timer.cancel(), timer.cancel)

    def _request(self, partition: Partition, body: SelectRequest, books: bool) -> SelectionRequest:
        # A booking reads all sequence hashes, so they are all checked before anything is done.
        prompt = prompt_to_select(body, partition.block_size, partition.is_eagle, whole=books)
        override = body.router_config_override
        request = SelectionRequest(
            prompt, self._default_terms if override is None else self._terms(override)
        )
        request.expected_output_tokens = body.expected_output_tokens
        if body.explain:
            request.explain()
        if body.pinned_worker is not None:
            request.pinned = body.pinned_worker.pinned()
        if body.allowed_worker_ids is not None:
            request.allowed_worker_ids = body.allowed()
        constraints = body.routing_constraints
        if not isinstance(constraints, UnsetType):
            request.required_taints = frozenset(constraints.required_taints)
            request.preferred_taints = {
                name: f32(weight) for name, weight in constraints.preferred_taints.items()
            }
        if body.priority_jump is not None:
            request.priority_jump = body.priority_jump
        if body.strict_priority is not None:
            request.strict_priority = body.strict_priority
        return request

    def _terms(self, override: RouterOverride | None) -> Terms:
        return (
            self._default_terms if override is None else overridden(self._default_terms, override)
        )

    # -- reservations --------------------------------------------------------------------------

    def reserve(self, body: ReservationRequest) -> Booked:
        partition = self.selector.ready_partition(body.model_name, body.group())
        prompt = prompt_to_book(body, partition.block_size, partition.is_eagle)
        return self.selector.reserve(
            partition,
            body.reservation_id,
            body.worker_id,
            body.dp_rank or 0,
            prompt,
            body.effective_prefill_tokens,
            self._clock(),
            body.expected_output_tokens,
            self._terms(body.router_config_override).track_prefill,
        )

    def prefill_complete(self, reservation_id: str) -> Ok:
        self.selector.prefill_complete(reservation_id, self._clock())
        return OK

    def output_block(self, reservation_id: str, body: OutputBlockRequest) -> Ok:
        self.selector.output_block(reservation_id, body.decay_fraction, self._clock())
        return OK

    def free(self, reservation_id: str) -> Ok:
        self.selector.free(reservation_id, self._clock())
        return OK

    # -- inspection ----------------------------------------------------------------------------

    def loads(self, query: Query) -> list[PartitionLoads]:
        model_name, tenant_id = query.get("model_name"), query.get("tenant_id")
        return inspection.loads(self.selector.catalog, model_name, tenant_id, self._clock())

    def potential_loads(self, body: ProjectionRequest) -> list[RankLoadRow]:
        partition = self.selector.ready_partition(body.model_name, body.group())
        prompt = prompt_to_select(body, partition.block_size, partition.is_eagle)
        track = self._terms(body.router_config_override).track_prefill
        return inspection.potential_loads(partition, prompt, track, self._clock())

    def overlap_scores(self, body: ProjectionRequest) -> OverlapScores:
        partition = self.selector.ready_partition(body.model_name, body.group())
        prompt = prompt_to_select(body, partition.block_size, partition.is_eagle)
        credit = self._terms(body.router_config_override).credit
        return inspection.overlap_scores(partition, prompt.local_hashes, credit)

    def dump(self) -> Answer:
        if self._state.is_recovering:
            # What a peer would recover of it is not all; peers that start together ask each other.
            raise Unavailable("start-up recovery is under way")
        return self._dump()

    def kv_sources(self, query: Query) -> Sequence[object]:
        return self._sources.statuses(query.get("model_name"), query.get("tenant_id"))


def _selection(
    partition: Partition,
    selection_id: str | None,
    reservation_id: str | None,
    placement: Placement,
) -> Selection:
    return Selection(
        UNSET if selection_id is None else selection_id,
        UNSET if reservation_id is None else reservation_id,
        partition.model_name,
        partition.tenant_id,
        placement.worker_id,
        placement.dp_rank,
        placement.endpoint,
        placement.block_size,
        placement.overlap,
        placement.effective_prefill_tokens,
        placement.explain,
    )
