"""Every kind of bad input gets its documented status, and changes nothing.

One service answers them all, with a worker and a reservation in it; what GET /workers and /loads
say is compared before and after each test. Statuses: spec selection.md 1.1 and appendix A, with
decisions D2 and D4 to D9.
"""

import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.running_service import RunningService

MAX_BODY = 8 * 1024 * 1024
JSON = {"content-type": "application/json"}
HASHES = '"block_hashes":[1,2],"sequence_hashes":[3,4],"isl_tokens":32'
RESERVATION = '"reservation_id":"new","worker_id":1,' + HASHES


@pytest.fixture(scope="module")
def service() -> Iterator[RunningService]:
    with RunningService(env={"DYN_USE_KV_EVENTS": "false"}) as running:
        worker = {"worker_id": 1, "endpoint": "http://w", "block_size": 16, "total_kv_blocks": 9}
        assert running.post("/workers", worker)[0] == 201
        booking = json.loads(f"{{{RESERVATION}}}")
        assert running.post("/reservations", {**booking, "reservation_id": "live"})[0] == 201
        yield running


@pytest.fixture(autouse=True)
def _nothing_changes(service: RunningService) -> Iterator[None]:
    def state() -> list[Any]:
        return [
            service.get(path) for path in ("/workers", "/loads", "/ready", "/replica_sync/peers")
        ]

    before = state()
    yield
    assert state() == before


def refused(
    service: RunningService,
    status: int,
    method: str,
    path: str,
    raw: bytes | str | None = None,
    headers: dict[str, str] | None = None,
) -> str:
    """The error text of a request that must be refused with `status`."""
    body = raw.encode() if isinstance(raw, str) else raw
    answer = service.request(method, path, raw=body, headers=headers)
    assert answer[0] == status, answer
    assert list(answer[1]) == ["error"]
    text = answer[1]["error"]
    assert isinstance(text, str)
    assert text
    return text


POSTS = {
    "/workers": '{"worker_id":2,"endpoint":"http://w","block_size":16}',
    "/select": f"{{{HASHES}}}",
    "/select_and_reserve": f"{{{HASHES}}}",
    "/reservations": f"{{{RESERVATION}}}",
    "/potential_loads": f"{{{HASHES}}}",
    "/overlap_scores": f"{{{HASHES}}}",
    "/reservations/live/output_block": "{}",
    "/replica_sync/register_peer": '{"endpoint":"tcp://127.0.0.1:1"}',
    "/replica_sync/deregister_peer": '{"endpoint":"tcp://127.0.0.1:1"}',
}

# -- before the body is looked at -----------------------------------------------------------------


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize(
    "content_type",
    [
        None,
        "",
        "text/plain",
        "application/jsonp",
        "application/x-www-form-urlencoded",
        "text/json",
        "application/json+x",
        "json",
    ],
)
def test_another_content_type_is_415(
    service: RunningService, path: str, content_type: str | None
) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    for body in (POSTS[path], "no json"):
        text = refused(service, 415, "POST", path, body, headers)
        assert text == "Expected request with `Content-Type: application/json`"


@pytest.mark.parametrize(
    "content_type",
    [
        *("application/json", "Application/JSON", "application/json; charset=utf-8"),
        *("application/vnd.x+json", "application/json;", "application/problem+JSON ; a=b"),
    ],
)
def test_every_kind_of_json_content_type_is_taken(
    service: RunningService, content_type: str
) -> None:
    answer = service.request(
        "POST",
        "/potential_loads",
        raw=POSTS["/potential_loads"].encode(),
        headers={"content-type": content_type},
    )
    assert answer[0] == 200


@pytest.mark.parametrize("path", ["/workers", "/select", "/reservations/live/output_block"])
def test_a_body_above_8_mib_is_413_and_at_8_mib_is_read(service: RunningService, path: str) -> None:
    text = refused(service, 413, "POST", path, b" " * (MAX_BODY + 1), JSON)
    assert text == "Failed to buffer the request body: length limit exceeded"
    assert "parse" in refused(service, 400, "POST", path, b" " * MAX_BODY, JSON)


def test_size_is_judged_after_content_type_and_before_json(service: RunningService) -> None:
    refused(service, 415, "POST", "/workers", b"{" * (MAX_BODY + 1), {"content-type": "x/y"})
    refused(service, 413, "POST", "/workers", b"{" * (MAX_BODY + 1), JSON)


# -- no JSON text at all: 400 ---------------------------------------------------------------------

