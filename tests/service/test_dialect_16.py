"""The 1.6 dialect through its routes, and what of it the 1.3 dialect has too.

What was recorded of 1.6.1 is played in `conformance/`; here is what no recording can show.
"""

from typing import Any

import pytest

from lean_selector.core.settings import API_1_3, API_1_6, Dialect
from lean_selector.http.response import encode_response
from lean_selector.service.header_warnings import refusal_lines
from tests.support.gates import InProcess, answer_of, selection_gate, selection_service

TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9]
# What the two dialects call a booking's id, and the second half of a partition's name.
NAMES = {
    API_1_3.name: ("reservation_id", "tenant_id"),
    API_1_6.name: ("selection_id", "routing_group"),
}


class Service(InProcess):
    """One dialect's routes over a selector with worker 1."""

    def __init__(self, dialect: Dialect = API_1_6, **settings: Any) -> None:
        service = selection_service(dialect=dialect, **settings)
        service._dump = lambda: encode_response(200, b'{"all":1}')
        service._bare_dump = lambda: encode_response(200, b'{"bare":1}')
        super().__init__(selection_gate(lines=refusal_lines, service=service))
        self.register(1)

    def register(self, worker_id: int, **fields: object) -> None:
        body = {"worker_id": worker_id, "endpoint": f"http://w{worker_id}", "block_size": 4}
        more = {"max_num_batched_tokens": 10, **fields}
        assert self.post("/workers", {**body, **more})[0] == 201

    def load(self) -> tuple[int, int, int]:
        """Prefill tokens, decode blocks and requests of worker 1."""
        row = self.get("/loads")[1][0]["loads"][0]
        names = "potential_prefill_tokens", "potential_decode_blocks", "active_requests"
        prefill, decode, requests = (row[name] for name in names)
        return prefill, decode, requests


@pytest.mark.parametrize("dialect", [API_1_3, API_1_6])
def test_what_was_selected_is_booked_by_its_id_alone_in_both_dialects(dialect: Dialect) -> None:
    service = Service(dialect)
    id_name, group_name = NAMES[dialect.name]
    assert service.post("/select", {"selection_id": "a", "token_ids": TOKENS})[0] == 200
    assert service.load() == (0, 0, 0)
    assert service.post("/reservations", {"selection_id": "a"}) == (
        201,
        {
            id_name: "a",
            "model_name": "default",
            group_name: "default",
            "worker_id": 1,
            "dp_rank": 0,
            "endpoint": "http://w1",
        },
    )
    assert service.load() == (9, 2, 1)
    word = "tenant" if dialect == API_1_3 else "routing_group"
    gone = (
        f"no pending selection a for model=default {word}=default "
        "(expired, already used, or never selected)"
    )
    assert service.post("/reservations", {"selection_id": "a"}) == (404, {"error": gone})


def test_in_the_1_3_dialect_a_cached_selection_may_be_booked_under_another_id() -> None:
    service = Service(API_1_3)
    service.post("/select", {"selection_id": "a", "token_ids": TOKENS})
    body = {"selection_id": "a", "reservation_id": "b"}
    assert service.post("/reservations", body)[1]["reservation_id"] == "b"
    assert service.request("DELETE", "/reservations/b")[0] == 200


def test_in_the_1_3_dialect_an_id_that_is_taken_leaves_the_selection() -> None:
    service = Service(API_1_3)
    service.post("/select_and_reserve", {"reservation_id": "a", "token_ids": TOKENS})
    service.post("/select", {"selection_id": "a", "token_ids": TOKENS})
    assert service.post("/reservations", {"selection_id": "a"})[0] == 409
    service.request("DELETE", "/reservations/a")
    assert service.post("/reservations", {"selection_id": "a"})[0] == 201


def test_booking_anew_forgets_what_was_selected_under_the_id() -> None:
    """D43."""
    service = Service()
    service.post("/select", {"selection_id": "a", "token_ids": TOKENS})
    service.post("/select_and_reserve", {"selection_id": "a", "token_ids": [1]})
    service.request("DELETE", "/reservations/a")
    assert service.post("/reservations", {"selection_id": "a"})[0] == 404


def test_an_id_is_taken_while_its_request_waits_and_free_when_its_client_is_gone() -> None:
    service = Service(queue_threshold=0.5)
    service.post("/select_and_reserve", {"selection_id": "first", "token_ids": TOKENS})
    waiting = service.later("/select_and_reserve", {"selection_id": "a", "token_ids": TOKENS})
    again = {"selection_id": "a", "token_ids": TOKENS}
    assert service.post("/select_and_reserve", again)[0] == 409
    assert service.post("/reservations", {**again, "worker_id": 1})[0] == 409
    assert service.request("DELETE", "/reservations/a")[0] == 404
    waiting.hang_up()
    assert service.post("/reservations", {**again, "worker_id": 1})[0] == 201


