"""One partition, a pair of model_name and tenant_id: index, slots, schedulable workers and queue.

Partitions share nothing. The first schedulable worker fixes `block_size` and `is_eagle` (spec
selection.md section 0). Before that, a partition may exist only because its index has blocks that
were copied from a peer; then `established` is False, and no rank can be chosen."""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from lean_selector.core.errors import NO_ENDPOINTS, Unavailable
from lean_selector.core.health.ejections import Ejections
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Watermark
from lean_selector.core.load.load_order import LoadOrder
from lean_selector.core.load.rank_load import RankCounts, RankLoad
from lean_selector.core.load.shapes import OFF, BusyThreshold, RankLimits, Reservation
from lean_selector.core.load.slots import Slots
from lean_selector.core.load.speeds import Speeds
from lean_selector.core.numbers import MAX_RANKS
from lean_selector.core.rank_bits import RankKey
from lean_selector.core.replication.ledger import Ledger, Ledgers
from lean_selector.core.selection.fullness import Fullness
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.queue import Queue
from lean_selector.core.selection.schedulable_worker import SchedulableWorker
from lean_selector.core.selection.shapes import (
    BOTH,
    DECODE,
    PREFILL,
    SELECT,
    SELECT_AND_RESERVE,
    WorkerSpec,
)
from lean_selector.core.settings import EjectionSettings

if TYPE_CHECKING:  # each is imported only with its feature
    from lean_selector.core.index.routed import RoutedPrompts
    from lean_selector.core.selection.fair_shares import FairShares
    from lean_selector.core.selection.transfer_domains import TransferDomains
    from lean_selector.core.sessions.table import SessionTable

# For up to this many allowed workers, ranks are looked up each time. Results for larger sets are
# cached, at most this many; 6 MB of ids at most.
_FEW_WORKERS = 8
_MAX_ALLOWED_SETS = 16


