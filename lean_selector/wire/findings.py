"""The findings that `lean-selector check` and the web page show, and the parts of a selector's
answers from which findings are derived."""

from collections.abc import Collection

import msgspec

from lean_selector.wire.discovery_states import DiscoveryReport
from lean_selector.wire.selection_bodies import KvSource, WorkerHealthDetail


class Finding(msgspec.Struct, frozen=True):
    """One line in the report of `lean-selector check`."""

    level: str  # ok, note, warning or error
    subject: str  # "selector", "worker 3", "worker 3 rank 1"
    what: str
    mend: str | None = None  # what to do about it


# -- what a selector answers -----------------------------------------------------------------------


class CheckedWorker(msgspec.Struct):
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
    uses_kv_events: bool = True
    routed_ttl_secs: float = 0.0  # how long a routed prompt is assumed cached
    worker_role: str = "both"

    def __post_init__(self) -> None:
        if self.routing_group is not None:
            self.tenant_id = self.routing_group


class CheckedReadiness(msgspec.Struct):
    """The fields of GET /ready that `lean-selector check` reads."""

    recovering: bool = False
    state_fault: str | None = None  # why the state directory cannot be written


class SelectorFacts(msgspec.Struct):
    """What `lean-selector check` judges. `sources` and `discoveries` are None if not reported."""

    is_ready: bool
    workers: list[CheckedWorker]
    sources: list[KvSource] | None
    discoveries: DiscoveryReport | None = None
    readiness: CheckedReadiness = msgspec.field(default_factory=CheckedReadiness)
    deaf_ports: Collection[str] = ()  # KV-event endpoints that were tried from here, in vain
