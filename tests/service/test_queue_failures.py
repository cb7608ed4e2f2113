"""What breaks for a request that waited in the queue: its own answer, and nobody else's."""

import json
import random

import pytest

from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.selector import Selector
from lean_selector.http.response import PendingReply, encode_response
from lean_selector.service.gate import Gate
from lean_selector.service.selection import SelectionService
from lean_selector.service.worker_handlers import ServiceState
from tests.support.gates import NOW, NoEngines, answered, request


class Dice(random.Random):
    """Raises while it `is_broken`."""

    is_broken = False

    def random(self) -> float:
        if self.is_broken:
            raise RuntimeError("a bug")
        return super().random()


@pytest.fixture
def dice() -> Dice:
    return Dice(7)


@pytest.fixture
def gate(dice: Dice) -> Gate:
    """Two workers, each busy above 8 tokens of prefill; which is taken is drawn."""
    engines = NoEngines()
    settings = RouterSettings(use_kv_events=False, queue_threshold=0.5, temperature=1.0)
    service = SelectionService(
        Selector(settings, engines, dice),
        dump=lambda: encode_response(200, b"{}"),
        sources=engines,
        state=ServiceState(),
        clock=lambda: NOW,
    )
    gate = Gate(service.routes())
    for worker_id in (1, 2):
        worker = {"endpoint": "http://w", "block_size": 16, "max_num_batched_tokens": 16}
        ask(gate, "/workers", {**worker, "worker_id": worker_id})
        rank = {"worker_id": worker_id, "effective_prefill_tokens": 9}
        ask(gate, "/reservations", {**rank, **prompt(9), "reservation_id": f"full{worker_id}"})
    return gate


def prompt(tokens: int) -> dict[str, object]:
    return {"block_hashes": [1], "sequence_hashes": [1], "isl_tokens": tokens}


def ask(gate: Gate, path: str, body: dict[str, object]) -> None:
    assert answered(gate, request("POST", path, json.dumps(body).encode()))[0] == 201


def waiting(gate: Gate, reservation_id: str) -> PendingReply:
    body = json.dumps({**prompt(1), "reservation_id": reservation_id}).encode()
    parked = gate(request("POST", "/select_and_reserve", body))
    assert isinstance(parked, PendingReply)
    return parked


def test_it_is_500_there_200_for_the_call_that_let_it_go_and_the_next_one_is_placed(
    gate: Gate, dice: Dice, caplog: pytest.LogCaptureFixture
) -> None:
    broken = waiting(gate, "broken")
    dice.is_broken = True
    done = request("POST", "/reservations/full1/prefill_complete")
    assert answered(gate, done) == (200, b'{"status":"ok"}')
    assert broken.response is not None
    assert broken.response.startswith(b"HTTP/1.1 500 ")
    assert broken.response.endswith(b'{"error":"internal error"}')
    assert [record.exc_text or "" for record in caplog.records if record.exc_info]
    dice.is_broken = False
    assert b'"pending_count":0' in answered(gate, request("GET", "/loads"))[1]
    body = json.dumps({**prompt(1), "reservation_id": "broken"}).encode()
    assert answered(gate, request("POST", "/select_and_reserve", body))[0] == 200


def test_those_behind_it_are_placed_in_the_same_call(gate: Gate, dice: Dice) -> None:
    first, second = waiting(gate, "first"), waiting(gate, "second")
    dice.is_broken = True
    first.observe(lambda _: setattr(dice, "is_broken", False), lambda: None)
    assert answered(gate, request("DELETE", "/reservations/full1"))[0] == 200
    assert first.response is not None
    assert first.response.startswith(b"HTTP/1.1 500 ")
    assert second.response is not None
    assert second.response.startswith(b"HTTP/1.1 200 ")


def test_what_a_request_holds_while_it_waits_is_told(gate: Gate) -> None:
    def held(blocks: int) -> int:
        hashes = list(range(1, blocks + 1))
        body = {"block_hashes": hashes, "sequence_hashes": hashes, "isl_tokens": 16 * blocks}
        reply = gate(request("POST", "/select", json.dumps(body).encode()))
        assert isinstance(reply, PendingReply)
        return reply.held_bytes

    assert held(1001) - held(1) == 16 * 1000