BROKEN = {
    "nothing": b"",
    "blanks": b" \n",
    "half an object": b"{",
    "half a key": b'{"a',
    "no colon": b'{"a" 1}',
    "no comma": b'{"a":1 "b":2}',
    "trailing comma": b'{"a":1,}',
    "no key": b"{,}",
    "number as key": b"{1:2}",
    "single quotes": b"{'a':1}",
    "leading zero": b'{"a":01}',
    "bare point": b'{"a":1.}',
    "plus sign": b'{"a":+1}',
    "NaN": b'{"a":NaN}',
    "Infinity": b'{"a":-Infinity}',
    "half a word": b'{"a":nul}',
    "bad escape": b'{"a":"\\q"}',
    "half an escape": b'{"a":"\\u12"}',
    "lone low surrogate": b'{"a":"\\udc00"}',
    "lone high surrogate": b'{"a":"\\ud800"}',
    "control character": b'{"a":"\x01"}',
    "bytes after the value": b"{} x",
    "two values": b"{}{}",
    "byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": '{"a":1}'.encode("utf-16"),
    "bad UTF-8 in an ignored string": b'{"a":"\xff"}',
    "bad UTF-8 in an ignored key": b'{"\xc3\x28":1}',
    "overlong UTF-8": b'{"a":"\xc0\xaf"}',
    "surrogate in UTF-8": b'{"a":"\xed\xa0\x80"}',
    "deep nesting": b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep nesting in objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "comment": b"{} // x",
}


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_what_is_no_json_text_is_400(service: RunningService, path: str, text: bytes) -> None:
    error = refused(service, 400, "POST", path, text, JSON)
    assert error.startswith("Failed to parse the request body as JSON: ")


@pytest.mark.parametrize(
    ("path", "text"),
    [
        pytest.param("/workers", b'{"worker_id":"x"} y', id="bytes after the value"),
        pytest.param("/workers", b'{"worker_id":"x",', id="cut off"),
        pytest.param("/workers", b'{"worker_id":"x","a":"\xff"}', id="bad UTF-8"),
        pytest.param("/workers", b'{"worker_id":1e400}', id="beyond f64"),
        pytest.param("/workers", b'{"worker_id":"x","a":1e400}', id="beyond f64, ignored"),
        pytest.param("/workers", b'{"worker_id":"x","a":' + b"[" * 99_999, id="deep"),
        pytest.param("/select", b'{"block_hashes":[1e400]}', id="hash beyond f64"),
        pytest.param("/select", b'{"isl_tokens":1' + b"0" * 400 + b"}", id="length beyond f64"),
        pytest.param("/select", b'{"priority_jump":1e400}', id="float beyond f64"),
        pytest.param("/select", b'{"block_hashes":' + b"[" * 99_999, id="deep hashes"),
        pytest.param("/select", b'{"block_hashes":"\\ud800"}', id="surrogate for hashes"),
    ],
)
def test_no_json_text_is_400_also_where_a_wrong_type_comes_first(
    service: RunningService, path: str, text: bytes
) -> None:
    error = refused(service, 400, "POST", path, text, JSON)
    assert error.startswith("Failed to parse the request body as JSON: ")


# -- the wrong shape: 422 -------------------------------------------------------------------------


@pytest.mark.parametrize("path", POSTS)
@pytest.mark.parametrize("text", ["null", "true", "5", '"x"', "[]", '["x"]'])
def test_a_body_that_is_no_object_is_422(service: RunningService, path: str, text: str) -> None:
    error = refused(service, 422, "POST", path, text, JSON)
    assert error.startswith("Failed to deserialize the JSON body into the target type: ")


SHAPES = [
    ("/workers", "worker_id", "{}"),
    ("/workers", "worker_id", '{"worker_id":18446744073709551616}'),
    ("/workers", "block_size", '{"worker_id":1,"block_size":1e1}'),
    ("/workers", "kv_events_endpoints", '{"worker_id":1,"kv_events_endpoints":{"x":"y"}}'),
    ("/workers", "kv_transfer_enforcement", '{"worker_id":1,"kv_transfer_enforcement":1}'),
    ("/reservations", "reservation_id", "{}"),
    ("/reservations", "worker_id", '{"reservation_id":"a"}'),
    ("/reservations/live/output_block", "decay_fraction", '{"decay_fraction":"x"}'),
    ("/reservations/nobody/output_block", "decay_fraction", '{"decay_fraction":"x"}'),
    ("/replica_sync/register_peer", "endpoint", "{}"),
    ("/replica_sync/deregister_peer", "endpoint", '{"endpoint":5}'),
]
SHAPES += [
    (path, field, f'{{{RESERVATION},"{field}":{value}}}')
    for path in ("/select", "/select_and_reserve", "/reservations", "/potential_loads")
    for field, value in (
        ("token_ids", '["1"]'),
        ("token_ids", "[4294967296]"),
        ("block_hashes", "{}"),
        ("block_hashes", "[9223372036854775808]"),
        ("sequence_hashes", "[1.5]"),
        ("sequence_hashes", "[1,null]"),
        ("sequence_hashes", "5"),
        ("isl_tokens", "18446744073709551616"),
        ("isl_tokens", "-1"),
        ("mm_routing_info", "[[1]]"),
        ("router_config_override", '{"router_temperature":-1}'),
        ("model_name", "null"),
        ("tenant_id", "5"),
    )
]


