"""Prompt bodies as MessagePack."""

from typing import Any

import msgspec
import pytest

from lean_selector.api.bodies import MSGPACK
from tests.support.asked import worker
from tests.support.gates import InProcess, answered, request, selector

BLOCKS = [11, -12, 2**63 - 1]
SEQUENCE = [-(2**63), 22, 23]
PROMPT = {"isl_tokens": 48, "block_hashes": BLOCKS, "sequence_hashes": SEQUENCE}


def packed(hashes: list[int]) -> bytes:
    return b"".join(value.to_bytes(8, "little", signed=True) for value in hashes)


@pytest.fixture
def service() -> InProcess:
    service = selector()
    service.add_worker()
    return service


def send(service: InProcess, path: str, body: object) -> Any:
    """Status and decoded answer of a MessagePack body; bytes go as they are."""
    raw = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    asked = request("POST", path, raw, content_type=MSGPACK)
    status, text = answered(service.gate, asked)
    return status, msgspec.json.decode(text)


@pytest.mark.parametrize(
    ("path", "lists"),
    [
        ("/select", (BLOCKS, SEQUENCE)),
        ("/select", ([value % 2**64 for value in BLOCKS], packed(SEQUENCE))),
        ("/select_and_reserve", (packed(BLOCKS), packed(SEQUENCE))),
        ("/potential_loads", (packed(BLOCKS), SEQUENCE)),
        ("/overlap_scores", (packed(BLOCKS), SEQUENCE)),
    ],
)
def test_every_form_of_the_lists_means_the_same(
    service: InProcess, lists: tuple[object, object], path: str
) -> None:
    body = {**PROMPT, "block_hashes": lists[0], "sequence_hashes": lists[1]}
    booked = {"reservation_id": "same"} if path == "/select_and_reserve" else {}
    expected = service.post(path, {**PROMPT, **booked})
    if booked:
        assert service.end("same") == 200
    assert send(service, path, {**body, **booked}) == expected
    if booked:
        _, loads = service.post("/potential_loads", PROMPT)
        assert loads[0]["potential_decode_blocks"] == 3, "the booking has the same blocks"


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/select", b"\xc1", 400, "MessagePack"),
        ("/select", msgspec.msgpack.encode(PROMPT) + b"x", 400, "MessagePack"),
        ("/select", [1], 422, "object"),
        ("/select", {**PROMPT, "isl_tokens": "5"}, 422, "isl_tokens"),
        ("/select", {**PROMPT, "sequence_hashes": [1, 2, 1.5]}, 422, "sequence_hashes"),
        ("/select", {**PROMPT, "block_hashes": packed([1])}, 400, "must match"),
        ("/workers", worker(), 415, "application/json"),  # a route without a prompt
    ],
)
def test_bad_bodies_are_refused_as_in_json(
    service: InProcess, path: str, body: object, status: int, words: str
) -> None:
    got, answer = send(service, path, body)
    assert got == status
    assert words in answer["error"]


INFINITY, NO_NUMBER = float("inf"), float("nan")
BEYOND_JSON = [
    *(
        pytest.param({"routing_constraints": {"preferred_taints": {"b": 1.0, "a": value}}}, id=key)
        for value, key in ((NO_NUMBER, "nan"), (INFINITY, "inf"), (-INFINITY, "-inf"))
    ),
    {"priority_jump": NO_NUMBER},
    {"priority_jump": -INFINITY},
    *(
        {"router_config_override": {name: value}}
        for name in (
            *("router_temperature", "prefill_load_scale", "overlap_score_weight"),
            "shared_cache_multiplier",
        )
        for value in (NO_NUMBER, INFINITY)
    ),
    {"router_config_override": {"overlap_score_credit": NO_NUMBER}},
]


@pytest.mark.parametrize("more", BEYOND_JSON)
def test_numbers_that_json_cannot_say_are_refused_by_name(
    service: InProcess, more: dict[str, Any]
) -> None:
    (name, value), *_ = more.items()
    status, answer = send(service, "/select_and_reserve", {**PROMPT, **more})
    if isinstance(value, dict):
        (name,) = value
    assert (status, name in answer["error"]) == (422, True)
    assert service.get("/loads")[1][0]["loads"][0]["active_requests"] == 0
