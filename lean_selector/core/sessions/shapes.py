"""What is kept of sessions, and what replicas tell each other of them."""

from enum import IntEnum

import msgspec


class Binding(msgspec.Struct, eq=False, gc=False):
    """The rank of one session. Read it anywhere; only SessionTable changes it.

    Of two bindings of a session the one of the higher (sequence, writer_id) counts, at every
    replica. Times are monotonic seconds.
    """

    worker_id: int
    dp_rank: int | None  # None: any rank of the worker; only a peer says so
    sequence: int
    writer_id: int  # of the replica that made it
    expires_at: float  # means something only while nothing holds it
    told_at: float  # when peers were last told of it
    leases: int = 0  # live reservations of the session that were booked here

    def is_at(self, worker_id: int, dp_rank: int) -> bool:
        """True when that rank is the one, or one of those, that it names."""
        return self.worker_id == worker_id and self.dp_rank in (None, dp_rank)


class Lease(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The hold of one reservation on the binding of its session."""

    session_id: str
    binding: Binding
    sequence: int  # of the binding when it was booked
    writer_id: int


class SessionEvent(msgspec.Struct, frozen=True, gc=False):
    """A binding as replicas tell it."""

    model_name: str
    tenant_id: str
    session_id: str
    worker_id: int
    dp_rank: int | None
    sequence: int
    writer_id: int


class LiveSession(msgspec.Struct, frozen=True, gc=False):
    """A binding as a replica that catches up may take it over."""

    event: SessionEvent
    idle_s: float  # since its session last had a reservation; 0 while it has one


class SessionVerdict(IntEnum):
    """What became of a peer's binding."""

    BOUND = 0  # the session had none here
    RENEWED = 1  # the one that is known, or a newer one of the same rank
    REPLACED = 2  # a newer one of another rank
    OWN = 3  # it is ours, come back through a loop of subscriptions
    OFF = 4  # sessions are off here
    UNKNOWN_PARTITION = 5
    UNKNOWN_WORKER = 6  # not registered here, or for another model or tenant
    OUTDATED = 7  # older than the one that is known
    EXPIRED = 8  # of a snapshot: past its time by our settings
    TOO_LONG = 9  # the session's id
    SEQUENCE = 10  # no honest replica counts that far
    FULL = 11
