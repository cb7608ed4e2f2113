"""A replica's live reservations (GET /replica_sync/snapshot) and bound sessions (GET
/replica_sync/sessions), one per line.

Each text is one JSON value with one item per line, so a reader can split the text without parsing
it as a whole. Times are sent as ages in seconds, because replicas share no clock."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

import msgspec

from lean_selector.core.hashing import unpack_signed
from lean_selector.core.load.shapes import ReservationSpec
from lean_selector.core.replication.catch_up import live_reservation
from lean_selector.core.replication.ledger import ReplicaTarget
from lean_selector.core.replication.shapes import LiveReservation
from lean_selector.core.sessions.shapes import LiveSession
from lean_selector.wire.replica_shapes import (
    SessionListHead,
    SnapshotHead,
    SnapshotLine,
)
from lean_selector.wire.scalars import hashes_from_json

_Head = TypeVar("_Head")


class BadSnapshot(ValueError):
    """A text is not a valid snapshot or list of sessions; the error's message says why."""


_encode = msgspec.json.Encoder().encode
_decode_head = msgspec.json.Decoder(SnapshotHead).decode
_decode_session_head = msgspec.json.Decoder(SessionListHead).decode
_decode_session_line = msgspec.json.Decoder(LiveSession).decode
_decode_line = msgspec.json.Decoder(SnapshotLine).decode


def encode_snapshot(router_id: int, sequence: int, lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield the text of GET /replica_sync/snapshot in parts. `lines`: the live reservations, by
    `live_lines`. They reflect at least this replica's first `sequence` events."""
    head = b'{"version":1,"router_id":%d,"sequence":%d,"reservations":[' % (router_id, sequence)
    return _listed(head, lines)


def _listed(head: bytes, items: Iterable[bytes]) -> Iterator[bytes]:
    """Yield `head`, which opens a list, its items, each on a line of its own, and the end."""
    yield head
    end = b"\n"
    for item in items:
        yield end + item
        end = b",\n"
    yield b"\n]}"


def live_lines(targets: Iterable[ReplicaTarget], router_id: int, now: float) -> Iterator[bytes]:
    """Yield the lines of all live reservations at `now`, for `encode_snapshot`. `router_id` is the
    id of this replica."""
    for target in list(targets):
        for held in target.slots.by_touch():
            yield snapshot_line(live_reservation(target, held, router_id), now)


def snapshot_line(live: LiveReservation, now: float) -> bytes:
    """Return the line for a live reservation at `now`, in monotonic seconds."""
    spec = live.spec
    return _encode(
        SnapshotLine(
            live.model_name,
            live.tenant_id,
            live.block_size,
            spec.request_id,
            spec.worker_id,
            spec.dp_rank,
            live.router_id,
            max(0.0, round(now - live.touched_at, 3)),
            spec.prefill_tokens or 0,
            live.prefill_done,
            spec.prefill_duration_s,
            spec.expected_output_tokens,
            spec.lora_name,
            msgspec.Raw(_encode(unpack_signed(live.sequence_hashes))),
        )
    )


class SnapshotParts(NamedTuple):
    """A snapshot split into lines, one per reservation; the reservations are not decoded yet."""

    router_id: int
    sequence: int  # how many events the replica had published; 0: not given
    lines: list[bytes]


def split_snapshot(text: bytes) -> SnapshotParts:
    """Split a snapshot into lines, one per reservation. Raises BadSnapshot."""
    about, lines = _split(text, _decode_head, "snapshot")
    return SnapshotParts(about.router_id, about.sequence, lines)


def _split(text: bytes, decode: Callable[[bytes], _Head], what: str) -> tuple[_Head, list[bytes]]:
    """Return the decoded fields before the list in `text`, and the list's lines, one per item."""
    head, *lines = text.rstrip().split(b"\n")
    try:
        about = decode(head + b"]}")
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadSnapshot(f"not a {what}: {error}") from None
    if not lines or lines.pop() != b"]}":
        raise BadSnapshot(f"not a {what}: its end is missing")
    return about, lines


def decode_line(line: bytes, clock: float) -> LiveReservation:
    """Decode one reservation of a snapshot. `clock` is the current time in seconds. The time of the
    reservation's last event is `clock` minus the age in the line. Raises BadSnapshot."""
    try:
        read = _decode_line(line.removesuffix(b","))
        hashes = hashes_from_json("sequence_hashes", read.sequence_hashes)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadSnapshot(str(error)) from None
    return LiveReservation(
        read.model_name,
        read.tenant_id,
        read.block_size,
        read.router_id,
        ReservationSpec(
            read.request_id,
            read.worker_id,
            read.dp_rank,
            read.lora_name,
            prefill_tokens=read.prefill_tokens,
            prefill_duration_s=read.prefill_duration_s,
            expected_output_tokens=read.expected_output_tokens,
        ),
        hashes,
        read.prefill_done,
        clock - read.age_s,
    )


# -- sessions --------------------------------------------------------------------------------------


def encode_session_list(sessions: Iterable[LiveSession]) -> Iterator[bytes]:
    """Yield the text of GET /replica_sync/sessions in parts."""
    return _listed(b'{"version":1,"sessions":[', map(_encode, sessions))


def split_session_list(text: bytes) -> list[bytes]:
    """Split GET /replica_sync/sessions into lines, one per session. Raises BadSnapshot."""
    _, lines = _split(text, _decode_session_head, "list of sessions")
    return lines


def decode_session_line(line: bytes) -> LiveSession:
    """Decode one session from GET /replica_sync/sessions. Raises BadSnapshot."""
    try:
        return _decode_session_line(line.removesuffix(b","))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadSnapshot(str(error)) from None
