"""The gate: which handler a request gets to, what becomes of its errors, and what is counted."""

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from lean_selector.api.access import READ
from lean_selector.api.bodies import SCOPE_FIELDS, Query
from lean_selector.api.gate import Gate, RouteMeter
from lean_selector.api.replies import LaterReply, Reply
from lean_selector.api.routes import Route
from lean_selector.core.errors import AllWorkersBusy, BadRequest, Conflict, NotFound
from lean_selector.http.response import PendingReply
from lean_selector.wire.selection_bodies import PromptFields
from tests.support.gates import answered, request


class Named(msgspec.Struct):
    name: str


def route(method: str, path: str, handler: Callable[..., object], **more: Any) -> Route:
    return Route(method, path, READ, "tests", "For tests", handler, **more)


class Handlers:
    """Routes of every kind, whose answers tell what they were given."""

    def __init__(self) -> None:
        self.later = LaterReply()
        self.error: Exception = BadRequest("no")

    def fail(self) -> object:
        raise self.error

    def fail_with(self, body: PromptFields) -> object:
        raise self.error

    def query(self, query: Query) -> Query:
        return query

    def gate(self) -> Gate:
        return Gate(
            [
                route("GET", "/plain", lambda: "plain"),
                route("POST", "/plain", lambda: "made", status=201),
                route("GET", "/query", self.query, query=SCOPE_FIELDS),
                route("GET", "/id/{worker_id}", lambda value: value),
                route("POST", "/named", lambda body: body.name, body=Named, status=201),
                route(
                    "POST", "/id/{worker_id}", lambda value, body: [value, body.name], body=Named
                ),
                route("GET", "/chosen", lambda: Reply(202, "chosen")),
                route("GET", "/later", lambda: self.later),
                route("GET", "/fail", self.fail),
                route("POST", "/prompt", self.fail_with, body=PromptFields),
            ],
            overload_status=529,
        )


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


def meter_of(gate: Gate, method: str, route: str) -> RouteMeter:
    (meter,) = [each for each in gate.meters if (each.method, each.route) == (method, route)]
    return meter


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        pytest.param("GET", "/plain", b"", (200, b'"plain"'), id="nothing"),
        pytest.param("HEAD", "/plain", b"", (200, b'"plain"'), id="as GET"),
        pytest.param("POST", "/plain", b"ignored", (201, b'"made"'), id="another status"),
        pytest.param("GET", "/id/7", b"", (200, b"7"), id="a parameter"),
        pytest.param("POST", "/named", b'{"name":"a"}', (201, b'"a"'), id="a body"),
        pytest.param("POST", "/id/7", b'{"name":"a"}', (200, b'[7,"a"]'), id="both"),
        pytest.param("GET", "/chosen", b"", (202, b'"chosen"'), id="a status of its own"),
    ],
)
def test_a_handler_gets_what_its_kind_of_route_takes(
    handlers: Handlers, method: str, path: str, body: bytes, expected: tuple[int, bytes]
) -> None:
    assert answered(handlers.gate(), request(method, path, body)) == expected


def test_a_handler_of_queries_gets_the_fields_it_knows(handlers: Handlers) -> None:
    asked = request("GET", "/query", query=b"model_name=m&x=1&routing_group=g")
    assert answered(handlers.gate(), asked) == (200, b'{"model_name":"m","tenant_id":"g"}')


def test_a_parameter_is_judged_before_the_body(handlers: Handlers) -> None:
    status, text = answered(handlers.gate(), request("POST", "/id/x", b"{"))
    assert status == 400
    assert b"Cannot parse `x`" in text


def test_what_has_no_route_is_404_and_counted_apart(handlers: Handlers) -> None:
    gate = handlers.gate()
    assert answered(gate, request("GET", "/nowhere")) == (404, b'{"error":"route not found"}')
    assert meter_of(gate, "", "none").by_status() == {"404": 1}
    assert b"x-warning: GET /openapi.json" in bytes(gate(request("GET", "/")))  # type: ignore[arg-type]


def test_a_wrong_method_is_told_which_are_right(handlers: Handlers) -> None:
    gate = handlers.gate()
    answer = gate(request("DELETE", "/plain"))
    assert isinstance(answer, bytes)
    assert answer.startswith(b"HTTP/1.1 405 ")
    assert b"\r\nallow: GET,HEAD,POST\r\n" in answer
    assert meter_of(gate, "", "none").by_status() == {"405": 1}


@pytest.mark.parametrize("error", [BadRequest("why"), NotFound("why"), Conflict("why")])
def test_an_error_of_the_core_has_its_status_and_words(handlers: Handlers, error: Conflict) -> None:
    handlers.error = error
    gate = handlers.gate()
    assert answered(gate, request("GET", "/fail")) == (error.status, b'{"error":"why"}')
    assert meter_of(gate, "GET", "/fail").by_status() == {str(error.status): 1}


def test_what_is_shed_has_the_status_for_overload_and_is_counted_as_shed(
    handlers: Handlers,
) -> None:
    handlers.error = AllWorkersBusy()
    gate = handlers.gate()
    answer = gate(request("GET", "/fail"))
    assert isinstance(answer, bytes)
    assert answer.startswith(b"HTTP/1.1 529 ")
    assert b"\r\nretry-after: 1\r\n" in answer
    meter = meter_of(gate, "GET", "/fail")
    assert (meter.shed, meter.by_status()) == (1, {"529": 1})


def test_a_fault_of_ours_is_logged_and_told_without_its_words(
    handlers: Handlers, caplog: pytest.LogCaptureFixture
) -> None:
    handlers.error = RuntimeError("a secret")
    assert answered(handlers.gate(), request("GET", "/fail")) == (
        500,
        b'{"error":"internal error"}',
    )
    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "a secret" in str(record.exc_info)


def test_answers_are_counted_by_status_and_by_how_long_they_took(handlers: Handlers) -> None:
    gate = handlers.gate()
    for name in (b'"a"', b'"b"', b"3"):
        answered(gate, request("POST", "/named", b'{"name":%b}' % name))
    meter = meter_of(gate, "POST", "/named")
    assert meter.by_status() == {"201": 2, "422": 1}
    assert sum(meter.buckets()) == meter.requests() == 3
    assert meter.seconds > 0


def test_an_answer_that_comes_later_is_counted_when_it_comes(handlers: Handlers) -> None:
    gate = handlers.gate()
    assert isinstance(gate(request("GET", "/later")), PendingReply)
    meter = meter_of(gate, "GET", "/later")
    assert meter.requests() == 0
    handlers.later.answer(404, "gone")
    assert meter.by_status() == {"404": 1}


def test_a_client_that_leaves_before_its_answer_is_counted_as_499(handlers: Handlers) -> None:
    gate = handlers.gate()
    gate(request("GET", "/later"))
    handlers.later.hang_up()
    assert meter_of(gate, "GET", "/later").by_status() == {"499": 1}
