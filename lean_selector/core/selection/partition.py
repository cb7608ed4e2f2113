"""One partition, a pair of model_name and tenant_id: index, slots, schedulable workers and queue.

Partitions share nothing. The first schedulable worker fixes `block_size` and `is_eagle` (spec
selection.md section 0). Before that, a partition may exist only because its index has blocks that
were copied from a peer; then `established` is False, and no rank can be chosen."""

import bisect
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

from lean_selector.core.health.ejections import Ejections
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.routed import RoutedPrompts
from lean_selector.core.load.busy import Headroom
from lean_selector.core.load.load_order import LoadOrder
from lean_selector.core.load.rank_load import RankCounts, RankLoad
from lean_selector.core.load.shapes import OFF, BusyThreshold, RankLimits, Reservation
from lean_selector.core.load.slots import Slots
from lean_selector.core.load.speeds import Speeds
from lean_selector.core.numbers import MAX_RANKS
from lean_selector.core.rank_bits import RankKey
from lean_selector.core.replication.ledger import Ledger, Ledgers
from lean_selector.core.selection.fullness import Fullness
from lean_selector.core.selection.router_settings import QueuePolicy
from lean_selector.core.selection.shapes import (
    SELECT,
    SELECT_AND_RESERVE,
    Overlap,
    PinnedWorker,
    Placement,
    SelectionRequest,
    WorkerSpec,
)
from lean_selector.core.sessions.table import SessionTable
from lean_selector.core.settings import EjectionSettings

# The reference's default for workers that do not state max_num_batched_tokens.
DEFAULT_MAX_BATCHED_TOKENS = 10_000_000
STATE_AGENT = "state_agent_v2"


class SchedulableWorker:
    """The part of a worker's record that the scheduler needs."""

    def __init__(self, spec: WorkerSpec, loads: list[RankLoad]) -> None:
        self.worker_id = spec.worker_id
        self.endpoint = spec.endpoint or ""
        self.taints = spec.taints
        self.ranks = spec.ranks
        self.loads = loads  # one per rank, in rank order
        self.mask = 0  # the same ranks as a set
        for load in loads:
            self.mask |= load.mask
        self.rank_name = str(loads[0].dp_rank)  # used if the worker has only one rank
        self.no_overlap = Overlap(0, 0, {str(load.dp_rank): 0 for load in loads}, 0, 0)
        self.total_kv_blocks = spec.total_kv_blocks
        # For hints where to fetch blocks: the worker's type, and the control endpoint of each rank
        # whose blocks no state agent publishes.
        self.hint_type = spec.router_hint_worker_type
        by_agent = spec.kv_event_source_mode == STATE_AGENT
        self.hint_sources = {} if by_agent else spec.router_hint_source_control_endpoints
        tokens = spec.max_num_batched_tokens
        self.max_num_batched_tokens = DEFAULT_MAX_BATCHED_TOKENS if tokens is None else tokens


# --------------------------------------------------------------------------------------------------
# Requests that wait for a worker, in the order in which they leave the queue.
#
# Order (spec selection.md 3.4): strict_priority, highest first; then the policy's score, highest
# first; then arrival. With jump = max(priority_jump, 0) and work = the fewest tokens left to
# prefill on any rank at arrival, the score is jump - arrival (fcfs), jump + arrival (lcfs), (1 +
# jump) / work (wspt, weighted shortest processing time), or jump - arrival - work / AGING
# (least-work: a request is overtaken only by requests that arrive within work / AGING seconds). A
# request never blocks others that can use other ranks (D11). So requests that may use the same
# ranks share a line, which stores the set of these ranks. When a rank comes free, only the first
# request of each line that includes the rank is checked. Each connection has at most one queued
# request, which limits the queue.

# What restricts a request to some ranks: a pin, allowed workers, required taints.
Ties = tuple[PinnedWorker | None, frozenset[int] | None, frozenset[str]]
Place = tuple[int, float, int]  # position in the queue; unique
AGING_TOKENS_PER_S = 4_000.0  # per second of waiting


class Parked:
    """A queued request. `on_answer` is called once: with a placement, or with the error (always a
    SelectorError, unless there is a bug)."""

    __slots__ = ("arrived_at", "key", "line", "on_answer", "request")

    def __init__(
        self,
        request: SelectionRequest,
        arrived_at: float,
        serial: int,
        score: float,
        on_answer: Callable[["Parked", Placement | Exception], None],
        line: "Line",
    ) -> None:
        self.request = request
        self.arrived_at = arrived_at
        self.on_answer = on_answer
        self.line = line
        self.key: Place = (-request.strict_priority, -score, serial)


