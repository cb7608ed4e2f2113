"""What becomes of reservations in all partitions once they are booked: prefilled, growing, ended,
expired. The selector books them.

Whatever may have freed capacity admits requests from the partition's queue. Times are arguments, in
monotonic seconds."""

from lean_selector.core.health.ejections import FAILED, REFUSED
from lean_selector.core.load.shapes import Reservation
from lean_selector.core.load.slots import check_decay_fraction
from lean_selector.core.replication.ledger import Ledgers
from lean_selector.core.selection.bookings import Bookings
from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.hearers import Decisions
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.worker_health import WorkerHealth

_FAULTS = frozenset((FAILED, REFUSED))


class Reservations:
    """Changes the reservations of one selector."""

    def __init__(
        self, catalog: Catalog, ledgers: Ledgers, bookings: Bookings, health: WorkerHealth
    ) -> None:
        self._catalog = catalog
        self._ledgers = ledgers
        self._bookings = bookings
        self._health = health
        self.decisions: Decisions | None = None  # set if there is a decision log

    def prefill_complete(
        self, reservation_id: str, now: float, ttft_s: float | None = None
    ) -> None:
        """Record that a request's prefill is complete. `ttft_s`: its time to first token."""
        holders = self._bookings.holders(reservation_id)
        if ttft_s is not None:
            counts = holders[0].slots.reservations[reservation_id].rank.counts
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
        for partition in self._bookings.holders(reservation_id):
            partition.ledger.output_block(reservation_id, now, decay_fraction)
            if decay_fraction is not None:  # the blocks weigh less: a rank may be free now
                partition.queue.admit(now)

    def expect_output(self, reservation_id: str, tokens: int, now: float) -> None:
        """Add to a new reservation the blocks that an answer of this many tokens will need."""
        for partition in self._bookings.holders(reservation_id):
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
        partition = self._bookings.holders(reservation_id)[0]
        reservation = partition.slots.reservations[reservation_id]
        rank = reservation.rank
        if cached_tokens is not None:
            if self.decisions is not None:
                self.decisions.reported(reservation_id, None, cached_tokens)
            rank.counts.report_cached(
                cached_tokens,
                reservation.block_count,
                reservation.booking.prefill_tokens,
                partition.block_size,
                known_tokens,
            )
        self.free(reservation_id, now, was_served=not reports_prefill and outcome not in _FAULTS)
        if outcome is not None:
            dp_rank = None if outcome == REFUSED else rank.dp_rank
            self._health.report(rank.worker_id, dp_rank, outcome, now)

    def free(self, reservation_id: str, now: float, was_served: bool = True) -> None:
        """End a reservation. Without `was_served`, its rank is no longer assumed to cache the
        prompt, unless the prefill was reported as complete."""
        for partition in self._bookings.holders(reservation_id):
            if not was_served:
                live = partition.slots.reservations[reservation_id]
                if not live.prefill_done and not live.is_replica:
                    partition.not_computed(live)
            reservation = partition.ledger.free(reservation_id, now)
            if reservation is not None and not reservation.prefill_done:
                partition.speeds.ended(reservation, now)
            self._bookings.forget(reservation_id)
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
            self._bookings.forget_ended(partition, expired)
            partition.queue.admit(now)
        return gone

    def arrived(self) -> int:
        """Count all requests booked so far, here and by peers, in partitions that still exist."""
        return sum(partition.slots.arrived for partition in self._catalog.partitions.values())
