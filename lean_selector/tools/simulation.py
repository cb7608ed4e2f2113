"""Plays a trace in virtual time on simulated engines, which a selector or a simple rule chooses.

The selector's core gets the same calls as in the service. Each choice is reserved. When an engine's
iteration ends, the core gets KV events, `prefill_complete` for first tokens, and `free` for ended
requests."""

import heapq
import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from itertools import count, pairwise
from operator import attrgetter
from statistics import fmean

import msgspec

from lean_selector.core.hashing import sequence_hashes_bytes, u64s
from lean_selector.core.index.shapes import Tier
from lean_selector.core.replication.events import ReplicaApplier, ReplicaEvents
from lean_selector.core.replication.shapes import EventKind, ReplicaEvent
from lean_selector.core.selection.overlap import NOTHING, match_by_rank
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.queue import Waiting
from lean_selector.core.selection.reservations import leg_of
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import (
    BOTH,
    DECODE,
    PREFILL,
    PinnedWorker,
    Placement,
    PrefillPlacement,
    SelectionRequest,
    Source,
    WorkerRole,
    WorkerSpec,
)
from lean_selector.tools.batching_engine import BatchingEngine, IterationTimes, SimulatedRequest
from lean_selector.tools.trace import TRACE_BLOCK_TOKENS
from lean_selector.tools.traffic import percentile
from lean_selector.wire.decision_lines import DecisionLine

MODEL = "simulated"
TICK_S = 1.0  # interval of periodic work, as in the service
BLOCK_SIZE = TRACE_BLOCK_TOKENS
_SPREAD = 0x9E37_79B9_7F4A_7C15  # odd, so that distinct ids stay distinct modulo 2^64

# -- requests --------------------------------------------------------------------------------------


def requests_of(
    lines: Sequence[DecisionLine], load: float, spread: bool = False
) -> list[SimulatedRequest]:
    """Return a trace's requests, with their arrival times divided by `load`.

    `spread`: requests with equal arrival times are spread evenly until the next arrival time."""
    made = []
    times = sorted(line.timestamp for line in lines)
    times = [at - times[0] for at in times]
    if spread:
        times = _spread(times)
    for arrival_ms, line in zip(times, sorted(lines, key=_timestamp), strict=True):
        blocks = line.input_length // BLOCK_SIZE
        layout = u64s(blocks)
        names = ((each + 1) * _SPREAD % 2**64 for each in line.hash_ids[:blocks])
        local = layout.pack(*names)
        chain = layout.unpack(sequence_hashes_bytes(local))
        at = arrival_ms / 1e3 / load
        made.append(SimulatedRequest(at, line.input_length, line.output_length, local, chain))
    return made


def deal(requests: Sequence[SimulatedRequest], rates: Sequence[float]) -> None:
    """Give each request to one of the ids `1`, `2`, ..., at these rates."""
    owed = [0.0] * len(rates)
    for request in requests:
        owed = [each + rate for each, rate in zip(owed, rates, strict=True)]
        at = max(range(len(rates)), key=owed.__getitem__)
        owed[at] -= sum(rates)
        request.fairness_id = f"{at + 1}"


_timestamp = attrgetter("timestamp")


def _spread(times: Sequence[float]) -> list[float]:
    """Spreads equal times evenly until the next time. Equal times at the end stay equal."""
    spread: list[float] = []
    for at, later in pairwise(dict.fromkeys(times)):
        equal = bisect_right(times, at) - bisect_left(times, at)
        spread += [at + turn * (later - at) / equal for turn in range(equal)]
    return spread + [at for at in times if at == times[-1]]


# -- policies --------------------------------------------------------------------------------------

# A rule that is not part of the core: returns the worker for a request.
Rule = Callable[[Partition, SimulatedRequest, int, float], int]


def round_robin(partition: Partition, request: SimulatedRequest, turn: int, now: float) -> int:
    workers = list(partition.workers)
    return workers[turn % len(workers)]


