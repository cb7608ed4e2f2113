"""The reservations of all partitions, by id: booked, prefilled, growing, ended, expired.

A partition's ledger has its reservations, books them and publishes them. Here the partition of an
id that a client sends is found (D4), and a rank that the client chose is checked before it is
booked. No rank is chosen here. Whatever may have freed capacity admits requests from the
partition's queue. Times are arguments, in monotonic seconds."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from lean_selector.core.errors import BadRequest, Conflict, DuplicateRequest, NotFound, rank_text
from lean_selector.core.health.ejections import FAILED, REFUSED
from lean_selector.core.load.shapes import Reservation, ReservationSpec
from lean_selector.core.load.slots import check_decay_fraction
from lean_selector.core.replication.ledger import Ledgers
from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.overlap import MatchSets
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.schedulable_worker import SchedulableWorker
from lean_selector.core.selection.scheduler import check_session
from lean_selector.core.selection.shapes import (
    DECODE,
    Booked,
    CachedSelection,
    Placement,
    PrefillChoice,
    SelectionRequest,
)
from lean_selector.core.selection.worker_health import WorkerHealth
from lean_selector.core.settings import Dialect

_FAULTS = frozenset((FAILED, REFUSED))

# A request that two workers serve has a second reservation, its leg: that of the prefill.
LEG: Final = "#prefill"
_MOST_CHARACTERS: Final = 4096  # of an id


def leg_of(reservation_id: str) -> str:
    return reservation_id + LEG


def check_own_id(name: str, value: str, *, has_leg: bool = False) -> None:
    """Raise BadRequest for an id that a client may not give to a reservation (with a leg)."""
    most = _MOST_CHARACTERS - len(LEG) if has_leg else _MOST_CHARACTERS
    if len(value) > most:
        raise BadRequest(f"{name} must not have more than {most} characters, and has {len(value)}")
    if value.endswith(LEG):
        raise BadRequest(f"{name} must not end with {LEG}, as the ids of legs do")


class Decisions(Protocol):
    """Receives each booked choice, and later the time to first token and the cached tokens."""

    def chosen(
        self,
        partition: Partition,
        request: SelectionRequest,
        matches: MatchSets,
        placement: Placement,
    ) -> None: ...

    def reported(
        self, reservation_id: str, ttft_s: float | None, cached_tokens: int | None
    ) -> None: ...


@dataclass(eq=False)
class Reservations:
    """Books and changes the reservations of one selector."""

    catalog: Catalog
    ledgers: Ledgers
    health: WorkerHealth
    dialect: Dialect

    def __post_init__(self) -> None:
        self.decisions: Decisions | None = None  # set if there is a decision log
        self.claimed: set[str] = set()  # ids of queued requests
        # Ids booked over HTTP at this replica, with their partition. An id is stale once its
        # reservation has ended (D4).
        self._booked: dict[str, Partition] = {}

    def __len__(self) -> int:
        """Number of stored reservation ids, including ids of reservations that have ended."""
        return len(self._booked)

    # -- booking -----------------------------------------------------------------------------------

    def book(
        self,
        partition: Partition,
        spec: ReservationSpec,
        prompt: Prompt,
        now: float,
        leg: PrefillChoice | None = None,
    ) -> None:
        """Book a rank for a prompt, and with `leg` the rank that does its prefill. Raises NotFound
        or Conflict, with nothing booked."""
        reservation_id = spec.request_id
        if leg is not None:
            self.check_free(partition, leg_of(reservation_id))
            if (leg.worker_id, leg.dp_rank) not in partition.slots.ranks:
                raise NotFound(f"Worker {rank_text(leg.worker_id, leg.dp_rank)} not found")
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
        if leg is not None:
            left, rank = leg.effective_prefill_tokens, (leg.worker_id, leg.dp_rank)
            its_id = leg_of(reservation_id)
            its_spec = ReservationSpec(its_id, *rank, prompt.lora_name, True, left or None)
            self.book(partition, its_spec, prompt, now)
            self.join_leg(partition, reservation_id, left)

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
        self.book(partition, spec, prompt, now, chosen.prefill)
        if session_id is not None and partition.sessions is not None:
            partition.sessions.book(session_id, reservation_id, worker_id, dp_rank, now)
        return spec

    def join_leg(self, partition: Partition, reservation_id: str, tokens: int) -> None:
        """Note with a reservation what its leg is expected to do, since the leg may end first."""
        live = partition.slots.reservations
        booked, leg = live[reservation_id], live[leg_of(reservation_id)]
        booked.ahead_tokens = 0  # its first token tells nothing of the speed of its own rank
        booked.prefills_on, booked.leg_tokens = leg.rank_load, tokens
        booked.expected_s = partition.speeds.expected_s(leg)

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
        leg: PrefillChoice | None = None,
    ) -> Booked:
        """Book a rank that the client chose, at once, whatever its load. Books `prefill_tokens`
        tokens of prefill; none if it is None or `books_prefill` is False. `leg`: the rank that
        does the prefill instead. Raises BadRequest, NotFound or Conflict, with nothing booked."""
        if leg is not None:
            _check_leg(partition, worker_id, leg, prompt, prefill_tokens)
            books_prefill = False
        if prefill_tokens is not None and prefill_tokens > prompt.isl_tokens:
            raise BadRequest(
                f"effective_prefill_tokens ({prefill_tokens}) "
                f"must not exceed isl_tokens ({prompt.isl_tokens})"
            )
        worker = partition.workers.get(worker_id)
        if worker is None:
            raise NotFound(f"schedulable worker {worker_id} not found for {self._scope(partition)}")
        if self.dialect.claims_ids:
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
        self.book(partition, spec, prompt, now, leg)
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
        if self.dialect.claims_ids:
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
        if self.dialect.claims_ids:
            return self._taken(reservation_id)
        return Conflict(f"failed to book scheduler state: {error.message}")

    def _taken(self, reservation_id: str) -> Conflict:
        return Conflict(f"selection {reservation_id} is already reserved or being reserved")

    def _scope(self, partition: Partition) -> str:
        return self.dialect.scope(partition.model_name, partition.tenant_id)

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
            for partition in self.catalog.partitions.values()
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
        holders = self._holders_or_end(reservation_id, now, is_complete=True)
        is_leg = reservation_id.endswith(LEG)
        if ttft_s is not None and holders:
            counts = holders[0].slots.reservations[reservation_id].rank_load.counts
            counts.ttft_s += ttft_s
            counts.ttft_count += 1
            if self.decisions is not None:
                self.decisions.reported(reservation_id, ttft_s, None)
        for partition in holders:
            reservation = partition.slots.reservations[reservation_id]
            self.end_leg(partition, reservation_id, now, is_complete=True)
            if not reservation.prefill_done:
                speeds, leg_load = partition.speeds, reservation.prefills_on
                speeds.completed(reservation, ttft_s, now, is_first_token=not is_leg)
                if leg_load is not None and reservation.expected_s:
                    seconds = now - reservation.booked_at if ttft_s is None else ttft_s
                    leg_load.counts.predict(reservation.expected_s, max(seconds, 1e-9))
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
        prefill_outcome: str | None = None,
    ) -> None:
        """Free a reservation and record the outcome for its rank. A refused connection counts for
        the whole worker. `cached_tokens` is the engine's count of cached tokens. `known_tokens`:
        how many prompt tokens are in blocks whose hashes the caller knew (None: all).
        `reports_prefill`: the caller reports every completed prefill, whatever the outcome.
        If the reservation has or had a leg, `cached_tokens` and `prefill_outcome` are the leg's."""
        served = prefill_outcome not in _FAULTS
        holders = self._holders_or_end(reservation_id, now, was_served=served)
        if not holders:
            return
        partition = holders[0]
        reservation = partition.slots.reservations[reservation_id]
        load = reservation.rank_load
        leg_load, booked_tokens = reservation.prefills_on, reservation.spec.prefill_tokens
        leg = self._leg(partition, reservation_id)
        if leg_load is not None:
            booked_tokens = reservation.leg_tokens or None
        elif leg is not None:
            leg_load, booked_tokens = leg.rank_load, leg.spec.prefill_tokens
        if cached_tokens is not None:
            if self.decisions is not None:
                self.decisions.reported(reservation_id, None, cached_tokens)
            (load if leg_load is None else leg_load).counts.report_cached(
                cached_tokens,
                reservation.block_count,
                booked_tokens,
                partition.block_size,
                known_tokens,
            )
        if not served:
            self.end_leg(partition, reservation_id, now, was_served=False)
        self.free(reservation_id, now, was_served=not reports_prefill and outcome not in _FAULTS)
        if prefill_outcome is not None and leg_load is not None:
            leg_rank = None if prefill_outcome == REFUSED else leg_load.dp_rank
            self.health.record_outcome(leg_load.worker_id, leg_rank, prefill_outcome, now)
        if outcome is not None:
            dp_rank = None if outcome == REFUSED else load.dp_rank
            self.health.record_outcome(load.worker_id, dp_rank, outcome, now)

    def free(self, reservation_id: str, now: float, was_served: bool = True) -> None:
        """End a reservation. Without `was_served`, its rank is no longer assumed to cache the
        prompt, unless the prefill was reported as complete. Its leg ends first, so that peers hear
        of both ends in an order in which neither is news that comes too early."""
        holders = self._holders_or_end(reservation_id, now, was_served=was_served)
        is_complete = was_served and reservation_id.endswith(LEG)
        for partition in holders:
            self.end_leg(partition, reservation_id, now, was_served=was_served)
            live = partition.slots.reservations[reservation_id]
            self._end(partition, live, now, is_complete=is_complete, was_served=was_served)
            partition.queue.admit(now)

    def _end(
        self,
        partition: Partition,
        reservation: Reservation,
        now: float,
        *,
        is_complete: bool,
        was_served: bool,
    ) -> None:
        """End one reservation. `is_complete`: so its prefill is over, if it was not before."""
        if not reservation.prefill_done:
            if not was_served and not reservation.is_replica:
                partition.not_computed(reservation)
            if is_complete:
                partition.speeds.completed(reservation, None, now, is_first_token=False)
            else:
                partition.speeds.ended(reservation, now)
        partition.ledger.free(reservation.request_id, now)
        self.forget(reservation.request_id)

    def _leg(self, partition: Partition, reservation_id: str) -> Reservation | None:
        """Return the live leg of a reservation. A worker that only decodes has none: what has the
        id there is somebody else's."""
        leg = partition.slots.reservations.get(reservation_id + LEG)
        if leg is None:
            return None
        worker = partition.workers.get(leg.rank_load.worker_id)
        return None if worker is None or worker.role == DECODE else leg

    def end_leg(
        self,
        partition: Partition,
        reservation_id: str,
        now: float,
        *,
        is_complete: bool = False,
        was_served: bool = True,
    ) -> bool:
        """End the leg of a reservation, if there is one. `is_complete`: the first token came now.
        Return whether there was one."""
        leg = self._leg(partition, reservation_id)
        if leg is None:
            return False
        self._end(partition, leg, now, is_complete=is_complete, was_served=was_served)
        return True

    def heard_end(
        self, partition: Partition, reservation_id: str, ended_by: int, now: float
    ) -> None:
        """End the leg of a reservation that a peer ended. The peer that booked the leg tells of its
        end itself; others may know of no legs. Only the end of our own leg is published."""
        leg = self._leg(partition, reservation_id)
        if leg is None or leg.router_id == ended_by:
            return
        if leg.is_replica:
            partition.slots.free(leg.request_id, now)
        else:
            self.end_leg(partition, reservation_id, now)

    def _holders_or_end(
        self,
        reservation_id: str,
        now: float,
        *,
        is_complete: bool = False,
        was_served: bool = True,
    ) -> list[Partition]:
        """Return the partitions of a reservation, as `holders`. If only its leg is live, end that,
        and return none. Raises NotFound if nothing is live."""
        try:
            return self.holders(reservation_id)
        except NotFound:
            how = {"is_complete": is_complete, "was_served": was_served}
            found = [
                partition
                for partition in self.catalog.partitions.values()
                if self.end_leg(partition, reservation_id, now, **how)
            ]
            if not found:
                raise
        for partition in found:
            partition.queue.admit(now)
        return []

    def expire(self, now: float, max_steps: int) -> list[tuple[Partition, Reservation]]:
        """Expire idle reservations, at most `max_steps` in total. If `max_steps` reservations are
        returned, call again: there may be more."""
        gone = []
        partitions = self.catalog.partitions
        ledgers = [partition.ledger for partition in partitions.values()]
        for ledger, expired in self.ledgers.expire(ledgers, now, max_steps):
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
        return sum(partition.slots.arrived for partition in self.catalog.partitions.values())


def _check_leg(
    partition: Partition,
    worker_id: int,
    leg: PrefillChoice,
    prompt: Prompt,
    prefill_tokens: int | None,
) -> None:
    """Raise BadRequest if a client may not book this leg with a reservation on a worker."""
    if prefill_tokens:
        raise BadRequest("effective_prefill_tokens must be in prefill, if that is given")
    if leg.effective_prefill_tokens > prompt.isl_tokens:
        raise BadRequest(
            f"prefill.effective_prefill_tokens ({leg.effective_prefill_tokens}) "
            f"must not exceed isl_tokens ({prompt.isl_tokens})"
        )
    if leg.worker_id == worker_id:
        raise BadRequest(f"prefill.worker_id: worker {worker_id} cannot form a pair with itself")
    worker = partition.workers.get(leg.worker_id)
    if worker is not None and worker.role == DECODE:
        raise BadRequest(f"prefill.worker_id: worker {leg.worker_id} has the role decode")


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
