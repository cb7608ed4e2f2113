"""Records of sessions: bindings, leases, and their events between replicas."""

from enum import IntEnum

import msgspec


class Binding(msgspec.Struct, eq=False, gc=False):
    """The rank of one session. Read only; SessionTable changes it.

    Of two bindings of a session, the one with the higher (sequence, writer_id) wins at every
    replica. Times are monotonic seconds."""

    worker_id: int
    dp_rank: int | None  # None: any rank of the worker; only peers send this
    sequence: int
    writer_id: int  # the replica that made the binding
    expires_at: float  # valid only without leases
    told_at: float  # when it was last published
    leases: int = 0  # live reservations of the session that were booked here

    def is_at(self, worker_id: int, dp_rank: int) -> bool:
        """Whether the binding names that rank, or all ranks of its worker."""
        return self.worker_id == worker_id and self.dp_rank in (None, dp_rank)


class Lease(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The hold of one reservation on the binding of its session."""

    session_id: str
    binding: Binding
    sequence: int  # that of the binding at booking
    writer_id: int


class SessionEvent(msgspec.Struct, frozen=True, gc=False):
    """A binding, as replicas publish it."""

    model_name: str
    tenant_id: str
    session_id: str
    worker_id: int
    dp_rank: int | None
    sequence: int
    writer_id: int


class LiveSession(msgspec.Struct, frozen=True, gc=False):
    """A binding, as a replica that catches up can adopt it."""

    event: SessionEvent
    idle_s: float  # seconds since the session's last reservation ended; 0 while it has one


class SessionVerdict(IntEnum):
    """The outcome of a peer's binding."""

    BOUND = 0  # the session had no binding here
    RENEWED = 1  # it is the known binding, or a newer one of the same rank
    REPLACED = 2  # a newer binding of another rank
    OWN = 3  # our own, returned through a subscription loop
    OFF = 4  # sessions are off here
    UNKNOWN_PARTITION = 5
    UNKNOWN_WORKER = 6  # not registered here, or for another model or tenant
    OUTDATED = 7  # older than the known one
    EXPIRED = 8  # in a snapshot: expired under our settings
    TOO_LONG = 9  # the session's id is too long
    SEQUENCE = 10  # a sequence too far ahead to be valid
    FULL = 11
