"""The routes of the slot tracker, described."""

from typing import Final

from lean_selector.core.tracker_rows import LoadRow, PotentialLoadRow, WorkerRow
from lean_selector.openapi.shapes import RouteDescription
from lean_selector.openapi.shared_routes import PEERS, SCOPE, SHARED_ROUTES, joining, leaving
from lean_selector.wire.peer_bodies import PeerUrlRequest
from lean_selector.wire.selection import Ok
from lean_selector.wire.slot_tracker import (
    AddRequest,
    LifecycleRequest,
    PotentialLoadsRequest,
    RegisterRequest,
    UnregisterRequest,
)

_NO_TRACKER: Final = "the model and tenant have no workers"
_URL: Final = {"url": "tcp://127.0.0.1:9092"}
_REQUEST: Final = {"model_name": "llama", "request_id": "req-1"}


def _lifecycle(summary: str, unknown: str) -> RouteDescription:
    return RouteDescription(
        summary=summary,
        group="requests",
        body=LifecycleRequest,
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
        body=RegisterRequest,
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
        body=UnregisterRequest,
        example={"worker_id": 7, "model_name": "llama"},
        answers={200: Ok},
        errors={400: "two names of the tenant differ", 404: "it is not registered"},
    ),
    ("GET", "/workers"): RouteDescription(
        summary="The workers", group="workers", query=SCOPE, answers={200: list[WorkerRow]}
    ),
    ("POST", "/add"): RouteDescription(
        summary="A request begins on a rank",
        group="requests",
        body=AddRequest,
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
        query=SCOPE,
        answers={200: list[LoadRow]},
    ),
    ("POST", "/potential_loads"): RouteDescription(
        summary="The load of each rank if this prompt ran there",
        group="loads",
        body=PotentialLoadsRequest,
        example={
            **{"model_name": "llama", "sequence_hashes": [101, -22, 303, 404]},
            **{"new_isl_tokens": 64},
        },
        answers={200: list[PotentialLoadRow]},
        errors={400: "two names of the tenant differ, or too many tokens", 404: _NO_TRACKER},
    ),
    ("POST", "/register_peer"): joining(PeerUrlRequest, _URL),
    ("POST", "/deregister_peer"): leaving(PeerUrlRequest, _URL),
    ("GET", "/peers"): PEERS,
    **SHARED_ROUTES,
}
