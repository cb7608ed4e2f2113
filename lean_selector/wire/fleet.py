"""The state of all workers and ranks, as in `GET /fleet` and the events of `GET /events`."""

import msgspec
from msgspec import UNSET, UnsetType

from lean_selector.core.index.shapes import UpperRun
from lean_selector.core.selection.shapes import Decision
from lean_selector.wire.findings import Finding


class FleetWorker(msgspec.Struct, frozen=True):
    """The fields of a registered worker that rarely change."""

    worker_id: int
    model_name: str
    tenant_id: str
    lifecycle: str
    endpoint: str | None
    block_size: int | None
    total_kv_blocks: int | None
    role: str = "both"


class FleetRank(msgspec.Struct, frozen=True, gc=False):
    """A rank's state and load, and totals of its requests and tokens since its registration."""

    worker_id: int
    dp_rank: int
    state: str
    since: int | None
    source: str | None
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
    """A partition (model and tenant) that has or had a worker."""

    model_name: str
    tenant_id: str
    block_size: int
    pending_count: int
    pending_isl_tokens: int
    shed: int


class Fleet(msgspec.Struct):
    """The answer of GET /fleet."""

    version: str
    now: float
    workers: list[FleetWorker]
    ranks: list[FleetRank]
    models: list[FleetModel]
    findings: list[Finding]


class FleetEvent(msgspec.Struct, frozen=True, kw_only=True):
    """One event of GET /events: changes since the previous event; if `whole`, the full state."""

    whole: bool
    version: str
    now: float
    monotonic: float  # seconds, on the clock of a choice's `at`
    workers: list[FleetWorker] | UnsetType = UNSET
    ranks: list[FleetRank]
    gone: list[str]  # removed ranks as WORKER/RANK
    models: list[FleetModel]
    findings: list[Finding] | UnsetType = UNSET
    seen: int  # number of choices since a page was opened
    choices: list[Decision]


class PrefixTree(msgspec.Struct, frozen=True):
    """An item of GET /prefixes: a partition's largest runs of cached blocks, parents first."""

    model_name: str
    tenant_id: str
    block_size: int
    held_blocks: int
    runs: list[UpperRun]
