"""Descriptions of the routes for the OpenAPI document, by method and path: summary, answers,
errors, and an example body. The type of the body is in the row of the route.
"""

from types import GenericAlias
from typing import Any, Final, NamedTuple

from lean_selector.core.load.shapes import LoadRow, PotentialLoadRow, WorkerRow
from lean_selector.core.selection.shapes import (
    Booked,
    OverlapScores,
    PartitionLoads,
    RankLoadRow,
    Selection,
    WorkerRecord,
)
from lean_selector.wire.discovery_states import DiscoveryReport
from lean_selector.wire.fleet import Fleet, PrefixTree
from lean_selector.wire.replica_shapes import SyncState
from lean_selector.wire.selection_16_bodies import (
    Booked16,
    OverlapScores16,
    PartitionLoads16,
    Selection16,
    WorkerDetail16,
    WorkerRecord16,
)
from lean_selector.wire.selection_bodies import (
    ErrorBody,
    KvSource,
    Ok,
    OpenAiErrorBody,
    Readiness,
    ThresholdRow,
    Thresholds,
    WorkerDetail,
)


class Text(NamedTuple):
    """An answer that is not JSON."""

    media_type: str


class RouteDescription(NamedTuple):
    """The description of one route.

    `answers` are those of the handler, by status: a type that msgspec knows, a list of alternative
    types, a Text, or None for an empty body. `errors` are the statuses of its own errors, with the
    reason; those that any route may have (an invalid body or path, an internal error) are described
    once for all. `refusal` is the body of such an error.
    """

    summary: str
    group: str
    answers: dict[int, Any]
    errors: dict[int, str] = {}
    example: Any = None  # of a body, as decoded from JSON; required if there is a body
    refusal: Any = ErrorBody


Descriptions = dict[tuple[str, str], RouteDescription]

_OFF: Final = "replica sync is off"
_PROMPT_FAULT: Final = "the prompt is invalid, or the two names of the tenant differ"
_NO_WORKERS: Final = "no worker of this model and tenant is eligible"
_NONE_READY: Final = "the model and tenant have no schedulable worker"
_BUSY: Final = "all workers are busy (with --overload-status)"
_NO_WORKER: Final = "the worker does not exist"
_NEVER: Final = "the reservation does not exist"
_TWO_NAMES: Final = "the two names of the tenant differ"
_NO_TRACKER: Final = "the model and tenant have no workers"
_PROMPT: Final[dict[str, Any]] = {"model_name": "llama", "token_ids": list(range(1, 33))}
_HASHES: Final[dict[str, Any]] = {
    **{"model_name": "llama", "isl_tokens": 40},
    **{"block_hashes": [11, 12], "sequence_hashes": [21, 22]},
}


def _described(summary: str, group: str, answer: Any, **more: Any) -> RouteDescription:
    """A route whose only success is a 200."""
    return RouteDescription(summary, group, {200: answer}, **more)


def _joining(example: Any) -> RouteDescription:
    return RouteDescription(
        "Add a peer; 201 if it is new",
        "replicas",
        {200: Ok, 201: Ok},
        {400: "the endpoint is invalid", 409: _OFF},
        example,
    )


def _leaving(example: Any) -> RouteDescription:
    errors = {404: "it is not a peer", 409: _OFF}
    return RouteDescription("Remove a peer", "replicas", {200: Ok}, errors, example)


_PEERS: Final = _described("List the peers", "replicas", [list[str], SyncState, dict[str, Any]])
_ENDPOINT: Final = {"endpoint": "tcp://127.0.0.1:9092"}
_SHARED: Final[Descriptions] = {
    ("GET", "/replica_sync/peers"): _PEERS,
    ("POST", "/replica_sync/register_peer"): _joining(_ENDPOINT),
    ("POST", "/replica_sync/deregister_peer"): _leaving(_ENDPOINT),
    ("GET", "/replica_sync/snapshot"): _described(
        "Live reservations, for a replica that catches up",
        "replicas",
        dict[str, Any],
        errors={409: _OFF},
    ),
    ("GET", "/discovery"): _described(
        "Discoveries, and the state of each discovered worker and peer",
        "discovery",
        DiscoveryReport,
    ),
    ("GET", "/metrics"): _described(
        "Metrics for Prometheus", "service", Text("text/plain; version=0.0.4; charset=utf-8")
    ),
    ("GET", "/openapi.json"): _described("This document", "service", dict[str, Any]),
}


# -- the selector ---------------------------------------------------------------------------------


def _many(kind: Any) -> Any:
    """The type of a list of these, for msgspec."""
    return GenericAlias(list, (kind,))


