"""What both services answer: replicas, discovery, metrics, and this document."""

from types import GenericAlias
from typing import Any, Final

from lean_selector.core.selection.shapes import (
    Booked,
    OverlapScores,
    PartitionLoads,
    RankLoadRow,
    Selection,
    WorkerRecord,
)
from lean_selector.core.tracker_rows import LoadRow, PotentialLoadRow, WorkerRow
from lean_selector.service.openapi.shapes import (
    Dialect,
    DumpEntry,
    DumpEntry16,
    RouteDescription,
    SessionList,
    Snapshot,
    Text,
)
from lean_selector.wire.busy import ThresholdRow, Thresholds
from lean_selector.wire.discovery_states import DiscoveryReport
from lean_selector.wire.replica_shapes import PlaneState
from lean_selector.wire.selection import (
    KvSource,
    Ok,
    OpenAiErrorBody,
    Readiness,
    WorkerDetail,
)
from lean_selector.wire.selection_16 import (
    Booked16,
    OverlapScores16,
    PartitionLoads16,
    Selection16,
    WorkerDetail16,
    WorkerRecord16,
)

SWITCHED_OFF: Final = "replica sync is off"
PEERS: Final = RouteDescription(
    summary="The replicas that this one speaks to",
    group="replicas",
    answers={200: [list[str], PlaneState, dict[str, Any]]},
)


def joining(example: Any) -> RouteDescription:
    return RouteDescription(
        summary="Speak to a replica; 201 if it was none of ours yet",
        group="replicas",
        example=example,
        answers={200: Ok, 201: Ok},
        errors={400: "the endpoint cannot be one", 409: SWITCHED_OFF},
    )


def leaving(example: Any) -> RouteDescription:
    return RouteDescription(
        summary="Speak to a replica no more",
        group="replicas",
        example=example,
        answers={200: Ok},
        errors={404: "it is none of ours", 409: SWITCHED_OFF},
    )


_ENDPOINT: Final = {"endpoint": "tcp://127.0.0.1:9092"}

SHARED_ROUTES: Final[dict[tuple[str, str], RouteDescription]] = {
    ("GET", "/replica_sync/peers"): PEERS,
    ("POST", "/replica_sync/register_peer"): joining(_ENDPOINT),
    ("POST", "/replica_sync/deregister_peer"): leaving(_ENDPOINT),
    ("GET", "/replica_sync/snapshot"): RouteDescription(
        summary="What is live, for a replica that catches up",
        group="replicas",
        answers={200: Snapshot},
        errors={409: SWITCHED_OFF},
    ),
    ("GET", "/discovery"): RouteDescription(
        summary="What is looked for, what was found, and what became of it",
        group="discovery",
        answers={200: DiscoveryReport},
    ),
    ("GET", "/metrics"): RouteDescription(
        summary="Metrics for Prometheus",
        group="service",
        answers={200: Text("text/plain; version=0.0.4; charset=utf-8")},
    ),
    ("GET", "/openapi.json"): RouteDescription(
        summary="This document",
        group="service",
        answers={200: dict[str, Any]},
    ),
}


# -- selector routes -----------------------------------------------------------------------------
#
# The routes of the selector, described, in each dialect that it speaks (`--api`).

API_1_3: Final = Dialect(
    record=WorkerRecord,
    detail=WorkerDetail,
    selection=Selection,
    booked=Booked,
    loads=PartitionLoads,
    scores=OverlapScores,
    dump=DumpEntry,
    id="reservation_id",
)
API_1_6: Final = Dialect(
    record=WorkerRecord16,
    detail=WorkerDetail16,
    selection=Selection16,
    booked=Booked16,
    loads=PartitionLoads16,
    scores=OverlapScores16,
    dump=DumpEntry16,
    id="selection_id",
)

_PROMPT_FAULT: Final = "the prompt makes no sense, or two names of the tenant differ"
_NO_WORKERS: Final = "no worker of this model and tenant can take it"
_BUSY: Final = "all workers are busy, where --overload-status says so"
_PROMPT: Final[dict[str, Any]] = {"model_name": "llama", "token_ids": list(range(1, 33))}
_HASHES: Final[dict[str, Any]] = {
    **{"model_name": "llama", "isl_tokens": 40},
    **{"block_hashes": [11, 12], "sequence_hashes": [21, 22]},
}


def _projection(summary: str, group: str, answer: Any) -> RouteDescription:
    return RouteDescription(
        summary=summary,
        group=group,
        example=_PROMPT,
        answers={200: answer},
        errors={400: _PROMPT_FAULT, 503: "the model and tenant have no schedulable worker"},
    )


def _named(kind: Any) -> Any:
    """Them by name, as msgspec knows it."""
    return GenericAlias(dict, (str, kind))


def _many(kind: Any) -> Any:
    """A list of them, as msgspec knows it."""
    return GenericAlias(list, (kind,))


