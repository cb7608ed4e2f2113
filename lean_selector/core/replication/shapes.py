"""Records of replication: events, live bookings, publishers."""

from enum import IntEnum

import msgspec

from lean_selector.core.load.shapes import Booking


class EventKind(IntEnum):
    ADD = 0
    PREFILL_COMPLETE = 1
    FREE = 2


class ReplicaEvent(msgspec.Struct, frozen=True, gc=False):
    """One event on the wire. The prompt and most of the booking matter for ADD only."""

    kind: EventKind
    model_name: str
    tenant_id: str
    block_size: int
    router_id: int  # the sender, not always the replica that admitted the request
    booking: Booking
    sequence_hashes: bytes = b""  # 8 bytes LE per block
    sequence: int | None = None  # the sender's number for the event; the reference sends none


class Early(msgspec.Struct, frozen=True, gc=False):
    kind: EventKind
    at: float


class LiveBooking(msgspec.Struct, gc=False):
    """A booking as a peer reports it, with its outstanding `booking.prefill_tokens`."""

    model_name: str
    tenant_id: str
    block_size: int
    router_id: int  # the replica that admitted it
    booking: Booking
    sequence_hashes: bytes  # 8 bytes LE per block
    prefill_done: bool
    touched_at: float  # in the clock of this record's holder


class AwaitedFree(msgspec.Struct, frozen=True, gc=False):
    live: LiveBooking
    until: float


class Publisher(msgspec.Struct):
    """The state of one publisher's numbers."""

    router_id: int
    sequence: int  # the highest number received
    heard_at: float
    missed: int = 0
    gap_at: int = 0  # the number that revealed the last gap; 0: none, or repaired
