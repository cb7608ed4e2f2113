"""The selector: catalog, partitions, reservations and queues of one process.

No call awaits anything, so choosing a rank and booking it is one atomic step. A request that must
wait is queued. A later call that frees capacity answers the request through its callback (D11).
The argument `events` publishes to other replicas. Times are arguments, in monotonic seconds."""

import heapq
import random
from collections.abc import Callable, Iterable

from lean_selector.core.errors import (
    AllWorkersBusy,
    Conflict,
    NotFound,
    SelectorError,
    Unavailable,
    rank_text,
)
from lean_selector.core.health.ejections import OK, REFUSED
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.routed import RoutedPrompts
from lean_selector.core.load.busy import BusyThresholds, Headroom
from lean_selector.core.load.shapes import OFF, BusyThreshold, Reservation
from lean_selector.core.load.slots import check_decay_fraction
from lean_selector.core.rank_bits import RankKey
from lean_selector.core.replication.events import restore
from lean_selector.core.replication.ledger import Ledgers, LifecycleEvents
from lean_selector.core.replication.shapes import LiveBooking
from lean_selector.core.selection.bookings import Bookings, SelectionCache
from lean_selector.core.selection.catalog import Catalog, SourceSink, Worker
from lean_selector.core.selection.choice import NO_ENDPOINTS, choose
from lean_selector.core.selection.cost import base_terms, terms, under
from lean_selector.core.selection.hearers import Decisions, Watch
from lean_selector.core.selection.overlap import MatchSets, as_sets, match_by_rank, match_sets
from lean_selector.core.selection.partition import Line, Parked, Partition, Place
from lean_selector.core.selection.router_settings import CostTerms, RouterSettings
from lean_selector.core.selection.scheduler import (
    check_pin,
    check_target,
    eligible,
    least_left_to_prefill,
    not_busy,
    placed,
    steered,
)
from lean_selector.core.selection.shapes import (
    CachedSelection,
    Decision,
    PartitionKey,
    Placement,
    SelectionRequest,
    WorkerSpec,
)
from lean_selector.core.sessions.table import SessionTables

# --------------------------------------------------------------------------------------------------
# Admit queued requests after capacity may have come free (D11).
#
# One event frees at most one rank. It costs next to nothing while no rank is below its threshold.
# If one is, each line is checked once for whether it includes the rank. Then only requests that can
# leave are visited, in the order of the queue.

PlaceNow = Callable[[Partition, SelectionRequest, int, MatchSets, float], Placement]
CallSoon = Callable[[Callable[[], None]], object]

# requests that one event admits per turn of the loop; takes a millisecond, answers included
MOST_AT_ONCE = 32


