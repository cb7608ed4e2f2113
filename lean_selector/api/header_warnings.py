"""The headers `x-known-models` and `x-warning` of answers. They list the known models, unknown
fields of the body, and endpoints of a registration that are probably wrong.

The headers are computed for failed requests, for registrations and changes of workers, and for
reports of how requests ended, but not for requests that get a worker. Imported at the first of
these."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, Protocol

import msgspec

from lean_selector.api.replies import is_json, printable, warning_line
from lean_selector.core.errors import NoWorkers
from lean_selector.core.rank_bits import RankKey
from lean_selector.core.selection.catalog import Worker
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.shapes import WorkerSpec
from lean_selector.core.zmq_endpoints import check_endpoint, zmq_key
from lean_selector.http.head import Request
from lean_selector.wire.discovery_states import (
    EVENTS_PORT,
    OF_OTHER_BLOCKS,
    OTHER_BLOCKS,
    WITHOUT_EVENTS,
)
from lean_selector.wire.selection_bodies import DROPPED_FIELDS

_MOST_MODELS: Final = 32
_MOST_MODELS_BYTES: Final = 2000
_MOST_FIELDS: Final = 64  # fields of a body that are checked
_LONGEST_BODY: Final = 1 << 20
_LONGEST_FIELD: Final = 64
# Names of our fields in other APIs.
_OTHER_NAMES: Final = {
    "model": "model_name",
    "model_id": "model_name",
    "tenant": "tenant_id",
    "prompt": "token_ids",
    "prompt_token_ids": "token_ids",
    "input_ids": "token_ids",
    "tokens": "token_ids",
    "messages": "token_ids",
    "lora": "lora_name",
    "salt": "cache_salt",
    "num_tokens": "isl_tokens",
    "id": "worker_id",
    "url": "endpoint",
    "address": "endpoint",
    "page_size": "block_size",
    "dp_size": "data_parallel_size",
    "dp_start": "data_parallel_start_rank",
    "request_id": "reservation_id",
    "reservation_id": "selection_id",
    "rank": "dp_rank",
    "data_parallel_rank": "dp_rank",
    "status": "outcome",
    "result": "outcome",
    "ttft": "ttft_ms",
    "ttft_s": "ttft_ms",
    "ttft_seconds": "ttft_ms",
    "cached": "cached_tokens",
}
_read_keys: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def known_models_line(models: Iterable[str]) -> bytes:
    """Return the header line `x-known-models`: model names as JSON strings, joined by ", ", and
    "..." if not all fit. Return b"" if there are no models."""
    shown: list[str] = []
    size = 0
    for model in models:
        text = printable(msgspec.json.encode(model).decode())
        size += len(text)
        if len(shown) == _MOST_MODELS or size > _MOST_MODELS_BYTES:
            shown.append("...")
            break
        shown.append(text)
    return b"x-known-models: %b\r\n" % ", ".join(shown).encode("ascii") if shown else b""


def refusal_lines(request: Request, error: Exception, fields: frozenset[str]) -> bytes:
    """Return header lines for a failed request: known models, and warnings of unknown fields."""
    lines, warnings = b"", unread_fields(request, fields)
    if isinstance(error, NoWorkers):
        lines = known_models_line(error.known_models)
        if error.other_tenants is not None:
            warnings.insert(0, error.other_tenants)
    return lines + warning_line(warnings) if warnings else lines


def unread_fields(request: Request, fields: frozenset[str]) -> list[str]:
    """Return warnings of unknown fields in a JSON body that resemble a known one in `fields`."""
    body = request.body
    if (
        not body
        or not fields
        or len(body) > _LONGEST_BODY
        or not is_json(request.headers.content_type)
    ):
        return []
    try:
        given = _read_keys(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []  # reported already
    warnings = []
    for field in list(given)[:_MOST_FIELDS]:
        if field in fields or len(field) > _LONGEST_FIELD:
            continue
        if field in DROPPED_FIELDS and "block_size" in fields:  # the fields of a worker
            warnings.append(DROPPED_FIELDS[field])
            continue
        meant = _OTHER_NAMES.get(field.lower())
        if meant not in fields:
            from difflib import get_close_matches  # imported here because it is rarely needed

            close = get_close_matches(field.lower(), fields, 1, 0.8)
            meant = close[0] if close else None
        if meant is not None and meant not in given:
            warnings.append(f"unknown field {field} is ignored: is {meant} meant?")
    return warnings


# -- registrations ---------------------------------------------------------------------------------


def assumed_without_events(routed_ttl_s: float) -> str:
    """What stands in for the KV events of an engine that publishes none, as every warning, finding
    and log line says it. `routed_ttl_s`: how long a routed prompt is assumed cached; 0: not."""
    if routed_ttl_s > 0.0:
        return f"caches are assumed from the prompts routed in the last {routed_ttl_s:g} s"
    return "load alone decides"


def mend_of_incomplete(reasons: Sequence[str]) -> str | None:
    """What makes a discovered worker schedulable that was found without these fields, or None."""
    mends = []
    if any(reason.startswith("kv_events endpoint") for reason in reasons):
        mends.append(f"{EVENTS_PORT}, or for engines that publish none {WITHOUT_EVENTS}")
    mends += [
        f"""--discover-defaults '{{"{field}":N}}'"""
        for field in ("block_size", "max_num_batched_tokens")
        if any(reason.startswith(f"{field} ") for reason in reasons)
    ]
    return "; ".join(mends) or None


# a socket may bind to these wildcards, but no client can connect to them
_LISTENING: Final = ("*", "0.0.0.0", "[::]")
_NAMED: Final = 4  # endpoints or ranks listed in a warning; a worker may have 4 096


class Sources(Protocol):
    """Lists the ranks whose KV events (`listeners`) or replays (`askers`) an endpoint sends."""

    def listeners(self, key: str) -> Sequence[RankKey]: ...

    def askers(self, key: str) -> Sequence[RankKey]: ...


def registration_warnings(worker: Worker, sources: Sources, settings: RouterSettings) -> list[str]:
    """Return one-line warnings about a worker that was just registered, and, with KV events, about
    its endpoints. `sources` has the event and replay endpoints of all workers, including this
    worker."""
    warnings = []
    if worker.reasons and worker.reasons[0].startswith(OF_OTHER_BLOCKS):
        warnings.append(OTHER_BLOCKS)
    if not settings.use_kv_events:
        return warnings
    if not worker.reasons and not _events_of(worker.spec):
        assumed = assumed_without_events(settings.routed_ttl_s)
        warnings.append(
            f"no source of KV events is given: {assumed}; give kv_events_endpoint, or the port of "
            f"discovered engines with {EVENTS_PORT}"
        )
    faults = _endpoint_faults(worker, sources)
    warnings += islice(faults, _NAMED)
    if next(faults, None) is not None:
        warnings.append("and more of its endpoints")
    return warnings


def _endpoint_faults(worker: Worker, sources: Sources) -> Iterator[str]:
    """Yields what is wrong with the worker's event and replay endpoints: how they are written, and
    the ranks that have them too. The ranks of one worker may share a replay endpoint."""
    worker_id = worker.spec.worker_id
    for field, endpoint, dp_rank in _events_of(worker.spec):
        key = zmq_key(endpoint)
        heard = [rank for rank in sources.listeners(key) if rank != (worker_id, dp_rank)]
        fault = endpoint_fault(endpoint) or _shared([*heard, *sources.askers(key)])
        if fault is not None:
            yield f"{field} {endpoint} {fault}"
    for field, endpoint in _replays_of(worker.spec):
        key = zmq_key(endpoint)
        asked = [rank for rank in sources.askers(key) if rank[0] != worker_id]
        fault = endpoint_fault(endpoint) or _shared([*asked, *sources.listeners(key)])
        if fault is not None:
            yield f"{field} {endpoint} {fault}"


def _events_of(spec: WorkerSpec) -> list[tuple[str, str, int]]:
    if not spec.kv_events_endpoints and spec.kv_events_endpoint is not None:
        return [("kv_events_endpoint", spec.kv_events_endpoint, spec.ranks.start)]
    return [
        (f"kv_events_endpoints[{rank}]", endpoint, rank)
        for rank, endpoint in sorted(spec.kv_events_endpoints.items())
    ]


def _replays_of(spec: WorkerSpec) -> list[tuple[str, str]]:
    one = [] if spec.replay_endpoint is None else [("replay_endpoint", spec.replay_endpoint)]
    by_rank = sorted(spec.replay_endpoints.items())
    return one + [(f"replay_endpoints[{rank}]", endpoint) for rank, endpoint in by_rank]


def endpoint_fault(endpoint: str) -> str | None:
    """Return why no selector can connect to a registered ZMQ endpoint, if its text shows that."""
    try:
        check_endpoint(endpoint)
    except ValueError:
        if "://" in endpoint:
            return "is not a ZMQ endpoint (tcp://host:port)"
        return f"has no scheme: tcp://{endpoint} is probably meant"
    scheme, _, address = endpoint.partition("://")
    if scheme == "inproc":
        return "is not reachable outside of the engine's process"
    if scheme == "tcp" and address.rpartition(":")[0] in _LISTENING:
        return "is a wildcard that an engine binds to: give its host"
    return None


def _shared(ranks: Sequence[RankKey]) -> str | None:
    if not ranks:
        return None
    named = [f"worker {worker_id} dp_rank {dp_rank}" for worker_id, dp_rank in ranks[:_NAMED]]
    more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"is also that of {', '.join(named)}{more}"
