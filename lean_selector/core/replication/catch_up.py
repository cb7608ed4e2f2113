"""Copy live reservations from peers' snapshots, at start or after missed events.

A reservation waits until its rank is registered here. Events about a request that arrive before the
request's reservation are recorded. Dynamo has no catch-up (decision D22; slot_tracker.md 3.1).
Independent of HTTP and sockets. Callers pass the time, in monotonic seconds."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum

import msgspec

from lean_selector.core.load.shapes import Booking, Reservation
from lean_selector.core.rank_bits import RankKey
from lean_selector.core.replication.events import ReplicaTarget, Verdict
from lean_selector.core.replication.shapes import AwaitedFree, EventKind, LiveBooking, ReplicaEvent

# How long a booking may wait for its rank. A control plane registers workers within seconds of a
# start; after a minute it must have failed, and clients may have ended the request.
HOLD_S = 60.0
# Limit of waiting bookings and of recorded ids: a 60 s backlog of 3 000 bookings a second. Takes
# 150 MB when full, with prompts of 64 blocks.
MAX_WAITING = 200_000
MAX_NOTED = 200_000

_Id = tuple[str, str, str]  # model_name, tenant_id, request_id
_Rank = tuple[str, str, int, int]  # model_name, tenant_id, worker_id, dp_rank


class Fate(IntEnum):
    """What became of a reservation in a peer's snapshot."""

    BOOKED = 0
    WAITING = 1  # its rank is not registered here yet
    HELD = 2  # the id is already live
    ENDED = 3  # its end arrived first
    EXPIRED = 4
    BLOCK_SIZE = 5
    NOT_REGISTERED = 6  # it waited for HOLD_S, or too many were waiting


class CatchUp:
    """Copies reservations from peers' snapshots until `ends_at`. Publishes nothing.

    Until then, pass each event that this replica receives or publishes to `note`, after applying
    the event. `counts[fate]` is the number of reservations with that outcome. A reservation of a
    snapshot that had to wait for its rank counts twice: as WAITING, and with its final outcome."""

    def __init__(
        self,
        router_id: int,
        lookup: Callable[[str, str], ReplicaTarget | None],
        copies_expire_s: float,
        now: float,
    ) -> None:
        self.counts = [0] * len(Fate)
        self._router_id = router_id
        self._lookup = lookup
        self._copies_expire_s = copies_expire_s
        # Oldest first. OrderedDicts, because finding the oldest key of a plain dict steps over the
        # holes that removed keys leave.
        self._waiting: OrderedDict[_Id, AwaitedFree] = OrderedDict()
        self._by_rank: dict[_Rank, dict[_Id, LiveBooking]] = {}  # by rank; no dict is empty
        self.begin_again(now)

    def begin_again(self, now: float) -> None:
        """Prepare for another snapshot. Copies whose rank is unregistered keep their deadlines."""
        self.ends_at = now + HOLD_S
        # Until the snapshot is complete: received ends and prefill completions, the oldest first.
        self._noted: OrderedDict[tuple[_Id, int, int], EventKind] | None = OrderedDict()

    def fates(self) -> Iterator[tuple[Fate, int]]:
        """Yield (outcome, number of reservations) for outcomes that occurred. For WAITING, only the
        reservations that wait for their rank now are counted."""
        counts = [*self.counts]
        counts[Fate.WAITING] = len(self._waiting)
        return ((fate, counts[fate]) for fate in Fate if counts[fate])

    def note(self, event: ReplicaEvent, verdict: Verdict | None, now: float) -> None:
        """Record an applied event. `verdict` is the result of a peer's event; None for our own."""
        booking = event.booking
        booking_id = event.model_name, event.tenant_id, booking.request_id
        waiting = self._waiting.get(booking_id)
        if event.kind is EventKind.ADD:
            if verdict in (Verdict.UNKNOWN_PARTITION, Verdict.RANK) and waiting is None:
                self._wait(_heard(event, now), now)
            return
        if self._noted is not None:
            key = booking_id, booking.worker_id, booking.dp_rank
            if self._noted.get(key) is not EventKind.FREE:
                self._noted[key] = event.kind
            if len(self._noted) > MAX_NOTED:
                self._noted.popitem(last=False)
        if waiting is None:
            return
        held = waiting.live
        if _key_of(held.booking) != _key_of(booking):
            return
        if event.kind is EventKind.FREE:
            self._wait_no_more(held)
            self.counts[Fate.ENDED] += 1
        else:
            _complete_prefill(held, now)

    def take(self, live: LiveBooking, now: float) -> Fate:
        """Copy one reservation from a snapshot; its `touched_at` must be in our clock's time.
        Within a partition, call this for the most recently active reservation first."""
        fate = self._take(live, now)
        self.counts[fate] += 1
        return fate

    def snapshot_is_in(self) -> None:
        """Stop recording ends and completed prefills: the snapshot is complete or has failed."""
        self._noted = None

    def admit_waiting(self, now: float, max_steps: int) -> bool:
        """Copy reservations whose ranks are now registered, and drop reservations that waited too
        long for their rank. Handles at most `max_steps` reservations; True if more are left."""
        steps_left = max_steps
        for (model_name, tenant_id, worker_id, dp_rank), bookings in list(self._by_rank.items()):
            target = self._lookup(model_name, tenant_id)
            if target is None or (worker_id, dp_rank) not in target.slots.ranks:
                continue
            while bookings:
                if not steps_left:
                    return True
                steps_left -= 1
                booking_id, booking = bookings.popitem()
                del self._waiting[booking_id]
                self.counts[self._book(target, booking, now)] += 1
            del self._by_rank[model_name, tenant_id, worker_id, dp_rank]
        while self._waiting:
            oldest = next(iter(self._waiting.values()))
            if now < oldest.until:
                break
            if not steps_left:
                return True
            steps_left -= 1
            self._wait_no_more(oldest.live)
            self.counts[Fate.NOT_REGISTERED] += 1
        return False

    def give_up_waiting(self) -> None:
        """Drop peers' reservations that still wait for their ranks to be registered here."""
        self.counts[Fate.NOT_REGISTERED] += len(self._waiting)
        self._waiting.clear()
        self._by_rank.clear()

    def _take(self, live: LiveBooking, now: float) -> Fate:
        if live.router_id == self._router_id:
            return Fate.HELD  # our own booking: our state is newer
        key = _id_of(live), live.booking.worker_id, live.booking.dp_rank
        heard = None if self._noted is None else self._noted.get(key)
        if heard is EventKind.FREE:
            return Fate.ENDED
        if heard is EventKind.PREFILL_COMPLETE:
            _complete_prefill(live, now)
        if key[0] in self._waiting:
            return Fate.HELD
        target = self._lookup(live.model_name, live.tenant_id)
        if target is None or _key_of(live.booking) not in target.slots.ranks:
            return self._wait(live, now)
        return self._book(target, live, now)

    def _wait(self, live: LiveBooking, now: float) -> Fate:
        if len(self._waiting) >= MAX_WAITING:
            return Fate.NOT_REGISTERED
        booking_id = _id_of(live)
        self._waiting[booking_id] = AwaitedFree(live, now + HOLD_S)
        self._by_rank.setdefault(_rank_of(live), {})[booking_id] = live
        return Fate.WAITING

    def _wait_no_more(self, live: LiveBooking) -> None:
        booking_id, rank = _id_of(live), _rank_of(live)
        del self._waiting[booking_id]
        of_rank = self._by_rank[rank]
        del of_rank[booking_id]
        if not of_rank:
            del self._by_rank[rank]

    def _book(self, target: ReplicaTarget, live: LiveBooking, now: float) -> Fate:
        if live.block_size != target.block_size:
            return Fate.BLOCK_SIZE
        slots, request_id = target.slots, live.booking.request_id
        if request_id in slots.reservations:
            return Fate.HELD
        if now - live.touched_at > self._copies_expire_s:
            return Fate.EXPIRED
        copy = slots.book(live.booking, live.sequence_hashes, now, live.router_id)
        if live.prefill_done:
            slots.prefill_complete(request_id, now)
        slots.backdate(copy, live.touched_at)
        return Fate.BOOKED


