"""Publish events to peers, apply peers' events, count missed events, and restore reservations."""

from collections import OrderedDict
from collections.abc import Callable
from enum import IntEnum

import msgspec

from lean_selector.core.load.shapes import Reservation, ReservationSpec
from lean_selector.core.load.slots import Slots
from lean_selector.core.replication.ledger import ReplicaTarget
from lean_selector.core.replication.shapes import (
    Early,
    EventKind,
    LiveReservation,
    Publisher,
    ReplicaEvent,
)

# -- events about requests, between replicas -------------------------------------------------------
# The applier turns a peer's event into changes of our slots; the emitter turns our changes into
# events. Follows slot_tracker.md sections 3.4 from step 4 on and 3.5, with decisions D12 and D17.
# Independent of MessagePack and sockets. The applier cannot publish and the emitter cannot apply,
# so no event can circulate.

# Longer than the tasks of a 1.3 sender can delay an event; short enough that a reused request id
# (ids should be unique) does not match an old event.
EARLY_MEMORY_S = 5.0
# 10 000 early events a second for EARLY_MEMORY_S. 1.3 senders reorder events within milliseconds
# only; most entries are ends of requests whose ADD was missed. Takes 15 MB when full.
MAX_EARLY = 50_000


class Verdict(IntEnum):
    """What became of a peer's event."""

    APPLIED = 0
    OWN = 1  # our own event, which a subscription loop returned
    UNKNOWN_PARTITION = 2
    BLOCK_SIZE = 3
    RANK = 4  # ADD on a rank that is not registered or not schedulable here
    DUPLICATE = 5  # ADD of a live id, or a repeated PREFILL_COMPLETE
    FREED_EARLY = 6  # ADD whose FREE arrived first
    # PREFILL_COMPLETE or FREE before the ADD; stored for EARLY_MEMORY_S
    UNKNOWN_REQUEST = 7
    WORKER_MISMATCH = 8  # PREFILL_COMPLETE or FREE for another rank, and not from the owner


_EarlyKey = tuple[str, str, str, int, int]  # model, tenant, request id, worker id, rank


class ReplicaApplier:
    """Applies peers' events to our reservations. Creates no worker or partition; never publishes.

    `lookup(model_name, tenant_id)` finds the partition, or returns None. `counts[kind][verdict]` is
    the number of events of this kind with this result."""

    def __init__(self, router_id: int, lookup: Callable[[str, str], ReplicaTarget | None]) -> None:
        self.router_id = router_id
        self.counts = [[0] * len(Verdict) for _ in EventKind]
        self._lookup = lookup
        # FREEs and PREFILL_COMPLETEs of unknown ids, oldest first; at most MAX_EARLY. An
        # OrderedDict, because finding the oldest key of a plain dict steps over the holes that
        # removed keys leave.
        self._early: OrderedDict[_EarlyKey, Early] = OrderedDict()

    def apply(self, event: ReplicaEvent, now: float) -> Verdict:
        """Apply one event that was received at `now`. Return what became of the event."""
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
        spec = event.spec
        request_id = spec.request_id
        held = slots.reservations.get(request_id)
        if held is None:
            self._remember(event, now)
            return Verdict.UNKNOWN_REQUEST
        if (
            held.rank_load.key != (spec.worker_id, spec.dp_rank)
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
        spec = event.spec
        if (spec.worker_id, spec.dp_rank) not in slots.ranks:
            return Verdict.RANK
        early = self._early.get(_early_key(event)) if self._early else None
        if early is not None and (now - early.at > EARLY_MEMORY_S or _precedes(early, event)):
            early = None
        if early is not None and early.kind is EventKind.FREE:
            return Verdict.FREED_EARLY
        held = slots.reservations.get(spec.request_id)
        if held is not None:
            if held.router_id == event.router_id:
                slots.touch(spec.request_id, now)  # its owner announces that it still runs
            return Verdict.DUPLICATE
        if early is not None:
            spec = msgspec.structs.replace(spec, prefill_tokens=None)
        slots.book(spec, event.sequence_hashes, now, event.router_id)
        return Verdict.APPLIED

    def _remember(self, event: ReplicaEvent, now: float) -> None:
        """Store a FREE or PREFILL_COMPLETE that arrived before the request's ADD. A FREE replaces a
        PREFILL_COMPLETE. The stored event is kept for some seconds, even after the ADD has come,
        because some peers' events arrive twice."""
        early = self._early
        key = _early_key(event)
        before = early.pop(key, None)
        kind, sequence = event.kind, event.sequence
        if before is not None:
            kind = before.kind if before.kind is EventKind.FREE else kind
            if before.router_id != event.router_id or before.sequence is None:
                sequence = None
        early[key] = Early(kind, now, event.router_id, sequence)
        while len(early) > MAX_EARLY or now - next(iter(early.values())).at > EARLY_MEMORY_S:
            early.popitem(last=False)


def _precedes(early: Early, event: ReplicaEvent) -> bool:
    """Whether the sender of an ADD sent what came before it about an earlier request of that id."""
    before, number = early.sequence, event.sequence
    if before is None or number is None:
        return False
    return early.router_id == event.router_id and before < number


def _early_key(event: ReplicaEvent) -> _EarlyKey:
    """Return the key under which to store an event that came before its request's ADD. The key
    omits the sender: clients may end a request at another replica than the ADD's sender."""
    spec = event.spec
    return (
        event.model_name,
        event.tenant_id,
        spec.request_id,
        spec.worker_id,
        spec.dp_rank,
    )


class ReplicaEvents:
    """Converts changes of our reservations to events, and passes the events to `publish` in the
    order of the calls. The caller decides which changes are published."""

    def __init__(self, router_id: int, publish: Callable[[ReplicaEvent], None]) -> None:
        self.router_id = router_id
        self._publish = publish
        self.counts = [0] * len(EventKind)  # published events, by kind

    def booked(
        self, target: ReplicaTarget, reservation: Reservation, sequence_hashes: bytes
    ) -> None:
        """Publish that a request was admitted here."""
        self._publish_event(EventKind.ADD, target, reservation.spec, sequence_hashes)

    def kept_alive(self, target: ReplicaTarget, reservation: Reservation) -> None:
        """Publish the ADD of our request again, so that peers do not expire the request while it
        only generates output. A peer without the request adds it, without prefill tokens (D12)."""
        hashes = target.slots.sequence_hashes_of(reservation)
        only_blocks = msgspec.structs.replace(
            reservation.spec, track_prefill_tokens=True, prefill_tokens=None
        )
        self._publish_event(EventKind.ADD, target, only_blocks, hashes)

    def prefill_completed(self, target: ReplicaTarget, reservation: Reservation) -> None:
        """Publish that the prefill of our or a peer's request was reported complete here."""
        self._publish_event(EventKind.PREFILL_COMPLETE, target, reservation.spec)

    def freed(self, target: ReplicaTarget, reservation: Reservation) -> None:
        """Publish that a request ended here. The reservation may have been removed already."""
        self._publish_event(EventKind.FREE, target, reservation.spec)

    def _publish_event(
        self,
        kind: EventKind,
        target: ReplicaTarget,
        spec: ReservationSpec,
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
                spec,
                sequence_hashes,
            )
        )


