"""A service's routes as the application that its server runs, with everything that observes it.

The gate and its meters, GET /metrics, GET /openapi.json, and the access log if it is asked for:
the same for every service, which adds the families of its own.
"""

from collections.abc import Callable, Sequence

from lean_selector.access.token_file import AccessTokens
from lean_selector.http.head import Request
from lean_selector.http.protocol import App
from lean_selector.service.exposition import Families, LoopLag, RouteMeter
from lean_selector.service.metrics import http_families, process_families
from lean_selector.services.access_log import with_access_log
from lean_selector.services.gate import Gate, Route
from lean_selector.services.guard import Guard
from lean_selector.services.metrics_answers import MetricsAnswers
from lean_selector.services.observation import Observation
from lean_selector.services.openapi_routes import OpenApiRoutes


def observed(
    routes: tuple[Route, ...],
    families_of: Callable[[Sequence[RouteMeter]], Families],
    observation: Observation,
    overload_status: int = 503,
    lines: Callable[[Request, Exception, str], bytes] | None = None,
    tokens: AccessTokens | None = None,
) -> App:
    """The application for `routes`; `families_of` gets the meters of all of them. `lines` are the
    gate's; `tokens` are those that are asked for, if any are."""
    families: Families = []
    metrics = MetricsAnswers(lambda: families, observation.call_soon)
    routes = (*routes, *metrics.routes())
    described = OpenApiRoutes(observation.document, routes, asks_tokens=tokens is not None)
    routes = (*routes, *described.routes())
    gate = Gate(routes, overload_status, lines, None if tokens is None else Guard(tokens))
    lag = LoopLag(observation.call_later)
    families += [
        *families_of(gate.meters),
        *http_families(gate.meters),
        *process_families(
            observation.service,
            observation.version,
            lag,
            observation.suppressed_log_lines,
            observation.dropped_log_lines,
        ),
    ]
    lag.start()
    return with_access_log(gate, routes) if observation.access_log else gate