def ended_meanwhile(
    targets: Iterable[ReplicaTarget], router_id: int, listed: list[LiveBooking], asked_at: float
) -> Iterator[ReplicaEvent | None]:
    """Compare our copies of a replica's requests with its snapshot; yield the events we missed.

    `listed` is the snapshot, requested at `asked_at`. Yields FREE for a request that the snapshot
    does not list on the same rank, and PREFILL_COMPLETE if the prefill is complete only in the
    snapshot. For any other request, and for each request whose last activity was at `asked_at` or
    later, yields None, so that the caller may pause."""
    by_id = {_id_of(live): live for live in listed if live.router_id == router_id}
    for target in targets:
        for held in list(target.slots.reservations.values()):
            live = by_id.get((target.model_name, target.tenant_id, held.request_id))
            if live is not None and _key_of(live.booking) != held.rank.key:
                live = None
            if (
                held.router_id != router_id
                or held.touched_at >= asked_at
                or (live is not None and (held.prefill_done or not live.prefill_done))
            ):
                yield None
                continue
            yield ReplicaEvent(
                EventKind.FREE if live is None else EventKind.PREFILL_COMPLETE,
                target.model_name,
                target.tenant_id,
                target.block_size,
                router_id,
                held.booking,
            )


def live_booking(target: ReplicaTarget, held: Reservation, own_router_id: int) -> LiveBooking:
    """Convert a live reservation for a snapshot. Blocks that the request generated are left out."""
    live = LiveBooking(
        target.model_name,
        target.tenant_id,
        target.block_size,
        own_router_id if held.router_id is None else held.router_id,
        held.booking,
        target.slots.sequence_hashes_of(held),
        held.prefill_done,
        held.touched_at,
    )
    if held.prefill_tokens != (held.booking.prefill_tokens or 0):
        live.booking = msgspec.structs.replace(held.booking, prefill_tokens=held.prefill_tokens)
    return live


def _heard(event: ReplicaEvent, now: float) -> LiveBooking:
    return LiveBooking(
        event.model_name,
        event.tenant_id,
        event.block_size,
        event.router_id,
        event.booking,
        event.sequence_hashes,
        False,
        now,
    )


def _complete_prefill(live: LiveBooking, now: float) -> None:
    live.booking = msgspec.structs.replace(live.booking, prefill_tokens=0)
    live.prefill_done, live.touched_at = True, now


def _id_of(live: LiveBooking) -> _Id:
    return live.model_name, live.tenant_id, live.booking.request_id


def _rank_of(live: LiveBooking) -> _Rank:
    return live.model_name, live.tenant_id, *_key_of(live.booking)


def _key_of(booking: Booking) -> RankKey:
    return booking.worker_id, booking.dp_rank
