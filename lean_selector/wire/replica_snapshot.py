"""The text of GET /replica_sync/snapshot: the live reservations of a replica, one per line.

It is JSON as a whole, and each reservation stands on a line of its own, so that a reader can take
it apart without parsing all of it at once. Ages instead of times: replicas share no clock.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import msgspec

from lean_selector.core.load.booking import Booking
from lean_selector.core.replication.records import LiveBooking
from lean_selector.wire.replica_shapes import SnapshotHead, SnapshotLine
from lean_selector.wire.scalars import hashes_from_json, unpack_signed


class BadSnapshot(ValueError):
    """The text is no snapshot; the message says why."""


_encode = msgspec.json.Encoder().encode
_decode_head = msgspec.json.Decoder(SnapshotHead).decode
_decode_line = msgspec.json.Decoder(SnapshotLine).decode


def encode_snapshot(
    router_id: int, sequence: int, listed: Iterable[LiveBooking], clock: Callable[[], float]
) -> Iterator[bytes]:
    """The text in parts; ages are counted by `clock`, monotonic seconds.

    `sequence`: how many events this replica has published; what they tell must be in `listed`.
    """
    yield b'{"version":1,"router_id":%d,"sequence":%d,"reservations":[' % (router_id, sequence)
    end = b"\n"
    for live in listed:
        booking = live.booking
        yield end + _encode(
            SnapshotLine(
                live.model_name,
                live.tenant_id,
                live.block_size,
                booking.request_id,
                booking.worker_id,
                booking.dp_rank,
                live.router_id,
                max(0.0, round(clock() - live.touched_at, 3)),
                booking.prefill_tokens or 0,
                live.prefill_done,
                booking.prefill_duration_s,
                booking.expected_output_tokens,
                booking.lora_name,
                msgspec.Raw(_encode(unpack_signed(live.sequence_hashes))),
            )
        )
        end = b",\n"
    yield b"\n]}"


class SnapshotParts(NamedTuple):
    """A snapshot whose reservations are still to be read."""

    router_id: int
    sequence: int  # how many events its replica had published; 0: it does not say
    lines: list[bytes]


def split_snapshot(text: bytes) -> SnapshotParts:
    """Takes the text apart by lines; raises BadSnapshot."""
    head, *lines = text.rstrip().split(b"\n")
    try:
        about = _decode_head(head + b"]}")
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BadSnapshot(f"not a snapshot: {error}") from None
    if not lines or lines.pop() != b"]}":
        raise BadSnapshot("not a snapshot: its end is missing")
    return SnapshotParts(about.router_id, about.sequence, lines)


def decode_line(line: bytes, clock: float) -> LiveBooking:
    """One reservation, times in the clock that says `clock` now; raises BadSnapshot."""
    try:
        read = _decode_line(line.removesuffix(b","))
        hashes = hashes_from_json("sequence_hashes", read.sequence_hashes)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise BadSnapshot(str(error)) from None
    return LiveBooking(
        read.model_name,
        read.tenant_id,
        read.block_size,
        read.router_id,
        Booking(
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
