"""Findings, as `lean-selector check` and the page tell them, and the answers that are judged."""

import msgspec

from lean_selector.wire.discovery_states import DiscoveryReport
from lean_selector.wire.selection_bodies import KvSource, WorkerHealthDetail


class Finding(msgspec.Struct, frozen=True):
    """One line of the table."""

    level: str  # ok, note, warning or error
    subject: str  # "selector", "worker 3", "worker 3 rank 1"
    what: str
    mend: str | None = None  # what to do, where something is to be done


# -- what a selector answers -----------------------------------------------------------------------


class WorkerRecord(msgspec.Struct):
    """A row of GET /workers?detail=true; the reference has some of these fields."""

    worker_id: int
    model_name: str
    lifecycle: str  # a slot tracker's workers have none, and are no workers for this check
    tenant_id: str = "default"
    routing_group: str | None = None  # the same, as 1.6 calls it
    endpoint: str | None = None
    block_size: int | None = None
    total_kv_blocks: int | None = None
    data_parallel_size: int | None = None  # None: one rank
    health: WorkerHealthDetail | None = None  # the reference has none
    not_schedulable_reasons: list[str] = []

    def __post_init__(self) -> None:
        if self.routing_group is not None:
            self.tenant_id = self.routing_group


class Readiness(msgspec.Struct):
    """The body of GET /ready, beside its status."""

    recovering: bool = False
    state_fault: str | None = None  # why the state directory cannot be written


class SelectorFacts(msgspec.Struct):
    """What a selector says of itself. The reference tells neither sources nor discoveries."""

    is_ready: bool
    workers: list[WorkerRecord]
    sources: list[KvSource] | None
    discoveries: DiscoveryReport | None = None
    readiness: Readiness = msgspec.field(default_factory=Readiness)