@pytest.mark.parametrize(("path", "field", "text"), SHAPES)
def test_a_field_of_the_wrong_shape_is_422_and_named(
    service: RunningService, path: str, field: str, text: str
) -> None:
    error = refused(service, 422, "POST", path, text, JSON)
    assert error.startswith("Failed to deserialize the JSON body into the target type: ")
    assert field in error


@pytest.mark.parametrize("state", ["", '"model_name":"nobody",'])
@pytest.mark.parametrize(
    "wrong",
    [
        '"block_hashes":5',
        '"sequence_hashes":[1,"x"],"block_hashes":[1,2],"isl_tokens":1',
        '"isl_tokens":18446744073709551616',
        '"allowed_worker_ids":[18446744073709551616]',
        '"pinned_worker":{"worker_id":18446744073709551616,"dp_rank":0}',
    ],
)
def test_a_wrong_shape_is_named_before_the_state_of_the_service(
    service: RunningService, state: str, wrong: str
) -> None:
    refused(service, 422, "POST", "/select", f"{{{state}{wrong}}}", JSON)


# -- content that makes no sense ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "text", "status", "error"),
    [
        pytest.param(
            "/select", "{}", 400, "block_hashes is required without token_ids", id="no prompt"
        ),
        pytest.param(
            "/select", '{"token_ids":[]}', 400, "isl_tokens must be greater than 0", id="D7 select"
        ),
        pytest.param(
            "/select_and_reserve",
            '{"token_ids":[],"reservation_id":"x"}',
            400,
            "isl_tokens must be greater than 0",
            id="D7 select_and_reserve",
        ),
        pytest.param(
            "/overlap_scores",
            '{"token_ids":[]}',
            400,
            "isl_tokens must be greater than 0",
            id="D7 overlap_scores",
        ),
        pytest.param(
            "/select_and_reserve",
            '{"block_hashes":[1],"sequence_hashes":[1],"isl_tokens":18446744073709551615}',
            400,
            "isl_tokens (18446744073709551615) exceeds the maximum 9007199254740991",
            id="D6",
        ),
        pytest.param(
            "/select",
            f'{{{HASHES},"tenant_id":"a","routing_group":"b"}}',
            400,
            "tenant_id `a` and routing_group `b` are two names of one thing and must not differ",
            id="D2",
        ),
        pytest.param(
            "/workers",
            '{"worker_id":2,"data_parallel_size":4097}',
            400,
            "data_parallel_size 4097 exceeds the maximum 4096",
            id="too many ranks",
        ),
        pytest.param(
            "/select",
            f'{{{HASHES},"pinned_worker":{{"worker_id":1,"dp_rank":0}},"allowed_worker_ids":[2]}}',
            400,
            "pinned worker 1 is not in allowed worker set",
            id="pin not allowed",
        ),
        pytest.param(
            "/select",
            f'{{{HASHES},"pinned_worker":{{"worker_id":1,"dp_rank":1}}}}',
            503,
            "no endpoints available to route work",
            id="pin out of range",
        ),
        pytest.param(
            "/select",
            f'{{{HASHES},"routing_constraints":{{"required_taints":["x"]}}}}',
            503,
            "no endpoints available to route work",
            id="nobody has the taint",
        ),
        pytest.param(
            "/select",
            '{"model_name":"m","tenant_id":"é"}',
            503,
            "no schedulable workers for model=m tenant=é",
            id="unknown partition",
        ),
        pytest.param(
            "/reservations",
            f'{{{RESERVATION},"effective_prefill_tokens":33}}',
            400,
            "effective_prefill_tokens (33) must not exceed isl_tokens (32)",
            id="too many prefill tokens",
        ),
        pytest.param(
            "/reservations",
            f'{{{RESERVATION},"worker_id":9}}',
            404,
            "schedulable worker 9 not found for model=default tenant=default",
            id="unknown worker",
        ),
        pytest.param(
            "/reservations",
            f'{{{RESERVATION},"dp_rank":1}}',
            404,
            "Worker WorkerWithDpRank { worker_id: 1, dp_rank: 1 } not found",
            id="D5 ghost rank",
        ),
        pytest.param(
            "/reservations",
            f'{{{RESERVATION},"reservation_id":"live"}}',
            409,
            "Request live already exists "
            "(assigned to worker WorkerWithDpRank { worker_id: 1, dp_rank: 0 })",
            id="live id",
        ),
        pytest.param(
            "/select_and_reserve",
            f'{{{HASHES},"reservation_id":"live"}}',
            409,
            "failed to book scheduler state: Request live already exists "
            "(assigned to worker WorkerWithDpRank { worker_id: 1, dp_rank: 0 })",
            id="live id, selected",
        ),
        pytest.param(
            "/reservations/live/output_block",
            '{"decay_fraction":1.0000001}',
            400,
            "decay_fraction must be between 0.0 and 1.0",
            id="fraction",
        ),
        pytest.param(
            "/reservations/nobody/output_block",
            '{"decay_fraction":-1}',
            400,
            "decay_fraction must be between 0.0 and 1.0",
            id="fraction before id",
        ),
        pytest.param(
            "/reservations/nobody/output_block",
            "{}",
            404,
            "reservation nobody not found",
            id="unknown id",
        ),
        pytest.param(
            "/replica_sync/register_peer",
            '{"endpoint":"foo"}',
            409,
            "replica sync is disabled",
            id="sync off",
        ),
    ],
)
def test_what_cannot_be_done_is_said_in_the_documented_words(
    service: RunningService, path: str, text: str, status: int, error: str
) -> None:
    assert refused(service, status, "POST", path, text, JSON) == error


