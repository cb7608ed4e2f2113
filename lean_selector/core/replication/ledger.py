"""The ledger of a partition: what is booked in it, and who is told.

Whatever is done here to requests, by calls or by time, is done through it, by both services: so
what peers hear of, how often a request is said to live, and when one is given up stand here and
nowhere else (slot_tracker.md section 3.5; D12). What peers did changes the slots without it
(ReplicaApplier), and so is told to nobody. Time is an argument: monotonic seconds.
"""

from collections.abc import Sequence
from typing import Protocol

from lean_selector.core.load.shapes import Booking, Reservation
from lean_selector.core.load.slots import Slots
from lean_selector.core.replication.events import ReplicaTarget

# How long a request that was admitted here lives after its last touch (D12).
RESERVATION_EXPIRY_S = 300.0
# Copies that peers admitted outlive that by this much: their owner expires them first (D12).
REPLICA_GRACE_S = 60.0
# An owner that did nothing peers would hear of tells them that it lives this often (D12).
REPUBLISH_AFTER_S = 120.0


def copies_expire_s(expiry_s: float) -> float:
    """How long copies live after their last touch where reservations expire after `expiry_s`."""
    return expiry_s + REPLICA_GRACE_S


def republish_after_s(expiry_s: float) -> float:
    """How often to say so where reservations expire after `expiry_s`: twice before they do."""
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
    """What the ledgers of one process share: whom they tell, how long a request lives unheard of,
    and whose turn it is to expire.
    """

    def __init__(
        self,
        expiry_s: float = RESERVATION_EXPIRY_S,
        events: LifecycleEvents | None = None,
    ) -> None:
        """`events`: None where there are no peers to tell."""
        self.events = events
        self.republish_after_s = republish_after_s(expiry_s)
        self._expiry_s = expiry_s
        self._copies_expire_s = copies_expire_s(expiry_s)
        self._turn = 0

    def expire(
        self, ledgers: Sequence["Ledger"], now: float, max_steps: int
    ) -> list[tuple["Ledger", list[Reservation]]]:
        """Gives up what was not touched for too long, at most `max_steps` in all, by ledger.

        A step gives up one reservation. As many as max_steps: call again, there may be more, and
        that call goes on behind where this one stopped: nobody waits for another's backlog.
        """
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
    """What is booked in one (model_name, tenant_id). A method that raises has changed nothing.

    What a call here did is told, wherever the request was admitted; what ended without a call only
    if it was admitted here, for whoever admitted a copy sees to that one.
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
        """Admits a request. Raises NotFound for an unknown rank, DuplicateRequest for a live id."""
        reservation = self.slots.book(booking, sequence_hashes, now)
        if self._events is not None:
            self._events.booked(self, reservation, sequence_hashes)
        return reservation

    def prefill_complete(self, request_id: str, now: float) -> Reservation | None:
        """Releases a request's prefill tokens; again is no error. None: not live."""
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
        """Adds generated blocks, as Slots.output_block. None: not live."""
        reservation = self.slots.output_block(request_id, now, decay_fraction, blocks)
        if self._events is not None and reservation is not None:
            self._keep_alive(self._events, reservation, now)
        return reservation

    def free(self, request_id: str, now: float) -> Reservation | None:
        """Releases a request. None: not live."""
        reservation = self.slots.free(request_id, now)
        if self._events is not None and reservation is not None:
            self._events.freed(self, reservation)
        return reservation

    def drop_rank(self, worker_id: int, dp_rank: int) -> list[Reservation]:
        """Forgets a rank and what was on it; returns that. An unknown rank has none."""
        dropped = self.slots.remove_rank(worker_id, dp_rank)
        self.tell_ended(dropped)
        return dropped

    def tell_ended(self, reservations: list[Reservation]) -> None:
        """These ended without a call; they are gone from the slots."""
        if self._events is not None:
            for reservation in reservations:
                if not reservation.is_replica:
                    self._events.freed(self, reservation)

    def _keep_alive(self, events: LifecycleEvents, reservation: Reservation, now: float) -> None:
        """Peers do not hear of what just touched it: say now and then that it lives (D12)."""
        if (
            reservation.router_id is None
            and now - reservation.published_at >= self._republish_after_s
        ):
            reservation.published_at = now
            events.kept_alive(self, reservation)
