"""The selection service: routes and handlers as in Dynamo's documents (`--api 1.3`).

A handler gets a struct, makes one call into the core, and returns a struct. The rules are in
`core`; `bodies` has the checks common to all routes. `selection_16` has what differs with `--api
1.6`; `worker_handlers` has the routes for workers. Spec: selection.md."""

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, Final, Protocol

from msgspec import UNSET, UnsetType

from lean_selector.api.access import ADMIN, READ, WRITE
from lean_selector.api.bodies import SCOPE_FIELDS, BadQuery, Query, wants_detail
from lean_selector.api.replies import Answer, CallSoon, Queued, SlicedAnswers
from lean_selector.api.routes import Route
from lean_selector.api.shared_handlers import OK, ReplicationApi
from lean_selector.api.worker_handlers import (
    DETAILED_FIELDS,
    KvSources,
    ServiceState,
    WorkerHandlers,
)
from lean_selector.core.errors import BadRequest, NotFound, Unavailable
from lean_selector.core.index.shapes import Watermark
from lean_selector.core.rank_bits import RankKey
from lean_selector.core.selection import inspection
from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.cost import base_terms, overridden
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.queue import Waiting
from lean_selector.core.selection.reservations import check_own_id
from lean_selector.core.selection.router_settings import CostTerms, RouterOverride
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import (
    EXPLANATION,
    LOAD,
    NEVER,
    OUTLOOK,
    SELECT_AND_RESERVE,
    Booked,
    CachedSelection,
    OverlapScores,
    PartitionKey,
    PartitionLoads,
    Placement,
    PrefillChoice,
    RankLoadRow,
    RankOutlook,
    Selection,
    SelectionRequest,
    WorkerLoad,
    WorkerRecord,
)
from lean_selector.wire.prompt_forms import prompt_to_book, prompt_to_select
from lean_selector.wire.scalars import DEFAULT_GROUP, allowed_workers
from lean_selector.wire.selection_bodies import (
    Ending,
    KvSource,
    Ok,
    OutputBlockRequest,
    ProjectionRequest,
    PromptFields,
    ReservationFields,
    ReservationRequest,
    SelectAndReserveRequest,
    SelectFields,
    SelectRequest,
    ThresholdRequest,
    ThresholdRow,
    Thresholds,
    WorkerPatch,
    WorkerRequest,
)

_SMALL_BLOCKS = 1000  # encoding takes up to a millisecond


class Watermarks(Protocol):
    """Tells which batches of KV events are in the blocks of ranks; `KvSubscriptions` is one."""

    def watermarks(self, partition: Partition) -> dict[RankKey, Watermark]: ...

    def watermark(self, partition: Partition, rank: RankKey) -> Watermark | None: ...


