"""Bad input to both services gets its documented status, names what is wrong, and changes nothing.

Statuses: spec selection.md 1.1 and appendix A, slot_tracker.md 1.2 and 1.3, with decisions D2 and
D4 to D9. What the reference answers was recorded (`tests/conformance/`), single fields are in
`tests/wire/`, and damaged bodies in `tests/properties/test_no_input_is_a_failure.py`.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.gates import InProcess, selector, slot_tracker_gate

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


def with_live_reservation() -> InProcess:
    service = selector()
    worker = {"worker_id": 1, "endpoint": "http://w", "block_size": 16, "total_kv_blocks": 9}
    assert service.post("/workers", worker)[0] == 201
    spec = {**json.loads(f"{{{RESERVATION}}}"), "reservation_id": "live"}
    assert service.post("/reservations", spec)[0] == 201
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


@pytest.mark.parametrize("body", [b"", b"no json", b"\xff"])
def test_calls_without_a_body_ignore_one(body: bytes) -> None:
    for headers in ({}, {"content-type": "text/plain"}):
        path = "/reservations/live/prefill_complete"
        assert SERVICE.request("POST", path, raw=body, headers=headers)[0] == 200
