"""Queries an engine for its model, block size and KV event endpoints (vLLM and SGLang).

Fields that an engine does not report stay unset."""

import re
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from lean_selector.core.zmq_endpoints import replay_endpoint_for
from lean_selector.discovery.particulars import Particulars
from lean_selector.http.outbound import OutboundClient, OutboundFailed
from lean_selector.http.urls import Url

# -- engines' responses, as far as they are read ---------------------------------------------------


class Model(msgspec.Struct):
    """A row of /v1/models. An adapter (LoRA) has its base model as parent."""

    id: str
    owned_by: str | None = None
    parent: str | None = None


class Models(msgspec.Struct):
    """The answer of GET /v1/models."""

    data: list[Model] = []


class EventSource(msgspec.Struct):
    """The endpoints of one rank in vLLM's GET /kv_event_sources."""

    endpoint: str
    data_parallel_rank: int | None = None
    replay_endpoint: str | None = None


class RankPublisher(msgspec.Struct):
    """The endpoint of one rank in SGLang's `kv_events.publishers`."""

    dp_rank: int
    endpoint: str


class KvEvents(msgspec.Struct):
    """`kv_events` in SGLang's /server_info. A rank's port is the base port plus the rank."""

    publisher: str = "zmq"
    endpoint_host: str = "*"
    endpoint_port_base: int | None = None
    replay_endpoint_port_base: int | None = None
    block_size: int | None = None
    dp_size: int | None = None
    publishers: list[RankPublisher] | None = None


class EventsConfig(msgspec.Struct):
    """The value of the engine's flag --kv-events-config. SGLang's /server_info has this value as
    JSON text. vLLM 0.32 reports a value for each rank, in GET /kv_event_sources."""

    publisher: str | None = None
    endpoint: str | None = None
    replay_endpoint: str | None = None


class ServerInfo(msgspec.Struct):
    """The answer of SGLang's GET /server_info (formerly /get_server_info)."""

    page_size: int | None = None
    max_total_num_tokens: int | None = None
    max_prefill_tokens: int | None = None
    dp_size: int | None = None
    speculative_algorithm: str | None = None
    kv_events: KvEvents | None = None
    kv_events_config: str | None = None


# -- reading the answers ---------------------------------------------------------------------------

_CONFIG: Final = b"vllm:cache_config_info{"
_LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_WILDCARDS: Final = frozenset({"*", "0.0.0.0", "::", "[::]"})
# Speculative methods that hash blocks over pairs of tokens.
_EAGLES: Final = frozenset({"EAGLE", "EAGLE3", "NEXTN"})


def model_of(body: bytes) -> tuple[str | None, str | None]:
    """Return `id` and `owned_by` of the first model in /v1/models that is not an adapter."""
    for model in msgspec.json.decode(body, type=Models).data:
        if model.parent is None:
            return model.id, model.owned_by
    return None, None


# -- vLLM ------------------------------------------------------------------------------------------


def read_vllm_metrics(body: bytes, into: Particulars) -> bool:
    """Copies block size, block count and ranks from vLLM's cache_config_info. False: missing."""
    engines = []
    at = body.find(_CONFIG)
    while at >= 0:
        if at == 0 or body[at - 1] == ord("\n"):
            engines.append(dict(_LABEL.findall(_line(body, at).decode(errors="replace"))))
        at = body.find(_CONFIG, at + 1)
    if not engines:
        return False
    sizes = [size for engine in engines if (size := _number(engine.get("block_size"))) is not None]
    counts = [
        count for engine in engines if (count := _number(engine.get("num_gpu_blocks"))) is not None
    ]
    into.block_size = sizes[0] if sizes else None
    into.total_kv_blocks = max(counts) if counts else None
    ranks = {rank for engine in engines if (rank := _number(engine.get("engine"))) is not None}
    _cover(into, ranks)
    return True


def read_vllm_sources(body: bytes, host: str, into: Particulars) -> None:
    """Reads each rank's endpoints for events and replay from vLLM's /kv_event_sources."""
    sources = list(_vllm_sources(body))
    if not sources:
        return
    events: dict[int, str] = {}
    replays: dict[int, str] = {}
    for source in sources:
        rank = source.data_parallel_rank or 0
        events[rank] = reachable(source.endpoint, host)
        if source.replay_endpoint:
            replays[rank] = reachable(source.replay_endpoint, host)
    into.kv_events_endpoints = events
    into.replay_endpoints = replays or None
    _cover(into, set(events))


def _vllm_sources(body: bytes) -> Iterator[EventSource]:
    """Yields each rank's endpoints from /kv_event_sources: a list, or a map by rank (vLLM 0.32)."""
    if body.lstrip().startswith(b"["):
        yield from msgspec.json.decode(body, type=list[EventSource])
        return
    for rank, raw in msgspec.json.decode(body, type=dict[str, msgspec.Raw]).items():
        if (number := _number(rank)) is not None:
            told = msgspec.json.decode(raw, type=EventsConfig)
            if told.publisher == "zmq" and told.endpoint:
                yield EventSource(told.endpoint, number, told.replay_endpoint)


def _line(body: bytes, at: int) -> bytes:
    end = body.find(b"\n", at)
    return body[at:] if end < 0 else body[at:end]


# -- SGLang ----------------------------------------------------------------------------------------


