"""Reports on workers over HTTP, and where it shows what came of them."""

from typing import Any

import pytest

from tests.support.gates import InProcess, answered, request, selector


def fleet(*worker_ids: int, **fields: object) -> InProcess:
    service = selector()
    for worker_id in worker_ids:
        service.add_worker(worker_id, **fields)
    return service


def report(service: InProcess, worker_id: int, outcome: str, **fields: object) -> Any:
    return service.post(f"/workers/{worker_id}/report", {"outcome": outcome, **fields})


def chosen(service: InProcess) -> set[int]:
    body = {"token_ids": [1, 2, 3]}
    return {service.post("/select", body)[1]["worker_id"] for _ in range(40)}


def detail(service: InProcess, worker_id: int) -> Any:
    workers = service.get("/workers?detail=true")[1]
    return next(each["health"] for each in workers if each["worker_id"] == worker_id)


def test_nothing_of_it_shows_in_the_plain_bodies() -> None:
    service = fleet(1, 2)
    before = service.get("/workers")
    for _ in range(3):
        report(service, 2, "failed")
    assert service.get("/workers") == before
    assert service.get("/workers?detail=false") == before
    assert "ejected" not in fleet(1).get("/ready")[1]


def test_a_report_that_makes_no_sense_is_told_which_field() -> None:
    service = fleet(1)
    assert report(service, 9, "ok") == (404, {"error": "worker 9 not found"})
    assert report(service, 1, "ok", dp_rank=1)[0] == 404
    for fields, name in (
        ({}, "outcome"),
        ({"outcome": "fine"}, "outcome"),
        ({"outcome": "ok", "dp_rank": -1}, "dp_rank"),
        ({"outcome": "ok", "ttft_ms": -1}, "ttft_ms"),
        ({"outcome": "ok", "cached_tokens": "many"}, "cached_tokens"),
    ):
        status, body = service.post("/workers/1/report", fields)
        assert (status, name in body["error"]) == (422, True), body
    status, body = service.get("/workers?detail=yes")
    assert (status, "detail must be true or false" in body["error"]) == (400, True)


def test_the_end_of_a_reservation_may_say_how_it_went() -> None:
    service = fleet(1, 2, 3)
    failed = 0
    while failed < 3:
        worker_id = service.book("r")["worker_id"]
        outcome = "failed" if worker_id == 2 else "ok"
        failed += outcome == "failed"
        assert service.request("DELETE", "/reservations/r", {"outcome": outcome})[0] == 200
    assert chosen(service) == {1, 3}


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
    service = fleet(1)
    service.book("r")
    answer = service.gate(request("DELETE", "/reservations/r", body))
    assert isinstance(answer, bytes)
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    [warning] = [line for line in answer.split(b"\r\n") if line.startswith(b"x-warning: ")]
    assert b"the body was ignored: " in warning
    assert fault in warning
    assert service.end("r") == 404


def test_an_end_without_a_body_or_with_one_of_another_type_is_as_before() -> None:
    service = fleet(1)
    assert service.request("DELETE", "/reservations/none", {"outcome": "ok"})[0] == 404
    service.book("r")
    assert service.end("r") == 200
    service.book("r")
    unread = request("DELETE", "/reservations/r", b"\xff anything", content_type=b"text/plain")
    assert answered(service.gate, unread)[0] == 200


def test_a_draining_worker_keeps_what_it_has_and_gets_nothing_new_until_it_is_back() -> None:
    service = fleet(1, 2, model_name="m")

    def chosen(**more: object) -> int | None:
        prompt = {"model_name": "m", "token_ids": [1, 2, 3], **more}
        status, answer = service.post("/select", prompt)
        assert status == 200 or answer == {"error": "no endpoints available to route work"}
        return answer.get("worker_id") if status == 200 else None

    def patch(worker_id: int, lifecycle: str) -> str:
        status, record = service.request("PATCH", f"/workers/{worker_id}", {"lifecycle": lifecycle})
        assert status == 200
        shown: str = record["lifecycle"]
        return shown

    booked = {"model_name": "m", "token_ids": [1, 2, 3], "reservation_id": "r"}
    assert service.post("/select_and_reserve", booked | {"allowed_worker_ids": [1]})[0] == 200
    assert patch(1, "draining") == "draining"
    assert {chosen() for _ in range(20)} == {2}
    assert chosen(allowed_worker_ids=[1]) is None
    assert chosen(pinned_worker={"worker_id": 1, "dp_rank": 0}) is None
    _, explained = service.post(
        "/select", {"model_name": "m", "token_ids": [1, 2, 3], "explain": True}
    )
    assert explained["explain"]["ranks"][0]["filtered"] == "draining"
    assert service.end("r") == 200
    # What registers it again, as discovery does, does not end it; another process does.
    assert service.add_worker(1, model_name="m")["lifecycle"] == "draining"
    assert patch(2, "draining") == "draining"
    assert chosen() is None
    assert patch(1, "incomplete") == "draining"  # a record that is sent back changes nothing
    assert patch(1, "schedulable") == "schedulable"
    assert {chosen() for _ in range(20)} == {1}
    moved = service.add_worker(2, endpoint="http://w3", model_name="m")
    assert moved["lifecycle"] == "schedulable"
