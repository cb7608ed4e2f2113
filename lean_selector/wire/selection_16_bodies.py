"""Bodies of the selection service for `--api 1.6`, where they differ from `selection_bodies`.

The tenant is called `routing_group`, and a reservation's id is called `selection_id`. `tenant_id`
is accepted as well (D2). Spec: selection_16.md 1 to 5, 8."""

import math
from typing import Self

import msgspec
from msgspec import UnsetType

from lean_selector.core.numbers import U32
from lean_selector.core.selection.router_settings import NotNegative, RouterOverride
from lean_selector.core.selection.shapes import (
    Booked,
    Disaggregate,
    Disaggregated,
    Explanation,
    FetchHint,
    Overlap,
    PartitionLoads,
    PrefillPlacement,
    RankLoadRow,
    WorkerLoad,
)
from lean_selector.wire.scalars import NonNegative, check_u64
from lean_selector.wire.selection_bodies import (
    Change,
    PrefillLeg,
    PromptFields,
    RankText,
    Registration,
    SelectFields,
)

# -- requests --------------------------------------------------------------------------------------


class RouterOverride16(RouterOverride, frozen=True, kw_only=True):
    """Router settings that a request overrides, with the wider ranges of Dynamo 1.6."""

    overlap_score_credit: NotNegative | None = None

    def __post_init__(self) -> None:
        for name, value in (
            ("overlap_score_credit", self.overlap_score_credit),
            ("prefill_load_scale", self.prefill_load_scale),
            ("prefill_load_scale", self.overlap_score_weight),
            ("router_temperature", self.router_temperature),
        ):
            if value is not None and not 0.0 <= value < math.inf:
                credit = name == "overlap_score_credit"
                kind = "a finite, non-negative number" if credit else "finite and non-negative"
                raise ValueError(f"{name} must be {kind}")
        multiplier = self.shared_cache_multiplier
        if multiplier is not None and not 0.0 <= multiplier <= 1.0:
            raise ValueError("shared_cache_multiplier must be between 0 and 1")


class WorkerRequest16(Registration, kw_only=True):
    """The body of POST /workers with `--api 1.6`."""

    router_hint_worker_type: str | None = None
    router_hint_source_control_endpoints: dict[RankText, str] = {}
    kv_event_source_mode: str | None = None

    def more(self) -> dict[str, object]:
        name = "router_hint_source_control_endpoints"
        return {
            "router_hint_worker_type": self.router_hint_worker_type,
            name: self.by_rank(name),
            "kv_event_source_mode": self.kv_event_source_mode,
        }


class WorkerPatch16(Change, kw_only=True):
    """The body of PATCH /workers/{worker_id} with `--api 1.6`."""

    router_hint_worker_type: str | None = None
    router_hint_source_control_endpoints: dict[RankText, str] | None = None
    kv_event_source_mode: str | None = None


class SelectRequest16(SelectFields, kw_only=True):
    """The body of POST /select with `--api 1.6`."""

    router_config_override: RouterOverride16 | None = None
    advisory: bool = False


class SelectAndReserveRequest16(SelectFields, kw_only=True):
    """The body of POST /select_and_reserve with `--api 1.6`."""

    router_config_override: RouterOverride16 | None = None


class ReservationRequest16(PromptFields, kw_only=True):
    """POST /reservations. Without `worker_id`, reserves what /select chose for `selection_id`."""

    selection_id: str
    worker_id: NonNegative | None = None
    dp_rank: U32 | None = None
    router_config_override: RouterOverride16 | None = None
    expected_output_tokens: U32 | None = None
    effective_prefill_tokens: NonNegative | None = None
    track_prefill_tokens: bool | None = None
    prefill: PrefillLeg | None = None

    def __post_init__(self) -> None:
        if self.worker_id is not None:
            check_u64("worker_id", self.worker_id)
        if self.effective_prefill_tokens is not None:
            check_u64("effective_prefill_tokens", self.effective_prefill_tokens)


class ProjectionRequest16(PromptFields, kw_only=True):
    """The body of POST /potential_loads and /overlap_scores with `--api 1.6`."""

    router_config_override: RouterOverride16 | None = None
    disaggregate: Disaggregate | None = None


# -- answers ---------------------------------------------------------------------------------------


class FetchPayload(msgspec.Struct, frozen=True):
    """Blocks that the engine can fetch, and the control endpoint of the rank that has them."""

    block_hashes: tuple[int, ...]
    source_control_endpoint: str


class FetchAction(msgspec.Struct, frozen=True):
    """One action in a `KvHint`: the engine should fetch the blocks in `payload`."""

    action_id: str
    action_type: str
    action_version: str
    payload: FetchPayload


class KvHint(msgspec.Struct, frozen=True):
    """Tells where the chosen worker can fetch blocks of the prompt."""

    protocol_version: str
    message_id: str
    actions: list[FetchAction]

    @classmethod
    def of(cls, hint: FetchHint, selection_id: str) -> Self:
        payload = FetchPayload(hint.block_hashes, hint.source_control_endpoint)
        return cls("0.1", selection_id, [FetchAction("a1", "kv.fetch", "1.0", payload)])


class Selection16(msgspec.Struct, frozen=True, gc=False):
    """The answer to /select and /select_and_reserve. JSON keys are in the order of the fields. The
    answer to /select has no sequence_hashes, isl_tokens, track_prefill_tokens and kv_hint."""

    selection_id: str | UnsetType
    sequence_hashes: tuple[int, ...] | UnsetType  # as signed integers
    isl_tokens: int | UnsetType
    track_prefill_tokens: bool | UnsetType
    model_name: str
    routing_group: str
    worker_id: int
    dp_rank: int
    endpoint: str
    block_size: int
    overlap: Overlap
    effective_prefill_tokens: int
    potential_decode_blocks: int
    decode_busy: bool | UnsetType
    worker_load: WorkerLoad | UnsetType
    kv_hint: KvHint | UnsetType
    explain: Explanation | UnsetType
    prefill: PrefillPlacement | UnsetType
    disaggregation: Disaggregated | UnsetType


class Booked16(msgspec.Struct, frozen=True, gc=False):
    """The answer of POST /reservations with `--api 1.6`."""

    selection_id: str
    model_name: str
    routing_group: str
    worker_id: int
    dp_rank: int
    endpoint: str

    @classmethod
    def of(cls, booked: Booked) -> Self:
        return cls(*msgspec.structs.astuple(booked))


class PartitionLoads16(msgspec.Struct, frozen=True, gc=False):
    """A partition in the answer of GET /loads with `--api 1.6`."""

    model_name: str
    routing_group: str
    loads: list[RankLoadRow]
    pending_count: int
    pending_isl_tokens: int

    @classmethod
    def of(cls, row: PartitionLoads) -> Self:
        return cls(*msgspec.structs.astuple(row))
