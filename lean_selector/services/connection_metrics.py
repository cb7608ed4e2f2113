"""Metrics of the HTTP connections: how many, what they hold, and what was refused (D27)."""

from lean_selector.http1.connections import Connections
from lean_selector.observing.load_metrics import Families
from lean_selector.observing.metrics import Family


def connection_families(connections: Connections) -> Families:
    return [
        Family(
            "lean_selector_http_connections",
            "gauge",
            "Open HTTP connections.",
            lambda: [("", len(connections.open))],
        ),
        Family(
            "lean_selector_http_connections_accepted_total",
            "counter",
            "HTTP connections that were let in.",
            lambda: [("", connections.accepted)],
        ),
        Family(
            "lean_selector_http_connections_refused_total",
            "counter",
            "HTTP connections refused with 503, because --max-connections were open.",
            lambda: [("", connections.refused)],
        ),
        Family(
            "lean_selector_http_accept_failures_total",
            "counter",
            "Times that no connection could be accepted: no descriptor or no memory was left.",
            lambda: [("", connections.accept_failures)],
        ),
        Family(
            "lean_selector_http_held_bytes",
            "gauge",
            "Bytes of requests that are being received, or wait behind another one.",
            lambda: [("", connections.held_bytes)],
        ),
        Family(
            "lean_selector_http_held_refused_total",
            "counter",
            "Connections closed with 503 because all together held too many bytes.",
            lambda: [("", connections.bodies_refused)],
        ),
    ]