class Admission:
    """Admits queued requests, a limited number in each iteration of the event loop."""

    def __init__(
        self, place: PlaceNow, refresh_after_s: float | None, call_soon: CallSoon | None
    ) -> None:
        """`place` chooses a rank and books it, or raises. If a request was queued for
        `refresh_after_s` seconds, its cached blocks are looked up again. `call_soon` is the event
        loop's method; without it, all requests are admitted at once."""
        self._place = place
        self._refresh_after_s = refresh_after_s
        self._call_soon = call_soon
        self._most = 1 << 60 if call_soon is None else MOST_AT_ONCE

    def admit(self, partition: Partition, now: float, hopeless_after_s: float = 0.0) -> None:
        """Fail queued requests that no worker can serve and that have waited for `hopeless_after_s`
        seconds. Then admit queued requests that can be placed now, in order."""
        parked = partition.parked
        if parked.hopeless and not parked.is_due:
            told = [
                item
                for line in parked.hopeless
                for item in line.items
                if now - item.arrived_at >= hopeless_after_s
            ]
            for item in told[: self._most]:
                if parked.leave(item):
                    item.on_answer(item, Unavailable(NO_ENDPOINTS))
            if len(told) > self._most:
                self._go_on_later(partition)
        self.admit_next(partition, now)

    def admit_next(self, partition: Partition, now: float) -> None:
        """Admit queued requests that can be placed now, in the order of the queue."""
        room, parked = partition.room, partition.parked
        if room is None or not len(parked):
            return
        room.advance(now)
        if parked.is_moving or parked.is_due:
            return  # the running admission will look again
        parked.is_moving = True
        left = self._most
        try:
            while room.came_free and left:
                left = self._let_go(partition, room, left)
        finally:
            parked.is_moving = False
        if room.came_free:
            self._go_on_later(partition)

    def _go_on_later(self, partition: Partition) -> None:
        def go_on() -> None:
            partition.parked.is_due = False
            assert partition.room is not None, "requests were parked"
            self.admit(partition, partition.room.now)

        assert self._call_soon is not None, "or all have gone"
        partition.parked.is_due = True
        self._call_soon(go_on)

    def _let_go(self, partition: Partition, room: Headroom, most: int) -> int:
        """Admit queued requests that can use ranks that came free, at most `most`. Returns how many
        of `most` are left. Returns early if more ranks come free; the caller then calls again."""
        came_free, room.came_free = room.came_free, 0
        open_lines: list[tuple[Place, Line]] = []
        blocked: Place | None = None  # the first request that cannot leave
        try:
            for line in partition.parked.lines():
                head = line.items[0].key
                if line.leads_to & came_free and line.is_open(room):
                    open_lines.append((head, line))
                elif line.ranks and (blocked is None or head < blocked):
                    blocked = head
            heapq.heapify(open_lines)
            while open_lines and most and not room.came_free:
                key, line = open_lines[0]
                if not line.items:
                    heapq.heappop(open_lines)
                elif line.items[0].key != key:
                    heapq.heapreplace(open_lines, (line.items[0].key, line))
                elif not line.is_open(room):
                    heapq.heappop(open_lines)
                    if blocked is None or key < blocked:
                        blocked = key
                else:
                    passes = blocked is not None and blocked < key
                    self._go(partition, room, line.items[0], passes)
                    most -= 1
        finally:
            if open_lines:
                room.came_free |= came_free
        return most

    def _go(self, partition: Partition, room: Headroom, parked: Parked, passes: bool) -> None:
        """Place a queued request. If `passes`, the request overtakes earlier requests, which stay
        queued. A request that overtakes may use only ranks below the queue's threshold."""
        request, now = parked.request, room.now
        waited_s = request.waited_s = now - parked.arrived_at
        partition.parked.leave(parked)
        answer: Placement | Exception
        try:
            ranks = not_busy(partition, request, eligible(partition, request))
            if passes:
                ranks &= room.below
            if self._refresh_after_s is not None and waited_s >= self._refresh_after_s:
                matches = match_sets(partition, request.prompt.local_hashes)
            else:
                matches = as_sets(partition, request.matches, parked.key[2])
            answer = self._place(partition, request, ranks, matches, now)
            partition.parked.admitted += 1
            partition.parked.waited_s += waited_s
        # a failure must reach this request, not the caller whose event admitted it
        except Exception as error:
            answer = error
        parked.on_answer(parked, answer)


# --------------------------------------------------------------------------------------------------
# Health reports and polls, applied to partitions and their queues.
#
# Replicas do not share ejections: each uses only the reports that it received and its own polls.


