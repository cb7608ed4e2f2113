"""Builds the HTTP application of a server from the routes of its service. Adds the routes /metrics,
/openapi.json and those of the page /ui, and, if enabled, the access log."""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import TYPE_CHECKING

from lean_selector import __version__
from lean_selector.api.access import OPEN, READ, AccessTokens
from lean_selector.api.gate import Gate, RouteMeter
from lean_selector.api.logs import LogState
from lean_selector.api.replies import CallSoon, SlicedAnswers
from lean_selector.api.routes import Route
from lean_selector.http.connections import Connections
from lean_selector.http.protocol import App
from lean_selector.wire.exposition import (
    CONTENT_TYPE,
    AnyFamily,
    Families,
    Histogram,
    exposition_text,
)
from lean_selector.wire.fleet import Fleet, PrefixTree

if TYPE_CHECKING:  # imported only when requested
    from lean_selector.api.ui import Page

# -- GET /metrics ----------------------------------------------------------------------------------
# The text is made in slices: a fleet of 512 ranks has thousands of samples, which take about a
# microsecond each.

PIECES_PER_PART = 32  # pieces between two checks of the clock: about 40 us


def metrics_route(
    families: Callable[[], Iterable[AnyFamily]],
    call_soon: CallSoon,
    clock: Callable[[], float] = time.perf_counter,
) -> Route:
    """Return the route GET /metrics. `families` is called for each scrape, to get all metrics."""

    def parts() -> Iterator[bytes]:
        from lean_selector.api.metrics import process_text

        pieces = chain(exposition_text(families()), (process_text(),))
        while part := list(islice(pieces, PIECES_PER_PART)):
            yield "".join(part).encode()

    sliced = SlicedAnswers("a scrape", parts, call_soon, CONTENT_TYPE, clock)
    return Route(
        "GET", "/metrics", READ, "service", "Metrics for Prometheus",
        lambda: sliced.answer(at_once=False), gives=str, media=CONTENT_TYPE.decode(),
    )  # fmt: skip


LAG_BOUNDS_S = (0.5e-3, 1e-3, 2e-3, 5e-3, 10e-3, 25e-3, 50e-3, 0.1, 0.25, 1.0)
LAG_EVERY_S = 0.05  # 20 wake-ups a second take 0.01 % of a core


class LoopLag:
    """Measures, 20 times a second, how many seconds late the event loop runs a timer."""

    def __init__(self, call_later: Callable[[float, Callable[[], None]], object]) -> None:
        self.histogram = Histogram(LAG_BOUNDS_S)
        self._call_later = call_later
        self._due = 0.0

    def start(self) -> None:
        self._due = time.perf_counter() + LAG_EVERY_S
        self._call_later(LAG_EVERY_S, self._on_time)

    def _on_time(self) -> None:
        late_s = time.perf_counter() - self._due
        self.start()
        self.histogram.add(max(0.0, late_s))


# -- GET /openapi.json -----------------------------------------------------------------------------


def openapi_route(
    title: str,
    routes: tuple[Route, ...],
    call_soon: CallSoon,
    clock: Callable[[], float] = time.perf_counter,
    *,
    asks_tokens: bool = False,
) -> Route:
    """Return the route GET /openapi.json, which describes `routes` and itself. With `asks_tokens`,
    the descriptions include the needed roles. The document is made when it is first requested."""
    made: list[bytes] = []  # the document, once it is complete

    def parts() -> Iterator[bytes]:
        from lean_selector.api.openapi_text import openapi_parts

        for part in made or openapi_parts(title, (*routes, itself), asks_tokens):
            if part and not made:
                made.append(part)
            yield part

    sliced = SlicedAnswers("the OpenAPI document", parts, call_soon, clock=clock)
    itself = Route(
        "GET", "/openapi.json", READ, "service", "This document",
        lambda: sliced.answer(at_once=bool(made)), gives=dict,
    )  # fmt: skip
    return itself


# -- the page --------------------------------------------------------------------------------------


def page_routes(page: "Callable[[], Page]") -> tuple[Route, ...]:
    """Return the routes of the page /ui. `page` returns the object with their handlers."""
    return (
        Route("GET", "/ui", OPEN, "looking", "The page that shows all this to people",
            lambda: page().ui(), gives=str, media="text/html; charset=utf-8"),
        Route("GET", "/fleet", READ, "looking",
            "Each rank's state, load and sums, and what is wrong, as `lean-selector check` has it",
            lambda: page().fleet.answer(at_once=False), gives=Fleet),
        Route("GET", "/choices", READ, "looking",
            "The last choices and their reasons, collected while somebody asks for them",
            lambda: page().choices(), gives=dict),
        Route("GET", "/prefixes", READ, "looking",
            "The runs of blocks that weigh most in each index, from a prompt's start: at most 200",
            lambda: page().prefixes.answer(at_once=False), gives=list[PrefixTree]),
    )  # fmt: skip


# -- the application -------------------------------------------------------------------------------


def observed(
    routes: tuple[Route, ...],
    families_of: Callable[[Sequence[RouteMeter]], Families],
    log_state: LogState,
    *,
    service: str,
    title: str,
    access_log: bool,
    overload_status: int = 503,
    tokens: AccessTokens | None = None,
    meters: Sequence[RouteMeter] = (),
    connections: Connections,
) -> App:
    """Return the HTTP application for `routes`. Must be called while the event loop runs.

    `families_of` gets the counters of all routes and the counters `meters`, and returns metrics.
    `service` is the service's name in metrics. `title` is that of /openapi.json. With `tokens`, a
    request needs a token of the route's role."""
    loop = asyncio.get_running_loop()
    made: Families = []

    def families() -> Families:
        """Return all metrics. Their modules are imported at the first scrape."""
        from lean_selector.api.metrics import http_families, process_families

        if not made:
            made[:] = [
                *families_of(meters),
                *http_families(meters),
                *process_families(service, __version__, lag.histogram, log_state),
            ]
        return made

    routes = (*routes, metrics_route(families, loop.call_soon))
    routes = (*routes, openapi_route(title, routes, loop.call_soon, asks_tokens=tokens is not None))
    gate = Gate(routes, overload_status, tokens)
    if tokens is not None:
        connections.refuses = gate.refuses
    lag = LoopLag(loop.call_later)
    meters = [*gate.meters, *meters]
    lag.start()
    if not access_log:
        return gate
    from lean_selector.api.access_log import with_access_log

    return with_access_log(gate, routes)
