"""Copy live reservations from peers' snapshots.

Events that arrive while a snapshot is on its way count more than the snapshot. Dynamo has no
catch-up (decision D22; slot_tracker.md 3.1). Independent of HTTP and sockets. Callers pass the
time, in monotonic seconds."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum

import msgspec

from lean_selector.core.load.shapes import Reservation, ReservationSpec
from lean_selector.core.rank_bits import RankKey
from lean_selector.core.replication.ledger import ReplicaTarget
from lean_selector.core.replication.shapes import EventKind, LiveReservation, ReplicaEvent

MAX_NOTED = 200_000  # ends: of a minute, at 3 000 a second

_Id = tuple[str, str, str]  # model_name, tenant_id, request_id


class Fate(IntEnum):
    """What became of a reservation in a peer's snapshot."""

    BOOKED = 0
    UNFIT = 1  # its rank is not registered here (its registration asks again), or has other blocks
    KNOWN = 2  # it is live here, is ours, has ended, or has expired; not counted


class CatchUp:
    """Copies reservations from peers' snapshots. Publishes nothing. `counts[fate]` is the number of
    reservations with that outcome."""

    def __init__(
        self,
        router_id: int,
        lookup: Callable[[str, str], ReplicaTarget | None],
        copies_expire_s: float,
    ) -> None:
        self.counts = [0] * len(Fate)
        self._router_id = router_id
        self._lookup = lookup
        self._copies_expire_s = copies_expire_s
        # From begin() to end(): ends and completed prefills, the oldest first. An OrderedDict,
        # because finding the oldest key of a plain dict steps over the holes of removed keys.
        self._noted: OrderedDict[tuple[_Id, RankKey], EventKind] | None = None

    def begin(self) -> None:
        """Note events from now on. Call this before a snapshot is requested."""
        self._noted = OrderedDict()

    def end(self) -> None:
        self._noted = None

    def note(self, event: ReplicaEvent) -> None:
        """Record an event that was applied here, or is published from here."""
        if self._noted is None or event.kind is EventKind.ADD:
            return
        spec = event.spec
        key = (event.model_name, event.tenant_id, spec.request_id), _key_of(spec)
        if self._noted.get(key) is not EventKind.FREE:
            self._noted[key] = event.kind
        if len(self._noted) > MAX_NOTED:
            self._noted.popitem(last=False)

    def take(self, live: LiveReservation, now: float) -> Fate:
        """Copy one reservation from a snapshot; its `touched_at` must be in our clock's time.
        Within a partition, call this for the most recently active reservation first."""
        fate = self._take(live, now)
        self.counts[fate] += 1
        return fate

    def _take(self, live: LiveReservation, now: float) -> Fate:
        key, request_id = _key_of(live.spec), live.spec.request_id
        heard = None if self._noted is None else self._noted.get((_id_of(live), key))
        if (
            live.router_id == self._router_id  # our state is newer
            or heard is EventKind.FREE
            or now - live.touched_at > self._copies_expire_s
        ):
            return Fate.KNOWN
        target = self._lookup(live.model_name, live.tenant_id)
        if target is None or key not in target.slots.ranks or live.block_size != target.block_size:
            return Fate.UNFIT
        slots = target.slots
        if request_id in slots.reservations:
            return Fate.KNOWN
        if heard is EventKind.PREFILL_COMPLETE:
            live.spec = msgspec.structs.replace(live.spec, prefill_tokens=0)
            live.prefill_done, live.touched_at = True, now
        copy = slots.book(live.spec, live.sequence_hashes, now, live.router_id)
        if live.prefill_done:
            slots.prefill_complete(request_id, now)
        slots.backdate(copy, live.touched_at)
        return Fate.BOOKED


def ended_meanwhile(
    targets: Iterable[ReplicaTarget], router_id: int, listed: list[LiveReservation], asked_at: float
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
            if live is not None and _key_of(live.spec) != held.rank_load.key:
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
                held.spec,
            )


def live_reservation(
    target: ReplicaTarget, held: Reservation, own_router_id: int
) -> LiveReservation:
    """Convert a live reservation for a snapshot. Blocks that the request generated are left out."""
    live = LiveReservation(
        target.model_name,
        target.tenant_id,
        target.block_size,
        own_router_id if held.router_id is None else held.router_id,
        held.spec,
        target.slots.sequence_hashes_of(held),
        held.prefill_done,
        held.touched_at,
    )
    if held.prefill_tokens != (held.spec.prefill_tokens or 0):
        live.spec = msgspec.structs.replace(held.spec, prefill_tokens=held.prefill_tokens)
    return live


def _id_of(live: LiveReservation) -> _Id:
    return live.model_name, live.tenant_id, live.spec.request_id


def _key_of(spec: ReservationSpec) -> RankKey:
    return spec.worker_id, spec.dp_rank
