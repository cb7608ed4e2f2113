"""Reports on workers over HTTP, and where it shows what came of them."""

import json
from typing import Any

import pytest

from lean_selector.service.gate import Gate
from tests.support.gates import answered, request, selection_gate


def call(gate: Gate, method: str, path: str, body: object = None, query: str = "") -> Any:
    raw = b"" if body is None else json.dumps(body).encode()
    status, text = answered(gate, request(method, path, raw, query=query.encode() or None))
    return status, json.loads(text)


def fleet(*worker_ids: int, **fields: object) -> Gate:
    gate = selection_gate()
    for worker_id in worker_ids:
        body = {"worker_id": worker_id, "endpoint": "http://w", "block_size": 16, **fields}
        assert call(gate, "POST", "/workers", body)[0] == 201
    return gate


def report(gate: Gate, worker_id: int, outcome: str, **fields: object) -> Any:
    return call(gate, "POST", f"/workers/{worker_id}/report", {"outcome": outcome, **fields})


def chosen(gate: Gate) -> set[int]:
    body = {"token_ids": [1, 2, 3]}
    return {call(gate, "POST", "/select", body)[1]["worker_id"] for _ in range(40)}


def detail(gate: Gate, worker_id: int) -> Any:
    workers = call(gate, "GET", "/workers", query="detail=true")[1]
    return next(each["health"] for each in workers if each["worker_id"] == worker_id)


def test_three_failures_in_a_row_eject_a_worker_and_it_shows_why() -> None:
    gate = fleet(1, 2, 3)
    for outcome in ("failed", "failed", "refused"):
        assert chosen(gate) == {1, 2, 3}
        assert report(gate, 2, outcome) == (200, {"status": "ok"})
    assert chosen(gate) == {1, 3}
    reason = "3 requests in a row failed, the last: connection refused"
    assert detail(gate, 2) == {
        "state": "ejected",
        "ranks": [
            {
                "dp_rank": 0,
                "state": "ejected",
                "reason": reason,
                "since_s": 0.0,
                "returns_in_s": 30.0,
                "failures": 3,
                "failed_polls": 0,
                "ejections": 1,
            }
        ],
    }
    assert detail(gate, 1) == {"state": "in_service", "ranks": []}
    ready = call(gate, "GET", "/ready")
    assert ready[0] == 200
    assert ready[1]["ejected"] == [{"worker_id": 2, "dp_ranks": [0], "reason": reason}]


def test_nothing_of_it_shows_in_the_plain_bodies() -> None:
    gate = fleet(1, 2)
    before = call(gate, "GET", "/workers")
    for _ in range(3):
        report(gate, 2, "failed")
    assert call(gate, "GET", "/workers") == before
    assert call(gate, "GET", "/workers", query="detail=false") == before
    assert "ejected" not in call(fleet(1), "GET", "/ready")[1]


def test_a_report_may_name_one_rank_and_tell_figures() -> None:
    gate = fleet(1, data_parallel_size=2)
    for _ in range(3):
        assert report(gate, 1, "failed", dp_rank=1)[0] == 200
    assert [row["dp_rank"] for row in detail(gate, 1)["ranks"]] == [1]
    assert report(gate, 1, "ok", ttft_ms=12.5, cached_tokens=32)[0] == 200


def test_a_report_that_makes_no_sense_is_told_which_field() -> None:
    gate = fleet(1)
    assert report(gate, 9, "ok") == (404, {"error": "worker 9 not found"})
    assert report(gate, 1, "ok", dp_rank=1)[0] == 404
    for fields, name in (
        ({}, "outcome"),
        ({"outcome": "fine"}, "outcome"),
        ({"outcome": "ok", "dp_rank": -1}, "dp_rank"),
        ({"outcome": "ok", "ttft_ms": -1}, "ttft_ms"),
        ({"outcome": "ok", "cached_tokens": "many"}, "cached_tokens"),
    ):
        status, body = call(gate, "POST", "/workers/1/report", fields)
        assert (status, name in body["error"]) == (422, True), body
    status, body = call(gate, "GET", "/workers", query="detail=yes")
    assert (status, "detail must be true or false" in body["error"]) == (400, True)


def book(gate: Gate, name: str) -> int:
    body = {"token_ids": list(range(40)), "reservation_id": name}
    return int(call(gate, "POST", "/select_and_reserve", body)[1]["worker_id"])


def test_the_end_of_a_reservation_may_say_how_it_went() -> None:
    gate = fleet(1, 2, 3)
    failed = 0
    while failed < 3:
        worker_id = book(gate, "r")
        outcome = "failed" if worker_id == 2 else "ok"
        failed += outcome == "failed"
        assert call(gate, "DELETE", "/reservations/r", {"outcome": outcome})[0] == 200
    assert chosen(gate) == {1, 3}


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (b'{"outcome": "fine"}', b"`$.outcome`"),
        (b'{"cached_tokens": -1}', b"`$.cached_tokens`"),
        (b"[]", b"Expected `object`"),
        (b"{", b"Failed to parse the request body as JSON"),
    ],
)
def test_an_end_frees_whatever_its_body_says_and_warns_of_what_it_ignored(
    body: bytes, fault: bytes
) -> None:
    gate = fleet(1)
    book(gate, "r")
    answer = gate(request("DELETE", "/reservations/r", body))
    assert isinstance(answer, bytes)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b'\r\n\r\n{"status":"ok"}')
    [warning] = [line for line in answer.split(b"\r\n") if line.startswith(b"x-warning: ")]
    assert b"the body was ignored: " in warning
    assert fault in warning
    assert call(gate, "DELETE", "/reservations/r")[0] == 404


def test_an_end_without_a_body_or_with_one_of_another_type_is_as_before() -> None:
    gate = fleet(1)
    assert call(gate, "DELETE", "/reservations/none", {"outcome": "ok"})[0] == 404
    book(gate, "r")
    assert call(gate, "DELETE", "/reservations/r")[0] == 200
    book(gate, "r")
    unread = request("DELETE", "/reservations/r", b"\xff anything", content_type=b"text/plain")
    assert answered(gate, unread)[0] == 200
