"""Whatever a client sends, on any route and in either form, the service does not fail.

Bodies that are right are cut anywhere, and damaged; what comes back is never a 500, and what is
refused is refused with a JSON error that says why.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lean_selector.api.bodies import MSGPACK
from lean_selector.api.gate import Gate
from lean_selector.http.response import JSON
from tests.support.damage import damaged
from tests.support.gates import answered, request, selection_gate, slot_tracker_gate
from tests.support.recorded_cases import scenarios

PROMPT: dict[str, Any] = {
    "model_name": "m",
    "tenant_id": "t",
    "block_hashes": [1, -2, 3],
    "sequence_hashes": [4, -(2**63), 2**63 - 1],
    "isl_tokens": 48,
    "is_eagle": False,
    "lora_name": "höchst\u2028\n",
}
TOKENS: dict[str, Any] = {
    "model_name": "m",
    "tenant_id": "t",
    "token_ids": [*range(40)],
    "cache_salt": "\x00",
    "block_mm_infos": [None, {"mm_objects": [{"mm_hash": 2**64 - 1, "offsets": [[0, 5]]}]}],
    "mm_routing_info": {"routing_token_ids": [1] * 20, "block_mm_infos": []},
}
CHOICE: dict[str, Any] = {
    "selection_id": "s",
    "explain": True,
    "router_config_override": {"overlap_score_credit": 0.5, "router_temperature": 1e-3},
    "expected_output_tokens": 7,
    "priority_jump": 1.5,
    "strict_priority": 1,
    "allowed_worker_ids": [1, 2],
    "routing_constraints": {"required_taints": [], "preferred_taints": {"a": -1.5e2}},
}
WORKER: dict[str, Any] = {
    "endpoint": "http://w",
    "kv_events_endpoints": {"0": "tcp://127.0.0.1:1"},
    "replay_endpoints": {"0": "tcp://127.0.0.1:2"},
    "block_size": 16,
    "data_parallel_start_rank": 0,
    "data_parallel_size": 2,
    "max_num_batched_tokens": 2**64 - 1,
    "total_kv_blocks": 9,
    "taints": ["a"],
    "topology_domains": {"zone": "z"},
    "kv_transfer_preferred_weight": 0.1,
}
BOOKING: dict[str, Any] = {"reservation_id": "r", "worker_id": 1, "dp_rank": 1}
SCOPE: dict[str, Any] = {"model_name": "m", "tenant_id": "t"}
PEER: dict[str, Any] = {"endpoint": "tcp://127.0.0.1:1"}
REGISTRATION = {"worker_id": 1, **SCOPE, **WORKER}

SELECTION: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/workers", REGISTRATION),
    ("PATCH", "/workers/1", WORKER),
    *(
        ("POST", path, {**prompt, **more})
        for path, more in (
            ("/select", CHOICE),
            ("/select_and_reserve", {**CHOICE, "reservation_id": "r"}),
            ("/reservations", {**BOOKING, "effective_prefill_tokens": 7}),
            ("/potential_loads", {}),
            ("/overlap_scores", {}),
        )
        for prompt in (PROMPT, TOKENS)
    ),
    ("POST", "/reservations/r/output_block", {"decay_fraction": 0.5}),
    ("POST", "/busy_threshold", {"model": "m", "active_decode_blocks_threshold": 0.5}),
    ("POST", "/replica_sync/register_peer", PEER),
    ("POST", "/replica_sync/deregister_peer", PEER),
]
SLOT_ROW = {"worker_id": 1, **SCOPE, "block_size": 16, "dp_start": 0, "dp_size": 2}
SLOT_PROMPT = {"sequence_hashes": [1, -2], "new_isl_tokens": 32}
SLOT_TRACKER: list[tuple[str, str, dict[str, Any]]] = [
    ("POST", "/register", SLOT_ROW),
    ("POST", "/unregister", {**SCOPE, "worker_id": 1}),
    ("POST", "/add", {**SCOPE, **SLOT_PROMPT, "request_id": "r", "worker_id": 1, "dp_rank": 0}),
    ("POST", "/prefill_complete", {**SCOPE, "request_id": "r"}),
    ("POST", "/free", {**SCOPE, "request_id": "r"}),
    ("POST", "/potential_loads", {**SCOPE, **SLOT_PROMPT}),
    ("POST", "/register_peer", {"url": "tcp://127.0.0.1:1"}),
]
Call = tuple[str, str, dict[str, Any]]
CALLS: list[tuple[bool, Call]] = [
    *((True, call) for call in SELECTION),
    *((False, call) for call in SLOT_TRACKER),
]
PAD = {"pad": "x" * 5000}  # long bodies are read in another way
RECORDED = [
    (recording == "selection", step["method"], step["path"], step["body"].encode())
    for recording in ("selection", "slot_tracker")
    for steps in scenarios(recording).values()
    for step in steps
    if step["method"] in ("POST", "PATCH", "DELETE") and step["status"] != 405 and step["body"]
]


def gate_of(is_selection: bool) -> Gate:
    """A service with one worker."""
    if is_selection:
        gate = selection_gate()
        assert (
            answered(gate, request("POST", "/workers", json.dumps(REGISTRATION).encode()))[0] == 201
        )
    else:
        gate = slot_tracker_gate()
        assert answered(gate, request("POST", "/register", json.dumps(SLOT_ROW).encode()))[0] == 201
    return gate


def check(gate: Gate, method: str, path: str, body: bytes, kind: bytes = JSON) -> list[int]:
    """Also that what is refused is explained: a wrong shape with the place of it."""
    statuses = []
    for form in (bytes, bytearray):  # as the reader hands over bodies of one piece and of several
        asked = request(method, path, b"", content_type=kind)
        asked.body = form(body)
        status, answer = answered(gate, asked)
        assert status in (200, 201, 400, 404, 409, 415, 422, 503), (status, answer)
        statuses.append(status)
        if status < 400:
            continue
        said = msgspec.json.decode(answer)
        assert list(said) == ["error"], said
        text = said["error"]
        assert isinstance(text, str)
        assert text
        if status == 422:
            # A number that stands for the whole body has no field to name.
            known = r"`\$|missing required field `\w+`|Expected `object`|Number out of range$"
            assert re.search(known, text), text
    return statuses


def cuts(body: bytes) -> Iterator[bytes]:
    for end in range(len(body) + 1):
        yield body[:end]


@pytest.mark.parametrize(("is_selection", "call"), CALLS, ids=lambda value: str(value)[:40])
def test_a_body_may_be_cut_anywhere(is_selection: bool, call: Call) -> None:
    gate = gate_of(is_selection)
    method, path, body = call
    # Blanks after commas and colons, and none: what follows a key is looked for in either place.
    for separators in (None, (",", ":")):
        for whole in cuts(json.dumps(body, separators=separators).encode()):
            check(gate, method, path, whole)
            if len(whole) > 1:
                padded = json.dumps(PAD).encode()[:-1] + b"," + whole[1:]
                check(gate, method, path, padded)
    for whole in cuts(msgspec.msgpack.encode(body)):
        check(gate, method, path, whole, MSGPACK)


@st.composite
def damaged_calls(draw: st.DrawFn) -> tuple[bool, str, str, bytes, bytes]:
    if draw(st.integers(0, 3)) == 0:
        is_selection, method, path, recorded = draw(st.sampled_from(RECORDED))
        return is_selection, method, path.partition("?")[0], draw(damaged(recorded)), JSON
    is_selection, (method, path, body) = draw(st.sampled_from(CALLS))
    if draw(st.booleans()):
        body = {**PAD, **body}
    if draw(st.booleans()):
        return is_selection, method, path, draw(damaged(msgspec.msgpack.encode(body))), MSGPACK
    separators = draw(st.sampled_from([None, (",", ":")]))
    text = json.dumps(body, separators=separators, ensure_ascii=draw(st.booleans())).encode()
    return is_selection, method, path, draw(damaged(text)), JSON


GATES = {is_selection: gate_of(is_selection) for is_selection in (True, False)}


STATES = {
    True: ["/workers", "/loads", "/busy_threshold", "/replica_sync/peers"],
    False: ["/workers", "/loads", "/peers"],
}


def state(is_selection: bool) -> list[bytes]:
    """All that a service says of what it holds."""
    gate = GATES[is_selection]
    return [answered(gate, request("GET", path))[1] for path in STATES[is_selection]]


@settings(max_examples=500)
@given(damaged_calls())
@example((True, "POST", "/select", json.dumps(PAD)[:-1].encode() + b',"block_hashes":', JSON))
def test_a_body_may_be_damaged_in_any_way(call: tuple[bool, str, str, bytes, bytes]) -> None:
    is_selection, method, path, body, kind = call
    before = state(is_selection)
    statuses = check(GATES[is_selection], method, path, body, kind)
    if min(statuses) >= 400:
        assert state(is_selection) == before, "what is refused changes nothing"


PATHS = [
    *("/workers/", "/reservations/", "/reservations//prefill_complete", "/nowhere", "/", "", "*"),
    *("/reservations/%ff", "/reservations/%", "/workers/%31", "/workers/18446744073709551616"),
    *("/workers", "/ready", "/loads", "/dump", "/kv_sources", "/busy_threshold", "/health"),
    *("/peers", "/replica_sync/peers", "/replica_sync/snapshot"),
]
PIECES = b"model_name= & tenant_id=a routing_group=b % %ff + = ;".split()
queries = st.one_of(
    st.none(), st.binary(max_size=20), st.lists(st.sampled_from(PIECES), max_size=6).map(b"".join)
)


@given(
    st.booleans(),
    st.sampled_from(["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "X"]),
    st.one_of(st.sampled_from(PATHS).map(str.encode), st.binary(max_size=30).map(b"/".__add__)),
    queries,
    st.one_of(st.none(), st.sampled_from([JSON, MSGPACK, b"", b"\xff/;", b"application/a+json"])),
)
def test_any_method_path_query_and_kind_is_answered(
    is_selection: bool, method: str, path: bytes, query: bytes | None, kind: bytes | None
) -> None:
    asked = request(method, path, b"{}", content_type=kind, accept=kind, query=query)
    answer = GATES[is_selection](asked)
    if isinstance(answer, bytes):
        assert int(answer[9:12]) != 500, answer
