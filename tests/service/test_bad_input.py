"""Bad input to both services gets its documented status, names what is wrong, and changes nothing.

Statuses: spec selection.md 1.1 and appendix A, slot_tracker.md 1.2 and 1.3, with decisions D2 and
D4 to D9. What the reference answers was recorded (`tests/conformance/`), single fields are in
`tests/wire/`, and damaged bodies in `tests/properties/test_no_input_is_a_failure.py`.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.gates import InProcess, selector, slot_tracker_gate
from tests.support.running_service import DEADLINE_S, RunningService

SLOT_TRACKER = "lean_selector.slot_tracker"
JSON = {"content-type": "application/json"}
HASHES = '"block_hashes":[1,2],"sequence_hashes":[3,4],"isl_tokens":32'
RESERVATION = '"reservation_id":"new","worker_id":1,' + HASHES
SCOPE = '"model_name":"m"'
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


def with_live_reservation() -> InProcess:
    service = selector()
    worker = {"worker_id": 1, "endpoint": "http://w", "block_size": 16, "total_kv_blocks": 9}
    assert service.post("/workers", worker)[0] == 201
    booking = {**json.loads(f"{{{RESERVATION}}}"), "reservation_id": "live"}
    assert service.post("/reservations", booking)[0] == 201
    return service


def with_live_request() -> InProcess:
    tracker = InProcess(slot_tracker_gate())
    worker = {"worker_id": 7, "model_name": "m", "block_size": 16, "dp_start": 0, "dp_size": 1}
    assert tracker.post("/register", worker)[0] == 201
    request = {"model_name": "m", "request_id": "live", "worker_id": 7, "dp_rank": 0}
    assert tracker.post("/add", {**request, "sequence_hashes": [5, -6]})[0] == 201
    return tracker


SERVICE, TRACKER = with_live_reservation(), with_live_request()


@pytest.fixture(autouse=True)
def _nothing_changes() -> Iterator[None]:
    def state() -> list[Any]:
        shown = ("/workers", "/loads", "/ready", "/replica_sync/peers")
        return [each.get(path) for each in (SERVICE, TRACKER) for path in shown]

    before = state()
    yield
    assert state() == before


def refused(
    service: InProcess,
    status: int,
    path: str,
    raw: str | bytes,
    headers: dict[str, str] | None = JSON,
    method: str = "POST",
) -> str:
    """The error text of a request that must be refused with `status`."""
    body = raw.encode() if isinstance(raw, str) else raw
    got, answer = service.request(method, path, raw=body, headers=headers)
    assert got == status, answer
    assert list(answer) == ["error"]
    assert answer["error"]
    return str(answer["error"])


# -- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("service", "path", "body"),
    [
        *((SERVICE, path, body) for path, body in POSTS.items()),
        *((TRACKER, path, body) for path, body in BODIES.items()),
    ],
)
def test_each_route_judges_the_kind_of_a_body_then_its_text_then_its_shape(
    service: InProcess, path: str, body: str
) -> None:
    for headers in ({}, {"content-type": "text/json"}):
        for text in (body, "no json"):
            refused(service, 415, path, text, headers)
    for broken in ("", "{", body + "{}", body.encode() + b"\xff", b'{"a":' + b"[" * 100_000):
        assert refused(service, 400, path, broken).startswith("Failed to parse the request body")
    for shape in ("null", "true", "5", '"x"', "[]", '["m","default","x"]'):
        assert refused(service, 422, path, shape).startswith("Failed to deserialize the JSON body")


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
def test_no_json_text_is_400_also_where_a_wrong_type_comes_first(path: str, text: bytes) -> None:
    refused(SERVICE, 400, path, text)


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
def test_a_wrong_shape_is_named_before_the_state_of_the_service(state: str, wrong: str) -> None:
    refused(SERVICE, 422, "/select", f"{{{state}{wrong}}}")


@pytest.mark.parametrize(
    ("path", "field", "text"),
    [
        ("/reservations/live/output_block", "decay_fraction", '{"decay_fraction":"x"}'),
        ("/reservations/nobody/output_block", "decay_fraction", '{"decay_fraction":"x"}'),
        ("/replica_sync/register_peer", "endpoint", "{}"),
        ("/replica_sync/deregister_peer", "endpoint", '{"endpoint":5}'),
    ],
)
def test_a_field_of_the_wrong_shape_is_named(path: str, field: str, text: str) -> None:
    assert field in refused(SERVICE, 422, path, text)


@pytest.mark.parametrize(
    ("path", "more", "status", "error"),
    [
        pytest.param(
            "/select",
            {"tenant_id": "a", "routing_group": "b"},
            400,
            "tenant_id `a` and routing_group `b` are two names of one thing and must not differ",
            id="D2",
        ),
        pytest.param(
            "/select",
            {"model_name": "m", "tenant_id": "é"},
            503,
            "no schedulable workers for model=m tenant=é",
            id="unknown partition",
        ),
        pytest.param(
            "/select",
            {"pinned_worker": {"worker_id": 1, "dp_rank": 1}},
            503,
            "no endpoints available to route work",
            id="pin out of range",
        ),
        pytest.param(
            "/reservations",
            {"dp_rank": 1},
            404,
            "Worker WorkerWithDpRank { worker_id: 1, dp_rank: 1 } not found",
            id="D5 ghost rank",
        ),
    ],
)
def test_what_cannot_be_done_is_said_in_the_documented_words(
    path: str, more: dict[str, object], status: int, error: str
) -> None:
    body = json.dumps({**json.loads(POSTS[path]), **more})
    assert refused(SERVICE, status, path, body) == error


# -- fields of the slot tracker -------------------------------------------------------------------


def with_value(path: str, field: str, value: object) -> str:
    return json.dumps({**json.loads(BODIES[path]), field: value})


@pytest.mark.parametrize(("path", "field"), FIELDS)
def test_null_wrong_types_and_missing_fields_are_422_naming_the_field(
    path: str, field: str
) -> None:
    is_text = field in ("model_name", "tenant_id", "routing_group", "request_id", "url", "endpoint")
    values: tuple[object, ...] = (None, True, 1.5, {}, [], [[]], 7 if is_text else "7")
    for value in values:
        if not (field == "sequence_hashes" and value == []):
            assert field in refused(TRACKER, 422, path, with_value(path, field, value))
    if field not in ("tenant_id", "routing_group", "new_isl_tokens"):  # these have a default
        body = json.loads(BODIES[path])
        del body[field]
        assert field in refused(TRACKER, 422, path, json.dumps(body))


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
def test_numbers_out_of_range_are_422(path: str, field: str, value: object) -> None:
    assert field in refused(TRACKER, 422, path, with_value(path, field, value))


# -- queries --------------------------------------------------------------------------------------


@pytest.mark.parametrize("service", [SERVICE, TRACKER])
@pytest.mark.parametrize(
    "query", ["model_name=m&model_name=m", "tenant_id=&tenant_id", "tenant_id=a&routing_group=b"]
)
def test_a_query_key_given_twice_is_400(service: InProcess, query: str) -> None:
    for path in ("/loads", "/workers"):
        text = refused(service, 400, f"{path}?{query}", "", method="GET")
        assert text.startswith("Failed to deserialize query string: ")
    refused(TRACKER, 400, "/peers?detail=perhaps", "", method="GET")


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
def test_filters_are_exact_and_bad_escapes_are_taken_literally(query: str, found: bool) -> None:
    for path in ("/workers", "/loads"):
        status, body = SERVICE.get(path + query)
        assert status == 200
        assert bool(body) is found


@pytest.mark.parametrize("body", [b"", b"no json", b"\xff"])
def test_calls_without_a_body_ignore_one(body: bytes) -> None:
    for headers in ({}, {"content-type": "text/plain"}):
        path = "/reservations/live/prefill_complete"
        assert SERVICE.request("POST", path, raw=body, headers=headers)[0] == 200


# -- over a socket --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "path", "most"),
    [("lean_selector", "/select", 8 * 1024 * 1024), (SLOT_TRACKER, "/free", 2 * 1024 * 1024)],
)
def test_a_body_at_the_limit_is_read_and_one_byte_more_is_413(
    module: str, path: str, most: int
) -> None:
    with RunningService(module=module) as service:
        for size, kind, status in (
            (most, JSON, 400),
            (most + 1, JSON, 413),
            (most + 1, {"content-type": "x/y"}, 415),
        ):
            answer = service.request("POST", path, raw=b"{" * size, headers=kind)
            assert answer[0] == status


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--replica-sync-peers", "tcp://a:1"), "require --replica-sync-bind"),
        (("--replica-sync-advertise", "tcp://a:1"), "require --replica-sync-bind"),
        (("--replica-sync-catch-up", "http://a:1"), "requires --replica-sync-port"),
        (("--replica-sync-bind", "nonsense"), "missing scheme"),
        (("--replica-sync-port", "9", "--replica-sync-bind", "tcp://*:9"), "give only one"),
        (
            ("--replica-sync-bind", "tcp://*:9", "--replica-sync-peers", "a,tcp://a:1"),
            "invalid replica peer endpoint `a`",
        ),
        (
            (
                *("--replica-sync-bind", "tcp://*:9", "--replica-sync-advertise", "tcp://a:1"),
                *("--replica-sync-peers", "tcp://b:1,tcp://a:1"),
            ),
            "`tcp://a:1` is this replica's own",
        ),
    ],
)
def test_a_wrong_command_line_ends_the_start_with_one_line(
    flags: tuple[str, ...], text: str
) -> None:
    ended, log = failed_start(*flags)
    assert ended == 2
    assert text in log
    assert log.count("\n") == log.count("lean-slot-tracker: error:") == 1


def failed_start(*flags: str) -> tuple[int, str]:
    """Exit status and log of a start that must fail."""
    ended = subprocess.run(
        [sys.executable, "-m", SLOT_TRACKER, *flags],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    return ended.returncode, ended.stderr


def test_ports_in_use_end_the_start_with_status_1() -> None:
    with RunningService(module=SLOT_TRACKER) as running:
        taken = str(running.port)
        status, log = failed_start("--port", taken)
        assert status == 1
        assert "Address already in use (os error 98)" in log
        status, log = failed_start("--port", "0", "--replica-sync-port", taken)
        assert status == 1
        assert f"failed to bind replica publisher to `tcp://*:{taken}`" in log