def _selector(
    record: Any,
    detail: Any,
    selection: Any,
    booked: Any,
    loads: Any,
    scores: Any,
    id: str,
) -> Descriptions:
    """The routes of one dialect, given the structs of its answers; `id` is the field with a
    reservation's id."""
    live = f"the {id} is already live"
    return {
        ("GET", "/health"): _described("Liveness", "service", Ok),
        ("GET", "/ready"): RouteDescription(
            "Readiness: 200 if a worker can be chosen", "service", {200: Readiness, 503: Readiness}
        ),
        ("POST", "/workers"): RouteDescription(
            "Register a worker, or replace its record",
            "workers",
            {201: record},
            {400: "a size or an endpoint is invalid, or the two names of the tenant differ"},
            {
                **{"worker_id": 1, "model_name": "llama", "endpoint": "http://worker-1:8000"},
                **{"block_size": 16, "total_kv_blocks": 20000, "max_num_batched_tokens": 8192},
                **{"kv_events_endpoint": "tcp://127.0.0.1:5557"},
                "replay_endpoint": "tcp://127.0.0.1:5558",
            },
        ),
        ("GET", "/workers"): _described(
            "List workers; `detail` adds health and event sources",
            "workers",
            [_many(record), _many(detail)],
        ),
        ("PATCH", "/workers/{worker_id}"): _described(
            "Change fields of a worker; absent or null fields stay",
            "workers",
            record,
            example={"max_num_batched_tokens": 4096, "taints": ["spot"]},
            errors={400: "a size or an endpoint is invalid", 404: _NO_WORKER},
        ),
        ("DELETE", "/workers/{worker_id}"): _described(
            "Remove a worker, its index and its reservations",
            "workers",
            record,
            errors={404: _NO_WORKER},
        ),
        ("POST", "/workers/{worker_id}/report"): _described(
            "Report the outcome of a request to a worker",
            "workers",
            Ok,
            example={"outcome": "ok", "dp_rank": 0, "ttft_ms": 35.5, "cached_tokens": 16},
            errors={404: "the worker or rank does not exist"},
        ),
        ("POST", "/select"): _described(
            "Choose a rank for a prompt; reserves nothing",
            "selections",
            selection,
            example={**_HASHES, "selection_id": "s-1", "allowed_worker_ids": [1]},
            errors={400: _PROMPT_FAULT, 429: _BUSY, 503: _NO_WORKERS, 529: _BUSY},
        ),
        ("POST", "/select_and_reserve"): _described(
            "Choose a rank for a prompt, and reserve it",
            "selections",
            selection,
            example={**_PROMPT, id: "request-1"},
            errors={400: _PROMPT_FAULT, 409: live, 429: _BUSY, 503: _NO_WORKERS, 529: _BUSY},
        ),
        ("POST", "/reservations"): RouteDescription(
            "Reserve a given rank, or the rank of an earlier `/select`",
            "reservations",
            {201: booked},
            {
                400: _PROMPT_FAULT,
                404: "the worker, the rank or the selection does not exist",
                409: live,
                503: _NONE_READY,
            },
            {
                **{id: "request-2", "model_name": "llama", "worker_id": 1, "dp_rank": 0},
                **{"sequence_hashes": [21, 22], "isl_tokens": 40, "effective_prefill_tokens": 40},
            },
        ),
        ("POST", "/reservations/{reservation_id}/prefill_complete"): _described(
            "Report the first token of a request", "reservations", Ok, errors={404: _NEVER}
        ),
        ("POST", "/reservations/{reservation_id}/output_block"): _described(
            "Report one more output block of a request",
            "reservations",
            Ok,
            example={"decay_fraction": 0.5},
            errors={
                400: "decay_fraction is not between 0.0 and 1.0",
                404: "the reservation is not live",
            },
        ),
        ("DELETE", "/reservations/{reservation_id}"): _described(
            "Free a reservation, with the outcome of its request",
            "reservations",
            Ok,
            example={"outcome": "ok", "cached_tokens": 16},
            errors={404: _NEVER},
        ),
        ("GET", "/loads"): _described(
            "The load of each rank; `detail` adds the engine's own report",
            "loads",
            _many(loads),
        ),
        ("POST", "/potential_loads"): _described(
            "The load of each rank with this prompt on it",
            "loads",
            list[RankLoadRow],
            example=_PROMPT,
            errors={400: _PROMPT_FAULT, 503: _NONE_READY},
        ),
        ("POST", "/overlap_scores"): _described(
            "Cached blocks of a prompt on each rank",
            "index",
            scores,
            example=_PROMPT,
            errors={400: _PROMPT_FAULT, 503: _NONE_READY},
        ),
        ("GET", "/dump"): _described(
            "The index, for --indexer-peers",
            "index",
            dict[str, Any],
            errors={503: "the index is being recovered"},
        ),
        ("GET", "/kv_sources"): _described(
            "State of each KV event source: last batch, gaps, lost and skipped events",
            "index",
            list[KvSource],
        ),
        ("POST", "/busy_threshold"): _described(
            "Set a model's busy thresholds; absent or null fields stay",
            "load shedding",
            ThresholdRow,
            example={"model": "llama", "active_decode_blocks_threshold": 0.85},
            errors={400: "a threshold is out of range", 404: "the model has no workers"},
        ),
        ("GET", "/busy_threshold"): _described(
            "The thresholds in force", "load shedding", Thresholds
        ),
        ("DELETE", "/busy_threshold"): _described(
            "Disable a model's thresholds",
            "load shedding",
            ThresholdRow,
            errors={400: "`model` is missing", 404: "the model has no workers"},
        ),
        ("GET", "/replica_sync/sessions"): _described(
            "Session bindings, for a replica that catches up",
            "replicas",
            dict[str, Any],
            errors={409: _OFF},
        ),
        ("GET", "/ui"): _described(
            "The page that shows all this to people", "looking", Text("text/html; charset=utf-8")
        ),
        ("GET", "/events"): _described(
            "What the page shows, once or twice a second: server-sent events `fleet`, whose data is"
            " that of `GET /fleet` as far as it changed, with the last choices",
            "looking",
            Text("text/event-stream"),
            errors={503: "too many listen"},
        ),
        ("GET", "/fleet"): _described(
            "Each rank's state, load and sums, and what is wrong, as `lean-selector check` has it",
            "looking",
            Fleet,
        ),
        ("GET", "/prefixes"): _described(
            "The runs of blocks that weigh most in each index, from a prompt's start: at most 200",
            "looking",
            list[PrefixTree],
        ),
        **_SHARED,
    }


