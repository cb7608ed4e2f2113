"""Bad input to the slot tracker gets its documented status and text, and changes nothing.

Spec slot_tracker.md 1.2 and 1.3, with decisions D2, D6, D8 and D9.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.running_service import DEADLINE_S, RunningService, free_port

MODULE = "lean_selector.slot_tracker"
MAX_BODY = 2 * 1024 * 1024
SCOPE = '"model_name":"m"'
BODIES = {
    "/register": f'{{"worker_id":8,{SCOPE},"block_size":16,"dp_start":0,"dp_size":1}}',
    "/unregister": f'{{"worker_id":8,{SCOPE}}}',
    "/add": f'{{{SCOPE},"request_id":"new","worker_id":7,"dp_rank":1,"sequence_hashes":[1]}}',
    "/prefill_complete": f'{{{SCOPE},"request_id":"unknown"}}',
    "/free": f'{{{SCOPE},"request_id":"unknown"}}',
    "/potential_loads": f'{{{SCOPE},"sequence_hashes":[1],"new_isl_tokens":1}}',
    "/register_peer": '{"url":"tcp://127.0.0.1:1"}',
    "/replica_sync/deregister_peer": '{"endpoint":"tcp://127.0.0.1:1"}',
}
FIELDS = [
    (path, field)
    for path, body in BODIES.items()
    for field in (*json.loads(body), "tenant_id", "routing_group", "new_isl_tokens")
    if field in json.loads(body) or (field != "new_isl_tokens" and "peer" not in path)
]


@pytest.fixture(scope="module")
def tracker() -> Iterator[RunningService]:
    with RunningService(
        "--replica-sync-port", str(free_port()), "--reservation-expiry-secs", "600", module=MODULE
    ) as running:
        worker = {"worker_id": 7, "model_name": "m", "block_size": 16, "dp_start": 0, "dp_size": 1}
        assert running.post("/register", worker)[0] == 201
        request = {"model_name": "m", "request_id": "live", "worker_id": 7, "dp_rank": 0}
        assert running.post("/add", {**request, "sequence_hashes": [5, -6]})[0] == 201
        yield running


@pytest.fixture(autouse=True)
def _nothing_changes(tracker: RunningService) -> Iterator[None]:
    def state() -> list[Any]:
        return [tracker.get(path) for path in ("/workers", "/loads", "/peers")]

    before = state()
    yield
    assert state() == before


def refused(
    tracker: RunningService,
    status: int,
    path: str,
    raw: str | bytes | None,
    headers: dict[str, str] | None = None,
    method: str = "POST",
) -> str:
    body = raw.encode() if isinstance(raw, str) else raw
    answer = tracker.request(method, path, raw=body, headers=headers)
    assert answer[0] == status, answer
    assert list(answer[1]) == ["error"]
    return str(answer[1]["error"])


def with_value(path: str, field: str, value: object) -> str:
    return json.dumps({**json.loads(BODIES[path]), field: value})


@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_null_and_wrong_types_are_422_naming_the_field(
    tracker: RunningService, path: str, field: str
) -> None:
    is_text = field in ("model_name", "tenant_id", "routing_group", "request_id", "url", "endpoint")
    values: tuple[object, ...] = (None, True, 1.5, {}, [], [[]], 7 if is_text else "7")
    for value in values:
        if field == "sequence_hashes" and value == []:
            continue
        assert field in refused(tracker, 422, path, with_value(path, field, value))


@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_missing_fields_are_422_unless_they_have_a_default(
    tracker: RunningService, path: str, field: str
) -> None:
    if field in ("tenant_id", "routing_group", "new_isl_tokens"):
        return
    body = json.loads(BODIES[path])
    del body[field]
    assert field in refused(tracker, 422, path, json.dumps(body))


@pytest.mark.parametrize(
    ("path", "field", "value"),
    [
        *(("/register", "worker_id", value) for value in (-1, 2**64, 10**30)),
        *(
            ("/register", field, value)
            for field in ("block_size", "dp_start", "dp_size")
            for value in (-1, 2**32)
        ),
        *(("/add", "dp_rank", value) for value in (-1, 2**32)),
        *(("/add", "new_isl_tokens", value) for value in (-1, 2**64)),
        *(("/potential_loads", "new_isl_tokens", value) for value in (-1, 2**64)),
        *(
            (path, "sequence_hashes", [1, value])
            for path in ("/add", "/potential_loads")
            for value in (2**63, -(2**63) - 1, 1.0, None, "1", True)
        ),
    ],
)
def test_numbers_out_of_range_are_422(
    tracker: RunningService, path: str, field: str, value: object
) -> None:
    assert field in refused(tracker, 422, path, with_value(path, field, value))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "{", "nul", "{'a':1}", '{"model_name":"m",}', '{"model_name":NaN}'),
        *('{"model_name":"\ud83d"}', '{"model_name":"a\tb"}', '{"model_name":1e999}', "[" * 2000),
    ],
)
def test_what_is_no_json_is_400(tracker: RunningService, path: str, text: str) -> None:
    refused(tracker, 400, path, text.encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("path", BODIES)
def test_json_of_another_shape_is_422_and_trailing_bytes_are_400(
    tracker: RunningService, path: str
) -> None:
    for text in ("null", "true", "5", '"s"', "[]", "{}", '["m","default","x"]'):
        refused(tracker, 422, path, text)
    refused(tracker, 400, path, BODIES[path] + "{}")
    refused(tracker, 400, path, BODIES[path].encode() + b"\xff")


@pytest.mark.parametrize("path", BODIES)
def test_another_content_type_is_415_and_another_method_405(
    tracker: RunningService, path: str
) -> None:
    for headers in ({}, {"content-type": ""}, {"content-type": "text/json"}):
        text = refused(tracker, 415, path, BODIES[path], headers)
        assert text == "Expected request with `Content-Type: application/json`"
    for method in ("GET", "PUT", "DELETE", "OPTIONS"):
        assert refused(tracker, 405, path, None, method=method) == "method not allowed"
    for other in (f"{path}/", f"/{path}", path.upper()):
        assert refused(tracker, 404, other, BODIES[path]) == "route not found"


def test_a_body_of_2_mib_is_taken_and_one_byte_more_is_413(tracker: RunningService) -> None:
    body = BODIES["/potential_loads"].encode()
    padded = body + b" " * (MAX_BODY - len(body))
    headers = {"content-type": "application/json"}
    assert tracker.request("POST", "/potential_loads", raw=padded, headers=headers)[0] == 200
    text = refused(tracker, 413, "/potential_loads", padded + b" ", headers)
    assert text == "Failed to buffer the request body: length limit exceeded"


RANK = "WorkerWithDpRank { worker_id: 7, dp_rank: %d }"


@pytest.mark.parametrize(
    ("path", "changes", "status", "text"),
    [
        ("/register", {"block_size": 0, "dp_size": 0}, 400, "block_size must be greater than 0"),
        ("/register", {"dp_size": 0}, 400, "dp_size must be greater than 0"),
        (
            "/register",
            {"dp_start": 2**32 - 1},
            400,
            "dp range overflows u32: start=4294967295 size=1",
        ),
        ("/register", {"dp_size": 5000}, 400, "dp_size 5000 exceeds the maximum 4096"),
        (
            "/register",
            {"worker_id": 7, "block_size": 32},
            409,
            "block_size mismatch for model=m tenant=default: existing=16, requested=32",
        ),
        (
            "/register",
            {"worker_id": 7},
            409,
            "worker 7 already registered for model=m tenant=default",
        ),
        ("/unregister", {}, 404, "worker 8 not found for model=m tenant=default"),
        ("/add", {"tenant_id": "x"}, 404, "no slot tracker for model=m tenant=x"),
        ("/add", {"request_id": "live"}, 404, f"Worker {RANK % 1} not found"),
        (
            "/add",
            {"request_id": "live", "dp_rank": 0},
            409,
            f"Request live already exists (assigned to worker {RANK % 0})",
        ),
        (
            "/add",
            {"dp_rank": 0, "new_isl_tokens": 2**53},
            400,
            "isl_tokens (9007199254740992) exceeds the maximum 9007199254740991",
        ),
        (
            "/potential_loads",
            {"new_isl_tokens": 2**64 - 1},
            400,
            "isl_tokens (18446744073709551615) exceeds the maximum 9007199254740991",
        ),
        ("/prefill_complete", {}, 404, "Request unknown not found"),
        ("/free", {"routing_group": "x"}, 404, "no slot tracker for model=m tenant=x"),
        ("/register_peer", {"url": "bad"}, 400, "invalid ZMQ endpoint `bad`: missing scheme"),
        ("/replica_sync/deregister_peer", {}, 404, "peer not found"),
    ],
)
def test_requests_that_clash_with_what_there_is_get_the_documented_text(
    tracker: RunningService, path: str, changes: dict[str, object], status: int, text: str
) -> None:
    body = json.dumps({**json.loads(BODIES[path]), **changes})
    assert refused(tracker, status, path, body) == text


@pytest.mark.parametrize(
    "query",
    [
        *("model_name=m&model_name=m", "tenant_id=a&tenant_id=a", "tenant_id=a&routing_group=b"),
    ],
)
def test_bad_queries_are_400(tracker: RunningService, query: str) -> None:
    for path in ("/loads", "/workers"):
        refused(tracker, 400, f"{path}?{query}", None, method="GET")
    refused(tracker, 400, "/peers?detail=perhaps", None, method="GET")
    refused(tracker, 400, "/peers?detail=true&detail=true", None, method="GET")


@pytest.mark.parametrize(
    ("flags", "status", "text"),
    [
        (["--replica-sync-peers", "tcp://a:1"], 2, "require --replica-sync-bind"),
        (["--replica-sync-advertise", "tcp://a:1"], 2, "require --replica-sync-bind"),
        (["--replica-sync-catch-up", "http://a:1"], 2, "requires --replica-sync-port"),
        (["--replica-sync-port", "0"], 2, "port must be greater than zero"),
        (["--replica-sync-port", "70000"], 2, "expected 1 to 65535"),
        (["--replica-sync-bind", "nonsense"], 2, "missing scheme"),
        (
            ["--replica-sync-port", "9", "--replica-sync-bind", "tcp://*:9"],
            2,
            "give only one",
        ),
        (
            ["--replica-sync-bind", "tcp://*:9", "--replica-sync-peers", "a,tcp://a:1"],
            2,
            "invalid replica peer endpoint `a`",
        ),
        (
            [
                *("--replica-sync-bind", "tcp://*:9", "--replica-sync-advertise", "tcp://a:1"),
                *("--replica-sync-peers", "tcp://b:1,tcp://a:1"),
            ],
            2,
            "`tcp://a:1` is this replica's own",
        ),
        (["--port", "70000"], 2, "expected 0 to 65535"),
        (["--reservation-expiry-secs", "0"], 2, "expected at least"),
        (["--nonsense"], 2, "--nonsense"),
        (["positional"], 2, "positional"),
    ],
)
def test_a_wrong_command_line_ends_the_start_with_one_line(
    flags: list[str], status: int, text: str
) -> None:
    ended, log = failed_start(*flags)
    assert ended == status
    assert text in log
    assert log.count("\n") == log.count("lean-slot-tracker: error:") == 1


def failed_start(*flags: str) -> tuple[int, str]:
    """Exit status and log of a start that must fail."""
    ended = subprocess.run(
        [sys.executable, "-m", MODULE, *flags],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return ended.returncode, ended.stderr


def test_ports_in_use_end_the_start_with_status_1(tracker: RunningService) -> None:
    taken = str(tracker.port)
    status, log = failed_start("--port", taken)
    assert status == 1
    assert "Address already in use (os error 98)" in log
    status, log = failed_start("--port", "0", "--replica-sync-port", taken)
    assert status == 1
    assert f"failed to bind replica publisher to `tcp://*:{taken}`" in log