# -- missed events ---------------------------------------------------------------------------------
# Detect missed events: a publisher numbers its events from 1.
#
# A PUB socket drops what a subscriber does not read in time, and never sends events that were
# published while a connection was down. So if a number does not follow the last one, it shows how
# many events were missed. A heartbeat shows losses at the end. The reference does not number events
# (decision D24). Independent of sockets. Time is an argument, in seconds.

# Twice the maximum number of peers, because a restarted replica is a new publisher. The publisher
# that was silent longest is dropped first.
MAX_PUBLISHERS = 512
# A peer that is subscribed to under two names delivers everything twice. The second copy is late by
# at most the length of the peer's queues. A number that is lower still comes from another counter.
MAX_LATE = 1_000_000
# 30 years of 1 000 events a second: a number that is further ahead is invalid.
MAX_JUMP = 2**40


class ReplicaSequences:
    """Detects missed events by the numbers that replicas give to their events."""

    def __init__(self) -> None:
        self.missed = 0  # events missed in total
        self._publishers: OrderedDict[int, Publisher] = OrderedDict()  # most recently heard last

    def publishers(self) -> list[Publisher]:
        """Return the replicas that number their events, sorted by router id."""
        return sorted(self._publishers.values(), key=lambda publisher: publisher.router_id)

    def behind(self) -> list[Publisher]:
        """Return the replicas with missed events that no later snapshot covers."""
        return [publisher for publisher in self._publishers.values() if publisher.gap_at]

    def event(self, router_id: int, sequence: int, now: float) -> int:
        """Record a received event's number. Return how many events just before it we missed."""
        return self._record(router_id, sequence, sequence - 1, now)

    def heartbeat(self, router_id: int, sequence: int, now: float) -> int:
        """Record the last number a replica used. Return how many of its last events we missed."""
        return self._record(router_id, sequence, sequence, now)

    def mended(self, router_id: int, sequence: int) -> bool:
        """Record that a snapshot has all events up to `sequence`. True if this closes a gap."""
        publisher = self._publishers.get(router_id)
        if publisher is None or not 0 < publisher.gap_at <= sequence:
            return False
        publisher.gap_at = 0
        return True

    def _record(self, router_id: int, sequence: int, before: int, now: float) -> int:
        """Record `sequence`. Return how many events we missed after the last, up to `before`."""
        publisher = self._publishers.get(router_id)
        if publisher is None:
            if len(self._publishers) >= MAX_PUBLISHERS:
                self._publishers.popitem(last=False)
            self._publishers[router_id] = Publisher(router_id, sequence, now)
            return 0  # events before our subscription do not count as missed
        self._publishers.move_to_end(router_id)
        publisher.heard_at = now
        last = publisher.sequence
        if sequence <= last and last - sequence <= MAX_LATE:
            return 0
        publisher.sequence = sequence
        if sequence < last or before - last > MAX_JUMP or before == last:
            return 0
        missed = before - last
        publisher.missed += missed
        publisher.gap_at = sequence
        self.missed += missed
        return missed


# -- restoring -------------------------------------------------------------------------------------
# Restore the reservations that were live when an earlier process ended.
#
# These are not published, because peers already know them. Time is an argument, in this process's
# monotonic seconds, and may be before its start.


def restore(target: ReplicaTarget, live: LiveReservation, router_id: int | None) -> bool:
    """Restore a reservation from before a restart, with its old times. Call this for the least
    recently active reservation first.

    `router_id` is the peer that admitted the request; None: this replica. Return False, and books
    nothing, if the rank is not registered, the id is already live, or the block size differs."""
    slots, spec = target.slots, live.spec
    request_id = spec.request_id
    if (
        live.block_size != target.block_size
        or (spec.worker_id, spec.dp_rank) not in slots.ranks
        or request_id in slots.reservations
    ):
        return False
    booked = slots.book(spec, live.sequence_hashes, live.touched_at, router_id)
    booked.ahead_tokens = 0  # what waited as it was booked is unknown
    if live.prefill_done:
        slots.prefill_complete(request_id, live.touched_at)
    return True