def _routes(says: Dialect) -> dict[tuple[str, str], RouteDescription]:
    return {
        ("GET", "/health"): RouteDescription(
            summary="The process lives", group="service", answers={200: Ok}
        ),
        ("GET", "/ready"): RouteDescription(
            summary="At least one worker can be chosen",
            group="service",
            answers={200: Readiness, 503: Readiness},
        ),
        # -- workers
        ("POST", "/workers"): RouteDescription(
            summary="Register a worker, or replace its record",
            group="workers",
            example={
                **{"worker_id": 1, "model_name": "llama", "endpoint": "http://worker-1:8000"},
                **{"block_size": 16, "total_kv_blocks": 20000, "max_num_batched_tokens": 8192},
                **{"kv_events_endpoint": "tcp://127.0.0.1:5557"},
                "replay_endpoint": "tcp://127.0.0.1:5558",
            },
            answers={201: says.record},
            errors={400: "a size or an endpoint that there cannot be, or two names that differ"},
        ),
        ("GET", "/workers"): RouteDescription(
            summary="The workers; with `detail` their health and event sources too",
            group="workers",
            answers={200: [_many(says.record), _many(says.detail)]},
        ),
        ("PATCH", "/workers/{worker_id}"): RouteDescription(
            summary="Change fields of a worker; what is absent or null stays",
            group="workers",
            example={"max_num_batched_tokens": 4096, "taints": ["spot"]},
            answers={200: says.record},
            errors={
                400: "a size or an endpoint that there cannot be",
                404: "there is no such worker",
            },
        ),
        ("DELETE", "/workers/{worker_id}"): RouteDescription(
            summary="Remove a worker, its index and its reservations",
            group="workers",
            answers={200: says.record},
            errors={404: "there is no such worker"},
        ),
        ("POST", "/workers/{worker_id}/report"): RouteDescription(
            summary="Tell how a request to a worker went",
            group="workers",
            example={"outcome": "ok", "dp_rank": 0, "ttft_ms": 35.5, "cached_tokens": 16},
            answers={200: Ok},
            errors={404: "there is no such worker or rank"},
        ),
        # -- selections
        ("POST", "/select"): RouteDescription(
            summary="Choose a rank for a prompt; nothing is booked",
            group="selections",
            example={**_HASHES, "selection_id": "s-1", "allowed_worker_ids": [1]},
            answers={200: says.selection},
            errors={400: _PROMPT_FAULT, 429: _BUSY, 503: _NO_WORKERS, 529: _BUSY},
        ),
        ("POST", "/select_and_reserve"): RouteDescription(
            summary="Choose a rank for a prompt, and book it",
            group="selections",
            example={**_PROMPT, says.id: "request-1"},
            answers={200: says.selection},
            errors={
                **{400: _PROMPT_FAULT, 409: f"the {says.id} is live already"},
                **{429: _BUSY, 503: _NO_WORKERS, 529: _BUSY},
            },
        ),
        # -- reservations
        ("POST", "/reservations"): RouteDescription(
            summary="Book a rank that was chosen elsewhere, or what was selected under an id",
            group="reservations",
            example={
                **{says.id: "request-2", "model_name": "llama", "worker_id": 1, "dp_rank": 0},
                **{"sequence_hashes": [21, 22], "isl_tokens": 40, "effective_prefill_tokens": 40},
            },
            answers={201: says.booked},
            errors={
                400: _PROMPT_FAULT,
                404: "there is no such worker or rank, or nothing was selected under that id",
                409: f"the {says.id} is live already",
                503: "the model and tenant have no schedulable worker",
            },
        ),
        ("POST", "/reservations/{reservation_id}/prefill_complete"): RouteDescription(
            summary="The first token of a request came",
            group="reservations",
            answers={200: Ok},
            errors={404: "there never was such a reservation"},
        ),
        ("POST", "/reservations/{reservation_id}/output_block"): RouteDescription(
            summary="A request fills one more block",
            group="reservations",
            example={"decay_fraction": 0.5},
            answers={200: Ok},
            errors={400: "decay_fraction is not within 0.0 and 1.0", 404: "it is not live"},
        ),
        ("DELETE", "/reservations/{reservation_id}"): RouteDescription(
            summary="A request has ended, and how",
            group="reservations",
            example={"outcome": "ok", "cached_tokens": 16},
            answers={200: Ok},
            errors={404: "there never was such a reservation"},
        ),
        # -- loads
        ("GET", "/loads"): RouteDescription(
            summary="The load of each rank",
            group="loads",
            answers={200: _many(says.loads)},
        ),
        ("POST", "/potential_loads"): _projection(
            "The load of each rank if this prompt ran there",
            "loads",
            list[RankLoadRow],
        ),
        ("POST", "/overlap_scores"): _projection(
            "How much of a prompt each rank has cached", "index", says.scores
        ),
        # -- the index
        ("GET", "/dump"): RouteDescription(
            summary="The index, in the form that --indexer-peers reads",
            group="index",
            answers={200: _named(says.dump)},
            errors={503: "start-up recovery is under way"},
        ),
        ("GET", "/kv_sources"): RouteDescription(
            summary="Each engine's events: state, last batch, gaps, what was lost or skipped",
            group="index",
            answers={200: list[KvSource]},
        ),
        # -- load shedding
        ("POST", "/busy_threshold"): RouteDescription(
            summary="From which load on a model's workers are busy; what is absent or null stays",
            group="load shedding",
            example={"model": "llama", "active_decode_blocks_threshold": 0.85},
            answers={200: ThresholdRow},
            errors={400: "a threshold that there cannot be", 404: "the model has no workers"},
        ),
        ("GET", "/busy_threshold"): RouteDescription(
            summary="The thresholds in force", group="load shedding", answers={200: Thresholds}
        ),
        ("DELETE", "/busy_threshold"): RouteDescription(
            summary="Switch a model's thresholds off",
            group="load shedding",
            answers={200: ThresholdRow},
            errors={400: "`model` is missing", 404: "the model has no workers"},
        ),
        # -- sessions
        ("GET", "/replica_sync/sessions"): RouteDescription(
            summary="Which rank each session is bound to, for a replica that catches up",
            group="replicas",
            answers={200: SessionList},
            errors={409: SWITCHED_OFF},
        ),
        **SHARED_ROUTES,
    }


