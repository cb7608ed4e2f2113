"""Find reservations by id in all partitions; remember choices of `/select` that can be booked."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from lean_selector.core.errors import BadRequest, Conflict, DuplicateRequest, NotFound, rank_text
from lean_selector.core.load.shapes import Booking, Reservation
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.router_settings import SelectionCacheSettings
from lean_selector.core.selection.schedulable_worker import SchedulableWorker
from lean_selector.core.selection.scheduler import check_session
from lean_selector.core.selection.shapes import Booked, CachedSelection, PartitionKey
from lean_selector.core.settings import API_1_3, Dialect

# -- selections that can be booked later -----------------------------------------------------------
# A cache of selections, so that they can be booked later by their ids.
#
# Stores what `/select` chose, by partition and id. Limited in age, number and bytes; the oldest are
# evicted first. Nothing here is booked. `Bookings.replay` checks whether a cached choice is still
# valid. Spec selection_16.md 5.1. Time is an argument.


class _Entry:
    __slots__ = ("expires_at", "selection", "size")

    def __init__(self, selection: CachedSelection, expires_at: float, size: int) -> None:
        self.selection = selection
        self.expires_at = expires_at
        self.size = size


class SelectionCache:
    """Recent choices of `/select`, of all partitions, that can still be booked by their ids."""

    def __init__(self, settings: SelectionCacheSettings) -> None:
        self._settings = settings
        self._entries: OrderedDict[tuple[PartitionKey, str], _Entry] = OrderedDict()  # oldest first
        self.size_bytes = 0
        # Totals: stored = live + used + expired + evicted + replaced or dropped.
        self.stored = self.used = self.expired = self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(
        self, key: PartitionKey, selection_id: str, selection: CachedSelection, now: float
    ) -> None:
        """Store a choice under an id, in place of an earlier choice with this id. As in Dynamo, a
        choice larger than the whole cache evicts all others, and then itself."""
        settings = self._settings
        if not settings.max_entries or not settings.max_bytes:
            return
        self.drop(key, selection_id)
        self.expire(now)
        size = _size_of(key, selection_id, selection)
        self._entries[key, selection_id] = _Entry(selection, now + settings.ttl_s, size)
        self.size_bytes += size
        self.stored += 1
        while len(self._entries) > settings.max_entries or self.size_bytes > settings.max_bytes:
            self._drop_oldest()
            self.evicted += 1

    def get(self, key: PartitionKey, selection_id: str, now: float) -> CachedSelection | None:
        self.expire(now)
        entry = self._entries.get((key, selection_id))
        return None if entry is None else entry.selection

    def use_up(self, key: PartitionKey, selection_id: str) -> None:
        """Drop a selection, because it was booked."""
        self.drop(key, selection_id)
        self.used += 1

    def drop(self, key: PartitionKey, selection_id: str) -> None:
        entry = self._entries.pop((key, selection_id), None)
        if entry is not None:
            self.size_bytes -= entry.size

    def expire(self, now: float) -> None:
        entries = self._entries
        while entries and next(iter(entries.values())).expires_at <= now:
            self._drop_oldest()
            self.expired += 1

    def _drop_oldest(self) -> None:
        _, entry = self._entries.popitem(last=False)
        self.size_bytes -= entry.size


def _size_of(key: PartitionKey, selection_id: str, selection: CachedSelection) -> int:
    """Return the size of a cached choice as Dynamo counts it: bytes of hashes and names."""
    prompt = selection.prompt
    size = 8 * prompt.sequence_count + len(prompt.local_hashes)
    for name in (*key, selection_id, prompt.lora_name, selection.session_id):
        if name is not None:
            size += len(name) if name.isascii() else len(name.encode())
    return size


# -- live reservations by id -----------------------------------------------------------------------
# Index of the live reservations of all partitions by id.
#
# A partition's ledger has its reservations, books them and publishes them. This index finds the
# partition of an id that a client sends (D4), and checks a rank that the client chose before it is
# booked. It chooses no rank, and is independent of the queue.


class Bookings:
    def __init__(
        self, partitions: Mapping[PartitionKey, Partition], dialect: Dialect = API_1_3
    ) -> None:
        self._partitions = partitions
        self._dialect = dialect
        self.claimed: set[str] = set()  # ids of queued requests
        # Ids booked over HTTP at this replica, with their partition. An id is stale once its
        # reservation has ended (D4).
        self._booked: dict[str, Partition] = {}

    def __len__(self) -> int:
        """Number of stored reservation ids, including ids of reservations that have ended."""
        return len(self._booked)

    def book(self, partition: Partition, booking: Booking, prompt: Prompt, now: float) -> None:
        """Book a rank for a prompt. Raises NotFound or Conflict, with nothing booked."""
        reservation_id = booking.request_id
        sequence = prompt.sequence_hashes()
        if reservation_id in self._booked:
            elsewhere = self.local_holder(reservation_id)
            if elsewhere is not None and elsewhere is not partition:
                raise _duplicate(elsewhere, reservation_id)
        partition.ledger.book(booking, sequence, now)
        if partition.routed is not None:
            key = booking.worker_id, booking.dp_rank
            partition.assume_cached(key, prompt, now)
        self._booked[reservation_id] = partition

    def book_choice(
        self, partition: Partition, chosen: CachedSelection, reservation_id: str, now: float
    ) -> Booking:
        """Book a choice, and bind its session to the chosen rank. Raises NotFound, Conflict, or
        BadRequest (the session is bound to another rank), with nothing booked."""
        worker_id, dp_rank = chosen.worker_id, chosen.dp_rank
        prompt, tracks, session_id = chosen.prompt, chosen.track_prefill, chosen.session_id
        if session_id is not None:
            self.check_free(partition, reservation_id)
            check_session(partition, session_id, worker_id, dp_rank, now)
        booking = Booking(
            reservation_id,
            worker_id,
            dp_rank,
            prompt.lora_name,
            tracks,
            (chosen.effective_prefill_tokens or None) if tracks else None,
            None,
            chosen.expected_output_tokens,
        )
        self.book(partition, booking, prompt, now)
        if session_id is not None and partition.sessions is not None:
            partition.sessions.book(session_id, reservation_id, worker_id, dp_rank, now)
        return booking

    def check_free(self, partition: Partition, reservation_id: str) -> None:
        """Raise Conflict if a reservation of the partition or of this replica has this id."""
        elsewhere = self.local_holder(reservation_id)
        if elsewhere is not None:
            raise _duplicate(elsewhere, reservation_id)
        if reservation_id in partition.slots.reservations:
            raise _duplicate(partition, reservation_id)

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
        *,
        books_prefill: bool = True,
    ) -> Booked:
        """Book a rank that the client chose, at once, whatever its load. Books `prefill_tokens`
        tokens of prefill; none if it is None or `books_prefill` is False. Raises BadRequest,
        NotFound or Conflict, with nothing booked."""
        if prefill_tokens is not None and prefill_tokens > prompt.isl_tokens:
            raise BadRequest(
                f"effective_prefill_tokens ({prefill_tokens}) "
                f"must not exceed isl_tokens ({prompt.isl_tokens})"
            )
        worker = partition.workers.get(worker_id)
        if worker is None:
            raise NotFound(f"schedulable worker {worker_id} not found for {self._scope(partition)}")
        if self._dialect.claims_ids:
            self.check_unclaimed(reservation_id, partition)
        if dp_rank not in worker.ranks:
            raise NotFound(f"Worker {rank_text(worker_id, dp_rank)} not found")
        booking = Booking(
            reservation_id,
            worker_id,
            dp_rank,
            prompt.lora_name,
            (track_prefill or prefill_tokens is not None) and books_prefill,
            (prefill_tokens or None) if books_prefill else None,
            None,
            expected_output_tokens,
        )
        self.book(partition, booking, prompt, now)
        return _booked(partition, booking, worker)

    def replay(
        self, partition: Partition, cached: CachedSelection, reservation_id: str, now: float
    ) -> Booked:
        """Book a choice that `/select` made earlier. Raises NotFound (the rank is gone), Conflict,
        or BadRequest (the session is bound to another rank), with nothing booked."""
        worker_id, dp_rank = cached.worker_id, cached.dp_rank
        worker = partition.workers.get(worker_id)
        if worker is None or dp_rank not in worker.ranks:
            raise NotFound(
                f"schedulable worker {worker_id} (dp_rank {dp_rank}) not found for "
                f"{self._scope(partition)}"
            )
        if self._dialect.claims_ids:
            self.check_unclaimed(reservation_id, partition)
        booking = self.book_choice(partition, cached, reservation_id, now)
        return _booked(partition, booking, worker)

    def check_unclaimed(self, reservation_id: str, partition: Partition) -> None:
        """Raise Conflict if the id is booked at this replica, used by a queued request, or live in
        this partition."""
        if (
            reservation_id in self.claimed
            or reservation_id in partition.slots.reservations
            or self.local_holder(reservation_id) is not None
        ):
            raise self._taken(reservation_id)

    def not_booked(self, error: Conflict, reservation_id: str) -> Conflict:
        """Return the Conflict with which this API version answers if booking raised `error`."""
        if self._dialect.claims_ids:
            return self._taken(reservation_id)
        return Conflict(f"failed to book scheduler state: {error.message}")

    def _taken(self, reservation_id: str) -> Conflict:
        return Conflict(f"selection {reservation_id} is already reserved or being reserved")

    def _scope(self, partition: Partition) -> str:
        return self._dialect.scope(partition.model_name, partition.tenant_id)

    def local_holder(self, reservation_id: str) -> Partition | None:
        """Return the partition where this replica booked the id, if the id is still live there."""
        partition = self._booked.get(reservation_id)
        if partition is None:
            return None
        reservation = partition.slots.reservations.get(reservation_id)
        if reservation is None or reservation.router_id is not None:
            del self._booked[reservation_id]
            return None
        return partition

    def holders(self, reservation_id: str) -> list[Partition]:
        """Return the partition where this replica booked the id. If there is none, return all
        partitions with a peer's booking (D4). Raises NotFound if the id is live nowhere."""
        local = self.local_holder(reservation_id)
        if local is not None:
            return [local]
        holders = [
            partition
            for partition in self._partitions.values()
            if reservation_id in partition.slots.reservations
        ]
        if not holders:
            raise NotFound(f"reservation {reservation_id} not found")
        return holders

    def restored(self, partition: Partition, reservation_id: str) -> None:
        """Record an id that was booked over HTTP before this process started."""
        self._booked[reservation_id] = partition

    def forget(self, reservation_id: str) -> None:
        self._booked.pop(reservation_id, None)

    def forget_ended(self, partition: Partition, reservations: Iterable[Reservation]) -> None:
        """Forget the ids of reservations that expired or whose rank was removed."""
        for reservation in reservations:
            request_id = reservation.request_id
            if not reservation.is_replica and self._booked.get(request_id) is partition:
                del self._booked[request_id]


def _booked(partition: Partition, booking: Booking, worker: SchedulableWorker) -> Booked:
    return Booked(
        booking.request_id,
        partition.model_name,
        partition.tenant_id,
        booking.worker_id,
        booking.dp_rank,
        worker.endpoint,
    )


def _duplicate(partition: Partition, reservation_id: str) -> DuplicateRequest:
    rank = partition.slots.reservations[reservation_id].rank
    return DuplicateRequest(reservation_id, rank.worker_id, rank.dp_rank)
