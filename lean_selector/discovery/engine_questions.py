"""Asks an engine what it is: which model, blocks of which size, and where it tells its events."""

from typing import Final

import msgspec

from lean_selector.discovery.engine_answers import (
    model_of,
    read_sglang_info,
    read_vllm_metrics,
    read_vllm_sources,
)
from lean_selector.discovery.particulars import Particulars
from lean_selector.outbound.client import OutboundClient
from lean_selector.outbound.failure import OutboundFailed
from lean_selector.outbound.url import Url

TIMEOUT_S: Final = 5.0  # of each question
MOST_METRICS_BYTES: Final = 16 << 20
_OF_SGLANG: Final = ("/server_info", "/get_server_info")  # the second is the older name
_NOT_SERVED: Final = (404, 405, 501)


async def ask_engine(client: OutboundClient, base: str) -> Particulars:
    """What the engine at `base` (`http://host:port`) says of itself; what it does not say is left
    out. Raises OutboundFailed when it does not answer, or not in words that we know.
    """
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
        raise OutboundFailed(f"{base}: an answer in words that we do not know: {error}") from None
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
    """The first of these that is served."""
    for path in paths:
        try:
            return await client.text(base + path, timeout_s=TIMEOUT_S)
        except OutboundFailed as error:
            if error.status not in _NOT_SERVED:
                raise
    return None