def read_sglang_info(body: bytes, host: str, into: Particulars) -> None:
    """Copies what SGLang's /server_info reports about the engine to `into`."""
    info = msgspec.json.decode(body, type=ServerInfo)
    into.block_size = info.page_size
    into.max_num_batched_tokens = info.max_prefill_tokens
    if info.dp_size and info.dp_size > 1:
        into.data_parallel_size = info.dp_size
    if (info.speculative_algorithm or "").upper() in _EAGLES:
        into.is_eagle = True
    if info.kv_events is not None and info.kv_events.publisher == "zmq":
        _read_kv_events(info.kv_events, host, into)
    elif info.kv_events_config:
        _read_events_config(info.kv_events_config, host, into)
    if info.max_total_num_tokens and into.block_size:
        into.total_kv_blocks = -(-info.max_total_num_tokens // into.block_size)


def _read_kv_events(told: KvEvents, host: str, into: Particulars) -> None:
    if told.block_size:
        into.block_size = told.block_size
    if told.dp_size and told.dp_size > 1:
        into.data_parallel_size = told.dp_size
    if told.publishers:
        into.kv_events_endpoints = {
            each.dp_rank: reachable(each.endpoint, host) for each in told.publishers
        }
    elif told.endpoint_port_base is not None:
        into.kv_events_endpoints = _from_base(told, told.endpoint_port_base, host, into)
        if told.replay_endpoint_port_base is not None:
            into.replay_endpoints = _from_base(told, told.replay_endpoint_port_base, host, into)


def _from_base(told: KvEvents, port: int, host: str, into: Particulars) -> dict[int, str]:
    bound = told.endpoint_host
    if ":" in bound and not bound.startswith("["):
        bound = f"[{bound}]"
    endpoint = reachable(f"tcp://{bound}:{port}", host)
    return _each_rank(endpoint, into.data_parallel_size or 1)


def _read_events_config(text: str, host: str, into: Particulars) -> None:
    told = msgspec.json.decode(text, type=EventsConfig)
    if told.publisher == "zmq":
        size = into.data_parallel_size or 1
        endpoint = reachable(told.endpoint or "tcp://*:5557", host)
        into.kv_events_endpoints = _each_rank(endpoint, size)
        if told.replay_endpoint:
            into.replay_endpoints = _each_rank(reachable(told.replay_endpoint, host), size)


def _each_rank(endpoint: str, size: int) -> dict[int, str]:
    return {rank: replay_endpoint_for(endpoint, rank) for rank in range(min(size, 4096))}


# -- both ------------------------------------------------------------------------------------------


def reachable(endpoint: str, host: str) -> str:
    """Return an endpoint with `host` in place of a wildcard, so that we can connect to it."""
    if not endpoint.startswith("tcp://"):
        return endpoint
    bound, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    if bound not in _WILDCARDS:
        return endpoint
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


def _cover(into: Particulars, ranks: Iterable[int]) -> None:
    """Sets the range of ranks in `into` to the smallest one that contains `ranks`."""
    found = set(ranks)
    if not found or found == {0}:
        return
    into.data_parallel_start_rank = min(found)
    into.data_parallel_size = max(found) - min(found) + 1


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isascii() and text.isdigit() and text else None


# -- asking ----------------------------------------------------------------------------------------

TIMEOUT_S: Final = 5.0  # per request
MOST_METRICS_BYTES: Final = 16 << 20
_OF_SGLANG: Final = ("/server_info", "/get_server_info")  # the second is the older name
_NOT_SERVED: Final = (404, 405, 501)


async def ask_engine(client: OutboundClient, base: str) -> Particulars:
    """Return what the engine at `base` (`http://host:port`) reports about itself. Raises
    OutboundFailed if the engine does not answer, or if an answer has an unknown form."""
    told = Particulars()
    try:
        told.model_name, owner = model_of(
            await client.text(base + "/v1/models", timeout_s=TIMEOUT_S)
        )
        if told.model_name is None:
            raise OutboundFailed(f"GET {base}/v1/models: it serves no model yet")
        host = Url(base).host
        if owner == "sglang" or not await _is_vllm(client, base, told):
            info = await _first(client, base, _OF_SGLANG)
            if info is not None:
                read_sglang_info(info, host, told)
            return told
        sources = await _first(client, base, ("/kv_event_sources",))
        if sources is not None:
            read_vllm_sources(sources, host, told)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise OutboundFailed(f"{base}: unknown form of response: {error}") from None
    return told


async def _is_vllm(client: OutboundClient, base: str, told: Particulars) -> bool:
    url = base + "/metrics"
    answer = await client.get(url, timeout_s=TIMEOUT_S, most_bytes=MOST_METRICS_BYTES)
    if answer.status in _NOT_SERVED:
        return False
    if answer.status != 200:
        raise OutboundFailed(f"GET {url}: status {answer.status}", answer.status)
    return read_vllm_metrics(answer.body, told)


async def _first(client: OutboundClient, base: str, paths: tuple[str, ...]) -> bytes | None:
    """Return the answer to the first of `paths` that the engine serves, or None."""
    for path in paths:
        try:
            return await client.text(base + path, timeout_s=TIMEOUT_S)
        except OutboundFailed as error:
            if error.status not in _NOT_SERVED:
                raise
    return None