# -- paths and queries ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        *(("GET", "/nope"), ("POST", "/select/"), ("GET", "//health"), ("GET", "/Health")),
        *(("GET", "/"), ("DELETE", "/workers/"), ("DELETE", "/reservations/")),
        *(("GET", "/reservations/a/b/c"), ("POST", "/reservations//")),
        *(("GET", "/%77orkers"), ("PATCH", "/workers/1/")),
    ],
)
def test_an_unknown_route_is_404(service: RunningService, method: str, path: str) -> None:
    assert refused(service, 404, method, path) == "route not found"


@pytest.mark.parametrize(
    ("method", "path", "allow"),
    [
        ("POST", "/health", "GET,HEAD"),
        ("PUT", "/workers", "POST,GET,HEAD"),
        ("GET", "/workers/1", "PATCH,DELETE"),
        ("GET", "/select", "POST"),
        ("GET", "/reservations/x", "DELETE"),
        ("DELETE", "/reservations/x/output_block", "POST"),
        ("OPTIONS", "/loads", "GET,HEAD"),
        ("FOO", "/health", "GET,HEAD"),
        ("GET", "/replica_sync/register_peer", "POST"),
        ("POST", "/replica_sync/peers", "GET,HEAD"),
    ],
)
def test_another_method_is_405_with_what_is_allowed(
    service: RunningService, method: str, path: str, allow: str
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=20)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        assert answer.status == 405
        assert answer.getheader("allow") == allow
        assert json.loads(answer.read()) == {"error": "method not allowed"}  # D9
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("worker_id", "shown"),
    [
        *(("abc", "abc"), ("-1", "-1"), ("+", "+"), ("1.0", "1.0"), ("1%20", "1 "), ("%", "%")),
        *(("%zz", "%zz"), ("0x1", "0x1"), ("1_0", "1_0"), ("%D9%A1", "\u0661")),
        *(("18446744073709551616", "18446744073709551616"), ("9" * 5000, "9" * 5000)),
    ],
)
@pytest.mark.parametrize("method", ["PATCH", "DELETE"])
def test_a_worker_id_that_is_no_u64_is_400_before_all_else(
    service: RunningService, method: str, worker_id: str, shown: str
) -> None:
    text = refused(service, 400, method, f"/workers/{worker_id}", b"no json", {})
    assert text == f"Invalid URL: Cannot parse `{shown}` to a `u64`"