SELECTOR_ROUTES: Final = _routes(API_1_3)
SELECTOR_16_ROUTES: Final = _routes(API_1_6)
# Only where the selector is told --prompts.
DOOR_ROUTES: Final[dict[tuple[str, str], RouteDescription]] = {
    ("POST", "/route/{path*}"): RouteDescription(
        summary="Choose and book a worker for a raw OpenAI request, and name it in headers",
        group="gateways",
        answers={
            200: None,
            **dict.fromkeys((400, 409, 413, 429, 500, 503), OpenAiErrorBody),
        },
        refusal=OpenAiErrorBody,
    ),
}


# -- slot tracker routes -------------------------------------------------------------------------
#
# The routes of the slot tracker, described.

_NO_TRACKER: Final = "the model and tenant have no workers"
_URL: Final = {"url": "tcp://127.0.0.1:9092"}
_REQUEST: Final = {"model_name": "llama", "request_id": "req-1"}


def _lifecycle(summary: str, unknown: str) -> RouteDescription:
    return RouteDescription(
        summary=summary,
        group="requests",
        example=_REQUEST,
        answers={200: Ok},
        errors={400: "two names of the tenant differ", 404: unknown},
    )


SLOT_TRACKER_ROUTES: Final[dict[tuple[str, str], RouteDescription]] = {
    ("GET", "/health"): RouteDescription(
        summary="The process lives", group="service", answers={200: None}
    ),
    ("POST", "/register"): RouteDescription(
        summary="Register a worker's ranks",
        group="workers",
        example={
            **{"worker_id": 7, "model_name": "llama", "block_size": 16},
            **{"dp_start": 0, "dp_size": 1},
        },
        answers={201: Ok},
        errors={
            400: "a size of 0, or ranks that there cannot be",
            409: "it is registered, or with another block size than its model",
        },
    ),
    ("POST", "/unregister"): RouteDescription(
        summary="Remove a worker, and drop its requests",
        group="workers",
        example={"worker_id": 7, "model_name": "llama"},
        answers={200: Ok},
        errors={400: "two names of the tenant differ", 404: "it is not registered"},
    ),
    ("GET", "/workers"): RouteDescription(
        summary="The workers", group="workers", answers={200: list[WorkerRow]}
    ),
    ("POST", "/add"): RouteDescription(
        summary="A request begins on a rank",
        group="requests",
        example={
            **_REQUEST,
            **{"worker_id": 7, "dp_rank": 0},
            **{"sequence_hashes": [101, -22, 303], "new_isl_tokens": 48},
        },
        answers={201: Ok},
        errors={
            400: "two names of the tenant differ, or too many tokens",
            404: "there is no such rank",
            409: "the id is live already",
        },
    ),
    ("POST", "/prefill_complete"): _lifecycle(
        "The first token of a request came", "there is no such request, model or tenant"
    ),
    ("POST", "/free"): _lifecycle("A request has ended; of an unknown id no error", _NO_TRACKER),
    ("GET", "/loads"): RouteDescription(
        summary="The load of each rank",
        group="loads",
        answers={200: list[LoadRow]},
    ),
    ("POST", "/potential_loads"): RouteDescription(
        summary="The load of each rank if this prompt ran there",
        group="loads",
        example={
            **{"model_name": "llama", "sequence_hashes": [101, -22, 303, 404]},
            **{"new_isl_tokens": 64},
        },
        answers={200: list[PotentialLoadRow]},
        errors={400: "two names of the tenant differ, or too many tokens", 404: _NO_TRACKER},
    ),
    ("POST", "/register_peer"): joining(_URL),
    ("POST", "/deregister_peer"): leaving(_URL),
    ("GET", "/peers"): PEERS,
    **SHARED_ROUTES,
}
