"""Replica-sync messages: the frames that selectors and slot trackers publish to each other.

The MessagePack layout follows slot_tracker.md section 3.2; section 3.4 says which input is
accepted. This module opens no sockets and applies no events. Frames contain the tenant under two
names: 1.3 receivers need `tenant_id`, and later receivers `routing_group`. The decoder accepts
either name. Our events also have a sequence number (decision D24), in a key that the reference
ignores. The reference also ignores our heartbeat, which has another topic.

The decoder accepts keys in any order and unknown keys; keys with a default may be missing. It reads
only maps, since every sender writes maps; the reference also accepts positional arrays, integer
keys, and bytes for text. Messages about sessions follow selection_16.md section 6.1."""

import struct
from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

import msgspec

from lean_selector.core.load.shapes import ReservationSpec
from lean_selector.core.numbers import U64
from lean_selector.core.replication.shapes import EventKind, ReplicaEvent
from lean_selector.core.sessions.shapes import SessionEvent
from lean_selector.wire.messagepack import array_header, count_of
from lean_selector.wire.replica_shapes import (
    Add,
    AddVariant,
    Duration,
    Envelope,
    EventWorker,
    Heartbeat,
    Hint,
    RequestEvent,
)

TOPIC = b"dynamo.slot-tracker.v1"
HEARTBEAT_TOPIC = TOPIC + b".lean-heartbeat"  # subscribers to TOPIC receive this too


# A prompt of a million tokens takes 0.6 MB in blocks of 16, and 9 MB in blocks of one token: 9
# bytes per hash, and a few hundred bytes for the other fields.
MAX_EVENT_BYTES = 10 << 20
MAX_HASHES = 1 << 20
MAX_OTHER_BYTES = 1 << 20  # of a message without its hashes

SESSION_TOPIC = b"dynamo.session-affinity.v1"
# An id has at most 256 bytes, the names of a model and a group a few more.
MAX_SESSION_BYTES = 64 << 10

NANOS = 1_000_000_000
T = TypeVar("T")


class UndecodableFrames(ValueError):
    """A message from another replica cannot be decoded; the error text says why."""


class TooBig(UndecodableFrames):
    """A message from another replica is larger than any valid message."""


_encode = msgspec.msgpack.Encoder().encode
_decode_envelope = msgspec.msgpack.Decoder(Envelope).decode
_decode_hashes = msgspec.msgpack.Decoder(list[U64]).decode
_decode_session = msgspec.msgpack.Decoder(SessionEvent).decode
_decode_heartbeat = msgspec.msgpack.Decoder(Heartbeat).decode

_MANY_HASHES = 1024
_NIL = b"\xc0"
_NO_HASHES = msgspec.Raw(b"\x90")
_KIND_NAME: dict[EventKind, Literal["MarkPrefillCompleted", "Free"]] = {
    EventKind.PREFILL_COMPLETE: "MarkPrefillCompleted",
    EventKind.FREE: "Free",
}
_KIND: dict[str, EventKind] = {name: kind for kind, name in _KIND_NAME.items()}


def encode_event(event: ReplicaEvent, sequence: int | None = None) -> bytes:
    """Return a replica event's ZMQ frame that follows TOPIC. `sequence`: the event's number."""
    spec = event.spec
    data: Literal["MarkPrefillCompleted", "Free"] | AddVariant
    if event.kind is EventKind.ADD:
        hint = None
        if spec.prefill_tokens is not None:
            duration = None
            if spec.prefill_duration_s is not None:
                duration = Duration(*divmod(round(spec.prefill_duration_s * NANOS), NANOS))
            hint = Hint(spec.prefill_tokens, duration)
        hashes = event.sequence_hashes
        data = AddVariant(
            Add(
                _token_sequence(hashes) if hashes else _NO_HASHES,
                spec.track_prefill_tokens,
                spec.expected_output_tokens,
                hint,
            )
        )
    else:
        data = _KIND_NAME[event.kind]
    return _encode(
        Envelope(
            model_name=event.model_name,
            tenant_id=event.tenant_id,
            routing_group=event.tenant_id,
            block_size=event.block_size,
            event=RequestEvent(
                spec.request_id,
                EventWorker(spec.worker_id, spec.dp_rank),
                data,
                event.router_id,
                spec.lora_name,
            ),
            lean_sequence=msgspec.UNSET if sequence is None else sequence,
        )
    )


def _token_sequence(hashes: bytes) -> msgspec.Raw:
    """Encode hashes (8 bytes LE each) as a MessagePack array of integers in their shortest form.

    A hash of at least 2^32 takes 9 bytes: `cf` and the number. If all hashes are that large, as
    usual, a million hashes take 15 ms. Otherwise a million hashes take 160 ms."""
    count = len(hashes) // 8
    if count >= _MANY_HASHES:
        upper = 0
        for byte in range(4, 8):
            upper |= int.from_bytes(hashes[byte::8], "little")
        if 0 not in upper.to_bytes(count, "little"):
            out = bytearray(9 * count)
            out[::9] = b"\xcf" * count
            for byte in range(8):
                out[8 - byte :: 9] = hashes[byte::8]
            short = count < 1 << 16
            header = b"\xdc" + count.to_bytes(2, "big") if short else array_header(count)
            return msgspec.Raw(header + bytes(out))
    return msgspec.Raw(_encode(struct.unpack(f"<{count}Q", hashes)))