class Partition:
    """State of one (model_name, tenant_id). Sets of ranks are ints (`RankBits`).

    `everyone`: all ranks. `candidates`: the ranks that a request without restrictions may use.
    Draining ranks are never candidates. Ejected ranks are candidates only if there are no others.
    Nor are ranks that only prefill, and ranks that only decode are if there are no others.
    `busy`: ranks whose load exceeds the busy threshold. `tainted`: the ranks of workers, by taint.
    `prefill_only`, `decode_only`: the ranks of workers with these roles.
    `queue.room`: the ranks with room for queued requests; None if requests are not queued."""

    def __init__(
        self,
        model_name: str,
        tenant_id: str,
        block_size: int,
        is_eagle: bool,
        index: KvIndex,
        prefill_load_scale: float = 1.0,
        *,
        request_weight: float = 0.0,
        queue: Queue | None = None,
        ledgers: Ledgers | None = None,
        ejection: EjectionSettings | None = None,
        routed: "RoutedPrompts | None" = None,
        sessions: "SessionTable | None" = None,
        shares: "FairShares | None" = None,
    ) -> None:
        """`ledgers`, shared by all partitions, publishes reservations to other replicas. If it is
        None, reservations are not published. `routed` marks booked prompts as cached, in `index` or
        in a separate index. `sessions` is None if sessions are off, `shares` if the queue has no
        fair shares."""
        self.model_name = model_name
        self.tenant_id = tenant_id
        self.block_size = block_size
        self.is_eagle = is_eagle
        self.index = index
        self.routed = routed
        # The predicted blocks, if they are separate from those known from events.
        self.predicted = None if routed is None or routed.index is index else routed.index
        self.established = False  # until a worker can be scheduled
        # From a recovered index: the batches of each source that was not subscribed to since.
        self.watermarks: dict[RankKey, Watermark] = {}
        self.order = LoadOrder(block_size, prefill_load_scale, request_weight)
        self.slots = Slots(self.order.changed, index.bits)
        self.sessions = sessions
        self.shares = shares
        if shares is not None or sessions is not None:
            self.slots.on_ended = self._ended
        shared = Ledgers() if ledgers is None else ledgers
        self.ledger = Ledger(model_name, tenant_id, block_size, self.slots, shared)
        self.workers: dict[int, SchedulableWorker] = {}
        self.speeds = Speeds()
        self.fullness = Fullness(index, self.order, self.workers)
        # Workers whose record names this partition and was complete at some time.
        self.members: set[int] = set()
        self.queue = Queue() if queue is None else queue
        self._gone = RankCounts()  # totals of removed ranks
        self.shed = {SELECT: 0, SELECT_AND_RESERVE: 0}  # request counts by route
        self.pairs = 0  # requests for which two ranks were chosen
        self.threshold = OFF
        self.everyone = self.candidates = self.busy = self.draining = 0
        self.prefill_only = self.decode_only = self.ejected = 0
        self.domains: TransferDomains | None = None  # if a worker named one
        self.health = Ejections(EjectionSettings() if ejection is None else ejection)
        self.tainted: dict[str, int] = {}
        # Recently used sets of allowed workers, with their ranks
        self._allowed: dict[frozenset[int], int] = {}
        self._limits: dict[RankKey, RankLimits] = {}  # by rank; empty without a threshold
        self._listen()

    def _listen(self) -> None:
        """Set the callback that updates load order, busy ranks and queue when a load changes."""
        told = self._judge if self.threshold.is_set else self.order.changed
        room, slots = self.queue.room, self.slots
        if room is None:
            slots.on_load_change = told
            return
        room_changed = room.changed

        def tell_both(load: RankLoad) -> None:
            told(load)
            room_changed(load)

        slots.on_load_change = tell_both

    def _ended(self, reservation: Reservation) -> None:
        """Tell the shares and the session table that a reservation has ended. If its rank was
        removed, other replicas are not told of its session, because they release it when they
        remove the rank."""
        slots = self.slots
        if self.shares is not None:
            self.shares.ended(reservation)
        if self.sessions is not None:
            is_rank_there = reservation.rank_load.key in slots.ranks
            self.sessions.release(reservation.request_id, slots.heard_at, tells=is_rank_there)

    def set_threshold(self, threshold: BusyThreshold) -> None:
        """Set the busy threshold, and check every rank against it."""
        self.threshold = threshold
        self._listen()
        self._limits = {}
        self.busy = 0
        for worker in self.workers.values():
            self._limit(worker)

    def _limit(self, worker: SchedulableWorker) -> None:
        """Set the loads above which the ranks of a worker are busy, from the busy threshold."""
        limits = self.threshold.limits(worker.total_kv_blocks, worker.max_num_batched_tokens)
        if worker.role == PREFILL:
            limits = RankLimits(prefill_tokens=limits.prefill_tokens)
        elif worker.role == DECODE:
            limits = RankLimits(decode_blocks=limits.decode_blocks)
        for load in worker.loads:
            if self.threshold.is_set:
                self._limits[load.key] = limits
                self._judge(load)
            if self.queue.room is not None:
                self.queue.room.put(load, worker.max_num_batched_tokens, limits)

    def _judge(self, load: RankLoad) -> None:
        """Check whether a rank's load is above its busy threshold, and record the result."""
        self.order.changed(load)
        limits = self._limits[load.key]  # every rank here belongs to a worker
        if limits.exceeded_by(load.active_prefill_tokens, load.active_decode_blocks):
            self.busy |= load.mask
        elif self.busy & load.mask:
            self.busy ^= load.mask

    def counts(self) -> RankCounts:
        """Return statistics of requests, summed over all ranks. Removed ranks are included."""
        total = RankCounts()
        total.add(self._gone)
        for load in self.slots.ranks.values():
            total.add(load.counts)
        return total

    def count_shed(self, asked_at: str) -> None:
        self.shed[asked_at] = self.shed.get(asked_at, 0) + 1

    # -- health ------------------------------------------------------------------------------------

    def record_outcome(self, keys: Sequence[RankKey], outcome: str, now: float) -> bool:
        """Record a request's outcome for these ranks. True if the eligible ranks changed."""
        return self.health.record_outcome(keys, outcome, *self._alike(keys, now)) and self._admit()

    def poll(self, keys: Sequence[RankKey], fault: str | None, now: float) -> bool:
        """Record a health poll of the worker that has these ranks. Return True if the set of
        eligible ranks changed."""
        return self.health.poll(keys, fault, *self._alike(keys, now)) and self._admit()

    def _alike(
        self, keys: Sequence[RankKey], now: float
    ) -> tuple[int, float, Callable[[RankKey], bool]]:
        """Return how many ranks have the role of these ranks, `now`, and what tells them."""
        role, workers = self.workers[keys[0][0]].role, self.workers
        ranks = self.everyone & ~self.prefill_only & ~self.decode_only
        if role != BOTH:
            ranks = self.prefill_only if role == PREFILL else self.decode_only
        return ranks.bit_count(), now, lambda key: workers[key[0]].role == role

    def settle_health(self, now: float) -> bool:
        """End ejections whose time is over. Return True if the set of eligible ranks changed."""
        return self.health.settle(now) and self._admit()

    def _admit(self) -> bool:
        """Recompute `candidates`: ranks for unrestricted requests. Return True if they changed."""
        ranks, ejected = self.slots.ranks, 0
        for key in self.health.out:
            ejected |= ranks[key].mask
        self.ejected = ejected
        candidates = self.usable(BOTH)
        if candidates == self.candidates and not self.has_roles:
            return False
        self.candidates = candidates
        room = self.queue.room
        if room is not None:
            room.avoided = self.everyone & ~candidates
            room.avoided_by_role = {
                role: self.everyone & ~self.usable(role) for role in (PREFILL, DECODE)
            }
            # Queued requests may be eligible for other ranks now.
            room.came_free |= self.everyone
        return True

    # -- roles -------------------------------------------------------------------------------------

    @property
    def has_roles(self) -> bool:
        return self.prefill_only | self.decode_only != 0

    def usable(self, role: str, among: int = -1) -> int:
        """Return those of the ranks `among` that may do this part of a request. Draining ranks may
        not, and ejected ranks are included only if there are no others. For a whole request (role
        `both`), ranks that only decode are included only if there are no others."""
        serving = among & self.everyone & ~self.draining
        healthy = serving & ~self.ejected
        if role == PREFILL:
            own = ~self.decode_only
            return healthy & own or serving & own
        own = ~self.prefill_only
        if role == DECODE or not self.decode_only:
            return healthy & own or serving & own
        whole = own & ~self.decode_only
        return healthy & whole or healthy & own or serving & whole or serving & own

    def missing_roles(self) -> list[str]:
        """Return which of the roles `prefill` and `decode` no worker has or includes."""
        if not self.has_roles:
            return []
        others = (PREFILL, self.decode_only), (DECODE, self.prefill_only)
        return [role for role, other in others if not self.everyone & ~other]

    def nobody(self) -> Unavailable:
        """Return the error for a request without a rank that it may use."""
        if self.everyone and not self.everyone & ~self.prefill_only:
            return Unavailable(f"{NO_ENDPOINTS}: no worker has the role both or decode")
        return Unavailable(NO_ENDPOINTS)

    def _domains_changed(self, worker: SchedulableWorker) -> None:
        if self.domains is not None:
            self.domains.changed()
        elif worker.transfer is not None:
            from lean_selector.core.selection.transfer_domains import TransferDomains

            self.domains = TransferDomains(self.workers)

    def _set_role(self, ranks: int, role: str) -> None:
        self.prefill_only = self.prefill_only & ~ranks | (ranks if role == PREFILL else 0)
        self.decode_only = self.decode_only & ~ranks | (ranks if role == DECODE else 0)
        self.speeds.prefill_only = self.prefill_only
        self.order.set_roles(self.prefill_only, self.has_roles)

    # -- busy --------------------------------------------------------------------------------------

    def ranks_of(self, worker_ids: frozenset[int]) -> int:
        """Return the set of the ranks of these workers. Unknown workers are ignored."""
        ranks = self._allowed.get(worker_ids) if len(worker_ids) > _FEW_WORKERS else None
        if ranks is not None:
            return ranks
        ranks = 0
        for worker_id in worker_ids:
            worker = self.workers.get(worker_id)
            if worker is not None:
                ranks |= worker.mask
        if _FEW_WORKERS < len(worker_ids) <= MAX_RANKS:
            if len(self._allowed) >= _MAX_ALLOWED_SETS:
                self._allowed.clear()
            self._allowed[worker_ids] = ranks
        return ranks

    def put_worker(self, spec: WorkerSpec, is_draining: bool = False) -> list[Reservation]:
        """Add or replace a worker. Return the reservations on ranks that the worker lost."""
        worker_id = spec.worker_id
        if not self.established:
            self.established, self.is_eagle = True, bool(spec.is_eagle)
        old = self.workers.get(worker_id)
        dropped: list[Reservation] = []
        if old is not None and old.endpoint != (spec.endpoint or ""):
            self.health.forget([load.key for load in old.loads])  # the engine is a new process
            for load in old.loads:
                self.speeds.forget(load)
        for load in () if old is None else old.loads:
            if load.dp_rank not in spec.ranks:
                dropped += self._drop_rank(load)
        loads = [self.slots.add_rank(worker_id, dp_rank) for dp_rank in spec.ranks]
        before = self.everyone
        for load in loads:
            if load.bucket is None:
                self.order.add(load)
                self.everyone |= load.mask
        if new := self.everyone ^ before:
            self.queue.forget_matches(new)
        bound = None if not spec.total_kv_blocks else 2 * spec.total_kv_blocks
        self.index.set_bound(worker_id, bound, None)
        if self.routed is not None:
            self.routed.set_bound(worker_id, spec.total_kv_blocks or None)
        worker = SchedulableWorker(spec, loads)
        if old is not None:
            self._take_taints(old)
        for taint in worker.taints:
            self.tainted[taint] = self.tainted.get(taint, 0) | worker.mask
        self.workers[worker_id] = worker
        if old is not None and old.role != worker.role:
            for load in loads:
                self.speeds.forget(load)
        if worker.role != BOTH or self.has_roles:
            self._set_role(worker.mask, worker.role)
        self._domains_changed(worker)
        self.draining &= ~worker.mask
        if is_draining:
            self.draining |= worker.mask
        self._allowed.clear()
        self.queue.worker_changed(old, worker)
        self.order.moved |= worker.mask
        self._limit(worker)
        self._admit()
        self.members.add(worker_id)
        return dropped

    def restore(self, members: Iterable[int]) -> None:
        """Make this a partition in which these workers were once schedulable."""
        self.established = True
        self.members.update(members)

    def remove_worker(self, worker_id: int) -> list[Reservation]:
        """Remove a worker. Return the reservations that were on its ranks."""
        self._drop_watermarks(worker_id)
        dropped: list[Reservation] = []
        worker = self.workers.pop(worker_id)
        self._domains_changed(worker)
        self._take_taints(worker)
        self._allowed.clear()
        self.queue.worker_changed(worker, None)
        for load in worker.loads:
            dropped += self._drop_rank(load)
        if self.routed is not None:
            self.routed.drop_worker(worker_id)
        self._admit()
        return dropped

    def abandon(self) -> None:
        """Free the memory of the indexes, in steps, because the partition is removed."""
        if self.routed is not None:
            self.routed.abandon()
        self.index.abandon()

    def _take_taints(self, worker: SchedulableWorker) -> None:
        for taint in worker.taints:
            ranks = self.tainted[taint] & ~worker.mask
            if ranks:
                self.tainted[taint] = ranks
            else:
                del self.tainted[taint]

    def unclaimed(self) -> list[int]:
        """Return the ids, sorted, of unregistered workers whose blocks were copied from a peer."""
        recovered = {worker_id for worker_id, _ in (*self.index.ranks(), *self.watermarks)}
        return sorted(recovered - self.workers.keys())

    def forget_unclaimed(self, worker_id: int) -> int:
        """If the worker is not registered, drop blocks copied from peers. Return how many."""
        if worker_id in self.workers:
            return 0
        self._drop_watermarks(worker_id)
        return self.index.drop_worker(worker_id)

    def take_watermark(self, rank: RankKey) -> Watermark | None:
        """Return which batches a peer's dump of this rank has, once: its source goes on there."""
        return self.watermarks.pop(rank, None)

    def _drop_watermarks(self, worker_id: int) -> None:
        for rank in [rank for rank in self.watermarks if rank[0] == worker_id]:
            del self.watermarks[rank]

    def _drop_rank(self, load: RankLoad) -> list[Reservation]:
        self.order.remove(load)
        self.speeds.forget(load)
        self.health.forget([load.key])
        self._gone.add(load.counts)
        others = ~load.mask
        self.everyone &= others
        self.candidates &= others
        self.draining &= others
        self.busy &= others
        if self.has_roles:
            self._set_role(load.mask, BOTH)
        self._limits.pop(load.key, None)
        if self.queue.room is not None:
            self.queue.room.drop(load)
        if self.routed is not None:
            self.routed.drop_rank(load.key)
        return self.ledger.drop_rank(load.worker_id, load.dp_rank)

    def assume_cached(self, rank: RankKey, prompt: Prompt, now: float) -> None:
        """Assume that a rank caches a prompt booked on it, unless events have reported all of its
        known blocks."""
        if self.routed is None:
            return
        local_hashes, known = prompt.local_hashes, prompt.known_blocks
        if self.predicted is not None and local_hashes:
            mask = self.slots.ranks[rank].mask
            for blocks, ranks in self.index.match_sets(local_hashes)[0]:
                if blocks >= known and ranks & mask:
                    return
        self.routed.add(rank, local_hashes, prompt.sequence_hashes(), now, known)

    def not_computed(self, reservation: Reservation) -> None:
        """Undo `assume_cached` for a reservation, whose rank computed nothing of the prompt."""
        if self.routed is not None:
            names = self.slots.sequence_hashes_of(reservation)
            self.routed.take_back(reservation.rank_load.key, names)

    def emptied(self, worker_id: int, dp_rank: int) -> None:
        """Drop the blocks assumed cached on a rank, because the rank's engine lost its cache."""
        if (load := self.slots.ranks.get((worker_id, dp_rank))) is not None:
            self.order.moved |= load.mask
        if self.routed is not None and self.predicted is not None:
            self.routed.drop_rank((worker_id, dp_rank))