def _cheapest(partition: Partition, turn: int, cost: Callable[[tuple[int, int]], float]) -> int:
    """Return the worker with the lowest cost. Workers with equal costs take turns."""
    keys = list(partition.slots.ranks)
    size = len(keys)
    return keys[min(range(size), key=lambda at: (cost(keys[at]), (at - turn) % size))][0]


def least_loaded(partition: Partition, request: SimulatedRequest, turn: int, now: float) -> int:
    """Return a worker with the fewest active requests."""
    ranks = partition.slots.ranks
    return _cheapest(partition, turn, lambda key: ranks[key].active_requests)


def lmetric(partition: Partition, request: SimulatedRequest, turn: int, now: float) -> int:
    """Return the worker for which (prefill tokens x active requests), including this request, is
    lowest."""
    ranks, matches = partition.slots.ranks, match_by_rank(partition, request.local_hashes)

    def cost(key: tuple[int, int]) -> float:
        cached = matches.get(key, NOTHING).device * BLOCK_SIZE
        tokens = ranks[key].active_prefill_tokens + request.isl_tokens - cached
        return tokens * (ranks[key].active_requests + 1)

    return _cheapest(partition, turn, cost)


RULES: dict[str, Rule] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "lmetric": lmetric,
}


class Policy(msgspec.Struct, frozen=True):
    """A policy that is compared with others: a simple `rule`, or the core with `settings`."""

    name: str
    settings: RouterSettings = RouterSettings()
    rule: Rule | None = None


# -- a run -----------------------------------------------------------------------------------------


class SimulatedFleet(msgspec.Struct, frozen=True):
    """A simulation's engines. Engine i needs `slowness[i % len(slowness)]` times the usual time."""

    engines: int = 8
    capacity_blocks: int = 3_000
    slowness: Sequence[float] = (1.0,)
    selectors: int = 1  # requests go to them in turn; each one has all engines
    sync_s: float | None = 0.001  # delay of replication between them; None: no replication
    times: IterationTimes = IterationTimes()
    # Of the engines: the first ones only prefill, the next ones only decode, the others do both.
    prefill: int = 0
    decode: int = 0
    transfer_s: float = 0.005  # to transfer the blocks of 1 000 tokens from one to the other

    def role(self, worker_id: int) -> WorkerRole:
        if worker_id <= self.prefill:
            return PREFILL
        return DECODE if worker_id <= self.prefill + self.decode else BOTH

    def engine(self, worker_id: int) -> BatchingEngine:
        """Return an engine; the first one has the number 1."""
        slowness = self.slowness[(worker_id - 1) % len(self.slowness)]
        return BatchingEngine(worker_id, self.capacity_blocks, BLOCK_SIZE, self.times, slowness)

    def spec(self, worker_id: int) -> WorkerSpec:
        """Return the registration of an engine."""
        return WorkerSpec(
            worker_id=worker_id,
            model_name=MODEL,
            endpoint=f"http://engine-{worker_id}",  # never connected to
            kv_events_endpoints={0: f"tcp://engine-{worker_id}:5557"},
            block_size=BLOCK_SIZE,
            worker_role=self.role(worker_id),
            max_num_batched_tokens=self.times.most_prompt_tokens,
            total_kv_blocks=self.capacity_blocks,
        )


class Outcome(msgspec.Struct, frozen=True):
    """The results of one policy on a trace."""

    policy: str
    requests: int
    hit_rate: float  # share of the prompt tokens
    imbalance: float  # computed prompt tokens of the busiest engine, relative to the average
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    within_share: float  # share of requests whose first token came within the given time
    token_gap_p99_s: float  # over the mean token gaps of the requests


class _NoSources:
    """Ignores subscriptions to KV events, because the simulation changes the index directly."""

    def subscribe(
        self, partition: Partition, worker_id: int, dp_rank: int, source: Source
    ) -> None: ...

    def unsubscribe(self, worker_id: int, dp_rank: int) -> Collection[int]:
        return ()


