"""Request bodies of the selection service for `--api 1.3`, and some of its answers.

Unknown fields are ignored. For optional fields, `null` counts as absent. In the spec selection.md,
section 1.3 describes the bodies, and section 1.4 the forms of a prompt."""

from typing import TYPE_CHECKING, Annotated, Final, Literal, Self

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from lean_selector.core.load.shapes import BusyThreshold
from lean_selector.core.numbers import MAX_RANKS, U32, Finite, NonNegative, check_u64
from lean_selector.core.selection.router_settings import RouterOverride
from lean_selector.core.selection.shapes import (
    BOTH,
    MOST_FAIRNESS_ID,
    AffinityTarget,
    Disaggregate,
    Disaggregation,
    PinnedWorker,
    PrefillChoice,
    WorkerRecord,
    WorkerRole,
    WorkerSpec,
)
from lean_selector.wire.scalars import (
    ABSENT,
    DEFAULT_GROUP,
    HashList,
    Id,
    JsonText,
    WorkerIds,
    group_of,
)

if TYPE_CHECKING:
    _HashListField = HashList
    _Tokens = list[int] | bytes  # bytes: the tokens of a long JSON body, packed to 4 bytes each
else:
    _HashListField = Raw  # as in a long JSON body; other bodies have their own types
    _Tokens = list[U32]


class Scoped(msgspec.Struct, kw_only=True):
    """The partition (model and tenant) that a request body names."""

    model_name: str = DEFAULT_GROUP
    tenant_id: str | UnsetType = UNSET
    routing_group: str | UnsetType = UNSET

    def group(self) -> str:
        return group_of(self.tenant_id, self.routing_group)


class MmObject(msgspec.Struct, frozen=True):
    """An image, or another multimodal object, in a prompt."""

    mm_hash: NonNegative
    offsets: list[Annotated[list[NonNegative], Meta(min_length=2, max_length=2)]]

    def __post_init__(self) -> None:
        check_u64("mm_hash", self.mm_hash)
        for offset in self.offsets:
            check_u64("offsets[...]", max(offset))


class BlockMmInfo(msgspec.Struct, frozen=True):
    """The multimodal objects in one block."""

    mm_objects: list[MmObject]


class MmRoutingInfo(msgspec.Struct, frozen=True):
    """A prompt with multimodal objects: its tokens, and the objects in each block."""

    routing_token_ids: list[U32]
    block_mm_infos: list[BlockMmInfo | None] = []


class PromptFields(Scoped, kw_only=True):
    """The fields that give a request's prompt, in bodies of five routes. `null` means absent."""

    token_ids: _Tokens | None = None
    mm_routing_info: MmRoutingInfo | None = None
    block_mm_infos: list[BlockMmInfo | None] | None = None
    block_hashes: _HashListField = ABSENT
    sequence_hashes: _HashListField = ABSENT
    isl_tokens: NonNegative | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    is_eagle: bool | None = None


# -- sources of KV events (D22) --------------------------------------------------------------------


class SourceCondition(msgspec.Struct, frozen=True):
    """The state of one rank's source of KV events, in GET /workers?detail=true."""

    dp_rank: int
    state: str
    state_age_s: float
    problem: str | None


class SourceStatus(msgspec.Struct, frozen=True):
    """The state of one rank's source of KV events, as in `GET /kv_sources`."""

    worker_id: int
    dp_rank: int
    endpoint: str
    replay_endpoint: str | None
    state: str
    state_age_s: float
    problem: str | None
    connection: str
    last_seq: int | None
    lag_batches: int
    lost_batches: int
    gaps: int
    replayed_batches: int
    restarts: int
    backlog_bytes: int
    dropped_batches: int
    messages: int
    skipped: dict[str, int]
    last_message_age_s: float | None
    last_error: str | None


class KvSource(SourceStatus, frozen=True, kw_only=True):
    """A rank's source of KV events in the answer of GET /kv_sources, with its partition."""

    model_name: str
    tenant_id: str
    index_accuracy: float | None = None


# -- outcomes and health of workers ----------------------------------------------------------------

Outcome = Literal["refused", "failed", "ok"]
TokenCount = Annotated[int, Meta(ge=0, le=2**53)]


