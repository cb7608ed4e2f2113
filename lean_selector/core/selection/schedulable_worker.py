"""The part of a worker's record that the scheduler and the queue need."""

from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.selection.shapes import Overlap, WorkerSpec

# The reference's default for workers that do not state max_num_batched_tokens.
DEFAULT_MAX_BATCHED_TOKENS = 10_000_000
STATE_AGENT = "state_agent_v2"


class SchedulableWorker:
    """The part of a worker's record that the scheduler needs."""

    def __init__(self, spec: WorkerSpec, loads: list[RankLoad]) -> None:
        self.worker_id = spec.worker_id
        self.endpoint = spec.endpoint or ""
        self.taints = spec.taints
        self.role: str = spec.worker_role
        self.disaggregation = spec.disaggregation
        self.domains = spec.topology_domains
        # A domain of `domains` that counts in pairs, whether it is required, and its weight.
        self.transfer: tuple[str, bool, float] | None = None
        if spec.kv_transfer_domain is not None and spec.kv_transfer_enforcement is not None:
            is_required = spec.kv_transfer_enforcement == "required"
            weight = spec.kv_transfer_preferred_weight or 0.0
            self.transfer = spec.kv_transfer_domain, is_required, 0.0 if is_required else weight
        self.ranks = spec.ranks
        self.loads = loads  # one per rank, in rank order
        self.mask = 0  # the same ranks as a set
        for load in loads:
            self.mask |= load.mask
        self.rank_name = str(loads[0].dp_rank)  # used if the worker has only one rank
        self.no_overlap = Overlap(0, 0, {str(load.dp_rank): 0 for load in loads}, 0, 0)
        self.total_kv_blocks = spec.total_kv_blocks
        # For hints where to fetch blocks: the worker's type, and the control endpoint of each rank
        # whose blocks no state agent publishes.
        self.hint_type = spec.router_hint_worker_type
        by_agent = spec.kv_event_source_mode == STATE_AGENT
        self.hint_sources = {} if by_agent else spec.router_hint_source_control_endpoints
        tokens = spec.max_num_batched_tokens
        self.max_num_batched_tokens = DEFAULT_MAX_BATCHED_TOKENS if tokens is None else tokens
