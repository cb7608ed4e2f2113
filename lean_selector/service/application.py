"""The application of a server: the routes of a service behind the gate, with GET /metrics, GET
/openapi.json, those of the page, and the access log if enabled."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from lean_selector import __version__
from lean_selector.http.connections import Connections
from lean_selector.http.head import Request
from lean_selector.http.protocol import App
from lean_selector.http.response import JSON, encode_response
from lean_selector.service.access import OPEN, READ, AccessTokens
from lean_selector.service.exposition import (
    CONTENT_TYPE,
    AnyFamily,
    Families,
    LoopLag,
    RouteMeter,
    exposition_text,
)
from lean_selector.service.gate import Endpoint, Gate, Route, plain
from lean_selector.service.logs import LogState
from lean_selector.service.metrics import http_families, process_families
from lean_selector.service.replies import INTERNAL_ERROR, CallSoon, LaterReply, SlicedAnswers

if TYPE_CHECKING:  # it is imported when it is asked for
    from lean_selector.service.ui import Page

# -- GET /metrics ---------------------------------------------------------------------------------
# Made in slices of the loop's turns: a fleet of 512 ranks has thousands of samples, at a
# microsecond or so each.

PIECES_PER_PART = 32  # pieces between two looks at the clock: about 40 us


def metrics_route(
    families: Callable[[], Iterable[AnyFamily]],
    call_soon: CallSoon,
    clock: Callable[[], float] = time.perf_counter,
) -> Route:
    """`families` is called at each scrape."""

    def parts() -> Iterator[bytes]:
        pieces = exposition_text(families())
        while part := list(islice(pieces, PIECES_PER_PART)):
            yield "".join(part).encode()

    sliced = SlicedAnswers("a scrape", parts, call_soon, CONTENT_TYPE, clock)
    # Not `plain`: this text is never MessagePack.
    return "GET", "/metrics", READ, Endpoint(lambda request, param: sliced.answer(at_once=False))


# -- GET /openapi.json ----------------------------------------------------------------------------
# Made on the first request, in a thread, and cached. Nothing of it is imported before.

_log = logging.getLogger("lean_selector.http")


class OpenApiRoutes:
    """`document`: its name in `openapi.document`; `routes`: all routes except this one."""

    def __init__(
        self, document: str, routes: tuple[Route, ...], *, asks_tokens: bool = False
    ) -> None:
        self._document = document
        self._asks_tokens = asks_tokens
        self._routes = (*routes, *self.routes())
        self._text = b""
        self._waiting: list[LaterReply] = []

    def routes(self) -> tuple[Route, ...]:
        return (("GET", "/openapi.json", READ, plain(self._answer)),)

    def _answer(self) -> bytes | LaterReply:
        if self._text:
            return encode_response(200, self._text, JSON)
        pending = LaterReply(is_being_made=True)
        self._waiting.append(pending)
        if len(self._waiting) == 1:
            work = asyncio.get_running_loop().run_in_executor(None, self._made)
            work.add_done_callback(self._tell)
        return pending

    def _made(self) -> bytes:
        """Make the document, in a thread."""
        from lean_selector.service.openapi.document import service_document

        return service_document(self._document, self._routes, asks_tokens=self._asks_tokens)

    def _tell(self, work: "asyncio.Future[bytes]") -> None:
        waiting, self._waiting = self._waiting, []
        if work.cancelled():
            return  # the loop is closed
        error = work.exception()
        if error is not None:
            _log.error("GET /openapi.json failed", exc_info=error)
            for pending in waiting:
                pending.answer(500, INTERNAL_ERROR)
            return
        self._text = work.result()
        for pending in waiting:
            pending.resolve(encode_response(200, self._text, JSON))


# -- the page -------------------------------------------------------------------------------------


def page_routes(page: "Callable[[], Page]") -> tuple[Route, ...]:
    """`page` is called for each request; it imports and makes the page for the first one."""
    return (
        ("GET", "/ui", OPEN, Endpoint(lambda request, param: page().ui())),
        ("GET", "/events", READ, Endpoint(lambda request, param: page().events.answer(request))),
        ("GET", "/fleet", READ,
            Endpoint(lambda request, param: page().fleet.answer(at_once=False))),
        ("GET", "/prefixes", READ,
            Endpoint(lambda request, param: page().prefixes.answer(at_once=False))),
    )  # fmt: skip


# -- the application ------------------------------------------------------------------------------


def observed(
    routes: tuple[Route, ...],
    families_of: Callable[[Sequence[RouteMeter]], Families],
    log_state: LogState,
    *,
    service: str,
    document: str,
    access_log: bool,
    overload_status: int = 503,
    lines: Callable[[Request, Exception, frozenset[str]], bytes] | None = None,
    tokens: AccessTokens | None = None,
    meters: Sequence[RouteMeter] = (),
    connections: Connections,
) -> App:
    """The application for `routes` on the running loop.

    `families_of` gets the meters of all routes, and `meters`. `service` is its name in the metrics,
    `document` that of its description in `openapi.document`; `lines` are the gate's; `tokens` are
    those required, if any; `connections` are the server's.
    """
    loop = asyncio.get_running_loop()
    families: Families = []
    routes = (*routes, metrics_route(lambda: families, loop.call_soon))
    described = OpenApiRoutes(document, routes, asks_tokens=tokens is not None)
    routes = (*routes, *described.routes())
    gate = Gate(routes, overload_status, lines, tokens)
    if tokens is not None:
        connections.refuses = gate.refuses
    lag = LoopLag(loop.call_later)
    meters = [*gate.meters, *meters]
    families += [
        *families_of(meters),
        *http_families(meters),
        *process_families(service, __version__, lag, log_state.suppressed, log_state.dropped),
    ]
    lag.start()
    if not access_log:
        return gate
    from lean_selector.service.access_log import with_access_log

    return with_access_log(gate, routes)
