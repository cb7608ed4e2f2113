"""Bodies of the selection service: requests (spec selection.md 1.3), and answers that are not rows
of the core.

Unknown fields are ignored, `null` counts as absent for the optional ones.
"""

import math
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from lean_selector.core.selection.settings import RouterOverride
from lean_selector.core.selection.shapes import BY_RANK, AffinityTarget, PinnedWorker, WorkerSpec
from lean_selector.wire.answer_forms import JsonText
from lean_selector.wire.prompt_fields import PromptFields
from lean_selector.wire.scalars import (
    U32,
    NonNegative,
    check_finite,
    check_u64,
    f32,
    f32_shortest,
)
from lean_selector.wire.scope import DEFAULT_GROUP, group_of
from lean_selector.wire.worker_health import EjectedWorker
from lean_selector.wire.worker_sets import allowed_workers

# The key of a map from ranks: digits as JSON writes a number, so no sign and no leading zero.
RankText = Annotated[str, Meta(pattern=r"^(0|[1-9][0-9]{0,9})\Z")]
Enforcement = Literal["required", "preferred"]


class WorkerFields(msgspec.Struct, kw_only=True):
    """What registration and PATCH have in common."""

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
    kv_transfer_preferred_weight: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "total_kv_blocks"):
            value = getattr(self, name)
            if value is not None:
                check_u64(name, value)
        if self.kv_transfer_preferred_weight is not None:
            if not math.isfinite(self.kv_transfer_preferred_weight):
                got = self.kv_transfer_preferred_weight
                raise ValueError(f"kv_transfer_preferred_weight: expected a number, got {got}")
            weight = f32(self.kv_transfer_preferred_weight)
            self.kv_transfer_preferred_weight = f32_shortest(weight)

    def by_rank(self, name: str) -> dict[int, str]:
        """A field that maps ranks to something; raises msgspec.ValidationError beyond u32."""
        ranked = {int(dp_rank): value for dp_rank, value in getattr(self, name).items()}
        if ranked and max(ranked) > 2**32 - 1:
            raise msgspec.ValidationError(f"Expected `int` <= {2**32 - 1} - at key in `$.{name}`")
        return ranked


class Registration(WorkerFields, kw_only=True):
    """What POST /workers has in every dialect."""

    worker_id: NonNegative
    model_name: str = DEFAULT_GROUP
    tenant_id: str | UnsetType = UNSET
    routing_group: str | UnsetType = UNSET
    kv_events_endpoints: dict[RankText, str] = {}
    taints: list[str] = []
    topology_domains: dict[str, str] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        check_u64("worker_id", self.worker_id)

    def spec(self) -> WorkerSpec:
        fields = {name: getattr(self, name) for name in WorkerFields.__struct_fields__}
        return WorkerSpec(
            worker_id=self.worker_id,
            model_name=self.model_name,
            tenant_id=group_of(self.tenant_id, self.routing_group),
            kv_events_endpoints=self.by_rank("kv_events_endpoints"),
            taints=frozenset(self.taints),
            topology_domains=self.topology_domains,
            **fields,
            **self.more(),
        )

    def more(self) -> dict[str, Any]:
        """What only this dialect has."""
        raise NotImplementedError


class WorkerRequest(Registration, kw_only=True):
    """POST /workers."""

    replay_endpoints: dict[RankText, str] = {}

    def more(self) -> dict[str, Any]:
        return {"replay_endpoints": self.by_rank("replay_endpoints")}


class Change(WorkerFields, kw_only=True):
    """What PATCH /workers/{worker_id} has in every dialect: what is present and not null
    overwrites."""

    kv_events_endpoints: dict[RankText, str] | None = None
    taints: list[str] | None = None
    topology_domains: dict[str, str] | None = None

    def changes(self) -> dict[str, object]:
        changes: dict[str, object] = {
            name: value
            for name in self.__struct_fields__
            if (value := getattr(self, name)) is not None
        }
        for name in changes.keys() & BY_RANK:
            changes[name] = self.by_rank(name)
        if self.taints is not None:
            changes["taints"] = frozenset(self.taints)
        return changes


class WorkerPatch(Change, kw_only=True):
    """PATCH /workers/{worker_id}."""

    replay_endpoints: dict[RankText, str] | None = None


class RoutingConstraints(msgspec.Struct):
    """The taints that a request speaks of."""

    required_taints: list[str] = []
    preferred_taints: dict[str, float] = {}  # single precision

    def weights(self) -> dict[str, float]:
        """Of the preferred taints, rounded to single precision. Raises BadRequest naming one that
        is no finite number."""
        for name, weight in self.preferred_taints.items():
            check_finite(f"routing_constraints.preferred_taints.{name}", weight)
        return {name: f32(weight) for name, weight in self.preferred_taints.items()}


