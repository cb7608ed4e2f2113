"""Pairs over HTTP, in both dialects: asked for, booked at once or later, ended, refused."""

from typing import Any

import pytest

from lean_selector.core.settings import API_1_3, API_1_6, Dialect
from tests.support.gates import InProcess, selector

BODY = {"token_ids": list(range(32)), "disaggregate": "auto"}
NO_LOAD = {1: (0, 0, 0), 2: (0, 0, 0)}


class Asked:
    """A service with a prefill worker 1 and a decode worker 2."""

    def __init__(self, dialect: Dialect) -> None:
        self.service: InProcess = selector(dialect=dialect)
        self.name = "selection_id" if dialect is API_1_6 else "reservation_id"
        for worker_id, role in ((1, "prefill"), (2, "decode")):
            body = {"worker_id": worker_id, "endpoint": f"http://w{worker_id}", "block_size": 16}
            more = {"worker_role": role, "disaggregation": {"protocol": "nixl"}}
            status, worker = self.service.request("POST", "/workers", {**body, **more})
            assert status == 201
            assert {name: worker[name] for name in more} == more

    def post(self, path: str, **changes: Any) -> tuple[int, Any]:
        return self.service.request("POST", path, {**BODY, **changes})

    def booked(self, name: str, **changes: Any) -> tuple[int, Any]:
        return self.post("/select_and_reserve", **{self.name: name, **changes})

    def end(self, name: str, **body: Any) -> int:
        return self.service.request("DELETE", f"/reservations/{name}", body)[0]

    def loads(self) -> dict[int, tuple[int, int, int]]:
        (rows,) = self.service.request("GET", "/loads")[1]
        names = "potential_prefill_tokens", "potential_decode_blocks", "active_requests"
        return {row["worker_id"]: tuple(row[name] for name in names) for row in rows["loads"]}


@pytest.fixture(params=[API_1_3, API_1_6], ids=["1.3", "1.6"])
def asked(request: pytest.FixtureRequest) -> Asked:
    return Asked(request.param)


def test_a_pair_is_chosen_booked_and_ended(asked: Asked) -> None:
    status, found = asked.booked("r")
    assert status == 200
    assert (found["worker_id"], found["effective_prefill_tokens"]) == (2, 0)
    assert found["prefill"] == {
        "worker_id": 1,
        "dp_rank": 0,
        "endpoint": "http://w1",
        "overlap": {"longest_matched": 0, "gpu": 0, "dp": {"0": 0}, "cpu": 0, "disk": 0},
        "effective_prefill_tokens": 32,
        "disaggregation": {"protocol": "nixl"},
    }
    assert list(found)[-2:] == ["prefill", "disaggregation"]
    assert found["disaggregation"] == {"used": True, "reason": "uncached"}
    assert asked.loads() == {1: (32, 2, 1), 2: (0, 2, 1)}
    assert asked.service.request("POST", "/reservations/r/prefill_complete")[0] == 200
    assert asked.loads() == {1: (0, 0, 0), 2: (0, 2, 1)}
    assert asked.end("r", outcome="ok", prefill_outcome="ok", cached_tokens=16) == 200
    assert asked.loads() == NO_LOAD
    load = asked.service
    assert load.request("POST", "/reservations/r/prefill_complete")[0] == 404


def test_who_does_not_ask_sees_nothing_of_it(asked: Asked) -> None:
    for how in ({"disaggregate": None}, {"disaggregate": "never"}):
        status, found = asked.booked("r", **how)
        assert (status, found["worker_id"]) == (200, 2)
        assert not found.keys() & {"prefill", "disaggregation"}
        assert asked.loads() == {1: (0, 0, 0), 2: (32, 2, 1)}
        assert asked.end("r") == 200
    assert asked.booked("r", disaggregate="sometimes")[0] in (400, 422)


def test_a_selection_books_its_pair_later(asked: Asked) -> None:
    for path in ("r%23prefill", "r"):
        assert asked.post("/select", selection_id="r")[1]["prefill"]["worker_id"] == 1
        assert asked.loads() == NO_LOAD
        body = {"selection_id": "r"}
        assert asked.service.request("POST", "/reservations", body)[0] == 201
        assert asked.loads() == {1: (32, 2, 1), 2: (0, 2, 1)}
        assert asked.end(path) == 200
        left = asked.loads()
        assert left[1] == (0, 0, 0)
        assert left[2] == ((0, 2, 1) if path != "r" else (0, 0, 0))
        asked.end("r")