class _Router:
    def __init__(
        self,
        number: int,
        settings: RouterSettings,
        specs: Iterable[WorkerSpec],
        seed: int,
        publish: Callable[[int, ReplicaEvent], None] | None,
    ) -> None:
        self.selector = Selector(settings, _NoSources(), random.Random(seed + number))
        if publish is not None:
            self.selector.ledgers.events = ReplicaEvents(number, partial(publish, number))
        for spec in specs:
            self.selector.upsert_worker(spec, 0.0)
        self.partition = self.selector.catalog.ready_partition(MODEL, "default")
        self._applier = ReplicaApplier(number, self.selector.scheduling_partition)

    def apply(self, event: ReplicaEvent, now: float) -> None:
        self._applier.apply(event, now)
        request_id = event.spec.request_id
        ended_by = None if event.kind is EventKind.ADD else event.router_id
        names = event.model_name, event.tenant_id, request_id
        self.selector.load_changed(*names, now, ended_by=ended_by)


class Simulation:
    """The simulation of one policy on engines. The same seed gives the same results."""

    def __init__(self, policy: Policy, fleet: SimulatedFleet, seed: int = 0) -> None:
        self._rule = policy.rule
        self._sync_s = fleet.sync_s
        self._transfer_s = fleet.transfer_s
        self.engines = {at: fleet.engine(at) for at in range(1, fleet.engines + 1)}
        # Those whose computed tokens are compared.
        self.prefilling = [self.engines[at] for at in self.engines if fleet.role(at) != DECODE]
        specs = [fleet.spec(worker_id) for worker_id in self.engines]
        publish = None if fleet.selectors == 1 or fleet.sync_s is None else self._publish
        self._routers = [
            _Router(number, policy.settings, specs, seed, publish)
            for number in range(fleet.selectors)
        ]
        self._now = 0.0
        self._next_tick = TICK_S
        self._turn = 0
        self._order = count()  # orders events with equal times as they were scheduled
        self._plan: list[tuple[float, int, Callable[[], None]]] = []

    def run(
        self, requests: Sequence[SimulatedRequest], on_request: Callable[[int], None] | None = None
    ) -> None:
        """Serves all requests in order of arrival. Calls `on_request` when a request arrives, with
        the number of requests that have arrived."""
        for number, request in enumerate(requests, 1):
            while self._next_tick < request.arrived_at:
                self._advance(self._next_tick)
                for router in self._routers:
                    router.selector.admit_waiting(self._now)
                self._next_tick += TICK_S
            self._advance(request.arrived_at)
            request.request_id = f"{number}"
            self._arrive(request, self._router_of(request))
            if on_request is not None:
                on_request(number)
        self._advance(float("inf"))
        waiting = sum(len(router.partition.queue) for router in self._routers)
        assert not waiting, "an idle fleet has room for every request"

    def _router_of(self, request: SimulatedRequest) -> _Router:
        return self._routers[int(request.request_id) % len(self._routers)]

    def _do_at(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._plan, (time, next(self._order), action))

    def _advance(self, until: float) -> None:
        while self._plan and self._plan[0][0] <= until:
            self._now, _, action = heapq.heappop(self._plan)
            action()
        if until < float("inf"):
            self._now = until

    def _publish(self, sender: int, event: ReplicaEvent) -> None:
        assert self._sync_s is not None, "else it is given to no selector"
        for number, router in enumerate(self._routers):
            if number != sender:
                at = self._now + self._sync_s
                self._do_at(at, partial(router.apply, event, at))

    def _arrive(self, request: SimulatedRequest, router: _Router) -> None:
        local, selector = request.local_hashes, router.selector
        if router.partition.routed is not None:
            router.partition.routed.expire(self._now)
        sequence = u64s(len(request.chain)).pack(*request.chain)
        asked = SelectionRequest(
            Prompt(request.isl_tokens, local, len(request.chain), sequence[:8], sequence),
            selector.terms,
            books=True,
            reservation_id=request.request_id,
        )
        asked.allowed_worker_ids = request.allowed
        asked.fairness_id = request.fairness_id
        asked.disaggregate = selector.pairs_asked(router.partition)
        if request.pinned is not None:
            asked.pinned = PinnedWorker(request.pinned, 0)
        elif self._rule is not None:
            worker_id = self._rule(router.partition, request, self._turn, self._now)
            asked.pinned = PinnedWorker(worker_id, 0)
        self._turn += 1

        def answered(answer: Placement | Exception) -> None:
            if isinstance(answer, Exception):
                raise answer
            prefill, left = answer.prefill, answer.effective_prefill_tokens
            engine = self.engines[answer.worker_id]
            if isinstance(prefill, PrefillPlacement):
                left = prefill.effective_prefill_tokens
                request.worker_id = engine.worker_id
                leg = request.prefill_elsewhere(self._now)
                self._submit(leg, self.engines[prefill.worker_id])
            else:
                self._submit(request, engine)
            request.found_tokens = request.isl_tokens - left

        answer = selector.select(router.partition, asked, self._now)
        if isinstance(answer, Waiting):
            answer.on_answer = answered
        else:
            answered(answer)

    def _submit(self, request: SimulatedRequest, engine: BatchingEngine) -> None:
        request.worker_id = engine.worker_id
        planned = engine.due
        engine.submit(request, self._now)
        if planned is None:
            engine.start(self._now)
        if engine.due != planned:
            self._plan_end(engine)

    def _plan_end(self, engine: BatchingEngine) -> None:
        if engine.due is not None:
            self._do_at(engine.due, partial(self._iteration_ends, engine, engine.due))

    def _iteration_ends(self, engine: BatchingEngine, due: float) -> None:
        if engine.due != due:
            return  # the iteration ended earlier, because a request arrived
        made, now, key = engine.finish(due), due, (engine.worker_id, 0)
        for router in self._routers:
            if not router.selector.settings.use_kv_events:
                continue
            index = router.partition.index
            if made.evicted:
                names = u64s(len(made.evicted)).pack(*made.evicted)
                index.remove(key, Tier.DEVICE, names)
            for request in made.first_tokens:
                at, end = request.hit, request.held
                parent = request.chain[at - 1] if at else None
                local = request.local_hashes[8 * at : 8 * end]
                if local:
                    names = u64s(end - at).pack(*request.chain[at:end])
                    index.store(key, Tier.DEVICE, parent, names, local)
        for request in made.first_tokens:
            reservations = self._router_of(request).selector.reservations
            if request.whole is not None:
                reservations.end(leg_of(request.request_id), "ok", None, now)
                arrives_at = now + self._transfer_s * request.isl_tokens / 1_000
                receiver = self.engines[request.whole.worker_id]
                self._do_at(arrives_at, partial(self._submit, request.whole, receiver))
            else:
                reservations.prefill_complete(request.request_id, now, request.ttft_s)
        for request in made.ended:
            if request.whole is None:
                self._router_of(request).selector.reservations.free(request.request_id, now)
        engine.start(now)
        self._plan_end(engine)


def outcome(
    name: str,
    requests: Sequence[SimulatedRequest],
    engines: Iterable[BatchingEngine],
    within_s: float,
) -> Outcome:
    """Return a simulation's results, with the share of requests whose TTFT was <= `within_s`."""
    ttft = sorted(request.ttft_s for request in requests)
    gaps = sorted(request.token_gap_s for request in requests if request.output_tokens > 1)
    work = [engine.computed_tokens for engine in engines]
    cached = sum(request.hit_tokens for request in requests)
    return Outcome(
        name,
        len(requests),
        cached / max(1, sum(request.isl_tokens for request in requests)),
        max(work) * len(work) / max(1, sum(work)),
        fmean(ttft),
        percentile(ttft, 0.50),
        percentile(ttft, 0.99),
        sum(each <= within_s for each in ttft) / len(ttft),
        percentile(gaps, 0.99),
    )