def test_a_select_that_waited_is_remembered_as_it_was_answered() -> None:
    service = Service(queue_threshold=0.5)
    service.post("/select_and_reserve", {"selection_id": "first", "token_ids": TOKENS})
    waiting = service.later("/select", {"selection_id": "a", "token_ids": TOKENS})
    assert service.post("/reservations", {"selection_id": "a"})[0] == 404
    service.request("DELETE", "/reservations/first")
    assert answer_of(waiting)[0] == 200
    assert service.post("/reservations", {"selection_id": "a"})[0] == 201


@pytest.mark.parametrize("dialect", [API_1_3, API_1_6])
def test_an_advisory_select_never_waits_and_is_told_the_load(dialect: Dialect) -> None:
    service = Service(dialect, queue_threshold=0.5, prefill_busy_threshold=0.5)
    id_name = NAMES[dialect.name][0]
    service.post("/select_and_reserve", {id_name: "first", "token_ids": TOKENS})
    status, answer = service.post("/select", {"token_ids": TOKENS, "advisory": True})
    assert status == 200
    assert answer["worker_load"] == {
        "active_prefill_tokens": 9,
        "prefill_token_capacity": 10,
        "prefill_busy": True,
    }


@pytest.mark.parametrize("by_flag", [True, False])
def test_where_no_reuse_is_assumed_the_same_tokens_are_other_blocks_each_time(
    by_flag: bool,
) -> None:
    service = Service(assume_kv_reuse=not by_flag)
    override = {} if by_flag else {"router_config_override": {"assume_kv_reuse": False}}
    hashes = [
        service.post("/select_and_reserve", {"token_ids": TOKENS, **override})[1]["sequence_hashes"]
        for _ in range(2)
    ]
    assert hashes[0] != hashes[1]
    assert service.load()[1] == 4
    sent = {"block_hashes": [1], "sequence_hashes": [7], "isl_tokens": 4, **override}
    for _ in range(2):
        assert service.post("/select_and_reserve", sent)[1]["sequence_hashes"] == [7]
    assert service.load()[1] == 5


def test_the_dump_is_theirs_and_in_detail_ours() -> None:
    service = Service()
    assert service.request("GET", "/dump") == (200, {"bare": 1})
    assert service.get("/dump?detail=true") == (200, {"all": 1})
    assert Service(API_1_3).get("/dump") == (200, {"all": 1})


def test_a_worker_in_detail_has_the_fields_of_its_record() -> None:
    service = Service()
    service.register(2, routing_group="g", router_hint_worker_type="decode")
    (shown,) = service.get("/workers?routing_group=g&detail=true")[1]
    assert shown["routing_group"] == "g"
    assert shown["router_hint_worker_type"] == "decode"
    assert shown["health"] == {"state": "in_service", "ranks": []}
    assert "tenant_id" not in shown


def test_who_sends_the_other_dialects_id_is_told() -> None:
    body = {"reservation_id": "a", "worker_id": 1, "token_ids": [1]}
    status, lines, _ = Service().with_headers("POST", "/reservations", body)
    assert status == 422
    assert "reservation_id is ignored: is selection_id meant?" in lines["x-warning"]


def test_the_last_partial_block_is_told_and_costs_nothing() -> None:
    """1.6.1 logs 9/4 + 2 of 9 tokens in blocks of 4, and answers 3 blocks."""
    answer = Service().post("/select", {"token_ids": TOKENS, "explain": True})[1]
    assert answer["potential_decode_blocks"] == 3
    why = answer["explain"]
    assert why["new_blocks"] == why["ranks"][0]["potential_decode_blocks"] == 2
    assert why["ranks"][0]["cost"] == 9 / 4 + 2


def test_so_preferred_taints_do_not_weigh_it() -> None:
    service = Service()
    service.register(1, taints=["c"])
    service.register(2)
    booked = {"selection_id": "b", "worker_id": 2, "sequence_hashes": [71, 72], "isl_tokens": 8}
    assert service.post("/reservations", booked)[0] == 201
    avoided = {"preferred_taints": {"c": -1.5}}
    body = {"token_ids": [1, 2, 3], "routing_constraints": avoided}
    assert service.post("/select", body)[1]["worker_id"] == 1, "2.47 times 0.75, against 2.75"
