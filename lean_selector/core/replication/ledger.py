"""The ledger of a partition: booking, expiry, and publication to peers.

Both services make every change to requests, by calls or by time, through it. So the rules for what
is published, how often a live request is announced, and when it expires are only here
(slot_tracker.md section 3.5; D12). Peers' events change the slots directly (ReplicaApplier), and so
are not published again. Time is an argument: monotonic seconds.
"""

from collections.abc import Sequence
from typing import Protocol

from lean_selector.core.load.shapes import Booking, Reservation
from lean_selector.core.load.slots import Slots
from lean_selector.core.replication.events import ReplicaTarget

# How long a request admitted here lives after its last touch (D12).
RESERVATION_EXPIRY_S = 300.0
# Copies of peers' requests live this much longer: their owner expires them first (D12).
REPLICA_GRACE_S = 60.0
# An owner whose request had no event for peers announces this often that it lives (D12).
REPUBLISH_AFTER_S = 120.0


def copies_expire_s(expiry_s: float) -> float:
    """How long copies live after their last touch if reservations expire after `expiry_s`."""
    return expiry_s + REPLICA_GRACE_S


def republish_after_s(expiry_s: float) -> float:
    """Interval of those announcements if reservations expire after `expiry_s`: twice before they
    do."""
    return min(REPUBLISH_AFTER_S, 0.4 * expiry_s)


class LifecycleEvents(Protocol):
    """Callbacks for what this replica did, called in order."""

    def booked(
        self, target: ReplicaTarget, reservation: Reservation, sequence_hashes: bytes
    ) -> None: ...

    def prefill_completed(self, target: ReplicaTarget, reservation: Reservation) -> None: ...

    def freed(self, target: ReplicaTarget, reservation: Reservation) -> None: ...

    def kept_alive(self, target: ReplicaTarget, reservation: Reservation) -> None: ...


class Ledgers:
    """What the ledgers of one process share: the events, the expiry time, and the order of
    expiry."""

    def __init__(
        self,
        expiry_s: float = RESERVATION_EXPIRY_S,
        events: LifecycleEvents | None = None,
    ) -> None:
        """`events`: None without peers."""
        self.events = events
        self.republish_after_s = republish_after_s(expiry_s)
        self._expiry_s = expiry_s
        self._copies_expire_s = copies_expire_s(expiry_s)
        self._turn = 0

    def expire(
        self, ledgers: Sequence["Ledger"], now: float, max_steps: int
    ) -> list[tuple["Ledger", list[Reservation]]]:
        """Expire idle requests, at most `max_steps` in all, ledger by ledger. A step expires one.
        If it returns as many as max_steps, call again: that call continues where this one stopped,
        so no ledger waits for another's backlog."""
        gone: list[tuple[Ledger, list[Reservation]]] = []
        start = self._turn
        for at in range(start, start + len(ledgers)):
            ledger = ledgers[at % len(ledgers)]
            expired = ledger.slots.expire(now, self._expiry_s, self._copies_expire_s, max_steps)
            if not expired:
                continue
            ledger.tell_ended(expired)
            gone.append((ledger, expired))
            max_steps -= len(expired)
            if not max_steps:
                self._turn = (at + 1) % len(ledgers)
                break
        return gone


class Ledger:
    """The bookings of one (model_name, tenant_id). A method that raises has changed nothing.

    A call made here is published, wherever the request was admitted. An end without a call is
    published only if the request was admitted here: the owner of a copy does that itself.
    """

    def __init__(
        self, model_name: str, tenant_id: str, block_size: int, slots: Slots, shared: Ledgers
    ) -> None:
        self.model_name = model_name
        self.tenant_id = tenant_id
        self.block_size = block_size
        self.slots = slots
        self._events = shared.events
        self._republish_after_s = shared.republish_after_s

    def book(self, booking: Booking, sequence_hashes: bytes, now: float) -> Reservation:
        """Admit a request. Raises NotFound for an unknown rank, DuplicateRequest for a live id."""
        reservation = self.slots.book(booking, sequence_hashes, now)
        if self._events is not None:
            self._events.booked(self, reservation, sequence_hashes)
        return reservation

    def prefill_complete(self, request_id: str, now: float) -> Reservation | None:
        """Release a request's prefill tokens; repeating it is no error. None: not live."""
        completed = self.slots.prefill_complete(request_id, now)
        if completed is None:
            return None
        reservation, first = completed
        if self._events is not None:
            if first:
                reservation.published_at = now
                self._events.prefill_completed(self, reservation)
            else:
                self._keep_alive(self._events, reservation, now)
        return reservation

    def output_block(
        self,
        request_id: str,
        now: float,
        decay_fraction: float | None = None,
        blocks: int = 1,
    ) -> Reservation | None:
        """Add generated blocks, like Slots.output_block. None: not live."""
        reservation = self.slots.output_block(request_id, now, decay_fraction, blocks)
        if self._events is not None and reservation is not None:
            self._keep_alive(self._events, reservation, now)
        return reservation

    def free(self, request_id: str, now: float) -> Reservation | None:
        """Release a request. None: not live."""
        reservation = self.slots.free(request_id, now)
        if self._events is not None and reservation is not None:
            self._events.freed(self, reservation)
        return reservation

    def drop_rank(self, worker_id: int, dp_rank: int) -> list[Reservation]:
        """Remove a rank and its requests; returns them. An unknown rank has none."""
        dropped = self.slots.remove_rank(worker_id, dp_rank)
        self.tell_ended(dropped)
        return dropped

    def tell_ended(self, reservations: list[Reservation]) -> None:
        """Publish requests that ended without a call; they are gone from the slots."""
        if self._events is not None:
            for reservation in reservations:
                if not reservation.is_replica:
                    self._events.freed(self, reservation)

    def _keep_alive(self, events: LifecycleEvents, reservation: Reservation, now: float) -> None:
        """Peers did not hear of this touch: announce from time to time that the request lives
        (D12)."""
        if (
            reservation.router_id is None
            and now - reservation.published_at >= self._republish_after_s
        ):
            reservation.published_at = now
            events.kept_alive(self, reservation)
