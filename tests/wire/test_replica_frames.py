"""Golden bytes of the replica frames, captured from the reference, and what a receiver accepts."""

import json
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.core.replication.shapes import EventKind, ReplicaEvent
from lean_selector.wire.replica_frames import (
    HEARTBEAT_TOPIC,
    MAX_EVENT_BYTES,
    MAX_HASHES,
    MAX_OTHER_BYTES,
    TOPIC,
    TooBig,
    UndecodableFrames,
    decode_event,
    decode_heartbeat,
    encode_event,
    encode_heartbeat,
    payload_of,
)
from tests.support.reservations import replica_event

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "replica_frames.json").read_bytes())
VERSIONS = {VECTORS["version"]: VECTORS, **VECTORS["other_versions"]}
CAPTURED = [
    pytest.param(version, case, id=f"{version} {case['from']} {case['caused_by'][:90]}")
    for version, vectors in VERSIONS.items()
    for case in vectors["captured"]
    if case["frames_hex"]
]
# Refused by the reference for reasons other than its bytes: another module's business.
NOT_OF_THE_BYTES = {
    "router_id equal to the receiver's own process id",
    "unknown model",
    "unknown group",
    "block_size mismatch",
    "unknown worker",
    "unknown dp_rank",
}
# Forms that the reference reads as well, and that no sender writes.
NOT_READ = {
    *("worker as [id, rank]", "token_sequence as bin", "request_id bin", "data as {0: payload}"),
    *("AddRequest payload positional", "event positional", "envelope positional"),
    "bytes after the map",
}
OTHER_GROUP_KEY = "only the other version's group key"  # D2: either is read
INJECTED = [
    pytest.param(case, id=f"{version} {case['label']}")
    for version, vectors in VERSIONS.items()
    for case in vectors["injected"]
]


def hashes_of(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}Q", *values)


def frames_of(case: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(frame) for frame in case["frames_hex"]]


def event_of(decoded: dict[str, Any]) -> ReplicaEvent:
    """The event that a captured frame tells of."""
    event, data = decoded["event"], decoded["event"]["data"]
    kinds = {"Free": EventKind.FREE, "MarkPrefillCompleted": EventKind.PREFILL_COMPLETE}
    where = (
        EventKind.ADD if isinstance(data, dict) else kinds[data],
        decoded["model_name"],
        decoded.get("tenant_id") or decoded["routing_group"],
        decoded["block_size"],
        event["request_id"],
        event["worker"]["worker_id"],
        event["worker"]["dp_rank"],
        event["router_id"],
        event["lora_name"],
    )
    if not isinstance(data, dict):
        return replica_event(*where)
    add = data["AddRequest"]
    hint = add["prefill_load_hint"] or {}
    return replica_event(
        *where,
        hashes_of(*add["token_sequence"]),
        add["track_prefill_tokens"],
        hint.get("initial_effective_prefill_tokens"),
        None,
        add["expected_output_tokens"],
    )


@pytest.mark.parametrize(("version", "case"), CAPTURED)
def test_a_captured_frame_is_read_and_written_again_but_for_the_second_group_key_and_a_number(
    version: str, case: dict[str, Any]
) -> None:
    topic, payload = frames_of(case)
    assert topic == TOPIC
    event = decode_event(payload_of([topic, payload]))
    assert event == event_of(case["decoded"])
    ours = encode_event(event)
    spare = b"routing_group" if version == "1.3.1" else b"tenant_id"
    extra = bytes([0xA0 | len(spare)]) + spare + msgspec.msgpack.encode(event.tenant_id)
    assert ours.count(extra) == 1
    assert ours[0] == 0x85
    assert b"\x84" + ours[1:].replace(extra, b"") == payload
    number = b"\xadlean_sequence\xcd\x03\xe8"  # the last key, where the reference has no more
    assert encode_event(event, 1000) == b"\x86" + ours[1:] + number


