"""Metrics of the HTTP connections: how many, what they hold, and what was refused (D27)."""

from lean_selector.http.connections import Connections
from lean_selector.observing.load_metrics import Families
from lean_selector.observing.metrics import Family


def connection_families(connections: Connections) -> Families:
    tls = connections.tls
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
        Family(
            "lean_selector_tls_handshakes_total",
            "counter",
            "TLS handshakes that ended well; nothing while TLS is off.",
            lambda: [("", tls.completed)] if tls.is_on else [],
        ),
        Family(
            "lean_selector_tls_handshake_failures_total",
            "counter",
            "TLS handshakes that failed, by reason.",
            lambda: [
                (f'{{reason="{reason}"}}', count)
                for reason, count in tls.failures.items()
                if tls.is_on
            ],
        ),
        Family(
            "lean_selector_tls_reloads_total",
            "counter",
            "Times that the files of TLS were read again: used, or refused and the last ones kept.",
            lambda: (
                [
                    ('{outcome="ok"}', tls.reloads),
                    ('{outcome="refused"}', tls.reload_failures),
                ]
                if tls.is_on
                else []
            ),
        ),
        Family(
            "lean_selector_tls_certificate_not_after_seconds",
            "gauge",
            "The last second of the certificate that clients are shown, since 1970.",
            lambda: [("", tls.not_after)] if tls.not_after is not None else [],
        ),
    ]
