"""The gate, which every request passes: it finds the route, checks the role of the access token,
calls the route's handler, and counts the answer. An exception of a handler becomes an answer with a
status and the body `{"error": ...}`."""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Final

import msgspec

from lean_selector.api.access import OPEN, READ, AccessTokens, Role, refusal_of
from lean_selector.api.bodies import shape_fault
from lean_selector.api.replies import INTERNAL_ERROR, Answer, LaterReply, reply, sent
from lean_selector.api.routes import Route, Run
from lean_selector.core.errors import (
    AllWorkersBusy,
    NoWorkers,
    SelectorError,
    UnknownModel,
    WaitedTooLong,
)
from lean_selector.http.head import Request
from lean_selector.http.response import Response, status_of
from lean_selector.http.routes_by_path import MethodNotAllowed, RouteTable
from lean_selector.wire.exposition import labels
from lean_selector.wire.selection_bodies import ErrorBody, OverloadBody

_log = logging.getLogger("lean_selector.http")

# The first interval in the request-rejection document: 2 ** 0 seconds, plus up to one at random.
RETRY_AFTER = b"retry-after: 1\r\n"
_WHERE: Final = b"x-warning: GET /openapi.json lists the routes, GET /metrics says how it is\r\n"
_TWO: Final = ord("2")
_ZERO: Final = ord("0")
_clock: Final = perf_counter
HUNG_UP = b"499"  # in counts only: the client disconnected before its answer


# Seconds. An 8-block selection takes about 12 us, so the first bucket is the usual one; queued
# requests are in the last.
LATENCY_BOUNDS_S: Final[tuple[float, ...]] = (
    50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 25e-3, 0.1, 0.5, 1.0, 5.0, 30.0,
)  # fmt: skip
FASTEST_S: Final = LATENCY_BOUNDS_S[0]


class RouteMeter:
    """Counts the answers of one route, by duration and by status.

    `others` has the counts of all statuses except 200. Class Gate does not call method `add` but
    has a copy of its code, because a call would double the time that counting takes."""

    def __init__(self, method: str, route: str) -> None:
        self.method = method
        self.route = route
        self.label = labels(method=method, route=route)
        self.fastest = 0  # answers in the first bucket
        self.slower = [0] * (len(LATENCY_BOUNDS_S) + 1)  # by bucket; the first is unused
        self.seconds = 0.0
        self.others: dict[bytes, int] = {}  # by status, except 200
        self.shed = 0  # shed requests among `others`
        self.unknown_models = 0  # answers for models that never had a worker
        self.unknown_tenants = 0  # answers for tenants without a worker, if others have one

    def add(self, seconds: float, status: bytes) -> None:
        if seconds <= FASTEST_S:
            self.fastest += 1
        else:
            self.slower[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
        self.seconds += seconds
        if status != b"200":
            self.others[status] = self.others.get(status, 0) + 1

    def refused(self, error: Exception) -> None:
        """Counts a failed request if it was shed, or if its model and tenant have no worker."""
        if isinstance(error, (AllWorkersBusy, WaitedTooLong)):
            self.shed += 1
        elif isinstance(error, UnknownModel):
            self.unknown_models += 1
        elif isinstance(error, NoWorkers) and not error.is_missing:
            if error.other_tenants is None:
                self.unknown_models += 1
            else:
                self.unknown_tenants += 1

    def requests(self) -> int:
        return self.fastest + sum(self.slower)

    def buckets(self) -> list[int]:
        return [self.fastest, *self.slower[1:]]

    def by_status(self) -> dict[str, int]:
        others = {status.decode(): count for status, count in sorted(self.others.items())}
        succeeded = self.requests() - sum(others.values())
        return {"200": succeeded, **others} if succeeded or not others else others


class Gate:
    """The application, which the HTTP protocol calls with each request. A call never raises.
    `meters` count answers per route; the last meter counts requests whose path has no route."""

    def __init__(
        self,
        routes: Iterable[Route],
        overload_status: int = 503,
        tokens: AccessTokens | None = None,
    ) -> None:
        """`overload_status` is the status for requests that are shed because all workers are busy.
        Without `tokens`, no request needs a token."""
        self._tokens = tokens
        metered: list[tuple[str, str, tuple[Run, RouteMeter, int, Route]]] = []
        for route in routes:
            meter, run, needed = RouteMeter(route.method, route.path), route.run, int(OPEN)
            if tokens is not None:
                needed = int(route.role)
                if route.brief is not None:
                    run = self._abridged(route, route.brief, tokens)
            metered.append((route.method, route.path, (run, meter, needed, route)))
        self._table: RouteTable[tuple[Run, RouteMeter, int, Route]] = RouteTable(metered)
        self._unrouted = RouteMeter("", "none")
        self.meters = [*(value[1] for _, _, value in metered), self._unrouted]
        self._overload_status = overload_status
        self._roles: dict[bytes | None, Role] = {} if tokens is None else tokens.roles

    def __call__(self, request: Request) -> Answer:
        started = _clock()
        found = self._table.match(request.method, request.path)
        if isinstance(found, tuple):
            (run, meter, needed, route), param = found
            answer: Answer
            try:
                if needed and self._roles.get(request.credential, OPEN) < needed:
                    answer = self._refused(request, needed, route)
                else:
                    answer = run(request, param)
            except Exception as error:
                answer = self._failed(request, meter, error, route)
            if not isinstance(answer, bytes):
                _meter_later(answer, meter, started)
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

    def _abridged(self, route: Route, brief: Callable[[], object], tokens: AccessTokens) -> Run:
        whole, status = route.run, route.status

        def answer(request: Request, param: bytes | None) -> Answer:
            if tokens.role_of(request.credential) >= READ:
                return whole(request, param)
            return sent(status, brief())

        return answer

    def _refused(self, request: Request, needed: int, route: Route | None = None) -> bytes:
        role = self._roles.get(request.credential, OPEN)
        refusal = refusal_of(request.credential, role, Role(needed))
        if route is not None and route.refused is not None:
            return route.refused(refusal)
        return reply(refusal.status, ErrorBody(refusal.text), refusal.line)

    def _unrouted_answer(self, request: Request, found: MethodNotAllowed | None) -> bytes:
        # Requests without a token are refused on unknown routes too.
        if self._tokens is not None and self._tokens.role_of(request.credential) < READ:
            return self._refused(request, READ)
        if isinstance(found, MethodNotAllowed):
            allow = b"allow: %b\r\n" % found.allow
            return reply(405, ErrorBody("method not allowed"), allow)
        return reply(404, ErrorBody("route not found"), _WHERE if request.path == b"/" else b"")

    def _failed(self, request: Request, meter: RouteMeter, error: Exception, route: Route) -> bytes:
        meter.refused(error)
        if isinstance(error, AllWorkersBusy):
            status = self._overload_status
            return reply(status, OverloadBody.of(error.message, status), RETRY_AFTER)
        if isinstance(error, msgspec.ValidationError):
            error = shape_fault(request, error)
        if isinstance(error, SelectorError):
            from lean_selector.api.header_warnings import refusal_lines

            lines = refusal_lines(request, error, route.fields())
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