class WorkerReport(msgspec.Struct, kw_only=True):
    """POST /workers/{worker_id}/report: how a request ended. Without `dp_rank`: for all ranks."""

    outcome: Outcome
    dp_rank: U32 | None = None
    ttft_ms: Annotated[float, Meta(ge=0.0, le=86_400_000.0)] | None = None
    cached_tokens: TokenCount | None = None


class Ending(msgspec.Struct, kw_only=True):
    """The optional body of DELETE /reservations/{reservation_id}: how the request ended."""

    outcome: Outcome | None = None
    cached_tokens: TokenCount | None = None
    prefill_outcome: Outcome | None = None


class RankHealthRow(msgspec.Struct, frozen=True):
    """The health of a rank that had failures or ejections."""

    dp_rank: int
    state: str
    reason: str | None
    since_s: float | None
    returns_in_s: float | None
    failures: int
    failed_polls: int
    ejections: int


class WorkerHealthDetail(msgspec.Struct, frozen=True):
    """A worker's health: the worst state of its ranks, and the ranks with failures or ejections."""

    state: str
    ranks: list[RankHealthRow]


class WorkerDetail(WorkerRecord, frozen=True, kw_only=True):
    """A worker in GET /workers?detail=true: registration, health, and sources of KV events."""

    health: WorkerHealthDetail
    kv_sources: list[SourceCondition]
    uses_kv_events: bool
    routed_ttl_secs: float


class EjectedWorker(msgspec.Struct, frozen=True):
    """A worker with ejected ranks, in GET /ready."""

    worker_id: int
    dp_ranks: list[int]
    reason: str


# -- requests --------------------------------------------------------------------------------------

# Ranges that /openapi.json shows. The core checks them, with the words of the reference.
NotNegative = Annotated[float, Meta(extra_json_schema={"minimum": 0})]
UpToOne = Annotated[float, Meta(extra_json_schema={"minimum": 0, "maximum": 1})]
# msgspec describes no keys of a map by rank.
_RANK_KEYS: Final = (
    "^(0|[1-9][0-9]{0,8}|[1-3][0-9]{9}|4[01][0-9]{8}|42[0-8][0-9]{7}|429[0-3][0-9]{6}"
    "|4294[0-8][0-9]{5}|42949[0-5][0-9]{4}|429496[0-6][0-9]{3}|4294967[01][0-9]{2}"
    "|42949672[0-8][0-9]|429496729[0-5])$"
)
ByRank = Annotated[
    dict[U32, str], Meta(extra_json_schema={"propertyNames": {"pattern": _RANK_KEYS}})
]
Enforcement = Literal["required", "preferred"]


# Fields that earlier releases read, and what became of them. They are accepted and ignored.
DROPPED_FIELDS: Final = {
    "load_endpoint": "field load_endpoint is ignored: load reports of engines are no longer read",
}


class WorkerFields(msgspec.Struct, kw_only=True):
    """The fields that POST /workers and PATCH /workers/{worker_id} share."""

    endpoint: str | None = None
    kv_events_endpoint: str | None = None
    replay_endpoint: str | None = None
    block_size: U32 | None = None
    data_parallel_start_rank: U32 | None = None
    data_parallel_size: U32 | None = None
    max_num_batched_tokens: NonNegative | None = None
    total_kv_blocks: NonNegative | None = None
    stable_routing_id: str | None = None
    is_eagle: bool | None = None
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: Enforcement | None = None
    kv_transfer_preferred_weight: Finite | None = None
    router_hint_worker_type: str | None = None
    kv_event_source_mode: str | None = None
    worker_role: WorkerRole | None = None
    disaggregation: Disaggregation | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "total_kv_blocks"):
            value = getattr(self, name)
            if value is not None:
                check_u64(name, value)


class WorkerRequest(WorkerFields, kw_only=True):
    """The body of POST /workers. Hints, and so the fields for them, are only in `--api 1.6`."""

    worker_id: NonNegative
    model_name: str = DEFAULT_GROUP
    tenant_id: str | UnsetType = UNSET
    routing_group: str | UnsetType = UNSET
    kv_events_endpoints: ByRank = {}
    replay_endpoints: ByRank = {}
    router_hint_source_control_endpoints: ByRank = {}
    taints: frozenset[str] = frozenset()
    topology_domains: dict[str, str] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_u64("worker_id", self.worker_id)

    def spec(self) -> WorkerSpec:
        fields = msgspec.structs.asdict(self)
        fields["tenant_id"] = group_of(self.tenant_id, fields.pop("routing_group"))
        fields["worker_role"] = self.worker_role or BOTH
        return WorkerSpec(**fields)


