"""What engines answer, as far as it is read. Fields that we do not know are theirs."""

import msgspec


class Model(msgspec.Struct):
    """Of /v1/models. An adapter (LoRA) has the model that it adapts as its parent."""

    id: str
    owned_by: str | None = None
    parent: str | None = None


class Models(msgspec.Struct):
    """GET /v1/models."""

    data: list[Model] = []


class EventSource(msgspec.Struct):
    """One rank of vLLM's GET /kv_event_sources."""

    endpoint: str
    data_parallel_rank: int | None = None
    replay_endpoint: str | None = None


class EventSources(msgspec.Struct):
    """The same in an object, as an earlier form of it had them."""

    sources: list[EventSource] = []


class RankPublisher(msgspec.Struct):
    """One rank of SGLang's `kv_events.publishers`."""

    dp_rank: int
    endpoint: str


class KvEvents(msgspec.Struct):
    """SGLang's `kv_events`: port `endpoint_port_base` + rank of the host."""

    publisher: str = "zmq"
    endpoint_host: str = "*"
    endpoint_port_base: int | None = None
    block_size: int | None = None
    dp_size: int | None = None
    publishers: list[RankPublisher] | None = None


class EventsConfig(msgspec.Struct):
    """What --kv-events-config takes: in SGLang's own flag, as JSON in a text, and by rank in vLLM's
    GET /kv_event_sources."""

    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None


class ServerInfo(msgspec.Struct):
    """SGLang's GET /server_info, of old /get_server_info."""

    page_size: int | None = None
    max_total_num_tokens: int | None = None
    max_prefill_tokens: int | None = None
    dp_size: int | None = None
    speculative_algorithm: str | None = None
    kv_events: KvEvents | None = None
    kv_events_config: str | None = None
