"""What both services answer: replicas, discovery, metrics, and this document."""

from typing import Any, Final

from lean_selector.openapi.shapes import QueryField, RouteDescription, Snapshot, Text
from lean_selector.wire.discovery_states import DiscoveryReport
from lean_selector.wire.peer_bodies import PeerRequest, PlaneState
from lean_selector.wire.selection import Ok

SWITCHED_OFF: Final = "replica sync is off"
DETAIL: Final = QueryField(
    "detail",
    "`true`: with what is known of each besides",
    "^([Tt][Rr][Uu][Ee]|[Ff][Aa][Ll][Ss][Ee]|1|0|)$",
)
GROUP: Final = (
    QueryField("tenant_id", "only of this tenant"),
    QueryField("routing_group", "the other name of tenant_id"),
)
SCOPE: Final = (QueryField("model_name", "only of this model"), *GROUP)
PEERS: Final = RouteDescription(
    summary="The replicas that this one speaks to",
    group="replicas",
    query=(DETAIL,),
    answers={200: [list[str], PlaneState, dict[str, Any]]},
)


def joining(body: Any, example: Any) -> RouteDescription:
    return RouteDescription(
        summary="Speak to a replica; 201 if it was none of ours yet",
        group="replicas",
        body=body,
        example=example,
        answers={200: Ok, 201: Ok},
        errors={400: "the endpoint cannot be one", 409: SWITCHED_OFF},
    )


def leaving(body: Any, example: Any) -> RouteDescription:
    return RouteDescription(
        summary="Speak to a replica no more",
        group="replicas",
        body=body,
        example=example,
        answers={200: Ok},
        errors={404: "it is none of ours", 409: SWITCHED_OFF},
    )


_ENDPOINT: Final = {"endpoint": "tcp://127.0.0.1:9092"}

SHARED_ROUTES: Final[dict[tuple[str, str], RouteDescription]] = {
    ("GET", "/replica_sync/peers"): PEERS,
    ("POST", "/replica_sync/register_peer"): joining(PeerRequest, _ENDPOINT),
    ("POST", "/replica_sync/deregister_peer"): leaving(PeerRequest, _ENDPOINT),
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
