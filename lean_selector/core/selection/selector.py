"""The selector: one process's catalog, partitions, reservations and queues, and their changes.

Everything here completes before it returns, so choosing a rank and booking it is one step that
nothing can come between. A request that must wait is parked and answered through its callback by
whichever later call frees capacity (D11). Lifecycle events for replicas go to the injected
`events`. Time is an argument: monotonic seconds.
"""

import random
from collections.abc import Callable

import msgspec

from lean_selector.core.errors import (
    AllWorkersBusy,
    BadRequest,
    Conflict,
    DuplicateRequest,
    NotFound,
    SelectorError,
    Unavailable,
    rank_text,
)
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.load.booking import Booking
from lean_selector.core.load.busy import BusyThresholds
from lean_selector.core.load.busy_limits import OFF, BusyThreshold
from lean_selector.core.load.headroom import Headroom
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.reservation import Reservation
from lean_selector.core.load.slots import check_decay_fraction
from lean_selector.core.replication.ledger import Ledgers, LifecycleEvents
from lean_selector.core.selection.admission import Admission
from lean_selector.core.selection.catalog import Catalog, SourceSink, Worker
from lean_selector.core.selection.cost import Candidate, Matches
from lean_selector.core.selection.explain import explained
from lean_selector.core.selection.parking import Parked
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.records import Booked, Placement, SelectionRequest
from lean_selector.core.selection.scheduler import (
    all_busy,
    candidates,
    check_pin,
    not_busy,
    place,
    place_by_order,
    suits_order,
)
from lean_selector.core.selection.settings import RouterSettings, Terms
from lean_selector.core.selection.terms import terms
from lean_selector.core.selection.workers import PartitionKey, WorkerSpec

# A request that nobody can serve is parked like others while others are, and a worker for it may
# register meanwhile: without any event it is answered this late. The reference does so every 60 s.
RECHECK_AFTER_S = 2.0

OnAnswer = Callable[[Parked, Placement | SelectorError], None]