class WorkerHealth:
    """Applies reported outcomes of requests, and health polls, to the workers of a catalog."""

    def __init__(self, catalog: Catalog, admit: Callable[[Partition, float], None]) -> None:
        """`admit`, called when more ranks have become eligible, admits queued requests."""
        self._catalog = catalog
        self._admit = admit

    def report(
        self,
        worker_id: int,
        dp_rank: int | None,
        outcome: str,
        now: float,
        ttft_s: float | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        """Report that a request to this rank, or to the whole worker, was `refused`, `failed` or
        `ok`.

        `ttft_s` and `cached_tokens` (as counted by the engine) are added to totals, and have no
        other effect. Does nothing if the worker is `incomplete`. Raises NotFound."""
        found = self.ranks_of(worker_id, dp_rank)
        if found is None:
            return
        partition, keys = found
        counts = partition.slots.ranks[keys[0]].counts  # once, even for a whole worker
        if outcome == OK:
            counts.ok += 1
        elif outcome == REFUSED:
            counts.refused += 1
        else:
            counts.failed += 1
        if ttft_s is not None:
            counts.ttft_s += ttft_s
            counts.ttft_count += 1
        if cached_tokens is not None:
            counts.cached_tokens += cached_tokens
        if partition.report(keys, outcome, now):
            self._admit(partition, now)

    def polled(self, worker_id: int, fault: str | None, now: float) -> None:
        """Record a health poll. `fault` is None if the poll succeeded. Ignores unknown workers."""
        if worker_id in self._catalog.workers:
            found = self.ranks_of(worker_id, None)
            if found is not None and found[0].poll(found[1], fault, now):
                self._admit(found[0], now)

    def settle(self, now: float) -> None:
        """End the ejections of ranks whose ejection time is over."""
        for partition in self._catalog.partitions.values():
            partition.settle_health(now)

    def ranks_of(
        self, worker_id: int, dp_rank: int | None
    ) -> tuple[Partition, list[RankKey]] | None:
        """Return the worker's partition and the key of this rank, or of all the worker's ranks if
        `dp_rank` is None. Returns None if the worker is `incomplete`. Raises NotFound."""
        worker = self._catalog.workers.get(worker_id)
        if worker is None:
            raise NotFound(f"worker {worker_id} not found")
        if dp_rank is not None and dp_rank not in worker.spec.ranks:
            raise NotFound(f"Worker {rank_text(worker_id, dp_rank)} not found")
        partition = self._catalog.partitions.get(worker.spec.key)
        known = None if partition is None else partition.workers.get(worker_id)
        if partition is None or known is None:
            return None
        if dp_rank is not None:
            return partition, [(worker_id, dp_rank)]
        return partition, [load.key for load in known.loads]


# A request that no worker can serve stays queued while others wait, because a worker that can may
# register. If nothing happens, it is answered after this time (the reference: 60 s).
RECHECK_AFTER_S = 2.0

OnAnswer = Callable[[Parked, Placement | Exception], None]


class Selector:
    """The state of one selection service."""

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
        sessions: SessionTables | None = None,
        check_worker: Callable[[WorkerSpec], None] = lambda spec: None,
        call_soon: CallSoon | None = None,
        decisions: Decisions | None = None,
    ) -> None:
        """`thresholds` are the default busy thresholds. `on_discarded` and `check_worker` are
        passed to the catalog. If `sessions` are not given, the settings define them. `call_soon` is
        the event loop's method, to admit queued requests in a later iteration of the loop."""
        self.settings = settings
        self.terms: CostTerms = terms(settings)  # for all models except the following
        self.model_terms = {
            model: under(base_terms(settings), policy)
            for model, policy in settings.model_policies.items()
        }
        self.ledgers = Ledgers(settings.reservation_expiry_s, events)
        if sessions is None and settings.sessions is not None:
            sessions = SessionTables(settings.sessions)
        self._sessions = sessions
        self._rng = rng
        self._decisions = decisions
        self._new_index = new_index
        self.limits = BusyThresholds(thresholds)
        self.catalog = Catalog(
            settings,
            sources,
            new_partition=self._new_partition,
            on_dropped=self._forget_ended,
            on_discarded=on_discarded,
            check=check_worker,
        )
        self.bookings = Bookings(self.catalog.partitions, settings.dialect)
        self.selections = SelectionCache(settings.selection_cache)
        self._admission = Admission(self._place, settings.overlap_refresh_after_s, call_soon)
        # Whether requests may be queued. If not, `select` does the same as `select_now`.
        self.parks = settings.queue_threshold is not None
        self._refuses_to_park: SelectorError | None = None
        self.health = WorkerHealth(self.catalog, self.admit_parked)
        self.watch: Watch | None = None  # set while a page is open

    def terms_of(self, model_name: str) -> CostTerms:
        """Return the weights of the cost formula for requests to this model without overrides."""
        return self.model_terms.get(model_name, self.terms)

    def _new_partition(self, key: PartitionKey, block_size: int, is_eagle: bool) -> Partition:
        index, ttl_s = self._new_index(block_size), self.settings.routed_ttl_s
        terms = self.terms_of(key[0])
        routed = None
        if ttl_s > 0.0:
            routed = RoutedPrompts(index.beside() if self.settings.use_kv_events else index, ttl_s)
        partition = Partition(
            *key,
            block_size,
            is_eagle,
            index,
            terms.scale,
            request_weight=terms.request_weight,
            queue_threshold=self.settings.queue_threshold,
            queue_policy=self.settings.queue_of(self.settings.policy_of(key[0])),
            ledgers=self.ledgers,
            ejection=self.settings.ejection,
            routed=routed,
            sessions=None if self._sessions is None else self._sessions.new_table(*key),
        )
        partition.set_threshold(self.limits.of(key))
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
        if self._sessions is not None:  # sessions of removed ranks start to expire
            for partition in self.catalog.partitions.values():
                partition.slots.heard_at = now
        worker = change()
        for partition in waiting:
            self.admit_parked(partition, now)
        return worker

    def _forget_ended(self, partition: Partition, reservations: list[Reservation]) -> None:
        self.bookings.forget_ended(partition, reservations)

    # -- busy thresholds -----------------------------------------------------------------------

    def thresholds(self) -> list[tuple[PartitionKey, BusyThreshold]]:
        """Return the busy thresholds in force, sorted, for each model and tenant with a worker."""
        return [(key, self.limits.of(key)) for key in sorted(self.catalog.scopes())]

    def change_threshold(
        self, key: PartitionKey, given: BusyThreshold, now: float
    ) -> BusyThreshold:
        """Change the given busy thresholds of a model and tenant, and return the thresholds in
        force. Raises BadRequest or NotFound."""
        return self._enforce(key, self.limits.change(key, given, self.catalog.scopes()), now)

    def switch_threshold_off(self, key: PartitionKey, now: float) -> BusyThreshold:
        """Switch the busy threshold of this model and tenant off. Raises NotFound."""
        return self._enforce(key, self.limits.switch_off(key, self.catalog.scopes()), now)

    def _enforce(self, key: PartitionKey, threshold: BusyThreshold, now: float) -> BusyThreshold:
        partition = self.catalog.partitions.get(key)
        if partition is not None:
            partition.set_threshold(threshold)
            self.admit_parked(partition, now)
        return threshold

    # -- selection -----------------------------------------------------------------------------

    def scheduling_partition(self, model_name: str, tenant_id: str) -> Partition | None:
        """Return the partition; None if it never had a schedulable worker to book a request on."""
        partition = self.catalog.partitions.get((model_name, tenant_id))
        return partition if partition is not None and partition.established else None

    def load_changed(
        self, model_name: str, tenant_id: str, reservation_id: str, now: float
    ) -> None:
        """Admit queued requests, because an event from another replica may have freed capacity."""
        self.bookings.local_holder(reservation_id)  # forgets the id if the peer freed it
        partition = self.catalog.partitions.get((model_name, tenant_id))
        if partition is not None:
            self.admit_parked(partition, now)

    def select(
        self, partition: Partition, request: SelectionRequest, now: float, on_answer: OnAnswer
    ) -> Placement | Parked:
        """Choose a rank, and book it if `request.books`. Returns the placement, or queues the
        request and calls `on_answer` later. Raises SelectorError, with nothing changed."""
        room, parked = partition.room, partition.parked
        if room is None:
            return self.select_now(partition, request, now)
        if len(parked):
            # queued requests use free capacity first
            self._admission.admit_next(partition, now)
        room.advance(now)
        ranks = self._free_ranks(partition, request)
        # a request that overtakes others may only use ranks below the threshold
        if len(parked):
            ranks &= room.below
            is_next = ranks != 0 and not (parked.is_moving or parked.is_due)
        else:  # a request without eligible rank fails at once
            is_next = not ranks or ranks & room.below != 0
        if is_next:
            matches = match_sets(partition, request.prompt.local_hashes)
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
        request.prompt.sequence_hashes()  # compute now: a later error would be lost
        request.matches = match_by_rank(partition, request.prompt.local_hashes)
        if not len(partition.parked):
            room.came_free = 0  # no request was queued, so nobody waits for these ranks
        left = 0
        if partition.parked.asks_work:
            left = least_left_to_prefill(partition, request)
        parked = partition.parked.park(request, now, on_answer, left)
        if partition.parked.is_moving or partition.parked.is_due:
            # The request arrived during an admission, and may be the next to leave.
            room.came_free |= parked.line.leads_to
        return parked

    def select_now(self, partition: Partition, request: SelectionRequest, now: float) -> Placement:
        """Choose a rank even if requests are queued, and book it if `request.books`."""
        ranks = self._free_ranks(partition, request)
        matches = match_sets(partition, request.prompt.local_hashes)
        return self._place(partition, request, ranks, matches, now)

    def _free_ranks(self, partition: Partition, request: SelectionRequest) -> int:
        if request.pinned is not None:
            check_pin(request)
            if request.target is not None:
                check_target(partition, request)
        try:
            return not_busy(partition, request, eligible(partition, request))
        except AllWorkersBusy:
            shed = partition.shed
            shed[request.asked_at] = shed.get(request.asked_at, 0) + 1
            raise

    def _place(
        self,
        partition: Partition,
        request: SelectionRequest,
        ranks: int,
        matches: MatchSets,
        now: float,
    ) -> Placement:
        """Choose among these ranks, and book the choice if `request.books`."""
        is_steered = False
        if request.session_id is not None or request.target is not None:
            chosen = steered(partition, request, ranks, now)
            is_steered, ranks = chosen != ranks, chosen
        load = choose(partition, request, ranks, matches, self._rng)
        placement = placed(partition, load, request, matches)
        if request.adds:
            from lean_selector.core.selection.explain import with_more

            placement = with_more(
                partition, request, ranks, matches, (load, placement), now, is_steered
            )
        prompt = request.prompt
        decision: Decision | None = None
        watch = self.watch
        if watch is not None:
            decision = watch.look(partition, request, ranks, matches, load, placement, now)
        if request.books:
            if self._decisions is not None:
                self._decisions.chosen(partition, request, ranks, matches, placement, now)
            choice = CachedSelection(
                load.worker_id,
                load.dp_rank,
                prompt,
                placement.effective_prefill_tokens,
                request.expected_output_tokens,
                request.terms.track_prefill,
                request.session_id,
            )
            try:
                self.bookings.book_choice(partition, choice, request.reservation_id, now)
            except Conflict as error:
                raise self.bookings.not_booked(error, request.reservation_id) from None
            if request.terms.eviction:
                partition.fullness.booked(load, ranks, placement.effective_prefill_tokens)
        if watch is not None and decision is not None:
            watch.add(decision)
        counts, isl_tokens = load.counts, prompt.isl_tokens
        counts.selections += 1
        counts.prompt_tokens += isl_tokens
        counts.overlap_tokens += isl_tokens - placement.effective_prefill_tokens
        return placement

    def admit_waiting(self, now: float) -> None:
        """End ejections whose time is over, admit queued requests, and fail requests that no worker
        can serve and that are older than RECHECK_AFTER_S. Call this about every second."""
        self.health.settle(now)
        self.selections.expire(now)
        for partition in list(self.catalog.partitions.values()):
            partition.speeds.settle(now)
            self._admission.admit(partition, now, RECHECK_AFTER_S)

    def admit_parked(self, partition: Partition, now: float) -> None:
        """Admit queued requests, because capacity may have come free."""
        if partition.room is not None:
            self._admission.admit(partition, now)

    def hung_up(self, partition: Partition, parked: Parked, now: float) -> None:
        """Remove a queued request whose client has disconnected."""
        if partition.parked.leave(parked):
            self.admit_parked(partition, now)

    def refuse_parked(self, error: SelectorError) -> None:
        """Answer all queued requests, and all that would be queued from now on, with `error`."""
        self._refuses_to_park = error
        for partition in self.catalog.partitions.values():
            for parked in partition.parked.in_order():
                if partition.parked.leave(parked):
                    parked.on_answer(parked, error)

    # -- reservations --------------------------------------------------------------------------

    def prefill_complete(
        self, reservation_id: str, now: float, ttft_s: float | None = None
    ) -> None:
        """Record that a request's prefill is complete. `ttft_s`: its time to first token."""
        holders = self.bookings.holders(reservation_id)
        if ttft_s is not None:
            counts = holders[0].slots.reservations[reservation_id].rank.counts
            counts.ttft_s += ttft_s
            counts.ttft_count += 1
            if self._decisions is not None:
                self._decisions.reported(reservation_id, ttft_s, None)
        for partition in holders:
            reservation = partition.slots.reservations[reservation_id]
            if not reservation.prefill_done:
                partition.speeds.completed(reservation, ttft_s, now)
            partition.ledger.prefill_complete(reservation_id, now)
            self.admit_parked(partition, now)

    def output_block(self, reservation_id: str, decay_fraction: float | None, now: float) -> None:
        if decay_fraction is not None:
            check_decay_fraction(decay_fraction)
        for partition in self.bookings.holders(reservation_id):
            partition.ledger.output_block(reservation_id, now, decay_fraction)
            if decay_fraction is not None:  # the blocks weigh less: a rank may be free now
                self.admit_parked(partition, now)

    def expect_output(self, reservation_id: str, tokens: int, now: float) -> None:
        """Add to a new reservation the blocks that an answer of this many tokens will need."""
        for partition in self.bookings.holders(reservation_id):
            if blocks := tokens // partition.block_size:
                partition.ledger.output_block(reservation_id, now, blocks=blocks)

    def end(
        self,
        reservation_id: str,
        outcome: str | None,
        cached_tokens: int | None,
        now: float,
        known_tokens: int | None = None,
    ) -> None:
        """Free a reservation and record the outcome for its rank. A refused connection counts for
        the whole worker. `cached_tokens` is the engine's count of cached tokens. `known_tokens`:
        how many prompt tokens are in blocks whose hashes the caller knew (None: all)."""
        partition = self.bookings.holders(reservation_id)[0]
        reservation = partition.slots.reservations[reservation_id]
        rank, booking = reservation.rank, reservation.booking
        if cached_tokens is not None:
            if self._decisions is not None:
                self._decisions.reported(reservation_id, None, cached_tokens)
            rank.counts.cached_tokens += cached_tokens
            if booking.prefill_tokens is not None:  # None: the prediction is unknown
                size = partition.block_size
                blocks = reservation.block_count - booking.prefill_tokens // size
                rank.counts.compared_tokens += cached_tokens
                found = max(0, blocks * size)
                rank.counts.compared_overlap_tokens += found
                cached = cached_tokens if known_tokens is None else min(cached_tokens, known_tokens)
                # An engine recomputes the last token of a fully cached prompt, and therefore its
                # last block.
                is_whole = blocks == reservation.block_count and cached + size == found
                if known_tokens != 0:
                    rank.counts.compare(cached if is_whole else found, cached)
        self.free(reservation_id, now)
        if outcome is not None:
            dp_rank = None if outcome == REFUSED else rank.dp_rank
            self.health.report(rank.worker_id, dp_rank, outcome, now)

    def free(self, reservation_id: str, now: float) -> None:
        for partition in self.bookings.holders(reservation_id):
            reservation = partition.ledger.free(reservation_id, now)
            if reservation is not None and not reservation.prefill_done:
                partition.speeds.ended(reservation, now)
            self.bookings.forget(reservation_id)
            self.admit_parked(partition, now)

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
            self.bookings.forget_ended(partition, expired)
            self.admit_parked(partition, now)
        return gone

    def arrived(self) -> int:
        """Count all requests booked so far, here and by peers, in partitions that still exist."""
        return sum(partition.slots.arrived for partition in self.catalog.partitions.values())


# --------------------------------------------------------------------------------------------------
# Restore the state of an earlier process into a new selector.
#
# Partitions are restored before their workers, workers before their bookings. Nothing is published.


def restore_partition(
    catalog: Catalog, key: PartitionKey, block_size: int, is_eagle: bool, members: Iterable[int]
) -> None:
    """Restore a partition of an earlier process. Workers with another block size are refused while
    one of `members`, the workers that were once schedulable in the partition, is left (D3)."""
    partition = catalog.partitions[key] = catalog.new_partition(key, block_size, is_eagle)
    partition.established = True
    partition.members.update(members)


def restore_booking(selector: Selector, live: LiveBooking, router_id: int | None) -> bool:
    """Restore a reservation of an earlier process. `router_id`: the replica that admitted the
    request; None: this replica. Returns False if the reservation could not be restored."""
    partition = selector.scheduling_partition(live.model_name, live.tenant_id)
    if partition is None:
        return False
    request_id, bookings = live.booking.request_id, selector.bookings
    if router_id is not None:
        return restore(partition, live, router_id)
    if bookings.local_holder(request_id) is not None or not restore(partition, live, None):
        return False
    bookings.restored(partition, request_id)
    return True
