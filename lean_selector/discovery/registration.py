"""A registration, put together: what an entry says, else the engine, else the defaults."""

from collections.abc import Mapping
from typing import Final

from lean_selector.core.selection.workers import WorkerSpec
from lean_selector.discovery.particulars import Particulars
from lean_selector.outbound.url import endpoint_url
from lean_selector.wire.selection import WorkerRequest

_EVENTS: Final = ("kv_events_endpoint", "kv_events_endpoints")
_REPLAYS: Final = ("replay_endpoint", "replay_endpoints")


def spec_of(
    worker_id: int, entry: Particulars, engine: Particulars | None, defaults: Particulars
) -> WorkerSpec:
    """What is registered. Raises ValueError where the three do not fit together."""
    fields = defaults.told()
    fields.pop("worker_id", None)
    for more in (engine, entry):
        if more is not None:
            told = more.told()
            for pair in (_EVENTS, _REPLAYS):
                if any(name in told for name in pair):  # one of the pair speaks for both
                    for name in pair:
                        fields.pop(name, None)
            fields.update(told)
    events_port, replay_port = fields.pop("events_port", None), fields.pop("replay_port", None)
    fields["worker_id"] = worker_id
    endpoint = str(fields.get("endpoint", ""))
    start, size = fields.get("data_parallel_start_rank", 0), fields.get("data_parallel_size", 1)
    assert isinstance(start, int)
    assert isinstance(size, int)
    ranks = range(start, start + min(size, 4096))
    if events_port is not None and not any(name in fields for name in _EVENTS):
        fields["kv_events_endpoints"] = _by_rank(endpoint, events_port, ranks)
    if replay_port is not None and not any(name in fields for name in _REPLAYS):
        fields["replay_endpoints"] = _by_rank(endpoint, replay_port, ranks)
    tenant, group = fields.get("tenant_id"), fields.get("routing_group")
    if tenant is not None and group is not None and tenant != group:
        raise ValueError("tenant_id and routing_group are two names of one thing")
    return WorkerRequest(**fields).spec()  # type: ignore[arg-type]  # each checked as a Particular


def is_complete(entry: Particulars, use_kv_events: bool) -> bool:
    """Nothing need be asked of the engine: the entry says all that a worker cannot do without."""
    told = entry.told()
    has_events = any(name in told for name in (*_EVENTS, "events_port"))
    return {"model_name", "block_size"} <= told.keys() and (has_events or not use_kv_events)


def _by_rank(endpoint: str, port: object, ranks: range) -> Mapping[str, str]:
    """On the endpoint's host, the next port for each further rank."""
    assert isinstance(port, int)
    try:
        url = endpoint_url(endpoint)
    except ValueError as error:
        raise ValueError(
            f"events_port and replay_port need a URL to tell the host: {error}"
        ) from None
    host = f"[{url.host}]" if ":" in url.host else url.host
    return {
        str(rank): f"tcp://{host}:{port + offset}"
        for offset, rank in enumerate(ranks)
        if port + offset <= 0xFFFF
    }