class Selector:
    """State of one selection service."""

    def __init__(
        self,
        settings: RouterSettings,
        sources: SourceSink,
        rng: random.Random,
        *,
        new_index: Callable[[int], KvIndex] = KvIndex,
        events: LifecycleEvents | None = None,
        thresholds: BusyThreshold = OFF,
        on_discarded: Callable[[Partition], None] = lambda partition: None,
    ) -> None:
        """`thresholds` hold for every model that is not given its own; `on_discarded` is the
        catalog's."""
        self.settings = settings
        self.terms: Terms = terms(settings)
        self.ledgers = Ledgers(settings.reservation_expiry_s, events)
        self._rng = rng
        self._new_index = new_index
        self._thresholds = BusyThresholds(thresholds)
        self.catalog = Catalog(
            settings,
            sources,
            new_partition=self._new_partition,
            on_dropped=self._forget_ended,
            on_discarded=on_discarded,
        )
        # Ids booked here over HTTP -> where. One whose reservation is gone is stale (D4).
        self._booked: dict[str, Partition] = {}
        self._admission = Admission(self._place, settings.overlap_refresh_after_s)
        self._refuses_to_park: SelectorError | None = None

    def _new_partition(self, key: PartitionKey, block_size: int, is_eagle: bool) -> Partition:
        index = self._new_index(block_size)
        partition = Partition(
            *key,
            block_size,
            is_eagle,
            index,
            self.terms.scale,
            queue_threshold=self.settings.queue_threshold,
            ledgers=self.ledgers,
        )
        partition.set_threshold(self._thresholds.of(key))
        return partition

    # -- workers -------------------------------------------------------------------------------

    def upsert_worker(self, spec: WorkerSpec, now: float) -> Worker:
        return self._changing_workers(lambda: self.catalog.upsert(spec), now)

    def patch_worker(self, worker_id: int, changes: dict[str, object], now: float) -> Worker:
        return self._changing_workers(lambda: self.catalog.patch(worker_id, changes), now)

    def remove_worker(self, worker_id: int, now: float) -> Worker:
        return self._changing_workers(lambda: self.catalog.remove(worker_id), now)

    def _changing_workers(self, change: Callable[[], Worker], now: float) -> Worker:
        waiting = [p for p in self.catalog.partitions.values() if len(p.parked)]
        worker = change()
        for partition in waiting:
            self.admit_parked(partition, now)
        return worker

    def _forget_ended(self, partition: Partition, reservations: list[Reservation]) -> None:
        """Of those that ended without a call, where they were booked."""
        for reservation in reservations:
            request_id = reservation.request_id
            if not reservation.is_replica and self._booked.get(request_id) is partition:
                del self._booked[request_id]

    # -- busy thresholds -----------------------------------------------------------------------

    def thresholds(self) -> list[tuple[PartitionKey, BusyThreshold]]:
        """What is in force for every model and tenant that has a registered worker, sorted."""
        return [(key, self._thresholds.of(key)) for key in sorted(self.catalog.scopes())]

    def change_threshold(
        self, key: PartitionKey, given: BusyThreshold, now: float
    ) -> BusyThreshold:
        """Sets what `given` sets, from the next selection on. Raises BadRequest or NotFound."""
        return self._enforce(key, self._thresholds.change(key, given, self.catalog.scopes()), now)

    def switch_threshold_off(self, key: PartitionKey, now: float) -> BusyThreshold:
        """Nothing is shed there any more, also by the defaults. Raises NotFound."""
        return self._enforce(key, self._thresholds.switch_off(key, self.catalog.scopes()), now)

    def _enforce(self, key: PartitionKey, threshold: BusyThreshold, now: float) -> BusyThreshold:
        partition = self.catalog.partitions.get(key)
        if partition is not None:
            partition.set_threshold(threshold)
            self.admit_parked(partition, now)
        return threshold

    # -- selection -----------------------------------------------------------------------------

    def ready_partition(self, model_name: str, tenant_id: str) -> Partition:
        """The partition, if it can schedule; raises Unavailable in the documented words."""
        partition = self.catalog.partitions.get((model_name, tenant_id))
        if partition is not None and partition.workers:
            return partition
        if not self.catalog.schedulable_count():
            raise Unavailable("no schedulable workers are available")
        raise Unavailable(f"no schedulable workers for model={model_name} tenant={tenant_id}")

    def scheduling_partition(self, model_name: str, tenant_id: str) -> Partition | None:
        """The partition that load may be booked in, or None."""
        partition = self.catalog.partitions.get((model_name, tenant_id))
        return partition if partition is not None and partition.established else None

    def load_changed(
        self, model_name: str, tenant_id: str, reservation_id: str, now: float
    ) -> None:
        """A peer's event was applied: whoever is parked there may have room now."""
        self._local_holder(reservation_id)  # forgets where it was booked, if the peer freed it
        partition = self.catalog.partitions.get((model_name, tenant_id))
        if partition is not None:
            self.admit_parked(partition, now)

    def select(
        self, partition: Partition, request: SelectionRequest, now: float, on_answer: OnAnswer
    ) -> Placement | Parked:
        """Chooses a rank, and books it when the request `books`.

        Answers at once, or parks the request and answers through `on_answer` later. Raises
        SelectorError; then nothing has changed.
        """
        room, parked = partition.room, partition.parked
        if room is None:
            return self.select_now(partition, request, now)
        if len(parked):
            self._admission.admit_next(partition, now)  # what wore off is theirs who waited for it
        # Whoever passes others gives no more load to what they wait for.
        passes = len(parked) > 0
        if suits_order(partition, request, self.terms):
            if room.free and not (passes and parked.is_moving):
                among = room.free if passes else None
                chosen = place_by_order(partition, request, self._rng, among)
                return self._taken(partition, request, chosen, now)
        else:
            room.advance(now)
            if not room.free and room.idle and request.takes_any_rank():
                return self._park(partition, room, request, now, on_answer)
            ranks = self._free_candidates(partition, request, now)
            if passes:
                ranks = [rank for rank in ranks if rank[1].mask & room.below]
                is_next = bool(ranks) and not parked.is_moving
            else:  # when nobody can serve it, it is told so
                is_next = not ranks or any(rank[1].mask & room.below for rank in ranks)
            if is_next:
                matches = partition.index.match(request.prompt.local_hashes)
                return self._place(partition, request, ranks, matches, now)
        return self._park(partition, room, request, now, on_answer)

    def _park(
        self,
        partition: Partition,
        room: Headroom,
        request: SelectionRequest,
        now: float,
        on_answer: OnAnswer,
    ) -> Parked:
        if self._refuses_to_park is not None:
            raise self._refuses_to_park
        request.prompt.sequence_hashes()  # read now: nobody could be told of a bad one later
        request.matches = partition.index.match(request.prompt.local_hashes)
        if not len(partition.parked):
            room.came_free = 0  # nobody waited for it
        parked = partition.parked.park(request, now, on_answer)
        if partition.parked.is_moving:  # it came between those who are let go: it may be next
            room.came_free |= parked.line.leads_to
        return parked

    @property
    def parks(self) -> bool:
        """Whether requests may have to wait; else `select_now` does what `select` does."""
        return self.settings.queue_threshold is not None

    def select_now(self, partition: Partition, request: SelectionRequest, now: float) -> Placement:
        """Chooses a rank, whatever the queue, and books it when the request `books`."""
        if suits_order(partition, request, self.terms):
            chosen = place_by_order(partition, request, self._rng)
            return self._taken(partition, request, chosen, now)
        ranks = self._free_candidates(partition, request, now)
        matches = partition.index.match(request.prompt.local_hashes)
        return self._place(partition, request, ranks, matches, now)

    def _free_candidates(
        self, partition: Partition, request: SelectionRequest, now: float
    ) -> list[Candidate]:
        check_pin(request)
        try:
            if all_busy(partition) and request.takes_any_rank():
                raise AllWorkersBusy  # at once: an overloaded service has no time to look at ranks
            return not_busy(partition, candidates(partition, request), now)
        except AllWorkersBusy:
            if request.books:
                partition.shed_bookings += 1
            else:
                partition.shed_selects += 1
            raise

    def _place(
        self,
        partition: Partition,
        request: SelectionRequest,
        ranks: list[Candidate],
        matches: Matches,
        now: float,
    ) -> Placement:
        load, placement = place(partition, request, ranks, matches, now, self._rng)
        if request.explains:
            why = explained(partition, request, ranks, matches, now)
            placement = msgspec.structs.replace(placement, explain=why)
        return self._taken(partition, request, (load, placement), now)

    def _taken(
        self,
        partition: Partition,
        request: SelectionRequest,
        chosen: tuple[RankLoad, Placement],
        now: float,
    ) -> Placement:
        """Books what was chosen, if the request asks for it."""
        load, placement = chosen
        if request.books:
            prompt = request.prompt
            tracks = request.terms.track_prefill
            booking = Booking(
                request.reservation_id,
                load.worker_id,
                load.dp_rank,
                prompt.lora_name,
                tracks,
                (placement.effective_prefill_tokens or None) if tracks else None,
                None,
                request.expected_output_tokens,
            )
            try:
                self._book(partition, booking, prompt, now)
            except Conflict as error:
                raise Conflict(f"failed to book scheduler state: {error.message}") from None
        partition.prompt_tokens += request.prompt.isl_tokens
        partition.prefill_tokens += placement.effective_prefill_tokens
        return placement

    def admit_waiting(self, now: float) -> None:
        """For those whom no event lets go: call it about every second.

        Load can wear off, and who came when nobody could serve him but others waited is told so
        after RECHECK_AFTER_S.
        """
        for partition in list(self.catalog.partitions.values()):
            self._admission.admit(partition, now, RECHECK_AFTER_S)

    def admit_parked(self, partition: Partition, now: float) -> None:
        """Something may have come free: lets those go who waited for it."""
        self._admission.admit(partition, now)

    def hung_up(self, partition: Partition, parked: Parked, now: float) -> None:
        """The client of a parked request is gone: it leaves the queue, and so its count (D11)."""
        if partition.parked.leave(parked):
            self.admit_parked(partition, now)

    def refuse_parked(self, error: SelectorError) -> None:
        """Answers every parked request with `error`, and who would park from now on, too."""
        self._refuses_to_park = error
        for partition in self.catalog.partitions.values():
            for parked in partition.parked.in_order():
                if partition.parked.leave(parked):
                    parked.on_answer(parked, error)

    # -- reservations --------------------------------------------------------------------------

    def reserve(
        self,
        partition: Partition,
        reservation_id: str,
        worker_id: int,
        dp_rank: int,
        prompt: Prompt,
        prefill_tokens: int | None,
        now: float,
        expected_output_tokens: int | None = None,
        track_prefill: bool = True,
    ) -> Booked:
        """Books a rank that the caller chose. Never queued, whatever the rank's load.

        `prefill_tokens` is authoritative; None books no prefill at all (kept as documented).
        Raises BadRequest, NotFound or Conflict, with nothing booked.
        """
        if prefill_tokens is not None and prefill_tokens > prompt.isl_tokens:
            raise BadRequest(
                f"effective_prefill_tokens ({prefill_tokens}) "
                f"must not exceed isl_tokens ({prompt.isl_tokens})"
            )
        worker = partition.workers.get(worker_id)
        if worker is None:
            raise NotFound(
                f"schedulable worker {worker_id} not found for "
                f"model={partition.model_name} tenant={partition.tenant_id}"
            )
        if dp_rank not in worker.ranks:
            raise NotFound(f"Worker {rank_text(worker_id, dp_rank)} not found")
        booking = Booking(
            reservation_id,
            worker_id,
            dp_rank,
            prompt.lora_name,
            track_prefill or prefill_tokens is not None,
            prefill_tokens or None,
            None,
            expected_output_tokens,
        )
        self._book(partition, booking, prompt, now)
        return Booked(
            reservation_id,
            partition.model_name,
            partition.tenant_id,
            worker_id,
            dp_rank,
            worker.endpoint,
        )

    def _book(self, partition: Partition, booking: Booking, prompt: Prompt, now: float) -> None:
        reservation_id = booking.request_id
        sequence = prompt.sequence_hashes()
        if reservation_id in self._booked:
            elsewhere = self._local_holder(reservation_id)
            if elsewhere is not None and elsewhere is not partition:
                rank = elsewhere.slots.reservations[reservation_id].rank
                raise DuplicateRequest(reservation_id, rank.worker_id, rank.dp_rank)
        partition.ledger.book(booking, sequence, now)
        self._booked[reservation_id] = partition

    def _local_holder(self, reservation_id: str) -> Partition | None:
        """The partition where this replica itself booked the id and still holds it."""
        partition = self._booked.get(reservation_id)
        if partition is None:
            return None
        reservation = partition.slots.reservations.get(reservation_id)
        if reservation is None or reservation.router_id is not None:
            del self._booked[reservation_id]
            return None
        return partition

    def _holders(self, reservation_id: str) -> list[Partition]:
        """Where a call by URL acts: on the local booking, else on every copy (D4).

        Raises NotFound when the id is live nowhere.
        """
        local = self._local_holder(reservation_id)
        if local is not None:
            return [local]
        holders = [
            partition
            for partition in self.catalog.partitions.values()
            if reservation_id in partition.slots.reservations
        ]
        if not holders:
            raise NotFound(f"reservation {reservation_id} not found")
        return holders

    def prefill_complete(self, reservation_id: str, now: float) -> None:
        for partition in self._holders(reservation_id):
            partition.ledger.prefill_complete(reservation_id, now)
            self.admit_parked(partition, now)

    def output_block(self, reservation_id: str, decay_fraction: float | None, now: float) -> None:
        if decay_fraction is not None:
            check_decay_fraction(decay_fraction)
        for partition in self._holders(reservation_id):
            partition.ledger.output_block(reservation_id, now, decay_fraction)
            if decay_fraction is not None:  # its blocks weigh less: a busy rank may be free
                self.admit_parked(partition, now)

    def free(self, reservation_id: str, now: float) -> None:
        for partition in self._holders(reservation_id):
            partition.ledger.free(reservation_id, now)
            self._booked.pop(reservation_id, None)
            self.admit_parked(partition, now)

    def expire(self, now: float, max_steps: int) -> list[tuple[Partition, Reservation]]:
        """Drops what was not touched for too long, at most `max_steps` in all.

        As many as max_steps: call again, there may be more.
        """
        gone = []
        partitions = self.catalog.partitions
        ledgers = [partition.ledger for partition in partitions.values()]
        for ledger, expired in self.ledgers.expire(ledgers, now, max_steps):
            partition = partitions[ledger.model_name, ledger.tenant_id]
            gone += [(partition, reservation) for reservation in expired]
            self._forget_ended(partition, expired)
            self.admit_parked(partition, now)
        return gone

    def arrived(self) -> int:
        """Requests booked, here and by peers, in all partitions that there are."""
        return sum(partition.slots.arrived for partition in self.catalog.partitions.values())
