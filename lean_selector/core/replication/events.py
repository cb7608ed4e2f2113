"""What replicas tell each other about requests, and what hearing it does.

Owns the applier (a peer's event -> our slots) and the emitter (our change -> an
event). Follows slot_tracker.md sections 3.4 from step 4 on and 3.5, with decisions D12 and D17.
Knows nothing of MessagePack or sockets. The applier has no way to publish and the emitter none to
apply, so an event cannot go round in circles.
"""

from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

import msgspec

from lean_selector.core.load.booking import Booking
from lean_selector.core.load.reservation import Reservation
from lean_selector.core.load.slots import Slots
from lean_selector.core.replication.records import Early, EventKind, ReplicaEvent

# Long enough for tasks of a 1.3 sender to overtake each other, short enough that a request id which
# is used again (ids ought to be unique) is not taken for a late one.
EARLY_MEMORY_S = 5.0
# 10 000 early events a second, for EARLY_MEMORY_S. 1.3 senders reorder by milliseconds; what fills
# it is the end of requests whose ADD we missed. 15 MB when full.
MAX_EARLY = 50_000


class Verdict(IntEnum):
    """What became of a peer's event."""

    APPLIED = 0
    OWN = 1  # it is ours, come back through a loop of subscriptions
    UNKNOWN_PARTITION = 2
    BLOCK_SIZE = 3
    RANK = 4  # ADD on a rank that is not registered, or not schedulable, here
    DUPLICATE = 5  # ADD of an id that is held, or a repeated PREFILL_COMPLETE
    FREED_EARLY = 6  # ADD whose FREE came first
    UNKNOWN_REQUEST = 7  # PREFILL_COMPLETE or FREE, now remembered for EARLY_MEMORY_S
    WORKER_MISMATCH = 8  # PREFILL_COMPLETE or FREE for another rank, from another than the owner