def test_a_client_books_a_pair_that_it_chose(asked: Asked) -> None:
    whole = {asked.name: "r", "worker_id": 2, "dp_rank": 0, "token_ids": list(range(32))}
    leg = {"worker_id": 1, "dp_rank": 0, "effective_prefill_tokens": 16}
    for wrong, status in (
        *(({"worker_id": 2}, 400), ({"worker_id": 9}, 404), ({"dp_rank": 1}, 404)),
        *(({"effective_prefill_tokens": 33}, 400), ({"effective_prefill_tokens": 1 << 64}, 422)),
    ):
        body = {**whole, "prefill": {**leg, **wrong}}
        assert asked.service.request("POST", "/reservations", body)[0] == status
    body = {**whole, "worker_id": 1, "prefill": {**leg, "worker_id": 2}}
    assert asked.service.request("POST", "/reservations", body)[0] == 400  # it only decodes
    body = {**whole, "prefill": leg, "effective_prefill_tokens": 1}
    assert asked.service.request("POST", "/reservations", body)[0] == 400
    assert asked.loads() == NO_LOAD
    assert asked.service.request("POST", "/reservations", {**whole, "prefill": leg})[0] == 201
    assert asked.loads() == {1: (16, 2, 1), 2: (0, 2, 1)}
    assert asked.end("r") == 200
    assert asked.loads() == NO_LOAD


def test_the_id_of_a_leg_is_nobodys_own(asked: Asked) -> None:
    for name, changes in (
        ("r#prefill", {}),
        ("r#prefill", {"disaggregate": "never"}),
        ("r" * 4089, {}),
    ):
        status, error = asked.booked(name, **changes)
        assert status == 400
        assert asked.name in error["error"]
    body = {asked.name: "r#prefill", "worker_id": 2, "token_ids": [1] * 16}
    assert asked.service.request("POST", "/reservations", body)[0] == 400
    assert asked.booked("r" * 4096, disaggregate="never")[0] == 200
    assert asked.booked("s" * 4088)[0] == 200


def test_if_either_id_is_taken_nothing_is_booked(asked: Asked) -> None:
    assert asked.booked("r")[0] == 200
    assert asked.booked("r")[0] == 409
    body = {asked.name: "r", "worker_id": 2, "token_ids": [1] * 16}
    assert asked.service.request("POST", "/reservations", body)[0] == 409
    assert asked.service.request("DELETE", "/workers/2")[0] == 200  # its reservation goes with it
    worker = {"worker_id": 2, "endpoint": "http://w2", "block_size": 16, "worker_role": "decode"}
    assert asked.service.request("POST", "/workers", worker)[0] == 201
    before = {1: (32, 2, 1), 2: (0, 0, 0)}
    assert asked.loads() == before
    assert asked.booked("r")[0] == 409
    leg = {"worker_id": 1, "dp_rank": 0}
    assert asked.service.request("POST", "/reservations", {**body, "prefill": leg})[0] == 409
    assert asked.loads() == before
    assert asked.end("r", outcome="ok") == 200  # what is left of it
    assert asked.loads() == NO_LOAD


def test_ready_tells_what_is_missing(asked: Asked) -> None:
    def ready() -> tuple[int, Any]:
        status, body = asked.service.request("GET", "/ready")
        return status, body.get("missing_roles")

    assert ready() == (200, None)
    assert asked.service.request("DELETE", "/workers/1")[0] == 200
    assert ready() == (200, ["prefill"])
    status, error = asked.booked("r")
    assert (status, error["error"]) == (503, "no usable prefill worker: no_prefill_worker")
    patch = {"worker_role": "prefill"}
    assert asked.service.request("PATCH", "/workers/2", patch)[1]["worker_role"] == "prefill"
    assert ready() == (503, ["decode"])
    patch = {"worker_role": "both"}
    assert "worker_role" not in asked.service.request("PATCH", "/workers/2", patch)[1]
    assert ready() == (200, None)