class DumpAnswers:
    """Makes the answers of GET /dump. Used only on the event loop's thread."""

    def __init__(
        self,
        catalog: Catalog,
        sources: Watermarks,
        call_soon: CallSoon,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._catalog = catalog
        self._sources = sources
        self._sliced = [
            SlicedAnswers("a dump", partial(self.parts, as_1_6), call_soon, clock=clock)
            for as_1_6 in (False, True)
        ]

    def answer(self, as_1_6: bool = False) -> Answer:
        """Return the dump; `as_1_6` omits the fields that Dynamo 1.6 lacks."""
        blocks = sum(
            partition.index.total_blocks for partition in self._catalog.partitions.values()
        )
        return self._sliced[as_1_6].answer(at_once=blocks <= _SMALL_BLOCKS)

    def parts(self, as_1_6: bool) -> Iterator[bytes]:
        from lean_selector.wire.dump import encode_dump
        from lean_selector.wire.dump_shapes import PartitionDump

        dumps: list[PartitionDump] = []
        for key, partition in sorted(self._catalog.partitions.items()):
            marks, index = self._sources.watermarks(partition), partition.index
            if marks or partition.established or not index.is_empty:
                mark = partial(self._sources.watermark, partition)
                runs = index.dump(watermarks=marks, watermark=mark)
                dumps.append(PartitionDump(*key, index.block_size, runs, marks, index.learned))
        return encode_dump(dumps, as_1_6=as_1_6)


_THRESHOLD_FIELDS: Final = frozenset({"model", "tenant_id", "routing_group"})
SHUTDOWN = "endpoint subscriber shutdown"  # the reference's text for queued requests

# Makes the answer for a placement.
Shape = Callable[[Placement], object]


_QUEUED_BYTES: Final = 1024  # memory of a queued request besides its lists
_MATCH_BYTES: Final = 800  # memory of one match, and of its set of ranks


def _held_by(request: SelectionRequest) -> int:
    """Return about how many bytes of memory a queued request takes."""
    prompt, allowed = request.prompt, request.allowed_worker_ids
    hashes = len(prompt.local_hashes) + len(prompt.sequence_hashes())
    ids = 0 if allowed is None else 64 * len(allowed)
    return _QUEUED_BYTES + hashes + ids + _MATCH_BYTES * len(request.matches)


class SelectionService(WorkerHandlers):
    """The handlers of the API of Dynamo 1.3 (`--api 1.3`), and their state."""

    def __init__(
        self,
        selector: Selector,
        *,
        dump: Callable[[bool], Answer],
        sources: KvSources,
        state: ServiceState,
        replication: ReplicationApi | None = None,
        clock: Callable[[], float] = time.monotonic,
        books_at: str = SELECT_AND_RESERVE,
    ) -> None:
        """`dump` is told whether to omit what Dynamo 1.6 lacks. If `select_and_reserve` sheds a
        request, metrics count it for route `books_at`."""
        super().__init__(selector, sources, state, replication, clock)
        self._dump = dump
        self._books_at = books_at
        self._base_terms = base_terms(selector.settings)

    def routes(self) -> tuple[Route, ...]:
        """Return all routes of the selector."""
        of = self._of
        return (
            Route("POST", "/workers", ADMIN, "workers",
                "Register a worker, or replace its record", self.register,
                body=WorkerRequest, gives=WorkerRecord, status=201, warns=True),
            Route("PATCH", "/workers/{worker_id}", ADMIN, "workers",
                "Change fields of a worker; absent or null fields stay",
                self.patch, body=WorkerPatch, gives=WorkerRecord, warns=True),
            Route("POST", "/select", WRITE, "selections",
                "Choose a rank for a prompt; reserves nothing",
                self.select, body=SelectRequest, gives=of(Selection), sheds=True),
            Route("POST", "/select_and_reserve", WRITE, "selections",
                "Choose a rank for a prompt, and reserve it",
                self.select_and_reserve, body=of(SelectAndReserveRequest), gives=of(Selection),
                sheds=True),
            Route("POST", "/reservations", WRITE, "reservations",
                "Reserve a given rank, or the rank of an earlier `/select`",
                self.reserve, body=of(ReservationRequest), gives=of(Booked), status=201),
            Route("GET", "/loads", READ, "loads",
                "The load of each rank; `detail` adds the engine's own report",
                self.loads, query=DETAILED_FIELDS, gives=of(list[PartitionLoads])),
            Route("POST", "/potential_loads", READ, "loads",
                "The load of each rank with this prompt on it",
                self.potential_loads, body=ProjectionRequest, gives=list[RankLoadRow]),
            Route("POST", "/overlap_scores", READ, "index",
                "Cached blocks of a prompt on each rank",
                self.overlap_scores, body=ProjectionRequest, gives=OverlapScores),
            Route("GET", "/dump", READ, "index", "The index, for --indexer-peers",
                self.dump_of, query=self.dump_query, gives=dict),
            Route("POST", "/busy_threshold", ADMIN, "load shedding",
                "Set a model's busy thresholds; absent or null fields stay",
                self.change_threshold, body=ThresholdRequest, gives=ThresholdRow),
            Route("GET", "/busy_threshold", READ, "load shedding", "The thresholds in force",
                self.list_thresholds, gives=Thresholds),
            Route("DELETE", "/busy_threshold", ADMIN, "load shedding",
                "Disable a model's thresholds",
                self.switch_threshold_off, query=_THRESHOLD_FIELDS, gives=ThresholdRow),
            *self.worker_routes(),
            Route("DELETE", "/reservations/{reservation_id}", WRITE, "reservations",
                "Free a reservation, with the outcome of its request",
                self.free, body=Ending, is_body_optional=True),
            Route("POST", "/reservations/{reservation_id}/prefill_complete", WRITE, "reservations",
                "Report the first token of a request",
                self.prefill_complete),
            Route("POST", "/reservations/{reservation_id}/output_block", WRITE, "reservations",
                "Report one more output block of a request",
                self.output_block, body=OutputBlockRequest),
            Route("GET", "/kv_sources", READ, "index",
                "State of each KV event source: last batch, gaps, lost and skipped events",
                self.kv_sources, query=SCOPE_FIELDS, gives=list[KvSource]),
            *self.replica_routes(),
            Route("GET", "/replica_sync/sessions", READ, "replicas",
                "Session bindings, for a replica that catches up",
                lambda: self._switched_on().session_list(), gives=dict),
        )  # fmt: skip

    # -- differences of the 1.6 dialect ------------------------------------------------------------

    # What a dialect has in place of types of bodies and answers.
    replaces: ClassVar[dict[Any, Any]] = {}
    dump_query: ClassVar[frozenset[str]] = frozenset()
    adds_to_select: ClassVar[int] = 0  # what each answer of /select needs

    def _of(self, kind: Any) -> Any:
        return self.replaces.get(kind, kind)

    def dump_of(self, query: Query | None = None) -> Answer:
        return self.dump()

    def prompt(
        self, body: PromptFields, partition: Partition, override: RouterOverride | None
    ) -> Prompt:
        """Return the prompt in a request's body, hashed with the block size of the partition."""
        return prompt_to_select(body, partition.block_size, partition.is_eagle)

    def prompt_to_book(self, body: ReservationFields, partition: Partition) -> Prompt:
        size, is_eagle = partition.block_size, partition.is_eagle
        return prompt_to_book(body, size, is_eagle, is_learned=partition.routed is not None)

    # -- selection ---------------------------------------------------------------------------------

    def select(self, body: SelectRequest) -> object:
        partition = self.selector.catalog.ready_partition(body.model_name, body.group())
        request = self._request(partition, body)
        selection_id = body.selection_id
        request.adds |= self.adds_to_select
        if body.advisory:
            request.adds |= OUTLOOK | LOAD
            found: Placement | Waiting = self.selector.select_now(partition, request, self._clock())
        else:
            found = self.selector.select(partition, request, self._clock())
        if isinstance(found, Waiting):
            return self._queued(
                found, lambda later: self._selected(partition, request, selection_id, later)
            )
        return self._selected(partition, request, selection_id, found)

    def _selected(
        self,
        partition: Partition,
        request: SelectionRequest,
        selection_id: str | None,
        placement: Placement,
    ) -> object:
        if selection_id is not None:
            self._remember(partition, selection_id, request, placement)
        return self._answer(partition, request, selection_id, placement)

    def select_and_reserve(
        self, body: SelectAndReserveRequest, deadline: float | None = None
    ) -> object:
        partition = self.selector.catalog.ready_partition(body.model_name, body.group())
        request = self._request(partition, body)
        selection_id, reservation_id = body.selection_id, body.reservation_id
        if reservation_id is None:
            reservation_id = str(uuid.uuid4())
        else:
            check_own_id("reservation_id", reservation_id, has_leg=request.asks_pair)
        request.books = True
        request.asked_at = self._books_at
        request.deadline = deadline
        request.reservation_id = reservation_id
        found = self.selector.select(partition, request, self._clock())
        if isinstance(found, Waiting):
            return self._queued(
                found, lambda later: self._answer(partition, request, selection_id, later)
            )
        return self._answer(partition, request, selection_id, found)

    def _answer(
        self,
        partition: Partition,
        request: SelectionRequest,
        selection_id: str | None,
        placement: Placement,
    ) -> object:
        return Selection(
            UNSET if selection_id is None else selection_id,
            request.reservation_id if request.books else UNSET,
            partition.model_name,
            partition.tenant_id,
            placement.worker_id,
            placement.dp_rank,
            placement.endpoint,
            placement.block_size,
            placement.overlap,
            placement.effective_prefill_tokens,
            self._worker_load(placement) if request.adds & LOAD else UNSET,
            placement.explain,
            placement.prefill,
            placement.disaggregation,
        )

    # -- requests that choose ----------------------------------------------------------------------

    def _queued(self, waiting: Waiting, shape: Shape) -> Queued:
        """Return the answer of a request that waits. `shape` is called after the choice."""
        return Queued(waiting, shape, self._clock, _held_by(waiting.request))

    def _request(self, partition: Partition, body: SelectFields) -> SelectionRequest:
        session_id = None
        if partition.sessions is not None:
            session_id = body.session()
            if session_id is not None:
                if body.pinned_worker is not None or body.affinity_target is not None:
                    session_id = None  # the session has no effect on these
                else:
                    partition.sessions.check_id(session_id)
        override = body.router_config_override
        terms = self._terms(partition.model_name, override)
        request = SelectionRequest(self.prompt(body, partition, override), terms)
        request.expected_output_tokens = body.expected_output_tokens
        if body.explain:
            request.adds = EXPLANATION
        if body.affinity_target is not None:
            request.target = body.affinity_target
        if body.pinned_worker is not None:
            request.pinned = body.pinned_worker
        if session_id is not None:
            request.session_id = session_id
        if body.allowed_worker_ids is not None:
            request.allowed_worker_ids = allowed_workers(body.allowed_worker_ids)
        constraints = body.routing_constraints
        if not isinstance(constraints, UnsetType):
            request.required_taints = constraints.required_taints
            request.preferred_taints = constraints.preferred_taints
        if body.priority_jump is not None:
            request.priority_jump = body.priority_jump
        if body.strict_priority is not None:
            request.strict_priority = body.strict_priority
        if body.disaggregate is not None:
            request.disaggregate = body.disaggregate
        if body.prefill_allowed_worker_ids is not None:
            ids = body.prefill_allowed_worker_ids
            request.prefill_allowed_worker_ids = allowed_workers(ids)
        if body.fairness_id is not None:
            request.fairness_id = body.fairness_id
        return request

    def _terms(self, model_name: str, override: RouterOverride | None) -> CostTerms:
        if override is None:  # as `Selector.terms_of`, without a call
            return self.selector.model_terms.get(model_name, self.selector.terms)
        return overridden(self._base_terms, override, self.selector.settings.policy_of(model_name))

    def _worker_load(self, placement: Placement) -> WorkerLoad:
        outlook = outlook_of(placement)
        threshold, capacity = (
            self.selector.settings.prefill_busy_threshold,
            outlook.prefill_token_capacity,
        )
        tokens, blocks = outlook.active_prefill_tokens, outlook.total_kv_blocks
        return WorkerLoad(
            tokens,
            capacity,
            UNSET if blocks is None else blocks,
            UNSET if threshold is None else tokens > threshold * capacity,
        )

    # -- selections that are booked later ----------------------------------------------------------

    def _remember(
        self,
        partition: Partition,
        selection_id: str,
        request: SelectionRequest,
        placement: Placement,
    ) -> None:
        """Caches the choice of `/select`, for a later reservation by `selection_id`."""
        leg, placed = None, placement.prefill
        if not isinstance(placed, UnsetType):
            leg = PrefillChoice(placed.worker_id, placed.dp_rank, placed.effective_prefill_tokens)
        cached = CachedSelection(
            placement.worker_id,
            placement.dp_rank,
            request.prompt.to_book(keeps_blocks=partition.routed is not None),
            placement.effective_prefill_tokens,
            request.expected_output_tokens,
            request.terms.track_prefill and leg is None,
            request.session_id,
            leg,
        )
        key = partition.model_name, partition.tenant_id
        self.selector.selections.put(key, selection_id, cached, self._clock())

    def _replayed(self, key: PartitionKey, selection_id: str, reservation_id: str) -> Booked:
        """Reserves the rank that an earlier `/select` chose. If this fails, the choice stays
        cached, except if the request's session is now bound to another rank."""
        selections, now = self.selector.selections, self._clock()
        cached = selections.get(key, selection_id, now)
        if cached is None:
            where = self.selector.settings.dialect.scope(*key)
            raise NotFound(
                f"no pending selection {selection_id} for {where} "
                "(expired, already used, or never selected)"
            )
        check_own_id("the reservation's id", reservation_id, has_leg=cached.prefill is not None)
        partition = self.selector.catalog.ready_partition(*key)
        try:
            booked = self.selector.reservations.replay(partition, cached, reservation_id, now)
        except BadRequest:  # its session is bound elsewhere
            selections.use_up(key, selection_id)
            raise
        selections.use_up(key, selection_id)
        return booked

    # -- reservations ------------------------------------------------------------------------------

    def reserve(self, body: ReservationRequest) -> object:
        key, selection_id = (body.model_name, body.group()), body.selection_id
        worker_id, reservation_id = body.worker_id, body.reservation_id
        if selection_id is not None:
            if not isinstance(worker_id, int):
                if isinstance(reservation_id, UnsetType):
                    reservation_id = selection_id
                return self._replayed(key, selection_id, reservation_id)
            self.selector.selections.drop(key, selection_id)
        assert isinstance(worker_id, int)  # the body was checked
        assert isinstance(reservation_id, str)
        check_own_id("reservation_id", reservation_id, has_leg=body.prefill is not None)
        return self._booked(key, body, worker_id, reservation_id)

    def _booked(
        self,
        key: PartitionKey,
        body: ReservationFields,
        worker_id: int,
        reservation_id: str,
        *,
        books_prefill: bool = True,
    ) -> Booked:
        """Reserves the rank that the request names."""
        partition = self.selector.catalog.ready_partition(*key)
        return self.selector.reservations.reserve(
            partition,
            reservation_id,
            worker_id,
            body.dp_rank or 0,
            self.prompt_to_book(body, partition),
            body.effective_prefill_tokens,
            self._clock(),
            body.expected_output_tokens,
            self._terms(partition.model_name, body.router_config_override).track_prefill,
            books_prefill=books_prefill,
            leg=body.prefill,
        )

    def prefill_complete(self, reservation_id: str) -> Ok:
        self.selector.reservations.prefill_complete(reservation_id, self._clock())
        return OK

    def output_block(self, reservation_id: str, body: OutputBlockRequest) -> Ok:
        self.selector.reservations.output_block(reservation_id, body.decay_fraction, self._clock())
        return OK

    def free(self, reservation_id: str, ending: Ending | None) -> Ok:
        now = self._clock()
        if ending is None:
            self.selector.reservations.free(reservation_id, now)
        else:
            self.selector.reservations.end(
                reservation_id,
                ending.outcome,
                ending.cached_tokens,
                now,
                prefill_outcome=ending.prefill_outcome,
            )
        return OK

    # -- inspection --------------------------------------------------------------------------------

    def loads(self, query: Query) -> Any:
        model_name, tenant_id = query.get("model_name"), query.get("tenant_id")
        catalog = self.selector.catalog
        return inspection.loads(catalog, model_name, tenant_id, detail=wants_detail(query))

    def potential_loads(self, body: ProjectionRequest) -> list[RankLoadRow]:
        partition = self.selector.catalog.ready_partition(body.model_name, body.group())
        override = body.router_config_override
        prompt = self.prompt(body, partition, override)
        terms = self._terms(partition.model_name, override)
        in_pairs = (body.disaggregate or NEVER) != NEVER
        return inspection.potential_loads(partition, prompt, terms, in_pairs=in_pairs)

    def overlap_scores(self, body: ProjectionRequest) -> Any:
        partition = self.selector.catalog.ready_partition(body.model_name, body.group())
        override = body.router_config_override
        prompt = self.prompt(body, partition, override)
        terms = self._terms(partition.model_name, override)
        return inspection.overlap_scores(partition, prompt.local_hashes, terms)

    def dump(self, *, as_1_6: bool = False) -> Answer:
        if self._state.is_recovering:
            # A peer would get an incomplete index: peers that start together query each other.
            raise Unavailable("start-up recovery is under way")
        return self._dump(as_1_6)

    def kv_sources(self, query: Query) -> Sequence[object]:
        return self._sources.statuses(query.get("model_name"), query.get("tenant_id"))

    # -- busy thresholds ---------------------------------------------------------------------------
    # Shapes as in the request-rejection document and slot_tracker.md 4.2; DELETE is ours.

    def list_thresholds(self) -> Thresholds:
        return Thresholds([ThresholdRow.of(*each) for each in self.selector.thresholds()])

    def change_threshold(self, body: ThresholdRequest) -> ThresholdRow:
        scope = body.scope()
        now = self._clock()
        return ThresholdRow.of(scope, self.selector.change_threshold(scope, body.given(), now))

    def switch_threshold_off(self, query: Query) -> ThresholdRow:
        if "model" not in query:
            raise BadQuery("missing field `model`")
        scope = query["model"], query.get("tenant_id") or DEFAULT_GROUP
        return ThresholdRow.of(scope, self.selector.switch_threshold_off(scope, self._clock()))


def outlook_of(placement: Placement) -> RankOutlook:
    assert not isinstance(placement.outlook, UnsetType)
    return placement.outlook