class ReplicaTarget(Protocol):
    """One partition as replication sees it."""

    @property
    def model_name(self) -> str: ...
    @property
    def tenant_id(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def slots(self) -> Slots: ...


_EarlyKey = tuple[str, str, str, int, int]  # model, tenant, request id, worker id, rank


class ReplicaApplier:
    """Applies peers' events to our slots. Never creates workers or partitions, never publishes.

    `lookup(model_name, tenant_id)` finds the partition, None when there is none.
    `counts[kind][verdict]` is how many events of a kind ended in a verdict.
    """

    def __init__(self, router_id: int, lookup: Callable[[str, str], ReplicaTarget | None]) -> None:
        self.router_id = router_id
        self.counts = [[0] * len(Verdict) for _ in EventKind]
        self._lookup = lookup
        # FREEs and PREFILL_COMPLETEs of unknown ids, oldest first; at most MAX_EARLY. An
        # OrderedDict, because the oldest of a plain dict is behind all the holes of older ones.
        self._early: OrderedDict[_EarlyKey, Early] = OrderedDict()

    def apply(self, event: ReplicaEvent, now: float) -> Verdict:
        """Apply one event heard at `now`; the first booking of an id wins."""
        verdict = self._apply(event, now)
        self.counts[event.kind][verdict] += 1
        return verdict

    def _apply(self, event: ReplicaEvent, now: float) -> Verdict:
        if event.router_id == self.router_id:
            return Verdict.OWN
        target = self._lookup(event.model_name, event.tenant_id)
        if target is None:
            return Verdict.UNKNOWN_PARTITION
        if event.block_size != target.block_size:
            return Verdict.BLOCK_SIZE
        slots = target.slots
        if event.kind is EventKind.ADD:
            return self._add(slots, event, now)
        booking = event.booking
        request_id = booking.request_id
        held = slots.reservations.get(request_id)
        if held is None:
            self._remember(event, now)
            return Verdict.UNKNOWN_REQUEST
        if (
            held.rank.key != (booking.worker_id, booking.dp_rank)
            and held.router_id != event.router_id
        ):
            return Verdict.WORKER_MISMATCH
        if event.kind is EventKind.FREE:
            slots.free(request_id, now)
            return Verdict.APPLIED
        completed = slots.prefill_complete(request_id, now)
        assert completed is not None, "the reservation was there a moment ago"
        return Verdict.APPLIED if completed[1] else Verdict.DUPLICATE

    def _add(self, slots: Slots, event: ReplicaEvent, now: float) -> Verdict:
        booking = event.booking
        if (booking.worker_id, booking.dp_rank) not in slots.ranks:
            return Verdict.RANK
        early = self._early.get(_early_key(event)) if self._early else None
        if early is not None and now - early.at > EARLY_MEMORY_S:
            early = None
        if early is not None and early.kind is EventKind.FREE:
            return Verdict.FREED_EARLY
        held = slots.reservations.get(booking.request_id)
        if held is not None:
            if held.router_id == event.router_id:
                slots.touch(booking.request_id, now)  # the owner says that it still runs
            return Verdict.DUPLICATE
        if early is not None:
            booking = msgspec.structs.replace(booking, prefill_tokens=None)
        slots.book(booking, event.sequence_hashes, now, event.router_id)
        return Verdict.APPLIED

    def _remember(self, event: ReplicaEvent, now: float) -> None:
        """Keep an early FREE or PREFILL_COMPLETE; a FREE outweighs the other.

        It stays until it is too old, also after its ADD came: a peer subscribed to under two names
        delivers everything twice.
        """
        early = self._early
        key = _early_key(event)
        before = early.pop(key, None)
        kind = before.kind if before is not None and before.kind is EventKind.FREE else event.kind
        early[key] = Early(kind, now)
        while len(early) > MAX_EARLY or now - next(iter(early.values())).at > EARLY_MEMORY_S:
            early.popitem(last=False)


def _early_key(event: ReplicaEvent) -> _EarlyKey:
    """Without the sender: whoever is called says that a request has ended, and its event comes by
    another connection than the ADD of the replica that admitted the request.
    """
    booking = event.booking
    return (
        event.model_name,
        event.tenant_id,
        booking.request_id,
        booking.worker_id,
        booking.dp_rank,
    )


class ReplicaEvents:
    """Turns what was done here into events and hands them to `publish`, in the order of the calls.

    Its caller, the ledger, decides what is worth telling.
    """

    def __init__(self, router_id: int, publish: Callable[[ReplicaEvent], None]) -> None:
        self.router_id = router_id
        self._publish = publish
        self.counts = [0] * len(EventKind)  # published, by kind

    def booked(
        self, target: ReplicaTarget, reservation: Reservation, sequence_hashes: bytes
    ) -> None:
        """A request was admitted here."""
        self._tell(EventKind.ADD, target, reservation.booking, sequence_hashes)

    def kept_alive(self, target: ReplicaTarget, reservation: Reservation) -> None:
        """Only what peers do not hear of, as output blocks, keeps a request of ours: it lives.

        A peer that holds the id notes that and no more; one that does not books the blocks (D12).
        """
        hashes = target.slots.sequence_hashes_of(reservation)
        only_blocks = msgspec.structs.replace(
            reservation.booking, track_prefill_tokens=True, prefill_tokens=None
        )
        self._tell(EventKind.ADD, target, only_blocks, hashes)

    def prefill_completed(self, target: ReplicaTarget, reservation: Reservation) -> None:
        """A request's prefill was completed by a call here, wherever it was admitted."""
        self._tell(EventKind.PREFILL_COMPLETE, target, reservation.booking)

    def freed(self, target: ReplicaTarget, reservation: Reservation) -> None:
        """A request ended here; the reservation may be gone from its slots already."""
        self._tell(EventKind.FREE, target, reservation.booking)

    def _tell(
        self,
        kind: EventKind,
        target: ReplicaTarget,
        booking: Booking,
        sequence_hashes: bytes = b"",
    ) -> None:
        self.counts[kind] += 1
        self._publish(
            ReplicaEvent(
                kind,
                target.model_name,
                target.tenant_id,
                target.block_size,
                self.router_id,
                booking,
                sequence_hashes,
            )
        )
