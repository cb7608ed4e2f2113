"""The reservations of all partitions, by id: booked, prefilled, growing, ended, expired.

A partition's ledger has its reservations, books them and publishes them. Here the partition of an
id that a client sends is found (D4), and a rank that the client chose is checked before it is
booked. No rank is chosen here. Whatever may have freed capacity admits requests from the
partition's queue. Times are arguments, in monotonic seconds."""

from collections.abc import Iterable

from lean_selector.core.errors import BadRequest, Conflict, DuplicateRequest, NotFound, rank_text
from lean_selector.core.health.ejections import FAILED, REFUSED
from lean_selector.core.load.shapes import Reservation, ReservationSpec
from lean_selector.core.load.slots import check_decay_fraction
from lean_selector.core.replication.ledger import Ledgers
from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.observers import Decisions
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.schedulable_worker import SchedulableWorker
from lean_selector.core.selection.scheduler import check_session
from lean_selector.core.selection.shapes import Booked, CachedSelection
from lean_selector.core.selection.worker_health import WorkerHealth
from lean_selector.core.settings import Dialect

_FAULTS = frozenset((FAILED, REFUSED))


class Reservations:
    """Books and changes the reservations of one selector."""

    def __init__(
        self, catalog: Catalog, ledgers: Ledgers, health: WorkerHealth, dialect: Dialect
    ) -> None:
        self._catalog = catalog
        self._ledgers = ledgers
        self._health = health
        self._dialect = dialect
        self.decisions: Decisions | None = None  # set if there is a decision log
        self.claimed: set[str] = set()  # ids of queued requests
        # Ids booked over HTTP at this replica, with their partition. An id is stale once its
        # reservation has ended (D4).
        self._booked: dict[str, Partition] = {}

    def __len__(self) -> int:
        """Number of stored reservation ids, including ids of reservations that have ended."""
        return len(self._booked)

    # -- booking -----------------------------------------------------------------------------------

    def book(self, partition: Partition, spec: ReservationSpec, prompt: Prompt, now: float) -> None:
        """Book a rank for a prompt. Raises NotFound or Conflict, with nothing booked."""
        reservation_id = spec.request_id
        sequence = prompt.sequence_hashes()
        if reservation_id in self._booked:
            elsewhere = self.local_holder(reservation_id)
            if elsewhere is not None and elsewhere is not partition:
                raise _duplicate(elsewhere, reservation_id)
        partition.ledger.book(spec, sequence, now)
        if partition.routed is not None:
            key = spec.worker_id, spec.dp_rank
            partition.assume_cached(key, prompt, now)
        self._booked[reservation_id] = partition

    def book_choice(
        self, partition: Partition, chosen: CachedSelection, reservation_id: str, now: float
    ) -> ReservationSpec:
        """Book a choice, and bind its session to the chosen rank. Raises NotFound, Conflict, or
        BadRequest (the session is bound to another rank), with nothing booked."""
        worker_id, dp_rank = chosen.worker_id, chosen.dp_rank
        prompt, tracks, session_id = chosen.prompt, chosen.track_prefill, chosen.session_id
        if session_id is not None:
            self.check_free(partition, reservation_id)
            check_session(partition, session_id, worker_id, dp_rank, now)
        spec = ReservationSpec(
            reservation_id,
            worker_id,
            dp_rank,
            prompt.lora_name,
            tracks,
            (chosen.effective_prefill_tokens or None) if tracks else None,
            None,
            chosen.expected_output_tokens,
        )
        self.book(partition, spec, prompt, now)
        if session_id is not None and partition.sessions is not None:
            partition.sessions.book(session_id, reservation_id, worker_id, dp_rank, now)
        return spec

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
        spec = ReservationSpec(
            reservation_id,
            worker_id,
            dp_rank,
            prompt.lora_name,
            (track_prefill or prefill_tokens is not None) and books_prefill,
            (prefill_tokens or None) if books_prefill else None,
            None,
            expected_output_tokens,
        )
        self.book(partition, spec, prompt, now)
        return _booked(partition, spec, worker)

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
        spec = self.book_choice(partition, cached, reservation_id, now)
        return _booked(partition, spec, worker)

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

    # -- by id -------------------------------------------------------------------------------------

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
        partitions with a peer's reservation (D4). Raises NotFound if the id is live nowhere."""
        local = self.local_holder(reservation_id)
        if local is not None:
            return [local]
        holders = [
            partition
            for partition in self._catalog.partitions.values()
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

    # -- once booked -------------------------------------------------------------------------------

    def prefill_complete(
        self, reservation_id: str, now: float, ttft_s: float | None = None
    ) -> None:
        """Record that a request's prefill is complete. `ttft_s`: its time to first token."""
        holders = self.holders(reservation_id)
        if ttft_s is not None:
            counts = holders[0].slots.reservations[reservation_id].rank_load.counts
            counts.ttft_s += ttft_s
            counts.ttft_count += 1
            if self.decisions is not None:
                self.decisions.reported(reservation_id, ttft_s, None)
        for partition in holders:
            reservation = partition.slots.reservations[reservation_id]
            if not reservation.prefill_done:
                partition.speeds.completed(reservation, ttft_s, now)
            partition.ledger.prefill_complete(reservation_id, now)
            partition.queue.admit(now)

    def output_block(self, reservation_id: str, decay_fraction: float | None, now: float) -> None:
        if decay_fraction is not None:
            check_decay_fraction(decay_fraction)
        for partition in self.holders(reservation_id):
            partition.ledger.output_block(reservation_id, now, decay_fraction)
            if decay_fraction is not None:  # the blocks weigh less: a rank may be free now
                partition.queue.admit(now)

    def expect_output(self, reservation_id: str, tokens: int, now: float) -> None:
        """Add to a new reservation the blocks that an answer of this many tokens will need."""
        for partition in self.holders(reservation_id):
            if blocks := tokens // partition.block_size:
                partition.ledger.output_block(reservation_id, now, blocks=blocks)

    def end(
        self,
        reservation_id: str,
        outcome: str | None,
        cached_tokens: int | None,
        now: float,
        known_tokens: int | None = None,
        *,
        reports_prefill: bool = False,
    ) -> None:
        """Free a reservation and record the outcome for its rank. A refused connection counts for
        the whole worker. `cached_tokens` is the engine's count of cached tokens. `known_tokens`:
        how many prompt tokens are in blocks whose hashes the caller knew (None: all).
        `reports_prefill`: the caller reports every completed prefill, whatever the outcome."""
        partition = self.holders(reservation_id)[0]
        reservation = partition.slots.reservations[reservation_id]
        load = reservation.rank_load
        if cached_tokens is not None:
            if self.decisions is not None:
                self.decisions.reported(reservation_id, None, cached_tokens)
            load.counts.report_cached(
                cached_tokens,
                reservation.block_count,
                reservation.spec.prefill_tokens,
                partition.block_size,
                known_tokens,
            )
        self.free(reservation_id, now, was_served=not reports_prefill and outcome not in _FAULTS)
        if outcome is not None:
            dp_rank = None if outcome == REFUSED else load.dp_rank
            self._health.record_outcome(load.worker_id, dp_rank, outcome, now)

    def free(self, reservation_id: str, now: float, was_served: bool = True) -> None:
        """End a reservation. Without `was_served`, its rank is no longer assumed to cache the
        prompt, unless the prefill was reported as complete."""
        for partition in self.holders(reservation_id):
            if not was_served:
                live = partition.slots.reservations[reservation_id]
                if not live.prefill_done and not live.is_replica:
                    partition.not_computed(live)
            reservation = partition.ledger.free(reservation_id, now)
            if reservation is not None and not reservation.prefill_done:
                partition.speeds.ended(reservation, now)
            self.forget(reservation_id)
            partition.queue.admit(now)

    def expire(self, now: float, max_steps: int) -> list[tuple[Partition, Reservation]]:
        """Expire idle reservations, at most `max_steps` in total. If `max_steps` reservations are
        returned, call again: there may be more."""
        gone = []
        partitions = self._catalog.partitions
        ledgers = [partition.ledger for partition in partitions.values()]
        for ledger, expired in self._ledgers.expire(ledgers, now, max_steps):
            partition = partitions[ledger.model_name, ledger.tenant_id]
            gone += [(partition, reservation) for reservation in expired]
            for reservation in expired:
                if not reservation.prefill_done:
                    partition.speeds.ended(reservation, now)
            self.forget_ended(partition, expired)
            partition.queue.admit(now)
        return gone

    def arrived(self) -> int:
        """Count all requests booked so far, here and by peers, in partitions that still exist."""
        return sum(partition.slots.arrived for partition in self._catalog.partitions.values())


def _booked(partition: Partition, spec: ReservationSpec, worker: SchedulableWorker) -> Booked:
    return Booked(
        spec.request_id,
        partition.model_name,
        partition.tenant_id,
        spec.worker_id,
        spec.dp_rank,
        worker.endpoint,
    )


def _duplicate(partition: Partition, reservation_id: str) -> DuplicateRequest:
    load = partition.slots.reservations[reservation_id].rank_load
    return DuplicateRequest(reservation_id, load.worker_id, load.dp_rank)
