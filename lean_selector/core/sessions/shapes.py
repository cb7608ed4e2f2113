"""Records of sessions: bindings, leases, and their events between replicas."""

from enum import IntEnum

import msgspec


class Binding(msgspec.Struct, eq=False, gc=False):
    """The rank of one session. Read only; only SessionTable changes it.

    Of two bindings of a session the one with the higher (sequence, writer_id) wins, at every
    replica. Times are monotonic seconds.
    """

    worker_id: int
    dp_rank: int | None  # None: any rank of the worker; only peers send that
    sequence: int
    writer_id: int  # id of the replica that made it
    expires_at: float  # meaningful only while nothing holds it
    told_at: float  # when it was last published
    leases: int = 0  # live reservations of the session that were booked here

    def is_at(self, worker_id: int, dp_rank: int) -> bool:
        """Whether the binding names that rank, or all of its worker's."""
        return self.worker_id == worker_id and self.dp_rank in (None, dp_rank)


class Lease(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The hold of one reservation on the binding of its session."""

    session_id: str
    binding: Binding
    sequence: int  # of the binding when it was booked
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
    idle_s: float  # seconds since the session's last reservation there; 0 while it has one


class SessionVerdict(IntEnum):
    """The outcome of a peer's binding."""

    BOUND = 0  # the session had no binding here
    RENEWED = 1  # the known binding, or a newer one of the same rank
    REPLACED = 2  # a newer one of another rank
    OWN = 3  # our own, returned through a loop of subscriptions
    OFF = 4  # sessions are off here
    UNKNOWN_PARTITION = 5
    UNKNOWN_WORKER = 6  # not registered here, or for another model or tenant
    OUTDATED = 7  # older than the known one
    EXPIRED = 8  # in a snapshot: expired by our settings
    TOO_LONG = 9  # the session's id is too long
    SEQUENCE = 10  # a sequence that no correct replica reaches
    FULL = 11
