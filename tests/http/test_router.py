"""Paths, methods, parameters and queries, as the reference was recorded to treat them."""

import pytest

from lean_selector.http.routes_by_path import (
    MethodNotAllowed,
    RepeatedQueryField,
    RouteTable,
    parse_query,
    percent_decode,
)

ROUTES = [
    ("GET", "/health", "health"),
    ("POST", "/workers", "register"),
    ("GET", "/workers", "list"),
    ("PATCH", "/workers/{worker_id}", "patch"),
    ("DELETE", "/workers/{worker_id}", "remove"),
    ("POST", "/reservations", "reserve"),
    ("DELETE", "/reservations/{reservation_id}", "free"),
    ("POST", "/reservations/{reservation_id}/prefill_complete", "prefill_complete"),
    ("GET", "/models/{model}/loads", "model_loads"),
    ("POST", "/workers/drain", "drain"),
    ("POST", "/route/{path*}", "route"),
]
TABLE = RouteTable(ROUTES)


@pytest.mark.parametrize(
    ("method", "path", "value", "param"),
    [
        (b"GET", b"/health", "health", None),
        (b"HEAD", b"/health", "health", None),
        (b"POST", b"/workers", "register", None),
        (b"GET", b"/workers", "list", None),
        (b"HEAD", b"/workers", "list", None),
        (b"DELETE", b"/workers/7", "remove", b"7"),
        (b"PATCH", b"/workers/%37", "patch", b"%37"),
        (b"DELETE", b"/reservations/a%2Fb", "free", b"a%2Fb"),
        (b"DELETE", b"/reservations/*", "free", b"*"),
        (b"POST", b"/reservations/{x}/prefill_complete", "prefill_complete", b"{x}"),
        (b"POST", b"/reservations//prefill_complete", "prefill_complete", b""),
        (b"POST", b"/workers/drain", "drain", None),
        (b"GET", b"/models/m/loads", "model_loads", b"m"),
        (b"POST", b"/route/v1/chat/completions", "route", b"v1/chat/completions"),
        (b"POST", b"/route/", "route", b""),
        (b"POST", b"/route//a%2F/", "route", b"/a%2F/"),
        (b"GET", b"/models/all/loads", "model_loads", b"all"),
    ],
)
def test_found(method: bytes, path: bytes, value: str, param: bytes | None) -> None:
    found = TABLE.match(method, path)
    assert found == (value, param)


@pytest.mark.parametrize(
    "path",
    [
        *(b"/", b"", b"*", b"/health/", b"//health", b"/workers/", b"/workers/1/", b"/workers/1/x"),
        *(b"/anything", b"/models/m", b"/models//", b"/reservations//"),
        *(b"/reservations/a/b/prefill_complete", b"/reservations/x/PREFILL_COMPLETE"),
        *(b"/reservations/x/prefill%5Fcomplete", b"/route"),
    ],
)
def test_not_found(path: bytes) -> None:
    assert TABLE.match(b"GET", path) is None


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        (b"POST", b"/health", b"GET,HEAD"),
        (b"FOO", b"/health", b"GET,HEAD"),
        (b"get", b"/health", b"GET,HEAD"),
        (b"PUT", b"/workers", b"POST,GET,HEAD"),
        (b"OPTIONS", b"/workers", b"POST,GET,HEAD"),
        (b"GET", b"/workers/1", b"PATCH,DELETE"),
        (b"HEAD", b"/reservations", b"POST"),
        (b"GET", b"/reservations/x", b"DELETE"),
        (b"GET", b"/reservations/x/prefill_complete", b"POST"),
        (b"DELETE", b"/workers/drain", b"POST"),
        (b"GET", b"/route/v1/models", b"POST"),
    ],
)
def test_method_not_allowed(method: bytes, path: bytes, allow: bytes) -> None:
    found = TABLE.match(method, path)
    assert isinstance(found, MethodNotAllowed)
    assert found.allow == allow


@pytest.mark.parametrize("template", ["/a", "/a/{id}"])
def test_a_route_is_declared_once(template: str) -> None:
    with pytest.raises(ValueError, match="declared twice"):
        RouteTable([("GET", template, 1), ("GET", template.replace("id", "name"), 2)])


@pytest.mark.parametrize("template", ["/{a}", "/a/{b}/{c}", "/a/b/{c}", "/{a}/{b}"])
def test_a_template_has_a_parameter_in_its_second_segment_only(template: str) -> None:
    with pytest.raises(ValueError, match="a parameter elsewhere"):
        RouteTable([("GET", template, 1)])


@pytest.mark.parametrize(
    ("segment", "text"),
    [
        *((b"abc", "abc"), (b"a%2Fb", "a/b"), (b"%31", "1"), (b"a+b", "a+b"), (b"100%", "100%")),
        *((b"%zz%4", "%zz%4"), (b"%c3%A9", "\u00e9"), ("\u00e9".encode(), "\u00e9")),
        (b"%2525", "%25"),
    ],
)
def test_percent_decode(segment: bytes, text: str) -> None:
    assert percent_decode(segment) == text


@pytest.mark.parametrize("segment", [b"%ff", b"\xff", b"%c3"])
def test_percent_decode_refuses_what_is_not_utf8(segment: bytes) -> None:
    with pytest.raises(ValueError, match="utf-8"):
        percent_decode(segment)


KNOWN = frozenset({"model_name", "tenant_id"})


@pytest.mark.parametrize(
    ("query", "fields"),
    [
        (b"", {}),
        (b"model_name=a&tenant_id=b", {"model_name": "a", "tenant_id": "b"}),
        (b"model_name=", {"model_name": ""}),
        (b"model_name", {"model_name": ""}),
        (b"&&model_name=a&", {"model_name": "a"}),
        (b"model_name=a+b%2Bc", {"model_name": "a b+c"}),
        (b"model_name=a=b", {"model_name": "a=b"}),
        (b"model_name=%zz%", {"model_name": "%zz%"}),
        (b"model_name=%ff", {"model_name": "\ufffd"}),
        (b"model%5Fname=a", {"model_name": "a"}),
        (b"x=1&x=2&MODEL_NAME=a", {}),
    ],
)
def test_parse_query(query: bytes, fields: dict[str, str]) -> None:
    assert parse_query(query, KNOWN) == fields


def test_a_known_field_twice_is_an_error_that_names_it() -> None:
    with pytest.raises(RepeatedQueryField) as error:
        parse_query(b"tenant_id=a&model_name=&tenant_id=a", KNOWN)
    assert error.value.field == "tenant_id"
    assert str(error.value) == "duplicate field `tenant_id`"
