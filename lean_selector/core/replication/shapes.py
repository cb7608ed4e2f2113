"""What replicas tell each other, and what is kept of it."""

from enum import IntEnum

import msgspec

from lean_selector.core.load.shapes import Booking


class EventKind(IntEnum):
    ADD = 0
    PREFILL_COMPLETE = 1
    FREE = 2


class ReplicaEvent(msgspec.Struct, frozen=True, gc=False):
    """One event on the wire. Beyond its ids and its adapter the booking matters for ADD only, and
    so does the prompt.
    """

    kind: EventKind
    model_name: str
    tenant_id: str
    block_size: int
    router_id: int  # the sender's, which need not be where the request was admitted
    booking: Booking
    sequence_hashes: bytes = b""  # 8 bytes LE per block
    sequence: int | None = None  # as heard: its number among the sender's; a reference gives none


class Early(msgspec.Struct, frozen=True, gc=False):
    kind: EventKind
    at: float


class LiveBooking(msgspec.Struct, gc=False):
    """A booking as a peer holds it; `booking.prefill_tokens` are those outstanding."""

    model_name: str
    tenant_id: str
    block_size: int
    router_id: int  # of the replica that admitted it
    booking: Booking
    sequence_hashes: bytes  # 8 bytes LE per block
    prefill_done: bool
    touched_at: float  # in the clock of whoever holds this record


class AwaitedFree(msgspec.Struct, frozen=True, gc=False):
    live: LiveBooking
    until: float


class Publisher(msgspec.Struct):
    """What is known of one publisher's numbers."""

    router_id: int
    sequence: int  # the highest that was heard
    heard_at: float
    missed: int = 0
    gap_at: int = 0  # the number that showed the last gap; 0: no gap, or it was mended since
