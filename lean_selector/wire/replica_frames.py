"""Replica-sync messages: the two frames that selectors and slot trackers publish to each other.

Owns the MessagePack layout of slot_tracker.md section 3.2 and the leniency and strictness of its
section 3.4. Knows nothing of sockets, nor of what an event does. Frames go out with both names of
the group key, as 1.3 receivers need `tenant_id` and later ones `routing_group`; either is read.
Ours also say the how-manieth event of their sender they are (decision D24), in a key that the
reference ignores as it does any unknown one, and so does the heartbeat, whose topic a reference
drops for not being its own.

Reading has two paths. The quick one is a typed decoder whose result is encoded again: equal bytes
prove that there was no repeated or unknown key, nor anything else to be lenient about. All known
senders pass it. What does not pass, or is so large that it has to be read in steps, goes to a
reader that takes MessagePack apart value by value (wire/replica_odd_frames.py).
"""

import struct
from collections.abc import Sequence
from typing import Literal

import msgspec

from lean_selector.core.load.shapes import Booking
from lean_selector.core.replication.shapes import EventKind, ReplicaEvent
from lean_selector.wire.messagepack import turned_round
from lean_selector.wire.replica_odd_frames import NANOS, TooBig, UndecodableFrames
from lean_selector.wire.replica_shapes import (
    U64,
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
HEARTBEAT_TOPIC = TOPIC + b".lean-heartbeat"  # subscribed to by its prefix


# A prompt of a million tokens is 0.6 MB in blocks of 16, and 9 MB in blocks of one: hashes are 9
# bytes each. Beside them there are a few hundred.
MAX_EVENT_BYTES = 10 << 20
# Read at once: 1 ms as a rule, 10 as integers that are no hashes. 230 000 tokens in blocks of 16.
QUICK_BYTES = 128 << 10


_encode = msgspec.msgpack.Encoder().encode
_decode_envelope = msgspec.msgpack.Decoder(Envelope).decode
_decode_heartbeat = msgspec.msgpack.Decoder(Heartbeat).decode

_MANY_HASHES = 1024
_NO_HASHES = msgspec.Raw(b"\x90")
_KIND_NAME: dict[EventKind, Literal["MarkPrefillCompleted", "Free"]] = {
    EventKind.PREFILL_COMPLETE: "MarkPrefillCompleted",
    EventKind.FREE: "Free",
}
_KIND: dict[str, EventKind] = {name: kind for kind, name in _KIND_NAME.items()}


def encode_event(event: ReplicaEvent, sequence: int | None = None) -> bytes:
    """The second frame of an event, numbered if `sequence` is given; the first is always TOPIC."""
    booking = event.booking
    data: Literal["MarkPrefillCompleted", "Free"] | AddVariant
    if event.kind is EventKind.ADD:
        hint = None
        if booking.prefill_tokens is not None:
            duration = None
            if booking.prefill_duration_s is not None:
                duration = Duration(*divmod(round(booking.prefill_duration_s * NANOS), NANOS))
            hint = Hint(booking.prefill_tokens, duration)
        hashes = event.sequence_hashes
        data = AddVariant(
            Add(
                _token_sequence(hashes) if hashes else _NO_HASHES,
                booking.track_prefill_tokens,
                booking.expected_output_tokens,
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
                booking.request_id,
                EventWorker(booking.worker_id, booking.dp_rank),
                data,
                event.router_id,
                booking.lora_name,
            ),
            lean_sequence=msgspec.UNSET if sequence is None else sequence,
        )
    )


def _token_sequence(hashes: bytes) -> msgspec.Raw:
    """8 bytes LE each as a MessagePack array of integers, each in its shortest form.

    A million take 160 ms as Python integers. In a long prompt as a rule none is below 2^32, which
    the upper halves of all tell at once; then all are `cf` and 8 bytes, and that takes 15.
    """
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
            return msgspec.Raw(_array_header(count) + bytes(out))
    return msgspec.Raw(_encode(struct.unpack(f"<{count}Q", hashes)))


def _array_header(count: int) -> bytes:
    if count < 1 << 16:
        return b"\xdc" + count.to_bytes(2, "big")
    return b"\xdd" + count.to_bytes(4, "big")


def encode_heartbeat(router_id: int, sequence: int) -> bytes:
    """The second frame of a heartbeat; the first is HEARTBEAT_TOPIC."""
    return _encode(Heartbeat(router_id, sequence))


def decode_heartbeat(frames: Sequence[bytes]) -> Heartbeat:
    """The heartbeat in a received message; raises UndecodableFrames."""
    if len(frames) != 2:
        raise UndecodableFrames(f"{len(frames)} frames instead of 2")
    try:
        return _decode_heartbeat(frames[1])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UndecodableFrames(f"heartbeat: {error}") from None


def payload_of(frames: Sequence[bytes]) -> bytes:
    """What holds the event of a received message; raises UndecodableFrames."""
    if len(frames) != 2:
        raise UndecodableFrames(f"{len(frames)} frames instead of 2")
    if frames[0] != TOPIC:  # a prefix subscription lets longer topics through
        raise UndecodableFrames("another topic")
    if len(frames[1]) > MAX_EVENT_BYTES:
        raise TooBig(f"more than {MAX_EVENT_BYTES} bytes")
    return frames[1]


def decode_quickly(payload: bytes) -> ReplicaEvent | None:
    """The event in a second frame as known senders write it; None: it takes `decode_in_steps`."""
    if len(payload) > QUICK_BYTES:
        return None
    try:
        envelope = _decode_envelope(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    tenant_id = envelope.tenant_id
    if tenant_id is msgspec.UNSET:
        tenant_id = envelope.routing_group
    if tenant_id is msgspec.UNSET or _encode(envelope) != payload:
        return None
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
            Booking(event.request_id, worker.worker_id, worker.dp_rank, event.lora_name),
            sequence=sequence,
        )
    add = data.add
    hashes = _packed_hashes(add.token_sequence)
    if hashes is None:
        return None
    hint = add.prefill_load_hint
    duration = hint.expected_prefill_duration if hint is not None else None
    return ReplicaEvent(
        EventKind.ADD,
        envelope.model_name,
        tenant_id,
        envelope.block_size,
        event.router_id,
        Booking(
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


_decode_hashes = msgspec.msgpack.Decoder(list[U64]).decode


def _packed_hashes(raw: msgspec.Raw) -> bytes | None:
    """A MessagePack array of u64 as 8 bytes LE each; None when it is anything else.

    Hashes are nearly always above 2^32, so every element is `cf` and 8 bytes. A header that agrees
    with the length and a `cf` in each ninth place prove it, and eight strided copies turn the bytes
    round: 6 us for 815 blocks, where decoding and packing integers takes 23.
    """
    data = bytes(raw)
    if len(data) > 3 and data[0] == 0xDC:
        count = data[1] << 8 | data[2]
        if len(data) == 3 + 9 * count and data[3::9] == b"\xcf" * count:
            return turned_round(data, 3, count)
    if data == b"\xc0":
        return b""
    try:
        hashes = _decode_hashes(data)
    except msgspec.DecodeError:
        return None
    return struct.pack(f"<{len(hashes)}Q", *hashes)
