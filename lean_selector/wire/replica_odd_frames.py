"""Replica events in frames that no known sender writes, and in large ones.

The leniency and strictness of slot_tracker.md section 3.4, beyond what a typed decoder can tell:
repeated and unknown keys, positional arrays, text as bytes. Read in steps, so that a frame of any
content holds nobody up.
"""

import struct
from collections.abc import Generator
from typing import TypeGuard

import msgspec

from lean_selector.core.load.shapes import Booking
from lean_selector.core.replication.shapes import EventKind, ReplicaEvent
from lean_selector.wire.messagepack import MAX_INTEGERS, MAX_TEXT_BYTES, Reader, TooMany
from lean_selector.wire.messagepack_values import Hashes, Map, Value

NANOS = 1_000_000_000


class UndecodableFrames(ValueError):
    """What arrived is not a replica event; the message says why."""


class TooBig(UndecodableFrames):
    """What arrived is larger than an event has reason to be."""


_KIND = {"MarkPrefillCompleted": EventKind.PREFILL_COMPLETE, "Free": EventKind.FREE}
# Declaration orders: positional arrays and integer keys count in them.
_ENVELOPE = ("model_name", "tenant_id", "block_size", "event")
_EVENT = ("request_id", "worker", "data", "router_id", "lora_name")
_WORKER = ("worker_id", "dp_rank")
_VARIANTS = ("AddRequest", "Free", "MarkPrefillCompleted")
_ADD = (
    "token_sequence",
    "track_prefill_tokens",
    "expected_output_tokens",
    "prefill_load_hint",
)
_HINT = ("initial_effective_prefill_tokens", "expected_prefill_duration")
_DURATION = ("secs", "nanos")


def decode_in_steps(payload: bytes) -> Generator[None, None, ReplicaEvent]:
    """The event in a second frame, in steps of a few milliseconds; raises UndecodableFrames."""
    try:
        value = yield from Reader(payload).value()  # bytes after the map are not looked at
        return _event_from(value)
    except TooMany as bound:
        raise TooBig(str(bound)) from None
    except (ValueError, IndexError, KeyError, struct.error) as error:
        raise UndecodableFrames(f"{type(error).__name__}: {error}") from None


def _event_from(value: Value) -> ReplicaEvent:
    envelope = _fields(value, _ENVELOPE, also=("routing_group", "lean_sequence"))
    event = _fields(envelope["event"], _EVENT)
    worker = _fields(event["worker"], _WORKER)
    kind, payload = _variant(event["data"])
    lora_name = event.get("lora_name")
    sequence = envelope.get("lean_sequence")
    booking = Booking(
        _string(event["request_id"]),
        _unsigned(worker["worker_id"]),
        _unsigned(worker["dp_rank"], 2**32),
        None if lora_name is None else _string(lora_name),
    )
    record = ReplicaEvent(
        kind,
        _string(envelope["model_name"]),
        _string(envelope["tenant_id"] if "tenant_id" in envelope else envelope["routing_group"]),
        _unsigned(envelope["block_size"], 2**32),
        _unsigned(event["router_id"]),
        booking,
        sequence=sequence if _is_unsigned(sequence) else None,
    )
    if kind is not EventKind.ADD:
        return record
    add = _fields(payload, _ADD)
    track = add.get("track_prefill_tokens", True)
    if not isinstance(track, bool):
        raise ValueError("track_prefill_tokens is not a boolean")
    tokens, duration_s = _hint(add.get("prefill_load_hint"))
    expected = add.get("expected_output_tokens")
    booking = msgspec.structs.replace(
        booking,
        track_prefill_tokens=track,
        prefill_tokens=tokens,
        prefill_duration_s=duration_s,
        expected_output_tokens=None if expected is None else _unsigned(expected, 2**32),
    )
    hashes = _token_sequence(add.get("token_sequence"))
    return msgspec.structs.replace(record, booking=booking, sequence_hashes=hashes)


def _fields(value: Value, names: tuple[str, ...], also: tuple[str, ...] = ()) -> dict[str, Value]:
    """The known fields of a struct, which is a map or an array of exactly `names`."""
    if isinstance(value, list):
        if len(value) != len(names):
            raise ValueError(f"{len(value)} elements instead of {len(names)}")
        return dict(zip(names, value, strict=True))
    if not isinstance(value, Map):
        raise ValueError("neither a map nor an array")
    found: dict[str, Value] = {}
    for key, item in value.pairs:
        name = _name(key, names)
        if name in found:
            raise ValueError(f"{name} given twice")
        if name in names or name in also:
            found[name] = item
    return found


def _name(key: Value, names: tuple[str, ...]) -> str:
    """A key as text: an integer stands for the field or variant of that index."""
    if type(key) is int and key >= 0:
        return names[key] if key < len(names) else ""
    if isinstance(key, bytes):
        return key.decode(errors="replace") if len(key) <= MAX_TEXT_BYTES else ""
    if isinstance(key, str):
        return key
    raise ValueError("a key that is no string")


def _variant(value: Value) -> tuple[EventKind, Value]:
    payload: Value = None
    if isinstance(value, Map):
        if len(value.pairs) != 1:
            raise ValueError(f"{len(value.pairs)} keys in data")
        value, payload = value.pairs[0]
    name = _name(value, _VARIANTS)
    if name == "AddRequest":
        return EventKind.ADD, payload
    if payload is not None:
        raise ValueError("a payload where there is none")
    return _KIND[name], None


def _hint(value: Value) -> tuple[int | None, float | None]:
    """Tokens and expected duration in seconds of a prefill hint."""
    if value is None:
        return None, None
    hint = _fields(value, _HINT)
    tokens = _unsigned(hint["initial_effective_prefill_tokens"])
    duration = hint.get("expected_prefill_duration")
    if duration is None:
        return tokens, None
    parts = _fields(duration, _DURATION)
    return tokens, _unsigned(parts["secs"]) + _unsigned(parts["nanos"], 2**32) / NANOS


def _token_sequence(value: Value) -> bytes:
    if value is None:
        return b""
    if isinstance(value, Hashes):
        return value.packed
    if isinstance(value, bytes):  # each byte is a hash
        if len(value) > MAX_INTEGERS:
            raise TooMany(f"more than {MAX_INTEGERS} hashes")
        packed = bytearray(8 * len(value))
        packed[::8] = value
        return bytes(packed)
    if not isinstance(value, list):
        raise ValueError("token_sequence is no array")
    return struct.pack(f"<{len(value)}Q", *(_unsigned(item) for item in value))


def _string(value: Value) -> str:
    if isinstance(value, bytes):
        if len(value) > MAX_TEXT_BYTES:
            raise TooMany(f"a string of more than {MAX_TEXT_BYTES} bytes")
        return value.decode()
    if not isinstance(value, str):
        raise ValueError("not a string")
    return value


def _is_unsigned(value: Value, bound: int = 2**64) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < bound


def _unsigned(value: Value, bound: int = 2**64) -> int:
    if not _is_unsigned(value, bound):
        raise ValueError("not an unsigned integer in range")
    return value