def encode_heartbeat(router_id: int, sequence: int) -> bytes:
    """Return the second ZMQ frame of a replica's heartbeat; the first is HEARTBEAT_TOPIC."""
    return _encode(Heartbeat(router_id, sequence))


def decode_heartbeat(frames: Sequence[bytes]) -> Heartbeat:
    """Decode the heartbeat in a received message. Raises UndecodableFrames."""
    return _decoded(_decode_heartbeat, payload_of(frames, HEARTBEAT_TOPIC), "heartbeat")


def _decoded(decode: Callable[[bytes], T], payload: bytes, what: str) -> T:
    try:
        return decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UndecodableFrames(f"{what}: {error}") from None


def encode_session(event: SessionEvent) -> bytes:
    """Return the ZMQ frame, after SESSION_TOPIC, that binds a session to a worker or rank."""
    return _encode(event)


def decode_session(frames: Sequence[bytes]) -> SessionEvent:
    """Decode a message that binds a session to a worker or rank. Raises UndecodableFrames."""
    payload = payload_of(frames, SESSION_TOPIC, MAX_SESSION_BYTES)
    return _decoded(_decode_session, payload, "session")


def payload_of(
    frames: Sequence[bytes], topic: bytes = TOPIC, most_bytes: int = MAX_EVENT_BYTES
) -> bytes:
    """Return the second of the two ZMQ frames of a message, by default of a replica event. Raises
    UndecodableFrames."""
    if len(frames) != 2:
        raise UndecodableFrames(f"{len(frames)} frames instead of 2")
    if frames[0] != topic:  # a subscription is for a prefix, so longer topics arrive too
        raise UndecodableFrames("another topic")
    if len(frames[1]) > most_bytes:
        raise TooBig(f"more than {most_bytes} bytes")
    return frames[1]


def decode_event(payload: bytes) -> ReplicaEvent:
    """Decode a replica event from its second ZMQ frame. Raises UndecodableFrames."""
    try:
        envelope = _decode_envelope(payload)
        data = envelope.event.data
        if not isinstance(data, AddVariant):
            return _event_of(envelope, b"")
        raw = data.add.token_sequence
        if len(payload) - len(memoryview(raw)) > MAX_OTHER_BYTES:
            raise TooBig(f"more than {MAX_OTHER_BYTES} bytes besides its hashes")
        return _event_of(envelope, _hashes(raw))
    except UndecodableFrames:
        raise
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise UndecodableFrames(f"{type(error).__name__}: {error}") from None


def _event_of(envelope: Envelope, hashes: bytes) -> ReplicaEvent:
    tenant_id = envelope.tenant_id
    if tenant_id is msgspec.UNSET:
        tenant_id = envelope.routing_group
    if tenant_id is msgspec.UNSET:
        raise UndecodableFrames("no tenant_id, and no routing_group")
    sequence = None if envelope.lean_sequence is msgspec.UNSET else envelope.lean_sequence
    event = envelope.event
    data = event.data
    worker = event.worker
    if not isinstance(data, AddVariant):
        return ReplicaEvent(
            _KIND[data],
            envelope.model_name,
            tenant_id,
            envelope.block_size,
            event.router_id,
            ReservationSpec(event.request_id, worker.worker_id, worker.dp_rank, event.lora_name),
            sequence=sequence,
        )
    add = data.add
    hint = add.prefill_load_hint
    duration = hint.expected_prefill_duration if hint is not None else None
    return ReplicaEvent(
        EventKind.ADD,
        envelope.model_name,
        tenant_id,
        envelope.block_size,
        event.router_id,
        ReservationSpec(
            event.request_id,
            worker.worker_id,
            worker.dp_rank,
            event.lora_name,
            add.track_prefill_tokens,
            hint.initial_effective_prefill_tokens if hint is not None else None,
            duration.secs + duration.nanos / NANOS if duration is not None else None,
            add.expected_output_tokens,
        ),
        hashes,
        sequence,
    )


def _hashes(raw: msgspec.Raw) -> bytes:
    """Pack a MessagePack array of u64 (or nil) to 8 bytes LE per hash.

    A hash of at least 2^32 takes 9 bytes: `cf` and the number. If all hashes are that large, as
    usual, slices of the array are copied, which takes 6 us for 815 blocks. Otherwise each hash is
    decoded, which takes 23 us."""
    data = bytes(raw)
    if data == _NIL:
        return b""
    count, at = count_of(data)
    if count > MAX_HASHES:
        raise TooBig(f"more than {MAX_HASHES} hashes")
    if len(data) == at + 9 * count and data[at::9] == b"\xcf" * count:
        out = bytearray(8 * count)
        for byte in range(8):
            out[byte::8] = data[at + 8 - byte :: 9]
        return bytes(out)
    return struct.pack(f"<{count}Q", *_decode_hashes(raw))
