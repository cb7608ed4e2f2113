"""The selector: catalog, partitions, reservations and queues of one process.

No call awaits anything, so choosing a rank and booking it is one atomic step. A request that must
wait is queued. A later call that frees capacity answers it (D11, see `Waiting`).
What `ledgers.events` hears is published to other replicas. Times are arguments, in monotonic
seconds."""

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from lean_selector.core.errors import Conflict, SelectorError, TooLate
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.load.busy import BusyThresholds
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.shapes import OFF, BusyThreshold
from lean_selector.core.replication.ledger import Ledgers
from lean_selector.core.selection.catalog import Catalog, SourceSink, Worker
from lean_selector.core.selection.choice import choose
from lean_selector.core.selection.cost import base_terms, terms, under
from lean_selector.core.selection.overlap import MatchSets, match_sets
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.placement import placed
from lean_selector.core.selection.queue import CallLater, CallSoon, Line, Queue, QueueRules, Waiting
from lean_selector.core.selection.reservations import Reservations
from lean_selector.core.selection.router_settings import CostTerms, RouterSettings
from lean_selector.core.selection.scheduler import (
    eligible,
    free_ranks,
    least_left_to_prefill,
    least_ttft_s,
    not_busy,
    steered,
)
from lean_selector.core.selection.selection_cache import SelectionCache
from lean_selector.core.selection.shapes import (
    AUTO,
    NEVER,
    CachedSelection,
    Disaggregate,
    PartitionKey,
    Placement,
    SelectionRequest,
    WorkerSpec,
)
from lean_selector.core.selection.worker_health import WorkerHealth

if TYPE_CHECKING:
    from lean_selector.core.selection.pairs import Pairing
    from lean_selector.core.selection.watch import ChoiceWatch
    from lean_selector.core.sessions.table import SessionTables

# A request that no worker can serve stays queued while others wait, because a worker that can may
# register. If nothing happens, it is answered after this time (the reference: 60 s).
RECHECK_AFTER_S = 2.0


