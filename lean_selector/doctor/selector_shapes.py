"""What a selector answers, as far as the check reads it. Fields that we do not know are its own."""

import msgspec


class Readiness(msgspec.Struct):
    """Of GET /ready, whose status says whether it is."""

    recovering: bool = False
    state_fault: str | None = None  # why the state directory cannot be written


class RankHealth(msgspec.Struct):
    """A rank that something is held against."""

    dp_rank: int
    state: str  # in_service, probation or ejected
    reason: str | None = None  # why it was ejected, if it was
    returns_in_s: float | None = None  # None: when a poll succeeds, or it is not ejected


class WorkerHealth(msgspec.Struct):
    """Of the ranks of a worker."""

    ranks: list[RankHealth] = []


class WorkerRecord(msgspec.Struct):
    """Of GET /workers?detail=true; of the reference's, what it has of these."""

    worker_id: int
    model_name: str
    lifecycle: str  # a slot tracker's workers have none, and are no workers for this check
    tenant_id: str = "default"
    routing_group: str | None = None  # the same, as 1.6 calls it
    endpoint: str | None = None
    block_size: int | None = None
    total_kv_blocks: int | None = None
    data_parallel_size: int | None = None  # None: one rank
    health: WorkerHealth = msgspec.field(default_factory=WorkerHealth)  # the reference has none
    not_schedulable_reasons: list[str] = []

    def __post_init__(self) -> None:
        if self.routing_group is not None:
            self.tenant_id = self.routing_group


class Source(msgspec.Struct):
    """Of GET /kv_sources."""

    worker_id: int
    dp_rank: int
    endpoint: str
    state: str
    problem: str | None = None  # what is wrong, in the selector's own words
    replay_endpoint: str | None = None
    last_seq: int | None = None
    messages: int = 0
    skipped: dict[str, int] = {}
    lost_batches: int = 0
    last_error: str | None = None


class Discovery(msgspec.Struct):
    """A `--discover` or `--replica-sync-discover` of GET /discovery."""

    discovery: str
    finds: str  # "workers" or "peers"
    state: str  # starting, watching or failing
    found: int | None = None  # what it found last, which holds; None before
    last_error: str | None = None


class DiscoveredWorker(msgspec.Struct):
    """A worker that a discovery names."""

    endpoint: str
    worker_id: int
    state: str  # asking, registered, by_http, removed or refused
    discoveries: list[str] = []
    last_error: str | None = None


class DiscoveredPeer(msgspec.Struct):
    """A peer that a discovery names."""

    endpoint: str
    state: str  # registered, known, removed, refused or itself
    last_error: str | None = None


class Discoveries(msgspec.Struct):
    """Of GET /discovery."""

    discoveries: list[Discovery] = []
    workers: list[DiscoveredWorker] = []
    peers: list[DiscoveredPeer] = []


class OverlapRow(msgspec.Struct):
    """One rank of POST /overlap_scores."""

    worker_id: int
    dp_rank: int
    device_blocks: int = 0


class OverlapScores(msgspec.Struct):
    """POST /overlap_scores."""

    workers: list[OverlapRow] = []


class SelectorFacts(msgspec.Struct):
    """What a selector says of itself."""

    is_ready: bool
    workers: list[WorkerRecord]
    sources: list[Source] | None  # None: it does not tell
    discoveries: Discoveries | None = None  # None: it has none of its own, as the reference
    readiness: Readiness = msgspec.field(default_factory=Readiness)
