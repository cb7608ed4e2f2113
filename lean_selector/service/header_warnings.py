"""The headers `x-known-models` and `x-warning` of answers. They list the known models, unknown
fields of the body, and endpoints of a registration that are probably wrong.

The headers are computed for failed requests, for registrations and changes of workers, and for
reports of how requests ended, but not for requests that get a worker."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Final, Protocol

import msgspec

from lean_selector.core.errors import NoWorkers
from lean_selector.core.rank_bits import RankKey
from lean_selector.core.selection.catalog import HttpPlaces, Worker
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.shapes import WorkerSpec
from lean_selector.core.zmq_endpoints import check_endpoint, http_place, zmq_key
from lean_selector.http.head import Request
from lean_selector.service.replies import is_json, printable, warning_line
from lean_selector.service.routes import Route, Served
from lean_selector.wire.discovery_states import (
    EVENTS_PORT,
    OF_OTHER_BLOCKS,
    OTHER_BLOCKS,
    WITHOUT_EVENTS,
)

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
    """Returns the header line `x-known-models`: model names as JSON strings, joined by ", ", and
    "..." if not all fit. Returns b"" if there are no models."""
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
    """Returns header lines for a failed request: known models, and warnings of unknown fields."""
    lines, warnings = b"", unread_fields(request, fields)
    if isinstance(error, NoWorkers):
        lines = known_models_line(error.known_models)
        if error.other_tenants is not None:
            warnings.insert(0, error.other_tenants)
    return lines + warning_line(warnings) if warnings else lines


def with_warnings(route: Route) -> Route:
    """Changes and returns `route`: its successful answers now also warn of unknown fields."""
    run, fields = route.run, route.fields()

    def answer(request: Request, param: bytes | None) -> Served:
        result = run(request, param)
        warnings = unread_fields(request, fields)
        if not warnings or not isinstance(result, bytes):
            return result
        head, _, body = result.partition(b"\r\n\r\n")
        return b"%b\r\n%b\r\n%b" % (head, warning_line(warnings), body)

    route.run = answer
    return route


def unread_fields(request: Request, fields: frozenset[str]) -> list[str]:
    """Returns warnings of unknown fields in a JSON body that resemble a known one in `fields`."""
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
        meant = _OTHER_NAMES.get(field.lower())
        if meant not in fields:
            from difflib import get_close_matches  # imported here because it is rarely needed

            close = get_close_matches(field.lower(), fields, 1, 0.8)
            meant = close[0] if close else None
        if meant is not None and meant not in given:
            warnings.append(f"unknown field {field} is ignored: is {meant} meant?")
    return warnings


# -- registrations --------------------------------------------------------------------------------


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
_NAMED: Final = 4  # endpoints or workers listed in a warning; a worker may have 4 096


class Sources(Protocol):
    """Lists the ranks whose KV events (`listeners`) or replays (`askers`) an endpoint sends."""

    def listeners(self, key: str) -> Sequence[RankKey]: ...

    def askers(self, key: str) -> Sequence[RankKey]: ...


def registration_warnings(
    worker: Worker, places: HttpPlaces, sources: Sources, settings: RouterSettings
) -> list[str]:
    """Returns one-line warnings about a worker that was just registered, and its endpoints.
    `places` and `sources` have the endpoints of all workers, including this worker. If KV events
    are off, only the worker's HTTP endpoint is checked."""
    listens = settings.use_kv_events
    judgement = _Judgement(worker, places, sources)
    warnings = list(judgement.of_http())
    if worker.reasons and worker.reasons[0].startswith(OF_OTHER_BLOCKS):
        warnings.append(OTHER_BLOCKS)
    room = len(warnings) + _NAMED
    if listens and not worker.reasons and not judgement.has_events:
        assumed = assumed_without_events(settings.routed_ttl_s)
        warnings.append(
            f"no source of KV events is given: {assumed}; give kv_events_endpoint, or the port of "
            f"discovered engines with {EVENTS_PORT}"
        )
    for warning in judgement.of_sources() if listens else ():
        if len(warnings) == room:
            warnings.append("and more of its endpoints")
            break
        warnings.append(warning)
    return warnings


