"""Both services' HTTP applications in process: requests go in as the reader hands them over."""

import json
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

from lean_selector.api.application import metrics_route, openapi_route, page_routes
from lean_selector.api.fleet import FleetView
from lean_selector.api.gate import Gate
from lean_selector.api.openapi_text import openapi_parts
from lean_selector.api.routes import Route
from lean_selector.api.selection import SelectionService
from lean_selector.api.selection_16 import SelectionService16
from lean_selector.api.shared_handlers import discovery_routes
from lean_selector.api.slot_tracker_handlers import SlotTrackerService
from lean_selector.api.ui import Page
from lean_selector.api.worker_handlers import ServiceState
from lean_selector.core.replication.events import ReplicaEvents
from lean_selector.core.replication.shapes import ReplicaEvent
from lean_selector.core.selection.queue import Timer
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import SELECT_AND_RESERVE
from lean_selector.core.settings import API_1_3, API_1_6
from lean_selector.core.trackers import Trackers
from lean_selector.gateway.route import RouteHandler
from lean_selector.http.head import Request, block_of
from lean_selector.http.response import JSON, PendingReply, encode_response
from lean_selector.wire.selection_bodies import KvSource, SourceCondition
from tests.support.asked import Asked
from tests.support.driven_selector import Sources

NOW = 1000.0
# Of each service's /openapi.json.
TITLES = {
    "selector": "lean-selector",
    "selector_16": "lean-selector --api 1.6",
    "slot_tracker": "lean-slot-tracker",
}


class NoEngines(Sources):
    """Where KV events would come from; none do."""

    def statuses(self, model_name: str | None, tenant_id: str | None) -> Sequence[object]:
        return []

    def conditions(self, worker_id: int, dp_ranks: Iterable[int]) -> list[SourceCondition]:
        return []

    def each_source(self) -> Iterator[KvSource]:
        return iter(())

    def listeners(self, key: str) -> Sequence[tuple[int, int]]:
        return []

    def askers(self, key: str) -> Sequence[tuple[int, int]]:
        return []


class Turns:
    """The loop's `call_soon`, run by hand."""

    def __init__(self) -> None:
        self.due: list[Callable[[], None]] = []

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.due.append(callback)

    def turn(self) -> None:
        """What is due now."""
        due, self.due = self.due, []
        for callback in due:
            callback()

    def run(self) -> int:
        """All that is due, and what comes of it; returns how many turns that took."""
        turns = 0
        while self.due:
            self.turn()
            turns += 1
        return turns


def selection_service(
    call_later: Callable[[float, Callable[[], None]], Timer] | None = None,
    dice: random.Random | None = None,
    books_at: str = SELECT_AND_RESERVE,
    publish: Callable[[ReplicaEvent], None] | None = None,
    **settings: Any,
) -> SelectionService:
    """Without engines, nothing is registered. `publish` is told what peers hear. In the dialect of
    1.6 where `dialect` says so."""
    engines = NoEngines()
    settings.setdefault("use_kv_events", False)
    kind = SelectionService16 if settings.get("dialect") == API_1_6 else SelectionService
    selector = Selector(
        RouterSettings(**settings),
        engines,
        dice or random.Random(7),
        call_later=call_later,
    )
    if publish is not None:
        selector.ledgers.events = ReplicaEvents(1, publish)
    return kind(
        selector,
        dump=lambda as_1_6: encode_response(200, b"{}"),
        sources=engines,
        state=ServiceState(),
        clock=lambda: NOW,
        books_at=books_at,
    )


def selection_gate(service: SelectionService | None = None) -> Gate:
    """The routes of that service, or of a new one."""
    service = selection_service() if service is None else service
    return Gate(service.routes())


def slot_tracker_gate() -> Gate:
    return Gate(SlotTrackerService(Trackers(), clock=lambda: NOW).routes())