@pytest.mark.parametrize("case", INJECTED)
def test_a_frame_of_maps_is_read_when_the_reference_reads_it_or_its_group_key_is_the_other(
    case: dict[str, Any],
) -> None:
    frames, label = frames_of(case), case["label"]
    readable = case["applied"] or label in NOT_OF_THE_BYTES or label == OTHER_GROUP_KEY
    if not readable or label in NOT_READ:
        with pytest.raises(UndecodableFrames):
            decode_event(payload_of(frames))
        return
    event = decode_event(payload_of(frames))
    assert (event.kind, event.tenant_id) == (
        EventKind.ADD,
        "zz" if label == "unknown group" else "default",
    )
    if case["applied"]:
        tokens = event.spec.prefill_tokens if event.spec.track_prefill_tokens else 0
        loads = [7, 0, tokens or 0, len(event.sequence_hashes) // 8]
        assert loads == case["loads_after"][0]


FULL = replica_event(
    EventKind.ADD, "llama", "t1", 16, "req", 7, 1, 2**64 - 1, "adapter", hashes_of(1, 2**64 - 1),
    True, 48, 2.5, 9,
)  # fmt: skip


def test_our_own_frame_reads_back_with_every_field() -> None:
    assert decode_event(encode_event(FULL)) == FULL


def test_the_number_of_an_event_is_read_wherever_it_stands() -> None:
    numbered = msgspec.structs.replace(FULL, sequence=2**40)
    assert decode_event(encode_event(FULL, 2**40)) == numbered
    short = replica_event(EventKind.FREE, "llama", "t1", 16, "req", 7, 1, 5, sequence=3)
    assert decode_event(encode_event(short, 3)) == short
    values = tree()
    assert decode_event(msgspec.msgpack.encode({"lean_sequence": 2**40, **values})) == numbered


def test_a_heartbeat_is_printed_as_documented_and_read_back() -> None:
    payload = encode_heartbeat(5, 1000)
    assert payload == b"\x82\xa9router_id\x05\xadlean_sequence\xcd\x03\xe8"
    beat = decode_heartbeat([HEARTBEAT_TOPIC, payload])
    assert (beat.router_id, beat.lean_sequence) == (5, 1000)
    assert HEARTBEAT_TOPIC == b"dynamo.slot-tracker.v1.lean-heartbeat"


@pytest.mark.parametrize(
    "frames",
    [
        [HEARTBEAT_TOPIC],
        [HEARTBEAT_TOPIC, encode_heartbeat(5, 1), b""],
        [HEARTBEAT_TOPIC, b""],
        [HEARTBEAT_TOPIC, msgspec.msgpack.encode({"router_id": 5})],
        [HEARTBEAT_TOPIC, msgspec.msgpack.encode({"router_id": 5, "lean_sequence": -1})],
        [HEARTBEAT_TOPIC, b"\x81\xa2\xff\xff\x01"],
    ],
)
def test_a_heartbeat_that_is_none_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(UndecodableFrames):
        decode_heartbeat(frames)


def tree(event: ReplicaEvent = FULL) -> dict[str, Any]:
    """The frame as plain values, to be changed and packed again."""
    values: dict[str, Any] = msgspec.msgpack.decode(encode_event(event))
    return values


def test_tenant_id_counts_when_the_group_keys_differ() -> None:
    envelope = tree()
    envelope["routing_group"] = "other"
    assert decode_event(msgspec.msgpack.encode(envelope)).tenant_id == "t1"


def test_an_unknown_key_beside_a_long_prompt_changes_nothing() -> None:
    hashes = hashes_of(*range(2**63, 2**63 + 815))
    envelope = tree(msgspec.structs.replace(FULL, sequence_hashes=hashes))
    envelope["sequence"] = 5
    event = decode_event(msgspec.msgpack.encode(envelope))
    assert event.sequence_hashes == hashes
    assert event.spec.prefill_duration_s == 2.5


PARTS = {
    "request_id": ("event", "request_id"),
    "worker": ("event", "worker"),
    "data": ("event", "data"),
    "tokens": ("event", "data", "AddRequest", "token_sequence"),
    "track": ("event", "data", "AddRequest", "track_prefill_tokens"),
    "duration": (
        *("event", "data", "AddRequest"),
        *("prefill_load_hint", "expected_prefill_duration"),
    ),
}


def swapped(**parts: object) -> bytes:
    """FULL's frame of one group key, with the named parts replaced."""
    envelope = tree()
    del envelope["routing_group"]
    for name, value in parts.items():
        *path, last = PARTS[name]
        inner = envelope
        for key in path:
            inner = inner[key]
        inner[last] = value
    return msgspec.msgpack.encode(envelope)


Raw = msgspec.Raw
MORE_ACCEPTED = {
    "as it is": swapped(),
    "long array": swapped(tokens=Raw(b"\xdd\0\0\0\x02\x01\xcf" + b"\xff" * 8)),
}
MORE_REFUSED = {
    "dp_rank beyond u32": swapped(worker={"worker_id": 7, "dp_rank": 2**32}),
    "tokens as bytes": swapped(tokens=b"\1\2"),
    "track_prefill_tokens nil": swapped(track=None),
    "tokens a map": swapped(tokens={}),
    "tokens a string": swapped(tokens="ab"),
    "AddRequest without payload": swapped(data="AddRequest"),
    "Free with payload": swapped(data={"Free": 1}),
    "invalid UTF-8": swapped(request_id=Raw(b"\xa3r\xffq")),
    "duration without nanos": swapped(duration={"secs": 2}),
    "arrays without end": b"\x91" * 5000,
    "an array that is not there": b"\xdd\xff\xff\xff\xff",
}


@pytest.mark.parametrize("payload", MORE_ACCEPTED.values(), ids=MORE_ACCEPTED.keys())
def test_a_lenient_spelling_reads_the_same(payload: bytes) -> None:
    assert decode_event(payload) == FULL


@pytest.mark.parametrize("payload", MORE_REFUSED.values(), ids=MORE_REFUSED.keys())
def test_a_wrong_shape_is_refused(payload: bytes) -> None:
    with pytest.raises(UndecodableFrames):
        decode_event(payload)


U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
ADDS = st.builds(
    replica_event,
    kind=st.just(EventKind.ADD),
    model_name=st.text(),
    tenant_id=st.text(),
    block_size=U32,
    request_id=st.text(),
    worker_id=U64,
    dp_rank=U32,
    router_id=U64,
    lora_name=st.none() | st.text(),
    sequence_hashes=st.lists(U64, max_size=5).map(lambda values: hashes_of(*values * 8)),
    track_prefill_tokens=st.booleans(),
    prefill_tokens=st.none() | U64,
    expected_output_tokens=st.none() | U32,
)


@given(ADDS)
def test_what_we_publish_is_read_back(event: ReplicaEvent) -> None:
    assert decode_event(encode_event(event)) == event


# -- frames of any content and size ----------------------------------------------------------------


def array_of(count: int, body: bytes) -> msgspec.Raw:
    return msgspec.Raw(b"\xdd" + count.to_bytes(4, "big") + body)


def odd(tokens: object, **more: object) -> bytes:
    """An ADD whose keys stand in another order than known senders write them in."""
    add = {"track_prefill_tokens": True, "token_sequence": tokens}
    event = {
        **{"request_id": "req", "worker": {"worker_id": 7, "dp_rank": 1}, "router_id": 5},
        **{"data": {"AddRequest": add}, **more},
    }
    where = {"model_name": "llama", "tenant_id": "t1", "block_size": 16}
    return msgspec.msgpack.encode({"event": event, **where})


@pytest.mark.parametrize("last", [2**64 - 1, 2**32, 2**32 - 1, 5])
@pytest.mark.parametrize("blocks", [1023, 1024, 70_000, 1_000_000])
def test_a_prompt_of_a_million_tokens_travels_whatever_its_hashes(blocks: int, last: int) -> None:
    hashes = struct.pack("<Q", 2**63 + 12345) * (blocks - 1) + struct.pack("<Q", last)
    event = msgspec.structs.replace(FULL, sequence_hashes=hashes)
    payload = encode_event(event)
    assert len(payload) <= MAX_EVENT_BYTES
    assert decode_event(payload) == event
    values = [2**63 + 12345] * (blocks - 1) + [last]
    assert payload.count(msgspec.msgpack.encode(values)) == 1  # each in its shortest form
    assert decode_event(odd(values)).sequence_hashes == hashes


def test_integers_of_all_lengths_are_read_from_a_long_odd_array() -> None:
    values = [(2**64 - 59) >> (n % 64) for n in range(20_000)] + [0, 2**64 - 1]
    assert decode_event(odd(values)).sequence_hashes == hashes_of(*values)


def test_one_value_that_is_no_hash_spoils_a_long_array() -> None:
    for bad in (-1, None, "1", 1.5, [1]):
        with pytest.raises(UndecodableFrames):
            decode_event(odd([*range(9_000), bad]))


@pytest.mark.parametrize(
    "payload",
    [
        odd(array_of(MAX_HASHES + 1, b"\x01" * (MAX_HASHES + 1))),
        odd([], request_id="r" * (MAX_OTHER_BYTES + 1)),
    ],
    ids=["hashes", "an id"],
)
def test_what_is_more_than_anybody_sends_is_refused_as_too_big(payload: bytes) -> None:
    with pytest.raises(TooBig):
        decode_event(payload)


def test_a_frame_beyond_the_bound_is_not_looked_at() -> None:
    with pytest.raises(TooBig):
        decode_event(payload_of([TOPIC, bytes(MAX_EVENT_BYTES + 1)]))
    with pytest.raises(UndecodableFrames) as raised:
        decode_event(payload_of([TOPIC, bytes(MAX_EVENT_BYTES)]))
    assert not isinstance(raised.value, TooBig)
