"""The 1.6 dialect through its routes, and what of it the 1.3 dialect has too.

What was recorded of 1.6.1 is played in `conformance/`; here is what no recording can show.
"""

from functools import partial
from typing import Any

import pytest

from lean_selector.core.settings import API_1_3, API_1_6, Dialect
from lean_selector.http.response import encode_response
from tests.support.gates import InProcess, answer_of, selection_gate, selection_service

TOKENS = [1, 2, 3, 4, 5, 6, 7, 8, 9]


class Service(InProcess):
    """One dialect's routes over a selector with worker 1."""

    def __init__(self, dialect: Dialect = API_1_6, **settings: Any) -> None:
        service = selection_service(dialect=dialect, **settings)
        service._dump = lambda as_1_6: encode_response(
            200, b'{"bare":1}' if as_1_6 else b'{"all":1}'
        )
        super().__init__(selection_gate(service=service))
        self.register = partial(self.add_worker, block_size=4, max_num_batched_tokens=10)
        self.register(1)

    def load(self) -> tuple[int, int, int]:
        """Prefill tokens, decode blocks and requests of worker 1."""
        row = self.get("/loads")[1][0]["loads"][0]
        names = "potential_prefill_tokens", "potential_decode_blocks", "active_requests"
        prefill, decode, requests = (row[name] for name in names)
        return prefill, decode, requests


def test_what_was_selected_is_booked_by_its_id_alone_in_the_1_3_dialect_too() -> None:
    service = Service(API_1_3)
    assert service.post("/select", {"selection_id": "a", "token_ids": TOKENS})[0] == 200
    assert service.load() == (0, 0, 0)
    where = {"model_name": "default", "tenant_id": "default", "endpoint": "http://w1"}
    booked = {"reservation_id": "a", **where, "worker_id": 1, "dp_rank": 0}
    assert service.post("/reservations", {"selection_id": "a"}) == (201, booked)
    assert service.load() == (9, 2, 1)
    status, answer = service.post("/reservations", {"selection_id": "a"})
    assert status == 404
    assert "no pending selection a for model=default tenant=default " in answer["error"]
    # An id that is taken leaves the selection, which may be booked under another one.
    service.post("/select", {"selection_id": "a", "token_ids": TOKENS})
    assert service.post("/reservations", {"selection_id": "a"})[0] == 409
    body = {"selection_id": "a", "reservation_id": "b"}
    assert service.post("/reservations", body)[1]["reservation_id"] == "b"
    assert service.end("b") == 200


def test_booking_anew_forgets_what_was_selected_under_the_id() -> None:
    """D43."""
    service = Service()
    service.post("/select", {"selection_id": "a", "token_ids": TOKENS})
    service.post("/select_and_reserve", {"selection_id": "a", "token_ids": [1]})
    service.end("a")
    assert service.post("/reservations", {"selection_id": "a"})[0] == 404


def test_an_id_is_taken_while_its_request_waits_and_free_when_its_client_is_gone() -> None:
    service = Service(queue_threshold=0.5)
    service.post("/select_and_reserve", {"selection_id": "first", "token_ids": TOKENS})
    waiting = service.later("/select_and_reserve", {"selection_id": "a", "token_ids": TOKENS})
    again = {"selection_id": "a", "token_ids": TOKENS}
    assert service.post("/select_and_reserve", again)[0] == 409
    assert service.post("/reservations", {**again, "worker_id": 1})[0] == 409
    assert service.end("a") == 404
    waiting.hang_up()
    assert service.post("/reservations", {**again, "worker_id": 1})[0] == 201


def test_a_select_that_waited_is_remembered_as_it_was_answered() -> None:
    service = Service(queue_threshold=0.5)
    service.post("/select_and_reserve", {"selection_id": "first", "token_ids": TOKENS})
    waiting = service.later("/select", {"selection_id": "a", "token_ids": TOKENS})
    assert service.post("/reservations", {"selection_id": "a"})[0] == 404
    service.end("first")
    assert answer_of(waiting)[0] == 200
    assert service.post("/reservations", {"selection_id": "a"})[0] == 201


def test_an_advisory_select_never_waits_and_is_told_the_load_in_the_1_3_dialect_too() -> None:
    service = Service(API_1_3, queue_threshold=0.5, prefill_busy_threshold=0.5)
    service.post("/select_and_reserve", {"token_ids": TOKENS})
    status, answer = service.post("/select", {"token_ids": TOKENS, "advisory": True})
    load = {"active_prefill_tokens": 9, "prefill_token_capacity": 10, "prefill_busy": True}
    assert (status, answer["worker_load"]) == (200, load)


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
