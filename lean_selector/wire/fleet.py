"""What the page /ui shows: the state of all workers and ranks, choices, and prefixes."""

import msgspec

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
    prefill_tokens: int = 0
    requests: int = 0
    cached_blocks: int = 0
    prompt_tokens: int = 0
    overlap_tokens: int = 0
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


class Choices(msgspec.Struct, frozen=True):
    """The answer of GET /choices: a sample of the last choices, the oldest first."""

    monotonic: float  # seconds, on the clock of a choice's `at`
    seen: int  # number of choices since they are collected
    choices: list[Decision]


class PrefixTree(msgspec.Struct, frozen=True):
    """An item of GET /prefixes: a partition's largest runs of cached blocks, parents first."""

    model_name: str
    tenant_id: str
    block_size: int
    held_blocks: int
    runs: list[UpperRun]
