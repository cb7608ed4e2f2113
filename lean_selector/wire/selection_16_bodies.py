"""Bodies of the selection service for `--api 1.6`, where they differ from `selection_bodies`.

The tenant is called `routing_group`, and a reservation's id is called `selection_id`. `tenant_id`
is accepted as well (D2). Spec: selection_16.md 1 to 5, 8."""

from typing import Self

import msgspec
from msgspec import UnsetType

from lean_selector.core.numbers import NonNegative, check_u64
from lean_selector.core.selection.shapes import (
    Booked,
    Disaggregated,
    Explanation,
    FetchHint,
    Overlap,
    PartitionLoads,
    PrefillPlacement,
    RankLoadRow,
    WorkerLoad,
)
from lean_selector.wire.scalars import Id
from lean_selector.wire.selection_bodies import (
    ReservationFields,
    SelectFields,
)

# -- requests --------------------------------------------------------------------------------------


class SelectAndReserveRequest16(SelectFields, kw_only=True):
    """The body of POST /select_and_reserve with `--api 1.6`."""


class ReservationRequest16(ReservationFields, kw_only=True):
    """POST /reservations. Without `worker_id`, reserves what /select chose for `selection_id`."""

    selection_id: Id
    worker_id: NonNegative | None = None
    track_prefill_tokens: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.worker_id is not None:
            check_u64("worker_id", self.worker_id)


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