SELECTOR_ROUTES: Final = _selector(
    WorkerRecord,
    WorkerDetail,
    Selection,
    Booked,
    PartitionLoads,
    OverlapScores,
    "reservation_id",
)
SELECTOR_16_ROUTES: Final = _selector(
    WorkerRecord16,
    WorkerDetail16,
    Selection16,
    Booked16,
    PartitionLoads16,
    OverlapScores16,
    "selection_id",
)
# Only with --prompts.
GATEWAY_ROUTES: Final[Descriptions] = {
    ("POST", "/route/{path*}"): RouteDescription(
        "Choose and reserve a worker for a raw OpenAI request; headers name it",
        "gateways",
        {200: Selection},
        refusal=OpenAiErrorBody,
    ),
}

# -- the slot tracker -----------------------------------------------------------------------------

_URL: Final = {"url": "tcp://127.0.0.1:9092"}
_REQUEST: Final = {"model_name": "llama", "request_id": "req-1"}

SLOT_TRACKER_ROUTES: Final[Descriptions] = {
    ("GET", "/health"): _described("Liveness", "service", None),
    ("POST", "/register"): RouteDescription(
        "Register a worker's ranks",
        "workers",
        {201: Ok},
        {
            400: "a size is 0, or the ranks are out of range",
            409: "it is registered already, or its block size differs from its model's",
        },
        {
            **{"worker_id": 7, "model_name": "llama", "block_size": 16},
            **{"dp_start": 0, "dp_size": 1},
        },
    ),
    ("POST", "/unregister"): _described(
        "Remove a worker and its requests",
        "workers",
        Ok,
        example={"worker_id": 7, "model_name": "llama"},
        errors={400: _TWO_NAMES, 404: "the worker is not registered"},
    ),
    ("GET", "/workers"): _described("List workers", "workers", list[WorkerRow]),
    ("POST", "/add"): RouteDescription(
        "Book a request on a rank",
        "requests",
        {201: Ok},
        {
            400: f"{_TWO_NAMES}, or too many tokens",
            404: "the rank does not exist",
            409: "the id is already live",
        },
        {
            **_REQUEST,
            **{"worker_id": 7, "dp_rank": 0},
            **{"sequence_hashes": [101, -22, 303], "new_isl_tokens": 48},
        },
    ),
    ("POST", "/prefill_complete"): _described(
        "Report the first token of a request",
        "requests",
        Ok,
        example=_REQUEST,
        errors={400: _TWO_NAMES, 404: "the request, model or tenant does not exist"},
    ),
    ("POST", "/free"): _described(
        "Free a request; an unknown id is no error",
        "requests",
        Ok,
        example=_REQUEST,
        errors={400: _TWO_NAMES, 404: _NO_TRACKER},
    ),
    ("GET", "/loads"): _described("The load of each rank", "loads", list[LoadRow]),
    ("POST", "/potential_loads"): _described(
        "The load of each rank with this prompt on it",
        "loads",
        list[PotentialLoadRow],
        example={
            **{"model_name": "llama", "sequence_hashes": [101, -22, 303, 404]},
            **{"new_isl_tokens": 64},
        },
        errors={400: f"{_TWO_NAMES}, or too many tokens", 404: _NO_TRACKER},
    ),
    ("POST", "/register_peer"): _joining(_URL),
    ("POST", "/deregister_peer"): _leaving(_URL),
    ("GET", "/peers"): _PEERS,
    **_SHARED,
}