class Pinned(msgspec.Struct):
    """The one rank that a request insists on."""

    worker_id: NonNegative
    dp_rank: U32

    def __post_init__(self) -> None:
        check_u64("worker_id", self.worker_id)

    def pinned(self) -> PinnedWorker:
        return PinnedWorker(self.worker_id, self.dp_rank)


class SelectionSessionContext(msgspec.Struct):
    """The session as agents tell it; only its id has an effect."""

    session_id: str
    parent_session_id: str | None = None
    session_final: bool | None = None
    input_trigger: Literal["user_message", "tool_result", "other"] | None = None
    agent_headers: dict[str, list[str]] | None = None


class WorkerAffinityTarget(msgspec.Struct):
    """Where a request would rather go than elsewhere."""

    worker_id: NonNegative
    dp_rank: U32 | None = None

    def __post_init__(self) -> None:
        check_u64("worker_id", self.worker_id)

    def target(self) -> AffinityTarget:
        return AffinityTarget(self.worker_id, self.dp_rank)


class SelectFields(PromptFields, kw_only=True):
    """What POST /select and /select_and_reserve have in common."""

    selection_id: str | None = None
    explain: bool | None = None  # the figures behind the choice, in the answer
    router_config_override: RouterOverride | None = None
    expected_output_tokens: U32 | None = None
    priority_jump: float | None = None
    strict_priority: U32 | None = None
    session_id: str | None = None
    session_context: SelectionSessionContext | None = None
    affinity_target: WorkerAffinityTarget | None = None
    pinned_worker: Pinned | None = None
    allowed_worker_ids: list[NonNegative] | None = None
    routing_constraints: RoutingConstraints | UnsetType = UNSET

    def check_shape(self) -> None:
        super().check_shape()
        self.allowed()

    def session(self) -> str | None:
        """The id of its session, under the name that counts."""
        context = self.session_context
        return self.session_id if context is None else context.session_id

    def allowed(self) -> frozenset[int] | None:
        ids = self.allowed_worker_ids
        return None if ids is None else allowed_workers(ids)


class SelectRequest(SelectFields, kw_only=True):
    """POST /select. An advisory one never waits, and is told the load of the rank."""

    advisory: bool = False


class SelectAndReserveRequest(SelectFields, kw_only=True):
    """POST /select_and_reserve."""

    reservation_id: str | None = None


class ReservationRequest(PromptFields, kw_only=True):
    """POST /reservations: a worker that the caller chose, or what was selected under
    `selection_id`, which then is the reservation's id too unless another is given."""

    reservation_id: str | UnsetType = UNSET
    selection_id: str | None = None
    worker_id: NonNegative | UnsetType | None = UNSET
    dp_rank: U32 | None = None
    router_config_override: RouterOverride | None = None
    expected_output_tokens: U32 | None = None
    effective_prefill_tokens: NonNegative | None = None

    def __post_init__(self) -> None:
        if self.selection_id is None or isinstance(self.worker_id, int):
            for name in ("reservation_id", "worker_id"):
                if getattr(self, name) is UNSET:
                    raise msgspec.ValidationError(f"Object missing required field `{name}`")
            if not isinstance(self.worker_id, int):
                raise msgspec.ValidationError("Expected `int`, got `null` - at `$.worker_id`")
            check_u64("worker_id", self.worker_id)
        if self.effective_prefill_tokens is not None:
            check_u64("effective_prefill_tokens", self.effective_prefill_tokens)


class ProjectionRequest(PromptFields, kw_only=True):
    """POST /potential_loads and /overlap_scores."""

    router_config_override: RouterOverride | None = None


class OutputBlockRequest(msgspec.Struct):
    """POST /reservations/{reservation_id}/output_block."""

    decay_fraction: float | None = None


class Ok(msgspec.Struct, frozen=True):
    """What was asked for is done."""

    status: str = "ok"


class ErrorBody(msgspec.Struct, frozen=True):
    """Every error but those that gateways may hand to their clients."""

    error: str


class Readiness(msgspec.Struct, frozen=True):
    """GET /ready."""

    ready: bool
    schedulable_workers: int
    # A list of WorkerRecord; not for whoever has no token, where tokens are asked for.
    workers: JsonText | UnsetType = UNSET
    recovering: bool | UnsetType = UNSET  # only while start-up recovery is under way
    ejected: list[EjectedWorker] | UnsetType = UNSET  # only while there are some
    state_fault: str | UnsetType = UNSET  # only while the state directory cannot be written
