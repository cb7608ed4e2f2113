"""A worker of a partition as the choice and the queue see it: made anew when its record changes."""

from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.selection.records import Overlap
from lean_selector.core.selection.workers import WorkerSpec

# The reference's capacity of a worker that does not state its own.
DEFAULT_MAX_BATCHED_TOKENS = 10_000_000
STATE_AGENT = "state_agent_v2"


class SchedulableWorker:
    """What the scheduler needs of a worker, and nothing more."""

    __slots__ = (
        "endpoint",
        "hint_sources",
        "hint_type",
        "loads",
        "mask",
        "max_num_batched_tokens",
        "no_overlap",
        "rank_name",
        "ranks",
        "taints",
        "total_kv_blocks",
        "worker_id",
    )

    def __init__(self, spec: WorkerSpec, loads: list[RankLoad]) -> None:
        self.worker_id = spec.worker_id
        self.endpoint = spec.endpoint or ""
        self.taints = spec.taints
        self.ranks = spec.ranks
        self.loads = loads  # one per rank, in rank order
        self.mask = 0  # the same as a set
        for load in loads:
            self.mask |= load.mask
        self.rank_name = str(loads[0].dp_rank)  # of its only rank, where it has one
        self.no_overlap = Overlap(0, 0, {str(load.dp_rank): 0 for load in loads}, 0, 0)
        self.total_kv_blocks = spec.total_kv_blocks
        # Of hints where blocks could be fetched from: what kind of worker, and where its ranks are
        # asked, unless an agent of its own tells of its blocks.
        self.hint_type = spec.router_hint_worker_type
        by_agent = spec.kv_event_source_mode == STATE_AGENT
        self.hint_sources = {} if by_agent else spec.router_hint_source_control_endpoints
        tokens = spec.max_num_batched_tokens
        self.max_num_batched_tokens = DEFAULT_MAX_BATCHED_TOKENS if tokens is None else tokens
