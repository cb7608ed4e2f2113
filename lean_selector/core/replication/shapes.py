"""Structs for replication: events, live reservations, and peers' event numbers."""

from enum import IntEnum

import msgspec

from lean_selector.core.load.shapes import ReservationSpec


class EventKind(IntEnum):
    ADD = 0
    PREFILL_COMPLETE = 1
    FREE = 2


class ReplicaEvent(msgspec.Struct, frozen=True, gc=False):
    """One event between replicas. Only an ADD needs the prompt and most fields of `spec`."""

    kind: EventKind
    model_name: str
    tenant_id: str
    block_size: int
    router_id: int  # the sender, which may not be the replica that admitted the request
    spec: ReservationSpec
    sequence_hashes: bytes = b""  # 8 bytes LE per block
    sequence: int | None = None  # the sender's number for the event; the reference sends none


class Early(msgspec.Struct, frozen=True, gc=False):
    kind: EventKind
    at: float
    router_id: int  # the sender
    sequence: int | None  # its number for the event; None: unknown, or others also sent such events


class LiveReservation(msgspec.Struct, gc=False):
    """A live reservation in a snapshot. `spec.prefill_tokens` omits tokens already computed."""

    model_name: str
    tenant_id: str
    block_size: int
    router_id: int  # the replica that admitted it
    spec: ReservationSpec
    sequence_hashes: bytes  # 8 bytes LE per block
    prefill_done: bool
    touched_at: float  # on the clock of the process that holds this record


class Publisher(msgspec.Struct):
    """Which numbered events of one replica were received."""

    router_id: int
    sequence: int  # the highest number received
    heard_at: float
    missed: int = 0
    gap_at: int = 0  # the number that revealed the last gap; 0: no gap, or it is closed
