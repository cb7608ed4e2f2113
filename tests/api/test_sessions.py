"""Sessions as their users see them, and what peers are told and list of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from lean_selector.core.sessions.shapes import SessionEvent
from lean_selector.core.settings import SessionSettings
from tests.support.gates import InProcess, selection_gate, selection_service
from tests.support.running_service import RunningService

VECTORS = json.loads(
    (Path(__file__).parents[1] / "data" / "session_affinity_frames.json").read_text()
)


class Fleet:
    """A service with workers 1 (ranks 0 and 1, with much to prefill) and 2."""

    def __init__(self, service: InProcess | RunningService) -> None:
        self.request = service.request
        for worker_id, size in ((1, 2), (2, 1)):
            service.add_worker(worker_id, model_name="m", block_size=4, data_parallel_size=size)
        for dp_rank in (0, 1):
            service.reserve(f"load {dp_rank}", 1, 90, model_name="m", dp_rank=dp_rank)

    def done(self, method: str, path: str, body: object = None) -> Any:
        status, answer = self.request(method, path, body)
        assert status in (200, 201), (status, answer)
        return answer

    def select(self, session_id: object = None, **fields: Any) -> tuple[int, int]:
        body = {"model_name": "m", "token_ids": [1, 2, 3, 4, 5], **fields}
        if session_id is not None:
            body["session_id"] = session_id
        answer = self.done("POST", "/select", body)
        return answer["worker_id"], answer["dp_rank"]

    def book(self, name: str, session_id: str, **fields: Any) -> tuple[int, Any]:
        body = {"model_name": "m", "token_ids": [1, 2, 3, 4, 5], "reservation_id": name}
        return self.request(
            "POST", "/select_and_reserve", {**body, "session_id": session_id, **fields}
        )


@pytest.fixture
def told() -> list[SessionEvent]:
    """What peers are told."""
    return []


@pytest.fixture
def fleet(told: list[SessionEvent]) -> Fleet:
    service = selection_service(sessions=SessionSettings(ttl_s=60.0))
    assert service.selector.sessions is not None
    service.selector.sessions.publish(0, lambda: 1, told.append)
    return Fleet(InProcess(selection_gate(service=service)))


def test_an_id_that_is_too_long_is_refused_before_all_else_that_is_wrong(fleet: Fleet) -> None:
    refused = 400, {"error": "session affinity ID must not exceed 256 bytes"}
    too_long = "é" * 129
    body = {"model_name": "m", "token_ids": [], "session_id": too_long}
    for route in ("/select", "/select_and_reserve"):
        assert fleet.request("POST", route, body) == refused
    # With a pin or a target the session is left alone.
    assert fleet.select(too_long, pinned_worker={"worker_id": 2, "dp_rank": 0}) == (2, 0)
    assert fleet.select(too_long, affinity_target={"worker_id": 2}) == (2, 0)


def test_bookings_and_releases_are_told_as_by_the_reference(
    fleet: Fleet, told: list[SessionEvent]
) -> None:
    """The captured calls again: which messages each causes, by session and version."""
    steps = [step for step in VECTORS["captured"] if "/workers" not in step["caused_by"]]
    numbers: dict[int, int] = {}  # of the reference's sequences, in order
    ours: dict[int, int] = {}
    compared = 0
    for step in steps[:10]:
        method, path, *body = step["caused_by"].split(" ", 2)
        sent = json.loads(body[0]) if body else None
        if sent and path == "/select_and_reserve":
            sent["reservation_id"] = sent.pop("selection_id")
        told.clear()
        fleet.request(method, path, sent)
        expected = [
            message["decoded"]
            for message in step["messages"]
            if message["topic"] == VECTORS["topic"]
        ]
        assert [
            (e.session_id, e.worker_id, ours.setdefault(e.sequence, len(ours))) for e in told
        ] == [
            (e["session_id"], e["worker_id"], numbers.setdefault(e["sequence"], len(numbers)))
            for e in expected
        ], step["caused_by"]
        compared += len(told)
    assert compared >= 5
