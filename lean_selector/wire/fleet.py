"""The fleet at one moment, as `GET /fleet` and the events of `GET /events` have it."""

import msgspec
from msgspec import UNSET, UnsetType

from lean_selector.core.index.shapes import UpperRun
from lean_selector.core.selection.shapes import Decision
from lean_selector.wire.findings import Finding


class FleetWorker(msgspec.Struct, frozen=True):
    """A registered worker, as far as it seldom changes."""

    worker_id: int
    model_name: str
    tenant_id: str
    lifecycle: str
    endpoint: str | None
    block_size: int | None
    total_kv_blocks: int | None


class FleetRank(msgspec.Struct, frozen=True, gc=False):
    """A rank of a worker: how it is, its load, and sums since it was registered."""

    worker_id: int
    dp_rank: int
    state: str  # in_service, probation, ejected; of a worker that is not schedulable its lifecycle
    since: int | None  # it is ejected or on probation since then
    source: str | None  # the state of its source of KV events; None: it has none
    source_since: int | None
    prefill_tokens: int = 0
    decode_blocks: int = 0
    requests: int = 0
    cached_blocks: int = 0
    selections: int = 0
    prompt_tokens: int = 0
    overlap_tokens: int = 0
    ok: int = 0
    failed: int = 0
    refused: int = 0
    ttft_s: float = 0.0
    ttft_count: int = 0
    predicted_s: float = 0.0
    predictions: int = 0


class FleetModel(msgspec.Struct, frozen=True):
    """A model and tenant that has had a worker."""

    model_name: str
    tenant_id: str
    block_size: int
    pending_count: int
    pending_isl_tokens: int
    shed: int  # requests, ever


class Fleet(msgspec.Struct):
    """GET /fleet."""

    version: str
    now: float  # seconds since 1970
    workers: list[FleetWorker]
    ranks: list[FleetRank]
    models: list[FleetModel]
    findings: list[Finding]


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True):
    """What is new since the event before; with `whole`, all there is."""

    whole: bool
    version: str
    now: float
    monotonic: float  # seconds, of the clock that `at` of a choice is told by
    workers: list[FleetWorker] | UnsetType = UNSET
    ranks: list[FleetRank]
    gone: list[str]  # WORKER/RANK
    models: list[FleetModel]
    findings: list[Finding] | UnsetType = UNSET
    seen: int  # choices since a page is open
    choices: list[Decision]


class PrefixTree(msgspec.Struct, frozen=True):
    """An item of GET /prefixes: the upper runs of the index of a model and tenant."""

    model_name: str
    tenant_id: str
    block_size: int
    held_blocks: int  # on all ranks and tiers
    runs: list[UpperRun]