def routes_of(service: str) -> list[Route]:
    """All that a service serves, with POST /route, by the name of its document."""
    shared = [*discovery_routes(None), metrics_route(list, Turns().call_soon)]
    shared.append(openapi_route(TITLES[service], (), Turns().call_soon))
    if service == "slot_tracker":
        return [*SlotTrackerService(Trackers()).routes(), *shared]
    dialect = API_1_6 if service == "selector_16" else API_1_3
    selection = selection_service(dialect=dialect)
    door = RouteHandler(
        cast(Any, None),  # nothing is asked
        selection,
    )
    return [*selection.routes(), *door.routes(), *looks_of(selection), *shared]


def described(
    service: str, *, asks_tokens: bool = False, without: Iterable[tuple[str, str]] = ()
) -> dict[str, Any]:
    """The OpenAPI document of a service that has its routes but these."""
    routes = [each for each in routes_of(service) if (each.method, each.path) not in without]
    document: dict[str, Any] = json.loads(
        b"".join(openapi_parts(TITLES[service], routes, asks_tokens))
    )
    return document


def looks_of(service: SelectionService, turns: Turns | None = None) -> tuple[Route, ...]:
    """The routes of the page; with `turns` those of the loop's."""
    turns = turns or Turns()
    view = FleetView(service.selector, NoEngines(), ServiceState(), clock=lambda: NOW)
    page = Page(service.selector, view, turns.call_soon, lambda delay, call: None)
    return page_routes(lambda: page)


def request(
    method: str,
    path: str | bytes,
    body: bytes | bytearray = b"",
    *,
    content_type: bytes | None = JSON,
    accept: bytes | None = None,
    query: bytes | None = None,
) -> Request:
    """Of a path, and what stands behind its `?` if no `query` is given."""
    fields = {b"content-type": content_type, b"accept": accept}
    block = block_of(
        {name: value for name, value in fields.items() if value is not None}, False, False
    )
    target, mark, behind = (path.encode() if isinstance(path, str) else path).partition(b"?")
    return Request(method.encode(), target, behind if mark else query, body, block)


def answered(gate: Gate, request: Request) -> tuple[int, bytes]:
    """Status and body of an answer that is not put off."""
    answer = gate(request)
    assert not isinstance(answer, PendingReply)
    head, _, body = bytes(answer).partition(b"\r\n\r\n")
    return int(head[9:12]), body


class InProcess(Asked):
    """A gate that is asked as a RunningService is: no process, no socket. Bodies are JSON."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate

    def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        raw: bytes = b"",
        headers: dict[str, str] | None = None,
    ) -> tuple[int, Any]:
        """Status and body of an answer that is not put off."""
        content = raw if body is None else json.dumps(body).encode()
        kind = "application/json" if headers is None else headers.get("content-type")
        asked = request(method, path, content, content_type=None if kind is None else kind.encode())
        status, text = answered(self.gate, asked)
        return status, json.loads(text) if text else None

    def later(self, path: str, body: object) -> PendingReply:
        """The answer of a POST that is parked."""
        answer = self.gate(request("POST", path, json.dumps(body).encode()))
        assert isinstance(answer, PendingReply)
        return answer

    def with_headers(
        self, method: str, path: str, body: object = None
    ) -> tuple[int, dict[str, str], Any]:
        content = b"" if body is None else json.dumps(body).encode()
        answer = self.gate(request(method, path, content))
        assert not isinstance(answer, PendingReply)
        head, _, text = bytes(answer).decode().partition("\r\n\r\n")
        lines: dict[str, str] = {}
        for line in head.split("\r\n")[1:]:
            name, _, value = line.partition(": ")
            lines[name] = f"{lines[name]}; {value}" if name in lines else value
        return int(head[9:12]), lines, json.loads(text)


def answer_of(parked: PendingReply) -> tuple[int | None, Any]:
    """Status and body of an answer that was parked; no status while it still is."""
    if parked.response is None:
        return None, None
    head, _, body = bytes(parked.response).partition(b"\r\n\r\n")
    return int(head[9:12]), json.loads(body)


def selector(
    call_later: Callable[[float, Callable[[], None]], Timer] | None = None, **settings: Any
) -> InProcess:
    """A selection service without workers."""
    return InProcess(selection_gate(service=selection_service(call_later, **settings)))
