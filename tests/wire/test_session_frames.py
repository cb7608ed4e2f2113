"""The frames of the session topic against those of the reference, and the list for peers."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.core.sessions.shapes import LiveSession, SessionEvent
from lean_selector.wire.replica_frames import (
    MAX_SESSION_BYTES,
    SESSION_TOPIC,
    TooBig,
    UndecodableFrames,
    decode_session,
    encode_session,
)
from lean_selector.wire.replica_snapshot import (
    BadSnapshot,
    decode_session_line,
    encode_session_list,
    split_session_list,
)
from tests.support.reservations import live_session, session_event

VECTORS = json.loads(
    (Path(__file__).parents[1] / "data" / "session_affinity_frames.json").read_text()
)

U32, U64 = st.integers(0, 2**32 - 1), st.integers(0, 2**64 - 1)
EVENTS = st.builds(session_event, st.text(), st.text(), st.text(), U64, st.none() | U32, U64, U64)


def frames_of(message: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in message["frames_hex"]]


def published() -> list[dict[str, Any]]:
    """Every message of the topic that the reference was heard to publish."""
    lists = [step["messages"] for step in VECTORS["captured"]]
    lists += [step.get("messages_published", []) for step in VECTORS["injected"]]
    lists += [step[f"published_by_{who}"] for step in VECTORS["two_services"] for who in ("A", "B")]
    return [each for messages in lists for each in messages if each["topic"] == VECTORS["topic"]]


def as_event(decoded: dict[str, Any]) -> SessionEvent:
    values: list[Any] = [decoded.get(key) for key in VECTORS["envelope_keys_in_order"]]
    return session_event(*values)


@pytest.mark.parametrize("message", published())
def test_what_the_reference_publishes_is_read_and_written_byte_for_byte(
    message: dict[str, Any],
) -> None:
    frames = frames_of(message)
    event = decode_session(frames)
    assert event == as_event(message["decoded"])
    assert [SESSION_TOPIC, encode_session(event)] == frames


# Whatever else it drops it drops for what it says.
UNREADABLE = (
    *(f"{field} missing" for field in VECTORS["envelope_keys_in_order"] if field != "dp_rank"),
    *("session_id missing", "tenant_id instead", "array instead", "worker_id as text"),
    *("negative sequence", "a third frame", "JSON", "topic only"),
    "bytes after the map",  # which no sender writes
)
INJECTED = [
    case
    for case in VECTORS["injected"]
    if case.get("frames_hex") and frames_of(case)[0] == SESSION_TOPIC
]


@pytest.mark.parametrize("case", INJECTED, ids=lambda case: case["what"])
def test_what_the_reference_can_read_is_read_and_nothing_else(case: dict[str, Any]) -> None:
    if case["what"].startswith(UNREADABLE):
        with pytest.raises(UndecodableFrames):
            decode_session(frames_of(case))
        return
    event = decode_session(frames_of(case))
    if case["decoded"] is not None:
        assert event == as_event(case["decoded"])


@given(EVENTS)
def test_what_was_written_is_read_back(event: SessionEvent) -> None:
    assert decode_session([SESSION_TOPIC, encode_session(event)]) == event


def test_a_message_has_two_frames_of_bounded_size() -> None:
    event = session_event("m", "t", "s", 1, 0, 5, 9)
    payload = encode_session(event)
    for frames in ([SESSION_TOPIC], [SESSION_TOPIC, payload, b""]):
        with pytest.raises(UndecodableFrames, match="frames instead of 2"):
            decode_session(frames)
    with pytest.raises(TooBig):
        decode_session([SESSION_TOPIC, payload + bytes(MAX_SESSION_BYTES)])


# -- the list --------------------------------------------------------------------------------------


def test_the_list_is_printed_as_documented() -> None:
    live = live_session(session_event("m", "t", "s", 7, None, 5, 9), 1.5)
    assert b"".join(encode_session_list([live])) == (
        b'{"version":1,"sessions":[\n'
        b'{"model_name":"m","tenant_id":"t","session_id":"s","worker_id":7,"dp_rank":null,'
        b'"sequence":5,"writer_id":9,"idle_s":1.5}\n]}'
    )


LISTED = st.builds(live_session, EVENTS, st.floats(0.0, 1e6).map(lambda idle_s: round(idle_s, 3)))


@given(st.lists(LISTED, max_size=4))
def test_a_list_is_read_back_line_by_line(listed: list[LiveSession]) -> None:
    text = b"".join(encode_session_list(listed))
    assert len(json.loads(text)["sessions"]) == len(listed)
    assert [decode_session_line(line) for line in split_session_list(text)] == listed


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b'{"version":2,"sessions":[\n]}', b'{"version":1,"sessions":[\n{}', b"\xff\n]}"],
)
def test_what_is_no_list_is_refused(text: bytes) -> None:
    with pytest.raises(BadSnapshot):
        split_session_list(text)


@pytest.mark.parametrize(
    "change",
    [{"worker_id": -1}, {"sequence": 2**64}, {"session_id": None}, {"idle_s": -1}, {"dp_rank": ""}],
)
def test_a_bad_line_is_refused(change: dict[str, object]) -> None:
    live = live_session(session_event("m", "t", "s", 7, 0, 5, 9), 1.5)
    (line,) = split_session_list(b"".join(encode_session_list([live])))
    with pytest.raises(BadSnapshot):
        decode_session_line(msgspec.json.encode({**msgspec.json.decode(line), **change}))
    with pytest.raises(BadSnapshot):
        decode_session_line(b"[" * 100_000)