class _Judgement:
    """Checks a worker's endpoints: their syntax, and whether other workers use them, too."""

    def __init__(self, worker: Worker, places: HttpPlaces, sources: Sources) -> None:
        self._worker = worker
        self._spec = spec = worker.spec
        self._places = places
        self._sources = sources
        place = http_place(spec.endpoint) if spec.endpoint else None
        self._served = None if place is None else f"tcp://{place.address}"
        self._events = {zmq_key(endpoint) for _, endpoint, _ in _events_of(spec)}
        self.has_events = bool(self._events)

    def of_http(self) -> Iterator[str]:
        endpoint = self._spec.endpoint
        if not endpoint:
            return
        if "://" not in endpoint:
            yield f"endpoint {endpoint} has no scheme: http://{endpoint} is probably meant"
        sharing = list(islice(self._places.sharing(self._spec), _NAMED + 1))
        if sharing:
            yield f"endpoint {endpoint} is also that of {_workers(sharing)}"
        if self._served is not None:
            taken = self._heard_there(self._served) or self._asked_there(self._served)
            if taken is not None:
                yield f"endpoint {endpoint} {taken}"

    def of_sources(self) -> Iterator[str]:
        for field, endpoint, dp_rank in _events_of(self._spec):
            fault = _fault(endpoint) or self._of_events(zmq_key(endpoint), dp_rank)
            if fault is not None:
                yield f"{field} {endpoint} {fault}"
        for field, endpoint in _replays_of(self._worker):
            fault = _fault(endpoint) or self._of_replay(zmq_key(endpoint))
            if fault is not None:
                yield f"{field} {endpoint} {fault}"
        for endpoint in self._worker.load_endpoints.values():
            fault = _fault(endpoint) or self._of_load(zmq_key(endpoint))
            if fault is not None:
                yield f"load_endpoint {endpoint} {fault}"

    def _of_events(self, key: str, dp_rank: int) -> str | None:
        own = self._spec.worker_id, dp_rank
        others = [rank for rank in self._sources.listeners(key) if rank != own]
        if others:
            return f"is also that of {_ranks(others)}"
        return self._asked_there(key) or self._served_there(key)

    def _of_replay(self, key: str) -> str | None:
        """Returns what is wrong with a replay endpoint, or None. The ranks of one worker may share
        a replay endpoint."""
        if key in self._events and key != self._served:
            return "is where the worker's events are expected"
        others = self._of_others(self._sources.askers(key))
        if others:
            return f"is also that of {_ranks(others)}"
        return self._heard_there(key) or self._served_there(key)

    def _of_load(self, key: str) -> str | None:
        if key in self._events:
            return "is where the worker's events are expected"
        return self._heard_there(key) or self._asked_there(key) or self._served_there(key)

    def _heard_there(self, key: str) -> str | None:
        others = self._of_others(self._sources.listeners(key))
        return f"is the kv_events endpoint of {_ranks(others)}" if others else None

    def _asked_there(self, key: str) -> str | None:
        others = self._of_others(self._sources.askers(key))
        return f"is the replay endpoint of {_ranks(others)}" if others else None

    def _served_there(self, key: str) -> str | None:
        if key == self._served:
            return "is the address of the worker's HTTP endpoint"
        there = self._places.at_address(key.removeprefix("tcp://"))
        others = list(islice(there, _NAMED + 1))
        return f"is the address of the HTTP endpoint of {_workers(others)}" if others else None

    def _of_others(self, ranks: Sequence[RankKey]) -> list[RankKey]:
        return [rank for rank in ranks if rank[0] != self._spec.worker_id]


def _events_of(spec: WorkerSpec) -> list[tuple[str, str, int]]:
    """Returns (field, endpoint, rank) for each KV-event endpoint in a worker's registration."""
    if not spec.kv_events_endpoints and spec.kv_events_endpoint is not None:
        return [("kv_events_endpoint", spec.kv_events_endpoint, spec.ranks.start)]
    return [
        (f"kv_events_endpoints[{rank}]", endpoint, rank)
        for rank, endpoint in sorted(spec.kv_events_endpoints.items())
    ]


def _replays_of(worker: Worker) -> Iterator[tuple[str, str]]:
    """Yields (field, endpoint) for each replay endpoint of a worker and of its ranks."""
    spec = worker.spec
    if spec.replay_endpoint is not None:
        yield "replay_endpoint", spec.replay_endpoint
        if _fault(spec.replay_endpoint) is None:
            for rank, source in worker.sources.items():
                derived = source.replay_endpoint
                if derived is None or derived == spec.replay_endpoint:
                    continue
                if rank not in spec.replay_endpoints:
                    yield f"replay_endpoint of dp_rank {rank}", derived
    for rank, endpoint in sorted(spec.replay_endpoints.items()):
        yield f"replay_endpoints[{rank}]", endpoint


def _fault(endpoint: str) -> str | None:
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


def _ranks(ranks: Sequence[RankKey]) -> str:
    named = [f"worker {worker_id} dp_rank {dp_rank}" for worker_id, dp_rank in ranks[:_NAMED]]
    more = len(ranks) - len(named)
    return ", ".join(named) + (f" and {more} more" if more else "")


def _workers(ids: Sequence[int]) -> str:
    named = ", ".join(f"worker {worker_id}" for worker_id in ids[:_NAMED])
    return named + (" and more" if len(ids) > _NAMED else "")
