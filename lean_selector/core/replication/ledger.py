"""The ledger of a partition: reserves ranks, expires requests, and publishes changes to peers.

The selection service and the slot tracker change reservations only through the ledger. Only the
ledger has the rules for what is published, how often a live request is announced to peers, and when
a request expires (slot_tracker.md section 3.5; D12). Peers' events change reservations directly
(ReplicaApplier), and are not published again. Callers pass the time: monotonic seconds."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lean_selector.core.load.shapes import Reservation, ReservationSpec
from lean_selector.core.load.slots import Slots

# How many seconds after its last touch a request admitted here expires (D12).
RESERVATION_EXPIRY_S = 300.0
# How many seconds longer copies live, because their owner should expire them first (D12).
REPLICA_GRACE_S = 60.0
# Seconds after which an owner announces a live request that had no event for peers (D12).
REPUBLISH_AFTER_S = 120.0


def copies_expire_s(expiry_s: float) -> float:
    """Return after how many seconds a peer's reservation expires here; ours after `expiry_s`."""
    return expiry_s + REPLICA_GRACE_S


def republish_after_s(expiry_s: float) -> float:
    """Return the seconds between announcements of a live request to peers. At least two
    announcements fit into the `expiry_s` seconds after which an idle reservation expires."""
    return min(REPUBLISH_AFTER_S, 0.4 * expiry_s)


class ReplicaTarget(Protocol):
    """The part of a partition that replication uses."""

    @property
    def model_name(self) -> str: ...
    @property
    def tenant_id(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def slots(self) -> Slots: ...


class LifecycleEvents(Protocol):
    """Callbacks for changes of reservations at this replica, called in the order of the changes."""

    def booked(
        self, target: ReplicaTarget, reservation: Reservation, sequence_hashes: bytes
    ) -> None: ...

    def prefill_completed(self, target: ReplicaTarget, reservation: Reservation) -> None: ...

    def freed(self, target: ReplicaTarget, reservation: Reservation) -> None: ...

    def kept_alive(self, target: ReplicaTarget, reservation: Reservation) -> None: ...


class Ledgers:
    """State that the ledgers of all partitions share: callbacks, expiry time, order of expiry."""

    def __init__(
        self,
        expiry_s: float = RESERVATION_EXPIRY_S,
        events: LifecycleEvents | None = None,
    ) -> None:
        """`events` receives the changes to publish to peers; it is None if there are no peers."""
        self.events = events
        self.republish_after_s = republish_after_s(expiry_s)
        self._expiry_s = expiry_s
        self._copies_expire_s = copies_expire_s(expiry_s)
        self._turn = 0

    def expire(
        self, ledgers: Sequence["Ledger"], now: float, max_steps: int
    ) -> list[tuple["Ledger", list[Reservation]]]:
        """Expire idle requests, ledger by ledger, at most `max_steps` in total. If `max_steps`
        requests are returned, call again. The next call begins with the next ledger, so a backlog
        in one ledger does not delay other ledgers."""
        gone: list[tuple[Ledger, list[Reservation]]] = []
        start = self._turn
        for at in range(start, start + len(ledgers)):
            ledger = ledgers[at % len(ledgers)]
            expired = ledger.slots.expire(now, self._expiry_s, self._copies_expire_s, max_steps)
            if not expired:
                continue
            ledger.publish_ended(expired)
            gone.append((ledger, expired))
            max_steps -= len(expired)
            if not max_steps:
                self._turn = (at + 1) % len(ledgers)
                break
        return gone


@dataclass(eq=False)
class Ledger:
    """The reservations of one (model_name, tenant_id). A method that raises has changed nothing.

    Publishes new reservations, completed prefills and calls of `free`, also for peers' requests. If
    a request expires or loses its rank, only the replica that admitted it publishes the end."""

    model_name: str
    tenant_id: str
    block_size: int
    slots: Slots
    shared: Ledgers

    def book(self, spec: ReservationSpec, sequence_hashes: bytes, now: float) -> Reservation:
        """Admit a request. Raises NotFound for an unknown rank, DuplicateRequest for a live id."""
        reservation = self.slots.book(spec, sequence_hashes, now)
        if (events := self.shared.events) is not None:
            events.booked(self, reservation, sequence_hashes)
        return reservation

    def prefill_complete(self, request_id: str, now: float) -> Reservation | None:
        """Release a request's prefill tokens, if it has any. Return None if it is not live."""
        completed = self.slots.prefill_complete(request_id, now)
        if completed is None:
            return None
        reservation, first = completed
        if self.shared.events is not None:
            if first:
                reservation.published_at = now
                self.shared.events.prefill_completed(self, reservation)
            else:
                self._keep_alive(self.shared.events, reservation, now)
        return reservation

    def output_block(
        self,
        request_id: str,
        now: float,
        decay_fraction: float | None = None,
        blocks: int = 1,
    ) -> Reservation | None:
        """Add blocks that a request has generated. Return None if the request is not live."""
        reservation = self.slots.output_block(request_id, now, decay_fraction, blocks)
        if self.shared.events is not None and reservation is not None:
            self._keep_alive(self.shared.events, reservation, now)
        return reservation

    def free(self, request_id: str, now: float) -> Reservation | None:
        """End a request and remove its reservation. Return None if the request is not live."""
        reservation = self.slots.free(request_id, now)
        if self.shared.events is not None and reservation is not None:
            self.shared.events.freed(self, reservation)
        return reservation

    def drop_rank(self, worker_id: int, dp_rank: int) -> list[Reservation]:
        """Remove a rank and its reservations. Return the reservations; [] for an unknown rank."""
        dropped = self.slots.remove_rank(worker_id, dp_rank)
        self.publish_ended(dropped)
        return dropped

    def publish_ended(self, reservations: list[Reservation]) -> None:
        """Publish the end of these reservations, except of those that a peer admitted."""
        if self.shared.events is not None:
            for reservation in reservations:
                if not reservation.is_replica:
                    self.shared.events.freed(self, reservation)

    def _keep_alive(self, events: LifecycleEvents, reservation: Reservation, now: float) -> None:
        """Publish our request again if nothing was published about the request for long (D12)."""
        if (
            reservation.router_id is None
            and now - reservation.published_at >= self.shared.republish_after_s
        ):
            reservation.published_at = now
            events.kept_alive(self, reservation)
