"""Structs for sessions: their bindings to ranks, their reservations, and replicas' events."""

from enum import IntEnum
from typing import Annotated

import msgspec

from lean_selector.core.numbers import U32, U64, U64_MAX


class Binding(msgspec.Struct, eq=False, gc=False):
    """The rank to which a session is bound. Only SessionTable may change a binding.

    If replicas bind a session to different ranks, the binding with the higher (sequence, writer_id)
    wins at every replica. Times are monotonic seconds."""

    worker_id: int
    dp_rank: int | None  # None: any rank of the worker; only peers send None
    sequence: int
    writer_id: int  # the replica that made the binding
    expires_at: float  # only valid if there are no reservations
    told_at: float  # when the binding was last published
    reservations: int = 0  # live reservations of the session, booked here

    def is_at(self, worker_id: int, dp_rank: int) -> bool:
        """Whether the session is bound to this rank, or to the worker as a whole."""
        return self.worker_id == worker_id and self.dp_rank in (None, dp_rank)


class SessionReservation(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A session's live reservation, which keeps the session's binding from expiring."""

    session_id: str
    binding: Binding
    sequence: int  # the binding's sequence when the reservation was booked
    writer_id: int


class SessionEvent(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A binding as replicas publish it, with the fields and in the order of Dynamo."""

    model_name: str
    routing_group: str  # the tenant
    session_id: str
    worker_id: U64
    dp_rank: U32 | None = None
    sequence: U64
    writer_id: U64


class LiveSession(SessionEvent, frozen=True, gc=False, kw_only=True):
    """A binding in a snapshot, which a replica requests to learn the live sessions."""

    routing_group: str = msgspec.field(name="tenant_id")
    # seconds since the session's last reservation ended; 0 while it has one
    idle_s: Annotated[float, msgspec.Meta(ge=0.0)]

    def __post_init__(self) -> None:
        if max(self.worker_id, self.sequence, self.writer_id) > U64_MAX:
            raise msgspec.ValidationError("Expected a u64")


class SessionVerdict(IntEnum):
    """The result of applying a binding that a peer has published."""

    BOUND = 0  # the session had no binding here
    RENEWED = 1  # the known binding, or a newer one with the same rank
    REPLACED = 2  # a newer binding with another rank
    OWN = 3  # our own binding, which a subscription loop returned
    OFF = 4  # sessions are off here
    UNKNOWN_PARTITION = 5
    UNKNOWN_WORKER = 6  # the worker is not registered here, or has another model or tenant
    OUTDATED = 7  # older than the known binding
    EXPIRED = 8  # in a snapshot: it has expired under our settings
    TOO_LONG = 9  # the session's id is too long
    SEQUENCE = 10  # a sequence too far ahead to be valid
    FULL = 11
