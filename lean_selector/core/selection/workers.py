"""What is known of a worker: as it was registered, as the API shows it, and where it publishes."""

import msgspec
from msgspec import UnsetType

PartitionKey = tuple[str, str]

# The fields of a record that are maps from ranks.
BY_RANK = ("kv_events_endpoints", "replay_endpoints", "router_hint_source_control_endpoints")


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as its owner registered it; None where nothing was said."""

    worker_id: int
    model_name: str = "default"
    tenant_id: str = "default"
    endpoint: str | None = None
    kv_events_endpoint: str | None = None
    kv_events_endpoints: dict[int, str] = {}
    replay_endpoint: str | None = None
    replay_endpoints: dict[int, str] = {}
    block_size: int | None = None
    data_parallel_start_rank: int | None = None
    data_parallel_size: int | None = None
    max_num_batched_tokens: int | None = None
    total_kv_blocks: int | None = None
    stable_routing_id: str | None = None
    is_eagle: bool | None = None
    taints: frozenset[str] = frozenset()
    topology_domains: dict[str, str] = {}
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: str | None = None
    kv_transfer_preferred_weight: float | None = None  # single precision
    # For hints where a prompt's blocks could be fetched from; of the 1.6 dialect.
    router_hint_worker_type: str | None = None
    router_hint_source_control_endpoints: dict[int, str] = {}
    kv_event_source_mode: str | None = None

    @property
    def key(self) -> PartitionKey:
        return self.model_name, self.tenant_id

    @property
    def ranks(self) -> range:
        start = self.data_parallel_start_rank or 0
        size = 1 if self.data_parallel_size is None else self.data_parallel_size
        return range(start, start + size)

    def kv_events_endpoint_of(self, dp_rank: int) -> str | None:
        """Where this rank publishes; the single endpoint counts for a worker of one rank only."""
        if self.kv_events_endpoints:
            return self.kv_events_endpoints.get(dp_rank)
        return self.kv_events_endpoint if self.ranks == range(dp_rank, dp_rank + 1) else None


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as the API shows it, in this key order."""

    worker_id: int
    model_name: str
    tenant_id: str
    lifecycle: str
    endpoint: str | None
    kv_events_endpoint: str | None
    kv_events_endpoints: dict[str, str] | UnsetType
    replay_endpoint: str | None
    replay_endpoints: dict[str, str] | UnsetType
    block_size: int | None
    data_parallel_start_rank: int | None
    data_parallel_size: int | None
    max_num_batched_tokens: int | None
    total_kv_blocks: int | None
    stable_routing_id: str | None
    is_eagle: bool | None
    taints: list[str]
    topology_domains: dict[str, str]
    kv_transfer_domain: str | None
    kv_transfer_enforcement: str | None
    kv_transfer_preferred_weight: float | None
    not_schedulable_reasons: list[str] | UnsetType


class Source(msgspec.Struct, frozen=True):
    """Where the KV events of one rank come from."""

    endpoint: str
    replay_endpoint: str | None