class WorkerPatch(WorkerFields, kw_only=True):
    """The body of PATCH /workers/{worker_id}. A field overwrites the old value if it is present and
    not null."""

    lifecycle: str | None = None
    kv_events_endpoints: ByRank | None = None
    replay_endpoints: ByRank | None = None
    router_hint_source_control_endpoints: ByRank | None = None
    taints: frozenset[str] | None = None
    topology_domains: dict[str, str] | None = None

    def changes(self) -> dict[str, object]:
        fields = msgspec.structs.asdict(self)
        return {name: value for name, value in fields.items() if value is not None}


class RoutingConstraints(msgspec.Struct):
    """The taints that a worker must or should have."""

    required_taints: Annotated[frozenset[str], Meta(max_length=MAX_RANKS)] = frozenset()
    preferred_taints: Annotated[dict[str, Finite], Meta(max_length=MAX_RANKS)] = {}


class SelectionSessionContext(msgspec.Struct):
    """The session of a request, as agents send it. Only `session_id` has an effect."""

    session_id: str
    parent_session_id: str | None = None
    session_final: bool | None = None
    input_trigger: Literal["user_message", "tool_result", "other"] | None = None
    agent_headers: dict[str, list[str]] | None = None


class SelectFields(PromptFields, kw_only=True):
    """The fields that the bodies of POST /select and /select_and_reserve share."""

    selection_id: Id | None = None
    explain: bool | None = None  # whether the answer should contain the figures behind the choice
    router_config_override: RouterOverride | None = None
    expected_output_tokens: U32 | None = None
    priority_jump: Finite | None = None
    strict_priority: U32 | None = None
    fairness_id: Annotated[str, Meta(max_length=MOST_FAIRNESS_ID)] | None = None
    session_id: str | None = None
    session_context: SelectionSessionContext | None = None
    affinity_target: AffinityTarget | None = None
    pinned_worker: PinnedWorker | None = None
    allowed_worker_ids: WorkerIds | None = None
    routing_constraints: RoutingConstraints | UnsetType = UNSET
    disaggregate: Disaggregate | None = None
    prefill_allowed_worker_ids: WorkerIds | None = None

    def session(self) -> str | None:
        """Return the session id. `session_context` takes precedence over `session_id`."""
        context = self.session_context
        return self.session_id if context is None else context.session_id


class SelectRequest(SelectFields, kw_only=True):
    """POST /select. An `advisory` request never queues; its answer has the chosen rank's load."""

    advisory: bool = False


class SelectAndReserveRequest(SelectFields, kw_only=True):
    """The body of POST /select_and_reserve."""

    reservation_id: Id | None = None


class ReservationFields(PromptFields, kw_only=True):
    """The fields of POST /reservations that `--api 1.3` and `--api 1.6` share."""

    dp_rank: U32 | None = None
    router_config_override: RouterOverride | None = None
    expected_output_tokens: U32 | None = None
    effective_prefill_tokens: NonNegative | None = None
    prefill: PrefillChoice | None = None

    def __post_init__(self) -> None:
        if self.effective_prefill_tokens is not None:
            check_u64("effective_prefill_tokens", self.effective_prefill_tokens)


class ReservationRequest(ReservationFields, kw_only=True):
    """POST /reservations. Reserves a rank of the given worker. Without `worker_id`, reserves what
    /select chose for `selection_id`, and `reservation_id` defaults to `selection_id`."""

    reservation_id: Id | UnsetType = UNSET
    selection_id: Id | None = None
    worker_id: NonNegative | UnsetType | None = UNSET

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.selection_id is None or isinstance(self.worker_id, int):
            for name in ("reservation_id", "worker_id"):
                if getattr(self, name) is UNSET:
                    raise msgspec.ValidationError(f"Object missing required field `{name}`")
            if not isinstance(self.worker_id, int):
                raise msgspec.ValidationError("Expected `int`, got `null` - at `$.worker_id`")
            check_u64("worker_id", self.worker_id)


class ProjectionRequest(PromptFields, kw_only=True):
    """The body of POST /potential_loads and /overlap_scores."""

    router_config_override: RouterOverride | None = None
    disaggregate: Disaggregate | None = None


class OutputBlockRequest(msgspec.Struct):
    """The body of POST /reservations/{reservation_id}/output_block."""

    decay_fraction: UpToOne | None = None


