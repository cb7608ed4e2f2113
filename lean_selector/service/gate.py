"""The gate, which every request passes: it finds the route, checks the role of the access token,
calls the route's handler, and counts the answer. An exception of a handler becomes an answer with a
status and the body `{"error": ...}`."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from time import perf_counter
from typing import Any, Final, Protocol, TypeVar

import msgspec

from lean_selector.core.errors import AllWorkersBusy, SelectorError
from lean_selector.http.head import Request
from lean_selector.http.response import Response, status_of
from lean_selector.http.routes_by_path import MethodNotAllowed, RouteTable
from lean_selector.http.streaming import StreamedReply
from lean_selector.service.access import ADMIN, OPEN, READ, AccessTokens, Refusal, Role, refusal_of
from lean_selector.service.bodies import SCOPE_FIELDS, Query, body_reader, query_of, shape_fault
from lean_selector.service.exposition import FASTEST_S, LATENCY_BOUNDS_S, RouteMeter
from lean_selector.service.replies import (
    INTERNAL_ERROR,
    Answer,
    LaterReply,
    Reply,
    is_json,
    reply,
    sent,
)
from lean_selector.wire.selection_bodies import ErrorBody, OverloadBody, PromptFields

T = TypeVar("T")
_NOTHING: Final = frozenset[str]()
Served = Answer | StreamedReply
Run = Callable[[Request, bytes | None], Served]  # the second argument is the path parameter


class Endpoint:
    """The handler `run` of a route, and the types of its input. If access tokens are enabled, the
    handler `brief` gives a shorter answer to a request without a valid token. If the route's errors
    do not have the form `{"error": ...}`, `refused` encodes its answers 401 and 403."""

    __slots__ = ("body", "brief", "is_body_optional", "query", "refused", "run")

    def __init__(
        self,
        run: Run,
        *,
        body: Any = None,
        is_body_optional: bool = False,
        query: frozenset[str] = _NOTHING,
        brief: Run | None = None,
        refused: Callable[[Refusal], bytes] | None = None,
    ) -> None:
        self.run = run
        self.body = body  # struct of the body
        self.is_body_optional = is_body_optional
        self.query = query  # known fields of the query
        self.brief = brief
        self.refused = refused

    def fields(self) -> frozenset[str]:
        """Returns the names of the body's fields."""
        return _NOTHING if self.body is None else frozenset(self.body.__struct_fields__)


# Method, path template, required role, endpoint. There is no default role, so each route must name
# it.
Route = tuple[str, str, Role, Endpoint]

_log = logging.getLogger("lean_selector.http")

# The first interval in the request-rejection document: 2 ** 0 seconds, plus up to one at random.
RETRY_AFTER = b"retry-after: 1\r\n"
_WHERE: Final = b"x-warning: GET /openapi.json lists the routes, GET /metrics says how it is\r\n"
_TWO: Final = ord("2")
_ZERO: Final = ord("0")
_clock: Final = perf_counter
HUNG_UP = b"499"  # in counts only: the client disconnected before its answer


