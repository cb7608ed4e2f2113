"""Findings of `lean-selector check` and of the page, and the answers from which they are
derived."""

import msgspec

from lean_selector.wire.discovery_states import DiscoveryReport
from lean_selector.wire.selection_bodies import KvSource, WorkerHealthDetail


class Finding(msgspec.Struct, frozen=True):
    """One line of the report."""

    level: str  # ok, note, warning or error
    subject: str  # "selector", "worker 3", "worker 3 rank 1"
    what: str
    mend: str | None = None  # what to do about it


# -- what a selector answers -----------------------------------------------------------------------


class WorkerRecord(msgspec.Struct):
    """A row of GET /workers?detail=true. The reference returns only some of these fields."""

    worker_id: int
    model_name: str
    lifecycle: str  # empty for workers of a slot tracker, which are not checked
    tenant_id: str = "default"
    routing_group: str | None = None  # the tenant, as 1.6 names it
    endpoint: str | None = None
    block_size: int | None = None
    total_kv_blocks: int | None = None
    data_parallel_size: int | None = None  # None: one rank
    health: WorkerHealthDetail | None = None  # None if the selector is the reference
    not_schedulable_reasons: list[str] = []

    def __post_init__(self) -> None:
        if self.routing_group is not None:
            self.tenant_id = self.routing_group


class Readiness(msgspec.Struct):
    """The body of GET /ready. `status` is the HTTP status."""

    recovering: bool = False
    state_fault: str | None = None  # why the state directory cannot be written


class SelectorFacts(msgspec.Struct):
    """What a selector reports about itself. The reference reports no sources and no discoveries."""

    is_ready: bool
    workers: list[WorkerRecord]
    sources: list[KvSource] | None
    discoveries: DiscoveryReport | None = None
    readiness: Readiness = msgspec.field(default_factory=Readiness)