@pytest.mark.parametrize("worker_id", ["7", "+7", "007", "%37", "18446744073709551615"])
def test_whatever_reads_as_a_u64_is_a_worker_id(service: RunningService, worker_id: str) -> None:
    number = 7 if worker_id.endswith("7") else 2**64 - 1
    text = refused(service, 404, "DELETE", f"/workers/{worker_id}")
    assert text == f"worker {number} not found"
    assert refused(service, 404, "PATCH", f"/workers/{worker_id}", "{}", JSON) == text


def test_zeros_before_a_worker_id_are_many_or_few(service: RunningService) -> None:
    assert refused(service, 404, "DELETE", "/workers/" + "0" * 5000 + "7") == "worker 7 not found"
    assert refused(service, 404, "DELETE", "/workers/" + "0" * 25) == "worker 0 not found"


@pytest.mark.parametrize(
    ("segment", "shown"),
    [
        ("a%2Fb", "a/b"),
        ("%C3%A9", "é"),
        ("a+b", "a+b"),
        ("%zz", "%zz"),
        ("%", "%"),
        ("a%20b", "a b"),
    ],
)
def test_a_reservation_id_is_percent_decoded(
    service: RunningService, segment: str, shown: str
) -> None:
    for method, path in (("DELETE", ""), ("POST", "/prefill_complete")):
        text = refused(service, 404, method, f"/reservations/{segment}{path}")
        assert text == f"reservation {shown} not found"


def test_an_empty_reservation_id_can_be_named_where_something_follows(
    service: RunningService,
) -> None:
    for call in ("prefill_complete", "output_block"):
        path = f"/reservations//{call}"
        assert refused(service, 404, "POST", path, "{}", JSON) == "reservation  not found"


@pytest.mark.parametrize("segment", ["%FF", "%C3", "a%ED%A0%80"])
def test_an_id_that_is_no_utf_8_is_400(service: RunningService, segment: str) -> None:
    text = refused(service, 400, "DELETE", f"/reservations/{segment}")
    assert text == "Invalid URL: Invalid UTF-8 in `reservation_id`"
    text = refused(service, 400, "DELETE", f"/workers/{segment}")
    assert text == "Invalid URL: Invalid UTF-8 in `worker_id`"


@pytest.mark.parametrize("path", ["/workers", "/loads"])
@pytest.mark.parametrize(
    ("query", "error"),
    [
        ("model_name=a&model_name=a", "duplicate field `model_name`"),
        ("tenant_id=&tenant_id", "duplicate field `tenant_id`"),
        ("model_name=a&x=1&model%5Fname=b", "duplicate field `model_name`"),
        ("tenant_id=a&routing_group=b", "tenant_id and routing_group"),
    ],
)
def test_a_query_key_given_twice_is_400(
    service: RunningService, path: str, query: str, error: str
) -> None:
    text = refused(service, 400, "GET", f"{path}?{query}")
    assert text.startswith(f"Failed to deserialize query string: {error}")


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("", True),
        ("?", True),
        ("?x=1&x=2", True),
        ("?model_name=default", True),
        ("?model_name=%64efault&tenant_id=default", True),
        ("?routing_group=default&tenant_id=default", True),
        ("?model_name=", False),
        ("?model_name", False),
        ("?tenant_id=default+", False),
        ("?model_name=%", False),
        ("?model_name=%zz", False),
        ("?model_name=%FF", False),
    ],
)
def test_filters_are_exact_and_bad_escapes_are_taken_literally(
    service: RunningService, query: str, found: bool
) -> None:
    for path in ("/workers", "/loads"):
        status, body = service.get(path + query)
        assert status == 200
        assert bool(body) is found


def test_head_answers_like_get_without_a_body(service: RunningService) -> None:
    for path in ("/health", "/ready", "/workers", "/loads", "/dump"):
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=20)
        try:
            connection.request("GET", path)
            full = connection.getresponse()
            length = str(len(full.read()))
            connection.request("HEAD", path)
            head = connection.getresponse()
            assert (head.status, head.getheader("content-length")) == (full.status, length)
            assert head.read() == b""
        finally:
            connection.close()


# -- calls that read no body ----------------------------------------------------------------------


@pytest.mark.parametrize("body", [None, b"", b"no json", b"\xff"])
def test_calls_without_a_body_ignore_one(service: RunningService, body: bytes | None) -> None:
    for headers in ({}, {"content-type": "text/plain"}):
        answer = service.request(
            "POST", "/reservations/live/prefill_complete", raw=body, headers=headers
        )
        assert answer == (200, {"status": "ok"})