_place = attrgetter("key")


class Line:
    """Queued requests that have the same `ties`: pin, allowed workers and required taints."""

    __slots__ = ("items", "leads_to", "ranks", "ties")

    def __init__(self, ties: Ties) -> None:
        self.ties = ties
        self.items: list[Parked] = []  # in order
        self.ranks = 0  # ranks that requests of the line may use, including busy ones
        # If one of these comes free, requests may leave. With a pin: all ranks of the worker,
        # because a busy rank accepts a pinned request if another rank of the worker is free.
        self.leads_to = 0

    def open_worker(self, worker: SchedulableWorker) -> None:
        """Add to `ranks` those ranks of a new worker that this line's queued requests may use."""
        pinned, allowed, required = self.ties
        if not required <= worker.taints:
            return
        if pinned is not None:
            if pinned.worker_id != worker.worker_id:
                return
            for load in worker.loads:
                if load.dp_rank == pinned.dp_rank:
                    self.ranks |= load.mask
                    self.leads_to |= worker.mask
        elif allowed is None or worker.worker_id in allowed:
            self.ranks |= worker.mask
            self.leads_to |= worker.mask

    def close_worker(self, worker: SchedulableWorker) -> None:
        self.ranks &= ~worker.mask
        self.leads_to &= ~worker.mask

    def is_open(self, room: Headroom) -> bool:
        """Whether a queued request of this line can be placed now on a rank below the queue's
        threshold. All requests of a line have the same pin, allowed workers and required taints."""
        if self.ties[0] is None:
            return (self.ranks & ~room.avoided or self.ranks) & room.below & room.idle != 0
        return self.ranks & room.below != 0 and self.leads_to & room.idle != 0


class ParkedQueue:
    """The queued requests of one partition."""

    def __init__(
        self, workers: Mapping[int, SchedulableWorker], policy: QueuePolicy = "fcfs"
    ) -> None:
        """`workers` are the partition's workers, by id. Call `worker_changed` for each change."""
        self._workers = workers
        self._policy = policy
        # Whether the policy needs `uncached_tokens` of each request.
        self.asks_work = policy in ("wspt", "least-work")
        self._lines: dict[Ties, Line] = {}
        self.serial = 0  # serial of the request that was queued last
        self._size = 0
        self.hopeless: set[Line] = set()  # lines whose requests no registered rank can serve
        self.is_moving = False  # while requests are being admitted
        self.is_due = False  # a later turn of the loop will admit more
        self.isl_tokens = 0  # sum over the queued requests
        self.admitted = 0  # how many were admitted, and their total waiting time
        self.waited_s = 0.0

    def __len__(self) -> int:
        return self._size

    def lines(self) -> Iterable[Line]:
        return self._lines.values()

    def in_order(self) -> list[Parked]:
        """Return the queued requests in order, as a new list."""
        return sorted((item for line in self._lines.values() for item in line.items), key=_place)

    def park(
        self,
        request: SelectionRequest,
        now: float,
        on_answer: Callable[[Parked, Placement | Exception], None],
        uncached_tokens: int = 0,
    ) -> Parked:
        """Queue a request. `uncached_tokens`: the tokens to prefill, if the policy needs them."""
        ties = request.pinned, request.allowed_worker_ids, request.required_taints
        line = self._lines.get(ties)
        if line is None:
            line = self._lines[ties] = self._new_line(ties)
        self.serial += 1
        score = self._score(request.priority_jump, now, uncached_tokens)
        parked = Parked(request, now, self.serial, score, on_answer, line)
        bisect.insort(line.items, parked, key=_place)
        self._size += 1
        self.isl_tokens += request.prompt.isl_tokens
        return parked

    def _score(self, priority_jump: float, now: float, uncached_tokens: int) -> float:
        jump = priority_jump if priority_jump > 0.0 else 0.0  # 0.0 also for NaN
        if self._policy == "fcfs":
            return jump - now
        if self._policy == "lcfs":
            return jump + now
        if self._policy == "least-work":
            return jump - now - uncached_tokens / AGING_TOKENS_PER_S
        return (1.0 + jump) / max(1, uncached_tokens)

    def _new_line(self, ties: Ties) -> Line:
        line = Line(ties)
        pinned = ties[0]
        if pinned is None:
            for worker in self._workers.values():
                line.open_worker(worker)
        elif (only := self._workers.get(pinned.worker_id)) is not None:
            line.open_worker(only)
        if not line.ranks:
            self.hopeless.add(line)
        return line

    def leave(self, parked: Parked) -> bool:
        """Remove a request from the queue. Returns False if the request is no longer queued."""
        line = parked.line
        if self._lines.get(line.ties) is not line:
            return False
        at = bisect.bisect_left(line.items, parked.key, key=_place)
        if at == len(line.items) or line.items[at] is not parked:
            return False
        del line.items[at]
        if not line.items:
            del self._lines[line.ties]
            self.hopeless.discard(line)
        self._size -= 1
        self.isl_tokens -= parked.request.prompt.isl_tokens
        return True

    def worker_changed(self, old: SchedulableWorker | None, new: SchedulableWorker | None) -> None:
        """Update which ranks the queued requests may use, because a worker was added (`old` is
        None), removed (`new` is None) or changed."""
        for line in self._lines.values():
            if old is not None:
                line.close_worker(old)
            if new is not None:
                line.open_worker(new)
            if line.ranks:
                self.hopeless.discard(line)
            else:
                self.hopeless.add(line)