class Gate:
    """The application, which the HTTP protocol calls with each request. A call never raises.
    `meters` count answers per route; the last meter counts requests whose path has no route."""

    def __init__(
        self,
        routes: Iterable[Route],
        overload_status: int = 503,
        lines: Callable[[Request, Exception, frozenset[str]], bytes] | None = None,
        tokens: AccessTokens | None = None,
    ) -> None:
        """`overload_status` is the status for requests that are shed because all workers are busy.
        `lines` returns header lines for the answer to a failed request; its last argument has the
        field names of the route's body. Without `tokens`, no request needs a token."""
        self._tokens = tokens
        metered: list[tuple[str, str, tuple[Run, RouteMeter, int, Endpoint]]] = []
        for method, path, role, endpoint in routes:
            meter, run, needed = RouteMeter(method, path), endpoint.run, int(OPEN)
            if tokens is not None:
                needed = int(role)
                if endpoint.brief is not None:
                    run = self._abridged(run, endpoint.brief, tokens)
            metered.append((method, path, (run, meter, needed, endpoint)))
        self._table: RouteTable[tuple[Run, RouteMeter, int, Endpoint]] = RouteTable(metered)
        self._unrouted = RouteMeter("", "none")
        self.meters = [*(value[1] for _, _, value in metered), self._unrouted]
        self._overload_status = overload_status
        self._lines = lines
        self._roles: dict[bytes | None, Role] = {} if tokens is None else tokens.roles

    def __call__(self, request: Request) -> Served:
        started = _clock()
        found = self._table.match(request.method, request.path)
        if isinstance(found, tuple):
            (run, meter, needed, endpoint), param = found
            answer: Served
            try:
                if needed and self._roles.get(request.credential, OPEN) < needed:
                    answer = self._refused(request, needed, endpoint)
                else:
                    answer = run(request, param)
            except Exception as error:
                answer = self._failed(request, meter, error, endpoint)
            if not isinstance(answer, bytes):
                if isinstance(answer, LaterReply):
                    _meter_later(answer, meter, started)
                else:  # a stream, which lasts as long as the client wants
                    meter.add(_clock() - started, b"200")
                return answer
        else:
            meter = self._unrouted
            answer = self._unrouted_answer(request, found)
        # RouteMeter.add, inlined: it takes a quarter of a microsecond, and a call would double that
        seconds = _clock() - started
        if seconds <= FASTEST_S:
            meter.fastest += 1
        else:
            meter.slower[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        meter.seconds += seconds
        # status_of, inlined likewise; no other 2?0 than 200 is used
        if answer[9] != _TWO or answer[11] != _ZERO:
            status = status_of(answer)
            meter.others[status] = meter.others.get(status, 0) + 1
        return answer

    def refuses(self, request: Request) -> bool:
        """Whether the request's token lacks the role that the route requires. Called before the
        body of the request is read."""
        if self._tokens is None:
            return False
        found = self._table.match(request.method, request.path)
        needed = found[0][2] if isinstance(found, tuple) else int(READ)
        return self._tokens.role_of(request.credential) < needed

    def _abridged(self, whole: Run, brief: Run, tokens: AccessTokens) -> Run:
        def answer(request: Request, param: bytes | None) -> Served:
            knows = tokens.role_of(request.credential) >= READ
            return (whole if knows else brief)(request, param)

        return answer

    def _refused(self, request: Request, needed: int, endpoint: Endpoint | None = None) -> bytes:
        """Returns the answer 401 or 403 to a request whose token lacks the role `needed`."""
        role = self._roles.get(request.credential, OPEN)
        refusal = refusal_of(request.credential, role, Role(needed))
        if endpoint is not None and endpoint.refused is not None:
            return endpoint.refused(refusal)
        return reply(refusal.status, ErrorBody(refusal.text), refusal.line)

    def _unrouted_answer(self, request: Request, found: MethodNotAllowed | None) -> bytes:
        # Requests without a token are refused on unknown routes too.
        if self._tokens is not None and self._tokens.role_of(request.credential) < READ:
            return self._refused(request, READ)
        if isinstance(found, MethodNotAllowed):
            allow = b"allow: %b\r\n" % found.allow
            return reply(405, ErrorBody("method not allowed"), allow)
        return reply(404, ErrorBody("route not found"), _WHERE if request.path == b"/" else b"")

    def _failed(
        self, request: Request, meter: RouteMeter, error: Exception, endpoint: Endpoint
    ) -> bytes:
        """Returns the answer to a request whose handler raised `error`."""
        meter.refused(error)
        if isinstance(error, AllWorkersBusy):
            status = self._overload_status
            return reply(status, OverloadBody.of(error.message, status), RETRY_AFTER)
        if isinstance(error, msgspec.ValidationError):
            error = shape_fault(request, error)
        if isinstance(error, SelectorError):
            lines = b"" if self._lines is None else self._lines(request, error, endpoint.fields())
            return reply(error.status, ErrorBody(error.message), lines)
        _log.error(
            "a handler failed", exc_info=error, extra={"path": request.path.decode("latin-1")}
        )
        return reply(500, INTERNAL_ERROR)


def _meter_later(answer: LaterReply, meter: RouteMeter, started: float) -> None:
    """Counts a delayed answer when it is sent, or status 499 when the client disconnects first."""

    def told(response: Response) -> None:
        if answer.fault is not None:
            meter.refused(answer.fault)
        meter.add(perf_counter() - started, status_of(response))

    answer.observe(told, lambda: meter.add(perf_counter() - started, HUNG_UP))


# -- kinds of routes ------------------------------------------------------------------------------
# A handler returns a body, which is sent with the route's status, or an object that `replies.sent`
# accepts.


def plain(
    handler: Callable[[], object], status: int = 200, brief: Callable[[], object] | None = None
) -> Endpoint:
    """Returns an endpoint. If access tokens are on, requests without a valid one go to `brief`."""

    def answer(request: Request, param: bytes | None) -> Answer:
        return sent(status, handler())

    return Endpoint(answer, brief=None if brief is None else plain(brief, status).run)


def with_query(
    handler: Callable[[Query], object], known: frozenset[str] = SCOPE_FIELDS
) -> Endpoint:
    """Returns an endpoint. Its `handler` gets those fields of the query that are in `known`."""

    def answer(request: Request, param: bytes | None) -> Answer:
        return sent(200, handler(query_of(request, known)))

    return Endpoint(answer, query=known)


def with_param(
    parse: Callable[[bytes], T], handler: Callable[[T], object], status: int = 200
) -> Endpoint:
    """Returns the endpoint of a route whose handler gets only the path parameter."""

    def answer(request: Request, param: bytes | None) -> Answer:
        assert param is not None
        return sent(status, handler(parse(param)))

    return Endpoint(answer)


def with_param_and_optional_body(
    parse: Callable[[bytes], Any],
    body_type: type[T],
    handler: Callable[[Any, T | None], object],
) -> Endpoint:
    """Returns the endpoint of a route with a path parameter and an optional JSON body. An invalid
    body is ignored, as in Dynamo, but the answer has a warning."""
    read = body_reader(body_type)

    def answer(request: Request, param: bytes | None) -> Answer:
        assert param is not None
        parsed = parse(param)
        if not request.body or not is_json(request.headers.content_type):
            return sent(200, handler(parsed, None))
        try:
            body = read(request)
        except (SelectorError, msgspec.ValidationError) as error:
            fault = (
                shape_fault(request, error) if isinstance(error, msgspec.ValidationError) else error
            )
            done = handler(parsed, None)
            return sent(200, Reply(200, done, [f"the body was ignored: {fault}"]))
        return sent(200, handler(parsed, body))

    return Endpoint(answer, body=body_type, is_body_optional=True)


def with_body(body_type: type[T], handler: Callable[[T], object], status: int = 200) -> Endpoint:
    """Returns the endpoint of a route with a JSON body; a body with a prompt may be MessagePack."""
    read = body_reader(body_type)

    def answer(request: Request, param: bytes | None) -> Answer:
        body = read(request)
        try:
            return sent(status, handler(body))
        except SelectorError:
            if isinstance(body, PromptFields):
                body.check_shape()  # a wrong shape is reported before other errors
            raise

    return Endpoint(answer, body=body_type)


def with_param_and_body(
    parse: Callable[[bytes], Any],
    body_type: type[T],
    handler: Callable[[Any, T], object],
    status: int = 200,
) -> Endpoint:
    """Returns the endpoint of a route with a path parameter and a JSON body."""
    read = body_reader(body_type)

    def answer(request: Request, param: bytes | None) -> Answer:
        assert param is not None
        parsed = parse(param)
        return sent(status, handler(parsed, read(request)))

    return Endpoint(answer, body=body_type)


# -- changes that are on disk before they are answered --------------------------------------------


class Saving(Protocol):
    """Writes changes of workers and settings to the state directory (--state-dir)."""

    def note(self) -> None: ...

    def when_saved(self, then: Callable[[], None]) -> bool: ...


def durable(routes: Sequence[Route], saving: Saving) -> tuple[Route, ...]:
    """Wraps the routes that need the role ADMIN, which change workers and settings. Their answers
    are delayed until the change has been written to disk or could not be written."""
    return tuple(
        (method, path, role, _durable(endpoint, saving) if role == ADMIN else endpoint)
        for method, path, role, endpoint in routes
    )


def _durable(endpoint: Endpoint, saving: Saving) -> Endpoint:
    run = endpoint.run

    def answer(request: Request, param: bytes | None) -> Served:
        made = run(request, param)
        saving.note()
        if not isinstance(made, bytes):
            return made
        response: bytes = made
        later = LaterReply(is_being_made=True)
        return later if saving.when_saved(lambda: later.resolve(response)) else response

    endpoint.run = answer
    return endpoint