class Selector:
    """The state of one selection service."""

    def __init__(
        self,
        settings: RouterSettings,
        sources: SourceSink,
        rng: random.Random,
        *,
        new_index: Callable[[int], KvIndex] = KvIndex,
        thresholds: BusyThreshold = OFF,
        on_discarded: Callable[[Partition], None] = lambda partition: None,
        check_worker: Callable[[WorkerSpec], None] = lambda spec: None,
        call_soon: CallSoon | None = None,
        call_later: CallLater | None = None,
    ) -> None:
        """`thresholds` are the default busy thresholds. `on_discarded` and `check_worker` are
        passed to the catalog. `call_soon` and `call_later` are the event loop's methods, for queued
        requests (see `QueueRules`)."""
        self.settings = settings
        self.terms: CostTerms = terms(settings)  # for all models except the following
        self.model_terms = {
            model: under(base_terms(settings), policy)
            for model, policy in settings.model_policies.items()
        }
        self.ledgers = Ledgers(settings.reservation_expiry_s)  # set `events` before any worker
        self.sessions: SessionTables | None = None  # sessions are off
        if settings.sessions is not None:
            from lean_selector.core.sessions import table

            self.sessions = table.SessionTables(settings.sessions)
        self._rng = rng
        self._new_index = new_index
        self.limits = BusyThresholds(thresholds)
        self.catalog = Catalog(
            settings,
            sources,
            new_partition=self._new_partition,
            on_dropped=lambda partition, ended: self.reservations.forget_ended(partition, ended),
            on_discarded=on_discarded,
            check=check_worker,
        )
        self.selections = SelectionCache(settings.selection_cache)
        self.health = WorkerHealth(self.catalog)
        self.reservations = Reservations(self.catalog, self.ledgers, self.health, settings.dialect)
        self._queues = QueueRules(
            self.reservations.free,
            threshold=settings.queue_threshold,
            max_wait_s=settings.queue_max_wait_s,
            call_soon=call_soon,
            call_later=call_later,
            claimed=self.reservations.claimed if settings.dialect.claims_ids else None,
        )
        self.watch: ChoiceWatch | None = None  # set while a page asks for choices
        self.pairs: dict[str, int] = {}  # requests that asked for a pair, by reason

    def terms_of(self, model_name: str) -> CostTerms:
        """Return the weights of the cost formula for requests to this model without overrides."""
        return self.model_terms.get(model_name, self.terms)

    def _new_partition(self, key: PartitionKey, block_size: int, is_eagle: bool) -> Partition:
        index, ttl_s = self._new_index(block_size), self.settings.routed_ttl_s
        terms = self.terms_of(key[0])
        routed = None
        if ttl_s > 0.0:
            from lean_selector.core.index.routed import RoutedPrompts

            until_events = self.settings.use_kv_events
            beside = index.empty_copy() if until_events else index
            routed = RoutedPrompts(beside, ttl_s, until_events=until_events)
        settings = self.settings
        shares = None
        if settings.queue_fairness == "on" and settings.queue_threshold is not None:
            from lean_selector.core.selection.fair_shares import FairShares

            shares = FairShares(settings.queue_weights, block_size)
        queue = Queue(
            lambda waiting, ranks, now: self._place_waiting(partition, waiting, ranks, now),
            settings.queue_of(settings.policy_of(key[0])),
            self._queues,
            Line if shares is None else shares.new_line,
        )
        partition = Partition(
            *key,
            block_size,
            is_eagle,
            index,
            terms.scale,
            request_weight=terms.request_weight,
            queue=queue,
            ledgers=self.ledgers,
            ejection=self.settings.ejection,
            routed=routed,
            sessions=None if self.sessions is None else self.sessions.new_table(*key),
            shares=shares,
        )
        partition.set_threshold(self.limits.of(key))
        return partition

    # -- workers -----------------------------------------------------------------------------------

    def upsert_worker(self, spec: WorkerSpec, now: float, *, anew: bool = False) -> Worker:
        return self._changing_workers(lambda: self.catalog.upsert(spec, anew=anew), now)

    def patch_worker(self, worker_id: int, changes: dict[str, object], now: float) -> Worker:
        return self._changing_workers(lambda: self.catalog.patch(worker_id, changes), now)

    def remove_worker(self, worker_id: int, now: float) -> Worker:
        return self._changing_workers(lambda: self.catalog.remove(worker_id), now)

    def _changing_workers(self, change: Callable[[], Worker], now: float) -> Worker:
        waiting = [p.queue for p in self.catalog.partitions.values() if len(p.queue)]
        if self.sessions is not None:  # sessions of removed ranks start to expire
            for partition in self.catalog.partitions.values():
                partition.slots.heard_at = now
        worker = change()
        for queue in waiting:
            queue.admit(now)
        return worker

    # -- busy thresholds ---------------------------------------------------------------------------

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
            partition.queue.admit(now)
        return threshold

    # -- selection ---------------------------------------------------------------------------------

    def scheduling_partition(self, model_name: str, tenant_id: str) -> Partition | None:
        """Return the partition; None if it never had a schedulable worker to book a request on."""
        partition = self.catalog.partitions.get((model_name, tenant_id))
        return partition if partition is not None and partition.established else None

    def pairs_asked(self, partition: Partition) -> Disaggregate:
        """Return whether to ask for a pair of workers for a request whose client says nothing of
        it. A fleet that lost its prefill workers must not silently become one without them."""
        prefill, decode = partition.prefill_only, partition.decode_only
        is_apart = prefill or (decode and not partition.everyone & ~decode)
        return AUTO if is_apart or self.settings.asks_pairs else NEVER

    def load_changed(
        self,
        model_name: str,
        tenant_id: str,
        reservation_id: str,
        now: float,
        *,
        ended_by: int | None = None,
    ) -> None:
        """Admit queued requests, because an event from another replica may have freed capacity.
        `ended_by`: the replica that completed the prefill of the reservation or freed it."""
        self.reservations.local_holder(reservation_id)  # forgets the id if the peer freed it
        partition = self.catalog.partitions.get((model_name, tenant_id))
        if partition is not None:
            if ended_by is not None:
                self.reservations.heard_end(partition, reservation_id, ended_by, now)
            partition.queue.admit(now)

    def select(
        self, partition: Partition, request: SelectionRequest, now: float, *, waits: bool = True
    ) -> Placement | Waiting:
        """Choose a rank, and book it if `request.books`; or queue the request, if queueing is on
        and it `waits`. Raises SelectorError, with nothing changed."""
        queue = partition.queue
        room = queue.room if waits else None
        if room is not None:
            queue.admit_next(now)  # queued requests use free capacity first
            room.advance(now)
        if request.disaggregate != NEVER or request.after_prefill:
            matches = match_sets(partition, request.prompt.local_hashes)
            pair = self._pairing(partition, request, matches, now).place(waits=waits)
            if pair is None:
                return self._wait(partition, request, now)
            placement = pair
        else:
            ranks = free_ranks(partition, request)
            if room is not None:
                ranks, is_next = queue.may_pass(room, ranks)
                if not is_next:
                    return self._wait(partition, request, now)
            matches = match_sets(partition, request.prompt.local_hashes)
            choice = self.choose(partition, request, ranks, matches, now)
            placement = self.keep(partition, request, choice, matches, now)
        if waits and partition.shares is not None and len(queue):
            partition.shares.charge(request, placement)
        return placement

    def _pairing(
        self, partition: Partition, request: SelectionRequest, matches: MatchSets, now: float
    ) -> "Pairing":
        from lean_selector.core.selection import pairs

        return pairs.Pairing(
            self.settings,
            self.reservations,
            self.pairs,
            partition,
            request,
            matches,
            lambda part, ranks: self.choose(partition, part, ranks, matches, now),
            lambda part, choice: self.keep(partition, part, choice, matches, now),
        )

    def _wait(self, partition: Partition, request: SelectionRequest, now: float) -> Waiting:
        if self._queues.refusal is not None:
            raise self._queues.refusal
        request.prompt.sequence_hashes()  # compute now: a later error would be lost
        request.matches = match_sets(partition, request.prompt.local_hashes)
        queue, work = partition.queue, 0
        if queue.asks_work:
            waits = request
            if request.asks_pair:  # for a rank that prefills
                from lean_selector.core.selection.pairs import prefill_of

                waits = prefill_of(request)
            work = least_left_to_prefill(partition, waits)
        if request.deadline is None or (ttft_s := least_ttft_s(partition, request)) is None:
            return queue.add(request, now, work)
        (behind_s, alone_s), left_s = ttft_s, request.deadline - now
        if behind_s > left_s:
            raise TooLate(behind_s, left_s)
        waiting = queue.add(request, now, work)
        waiting.limit(left_s - alone_s, TooLate(alone_s, alone_s))
        return waiting

    def select_now(self, partition: Partition, request: SelectionRequest, now: float) -> Placement:
        """Choose a rank even if requests are queued, and book it if `request.books`."""
        found = self.select(partition, request, now, waits=False)
        assert isinstance(found, Placement), "it does not wait"
        return found

    def _place_waiting(
        self, partition: Partition, waiting: Waiting, among: int, now: float
    ) -> Placement:
        """Choose a rank for a request that leaves the queue, among those of `among` that it may
        use. If it waited for long, its cached blocks are looked up again."""
        request, refresh_s = waiting.request, self.settings.overlap_refresh_after_s
        if refresh_s is not None and request.waited_s >= refresh_s:
            matches = match_sets(partition, request.prompt.local_hashes)
        else:
            matches = request.matches
        if request.disaggregate != NEVER:
            pair = self._pairing(partition, request, matches, now).place(among=among)
            assert pair is not None, "it does not wait again"
            placement = pair
        else:
            ranks = not_busy(partition, request, eligible(partition, request)) & among
            choice = self.choose(partition, request, ranks, matches, now)
            placement = self.keep(partition, request, choice, matches, now)
        if partition.shares is not None:
            partition.shares.charge(request, placement)
        return placement

    def choose(
        self,
        partition: Partition,
        request: SelectionRequest,
        ranks: int,
        matches: MatchSets,
        now: float,
    ) -> tuple[RankLoad, Placement, int]:
        """Choose among these ranks. Return the rank, the answer, and the ranks that were left by a
        session or a target. Nothing is changed."""
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
        return load, placement, ranks

    def keep(
        self,
        partition: Partition,
        request: SelectionRequest,
        choice: tuple[RankLoad, Placement, int],
        matches: MatchSets,
        now: float,
    ) -> Placement:
        """Book a choice if `request.books`, and count it. Return its answer. Raises Conflict or
        BadRequest, with nothing changed."""
        prompt, (load, placement, ranks) = request.prompt, choice
        if self.watch is not None:
            self.watch.sample(partition, request, ranks, matches, load, placement, now)
        if request.books:
            decisions = self.reservations.decisions
            if decisions is not None:
                decisions.chosen(partition, request, matches, placement)
            terms = request.terms
            left = placement.effective_prefill_tokens
            chosen = CachedSelection(
                load.worker_id,
                load.dp_rank,
                prompt,
                left,
                request.expected_output_tokens,
                terms.track_prefill,
                request.session_id,
            )
            try:
                self.reservations.book_choice(partition, chosen, request.reservation_id, now)
            except Conflict as error:
                raise self.reservations.not_booked(error, request.reservation_id) from None
            if terms.eviction:
                partition.fullness.booked(load, ranks, left, request.role)
        counts, isl_tokens = load.counts, prompt.isl_tokens
        counts.selections += 1
        if not request.after_prefill:
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
            if partition.shares is not None:
                partition.shares.settle(now)
            partition.queue.admit(now, RECHECK_AFTER_S)

    def refuse_waiting(self, error: SelectorError) -> None:
        """Answer all queued requests, and all that would be queued from now on, with `error`."""
        self._queues.refusal = error
        for partition in self.catalog.partitions.values():
            for waiting in partition.queue.in_order():
                partition.queue.refuse(waiting, error)