# For up to this many allowed workers, ranks are looked up each time. Results for larger sets are
# cached, at most this many; 6 MB of ids at most.
_FEW_WORKERS = 8
_MAX_ALLOWED_SETS = 16


class Partition:
    """State of one (model_name, tenant_id). Sets of ranks are ints (`RankBits`).

    `everyone`: all ranks. `candidates`: the ranks that a request without restrictions may use.
    Draining ranks are never candidates. Ejected ranks are candidates only if there are no others.
    `busy`: ranks whose load exceeds the busy threshold. `tainted`: the ranks of workers, by taint.
    `room`: the ranks with room for queued requests; None if requests are not queued."""

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
        queue_threshold: float | None = None,
        queue_policy: QueuePolicy = "fcfs",
        ledgers: Ledgers | None = None,
        ejection: EjectionSettings | None = None,
        routed: RoutedPrompts | None = None,
        sessions: SessionTable | None = None,
    ) -> None:
        """`ledgers`, shared by all partitions, publishes bookings to other replicas. If it is None,
        bookings are not published. `routed` marks booked prompts as cached, in `index` or in a
        separate index. `sessions` is None if sessions are off."""
        self.model_name = model_name
        self.tenant_id = tenant_id
        self.block_size = block_size
        self.is_eagle = is_eagle
        self.index = index
        self.routed = routed
        # The predicted blocks, if they are separate from those known from events.
        self.predicted = None if routed is None or routed.index is index else routed.index
        self.established = True
        # From a recovered index: last batch of each source that was not subscribed to since.
        self.watermarks: dict[RankKey, int] = {}
        self.order = LoadOrder(block_size, prefill_load_scale, request_weight)
        self.slots = Slots(self.order.changed, index.bits)
        self.sessions = sessions
        if sessions is not None:
            self.slots.on_ended = self._release_session
        shared = Ledgers() if ledgers is None else ledgers
        self.ledger = Ledger(model_name, tenant_id, block_size, self.slots, shared)
        self.workers: dict[int, SchedulableWorker] = {}
        self.speeds = Speeds()
        self.slots.on_reports = self.speeds.reported
        self.fullness = Fullness(index, self.order, self.workers)
        # Workers whose record names this partition and was complete at some time.
        self.members: set[int] = set()
        self.parked = ParkedQueue(self.workers, queue_policy)
        self.room = None if queue_threshold is None else Headroom(queue_threshold)
        self._gone = RankCounts()  # totals of removed ranks
        self.shed = {SELECT: 0, SELECT_AND_RESERVE: 0}  # request counts by route
        self.threshold = OFF
        self.everyone = self.candidates = self.busy = self.draining = 0
        self.health = Ejections(EjectionSettings() if ejection is None else ejection)
        self.tainted: dict[str, int] = {}
        # Recently used sets of allowed workers, with their ranks
        self._allowed: dict[frozenset[int], int] = {}
        self._limits: dict[RankKey, RankLimits] = {}  # by rank; empty without a threshold
        self._listen()

    def _listen(self) -> None:
        """Set the callback that updates load order, busy ranks and queue when a load changes."""
        told = self._judge if self.threshold.is_set else self.order.changed
        room, slots = self.room, self.slots
        if room is None:
            slots.on_load_change = told
            return
        room_changed = room.changed

        def tell_both(load: RankLoad) -> None:
            told(load)
            room_changed(load)

        slots.on_load_change = tell_both

    def _release_session(self, reservation: Reservation) -> None:
        """Tell the session table that a reservation has ended. If its rank was removed, other
        replicas are not told, because they release the session when they remove the rank."""
        slots, sessions = self.slots, self.sessions
        assert sessions is not None, "there are sessions"
        is_rank_there = reservation.rank.key in slots.ranks
        sessions.release(reservation.request_id, slots.heard_at, tells=is_rank_there)

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
        for load in worker.loads:
            if self.threshold.is_set:
                self._limits[load.key] = limits
                self._judge(load)
            if self.room is not None:
                self.room.put(load, worker.max_num_batched_tokens, limits)

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

    # -- health --------------------------------------------------------------------------------

    def report(self, keys: Sequence[RankKey], outcome: str, now: float) -> bool:
        """Record a request's outcome for these ranks. True if the eligible ranks changed."""
        return self.health.report(keys, outcome, len(self.slots.ranks), now) and self._admit()

    def poll(self, keys: Sequence[RankKey], fault: str | None, now: float) -> bool:
        """Record a health poll of the worker that has these ranks. Returns True if the set of
        eligible ranks changed."""
        return self.health.poll(keys, fault, len(self.slots.ranks), now) and self._admit()

    def settle_health(self, now: float) -> bool:
        """End ejections whose time is over. Returns True if the set of eligible ranks changed."""
        return self.health.settle(now) and self._admit()

    def _admit(self) -> bool:
        """Recompute `candidates`: ranks for unrestricted requests. Returns True if they changed."""
        ranks, ejected = self.slots.ranks, 0
        for key in self.health.out:
            ejected |= ranks[key].mask
        serving = self.everyone & ~self.draining
        candidates = serving & ~ejected or serving
        if candidates == self.candidates:
            return False
        self.candidates = candidates
        if self.room is not None:
            self.room.avoided = self.everyone & ~candidates
            # Queued requests may be eligible for other ranks now.
            self.room.came_free |= self.everyone
        return True

    # -- busy ----------------------------------------------------------------------------------

    def is_worker_busy(self, worker: SchedulableWorker) -> bool:
        """Whether the load of every rank of the worker is above the busy threshold."""
        return not worker.mask & ~self.busy

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
        """Add or replace a worker. Returns the reservations on ranks that the worker lost."""
        worker_id = spec.worker_id
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
        for load in loads:
            if load.bucket is None:
                self.order.add(load)
                self.everyone |= load.mask
                load.came_after = self.parked.serial
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
        self.draining &= ~worker.mask
        if is_draining:
            self.draining |= worker.mask
        self._allowed.clear()
        self.parked.worker_changed(old, worker)
        self.order.moved |= worker.mask
        self._limit(worker)
        self._admit()
        self.members.add(worker_id)
        return dropped

    def remove_worker(self, worker_id: int) -> list[Reservation]:
        """Remove a worker. Returns the reservations that were on its ranks."""
        for rank in [rank for rank in self.watermarks if rank[0] == worker_id]:
            del self.watermarks[rank]
        dropped: list[Reservation] = []
        worker = self.workers.pop(worker_id)
        self._take_taints(worker)
        self._allowed.clear()
        self.parked.worker_changed(worker, None)
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
        recovered = self.index.workers() | {worker_id for worker_id, _ in self.watermarks}
        return sorted(recovered - self.workers.keys())

    def forget_unclaimed(self, worker_id: int) -> int:
        """If the worker is not registered, drop blocks copied from peers. Returns how many."""
        if worker_id in self.workers:
            return 0
        for rank in [rank for rank in self.watermarks if rank[0] == worker_id]:
            del self.watermarks[rank]
        return self.index.drop_worker(worker_id)

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
        self._limits.pop(load.key, None)
        if self.room is not None:
            self.room.drop(load)
        if self.routed is not None:
            self.routed.drop_rank(load.key)
        return self.ledger.drop_rank(load.worker_id, load.dp_rank)

    def emptied(self, worker_id: int, dp_rank: int) -> None:
        """Drop the blocks assumed cached on a rank, because the rank's engine lost its cache."""
        if (load := self.slots.ranks.get((worker_id, dp_rank))) is not None:
            self.order.moved |= load.mask
        if self.routed is not None and self.predicted is not None:
            self.routed.drop_rank((worker_id, dp_rank))
