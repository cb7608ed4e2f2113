"""Bodies that tell how a worker did: reports of gateways, and what the end of a request adds."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from lean_selector.core.selection.shapes import WorkerRecord
from lean_selector.wire.scalars import U32
from lean_selector.wire.worker_details import SourceCondition

Outcome = Literal["refused", "failed", "ok"]
TokenCount = Annotated[int, Meta(ge=0, le=2**53)]


class WorkerReport(msgspec.Struct, kw_only=True):
    """POST /workers/{worker_id}/report. Without `dp_rank` the whole worker is meant."""

    outcome: Outcome
    dp_rank: U32 | None = None
    ttft_ms: Annotated[float, Meta(ge=0.0, le=86_400_000.0)] | None = None
    cached_tokens: TokenCount | None = None  # of the prompt, as the engine counted them


class Ending(msgspec.Struct, kw_only=True):
    """The body that DELETE /reservations/{reservation_id} may have."""

    outcome: Outcome | None = None
    cached_tokens: TokenCount | None = None


class RankHealthRow(msgspec.Struct, frozen=True):
    """A rank that something is held against. Seconds are from now."""

    dp_rank: int
    state: str  # in_service, probation or ejected
    reason: str | None  # why it was ejected, if it was
    since_s: float | None  # ejected or on probation for so long
    returns_in_s: float | None  # None: when a poll succeeds, or it is not ejected
    failures: int  # in a row
    failed_polls: int  # in a row
    ejections: int  # what the next one grows with


class WorkerHealthDetail(msgspec.Struct, frozen=True):
    """`state` is that of the worst rank; `ranks` those that something is held against."""

    state: str
    ranks: list[RankHealthRow]


class WorkerDetail(WorkerRecord, frozen=True, kw_only=True):
    """A worker in GET /workers?detail=true: its record, and how it is."""

    health: WorkerHealthDetail
    kv_sources: list[SourceCondition]  # by rank; none of a worker that is not listened to


class EjectedWorker(msgspec.Struct, frozen=True):
    """In GET /ready, only while there are some."""

    worker_id: int
    dp_ranks: list[int]
    reason: str