class Ok(msgspec.Struct, frozen=True):
    """The answer to a request that succeeded."""

    status: str = "ok"


class ErrorBody(msgspec.Struct, frozen=True):
    """The body of any error, except those in OpenAI's format."""

    error: str


class Readiness(msgspec.Struct, frozen=True):
    """The answer of GET /ready."""

    ready: bool
    schedulable_workers: int
    # A list of WorkerRecord. Absent if tokens are enabled and the client sent none.
    workers: JsonText | UnsetType = UNSET
    recovering: bool | UnsetType = UNSET
    ejected: list[EjectedWorker] | UnsetType = UNSET
    state_fault: str | UnsetType = UNSET
    missing_roles: list[str] | UnsetType = UNSET


# -- ids and errors --------------------------------------------------------------------------------


class BodyIds(msgspec.Struct):
    """The ids in a request or answer, for the access log."""

    request_id: str | UnsetType | None = UNSET
    selection_id: str | UnsetType | None = UNSET
    reservation_id: str | UnsetType | None = UNSET


class OpenAiError(msgspec.Struct, frozen=True):
    """An error in OpenAI's format. `param` is always null; `message` names a wrong field."""

    message: str
    type: str
    param: None
    code: str | None


class OpenAiErrorBody(msgspec.Struct, frozen=True):
    """The body of an error that gateways may pass on to clients of OpenAI's API."""

    error: OpenAiError

    @classmethod
    def encoded(cls, status: int, message: str, code: str | None = None) -> bytes:
        """Return the body of an error: `{"error": {"message", "type", "param", "code"}}`. `code` is
        a machine-readable reason, such as `model_not_found`."""
        if status == 429:
            kind = "rate_limit_error"
        else:
            kind = "invalid_request_error" if status < 500 else "server_error"
        return msgspec.json.encode(cls(OpenAiError(message, kind, None, code)))


# -- busy thresholds, and the answer to a shed request ---------------------------------------------


class ThresholdRequest(msgspec.Struct, kw_only=True):
    """POST /busy_threshold. A field that is absent or null stays unchanged."""

    model: str
    tenant_id: str | UnsetType = UNSET
    routing_group: str | UnsetType = UNSET
    active_decode_blocks_threshold: UpToOne | None = None
    active_prefill_tokens_threshold: NonNegative | None = None
    active_prefill_tokens_threshold_frac: NotNegative | None = None

    def __post_init__(self) -> None:
        if self.active_prefill_tokens_threshold is not None:
            check_u64("active_prefill_tokens_threshold", self.active_prefill_tokens_threshold)

    def scope(self) -> tuple[str, str]:
        return self.model, group_of(self.tenant_id, self.routing_group)

    def given(self) -> BusyThreshold:
        return BusyThreshold(
            self.active_decode_blocks_threshold,
            self.active_prefill_tokens_threshold,
            self.active_prefill_tokens_threshold_frac,
        )


class ThresholdRow(msgspec.Struct, frozen=True, kw_only=True):
    """The thresholds in force for a model. A threshold that is null is disabled."""

    model: str
    tenant_id: str | UnsetType
    active_decode_blocks_threshold: float | None
    active_prefill_tokens_threshold: int | None
    active_prefill_tokens_threshold_frac: float | UnsetType

    @classmethod
    def of(cls, scope: tuple[str, str], threshold: BusyThreshold) -> Self:
        model_name, tenant_id = scope
        frac = threshold.active_prefill_tokens_frac
        return cls(
            model=model_name,
            tenant_id=UNSET if tenant_id == DEFAULT_GROUP else tenant_id,
            active_decode_blocks_threshold=threshold.active_decode_blocks,
            active_prefill_tokens_threshold=threshold.active_prefill_tokens,
            active_prefill_tokens_threshold_frac=UNSET if frac is None else frac,
        )


class Thresholds(msgspec.Struct, frozen=True):
    """The answer of GET /busy_threshold."""

    thresholds: list[ThresholdRow]


class OverloadBody(msgspec.Struct, frozen=True):
    """The answer to a request that is shed. `error` is a text, as in other errors."""

    error: str
    message: str
    type: str
    code: int

    @classmethod
    def of(cls, error: str, status: int) -> Self:
        message = f"Service temporarily unavailable: {error}"
        return cls(error, message, "service_unavailable", status)
