"""A trace in virtual time: the selector's core, or a simple rule, in front of simulated engines.

The core is driven as the service drives it: each choice books, KV events of the engines change the
index when an iteration ends, `prefill_complete` comes with the first token and `free` with the
last. Rules choose from the same load and index, and book the rank that they chose.
"""

import heapq
import random
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import count
from statistics import fmean

import msgspec

from lean_selector.core.hashing import sequence_hashes_bytes, u64s
from lean_selector.core.index.shapes import Tier
from lean_selector.core.load.slots import Slots
from lean_selector.core.selection.overlap import NOTHING, match_by_rank
from lean_selector.core.selection.partition import Parked, Partition
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import (
    PinnedWorker,
    Placement,
    SelectionRequest,
    Source,
    WorkerSpec,
)
from lean_selector.tools.batching_engine import BatchingEngine, IterationTimes, SimulatedRequest
from lean_selector.tools.trace import TRACE_BLOCK_TOKENS, TraceLine
from lean_selector.tools.traffic import percentile

MODEL = "simulated"
BLOCK_SIZE = TRACE_BLOCK_TOKENS
_SPREAD = 0x9E37_79B9_7F4A_7C15  # odd: distinct ids stay distinct modulo 2^64

# -- requests --------------------------------------------------------------------------------------


def requests_of(lines: Iterable[TraceLine], load: float) -> list[SimulatedRequest]:
    """Requests, `load` times as fast as in the trace. Partial blocks are never cached."""
    made = []
    for line in lines:
        blocks = line.input_length // BLOCK_SIZE
        layout = u64s(blocks)
        names = ((each + 1) * _SPREAD % 2**64 for each in line.hash_ids[:blocks])
        local = layout.pack(*names)
        chain = layout.unpack(sequence_hashes_bytes(local))
        at = line.timestamp / 1e3 / load
        made.append(SimulatedRequest(at, line.input_length, line.output_length, local, chain))
    made.sort(key=lambda request: request.arrived_at)
    return made


# -- who chooses -----------------------------------------------------------------------------------

# The worker that a request goes to, by a rule that is none of the core's.
Rule = Callable[[Partition, SimulatedRequest, int, float], int]


def round_robin(partition: Partition, request: SimulatedRequest, turn: int, now: float) -> int:
    """One worker after the other."""
    workers = list(partition.workers)
    return workers[turn % len(workers)]


def _cheapest(partition: Partition, turn: int, cost: Callable[[tuple[int, int]], float]) -> int:
    """The worker with the lowest cost; among equals the next in turn."""
    keys = list(partition.slots.ranks)
    size = len(keys)
    return keys[min(range(size), key=lambda at: (cost(keys[at]), (at - turn) % size))][0]


def least_loaded(partition: Partition, request: SimulatedRequest, turn: int, now: float) -> int:
    """A worker with the fewest active requests."""
    ranks = partition.slots.ranks
    return _cheapest(partition, turn, lambda key: ranks[key].active_requests)


def lmetric(partition: Partition, request: SimulatedRequest, turn: int, now: float) -> int:
    """The least product of prefill tokens, with its own, and active requests, with itself."""
    ranks, matches = partition.slots.ranks, match_by_rank(partition, request.local_hashes)

    def cost(key: tuple[int, int]) -> float:
        cached = matches.get(key, NOTHING).device * BLOCK_SIZE
        tokens = ranks[key].prefill_tokens_at(now) + request.isl_tokens - cached
        return tokens * (ranks[key].active_requests + 1)

    return _cheapest(partition, turn, cost)


RULES: dict[str, Rule] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "lmetric": lmetric,
}


class Policy(msgspec.Struct, frozen=True):
    """A row of the comparison: the core with these settings, or a rule."""

    name: str
    settings: RouterSettings = RouterSettings()
    rule: Rule | None = None


# -- a run -----------------------------------------------------------------------------------------


class Fleet(msgspec.Struct, frozen=True):
    """The engines of a run. `slowness` is dealt out to them in turn."""

    engines: int = 8
    capacity_blocks: int = 3_000
    slowness: Sequence[float] = (1.0,)
    times: IterationTimes = IterationTimes()


class Outcome(msgspec.Struct, frozen=True):
    """How a policy served a trace."""

    policy: str
    requests: int
    hit_rate: float  # of the prompts' tokens
    imbalance: float  # prompt tokens computed by the busiest engine over the average
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    within_share: float  # of requests, with their first token within the wanted time
    token_gap_p99_s: float  # of the requests' mean times between tokens


class _NoSources:
    """Nothing is subscribed to: KV events are applied to the index directly."""

    def subscribe(
        self, partition: Partition, worker_id: int, dp_rank: int, source: Source
    ) -> None: ...

    def unsubscribe(self, worker_id: int, dp_rank: int) -> Collection[int]:
        return ()

    def follow_load(
        self, worker_id: int, endpoints: Mapping[int, str], slots: Slots | None
    ) -> None: ...


class Simulation:
    """One policy, one fleet, one trace. Same input, same outcome."""

    def __init__(self, policy: Policy, fleet: Fleet, seed: int = 0) -> None:
        self._policy = policy
        self._selector = Selector(policy.settings, _NoSources(), random.Random(seed))
        self.engines: dict[int, BatchingEngine] = {}
        for at in range(fleet.engines):
            worker_id = at + 1
            self._selector.upsert_worker(
                WorkerSpec(
                    worker_id=worker_id,
                    model_name=MODEL,
                    endpoint=f"http://engine-{worker_id}",  # named, never contacted
                    kv_events_endpoints={0: f"tcp://engine-{worker_id}:5557"},
                    block_size=BLOCK_SIZE,
                    max_num_batched_tokens=fleet.times.most_prompt_tokens,
                    total_kv_blocks=fleet.capacity_blocks,
                ),
                0.0,
            )
            self.engines[worker_id] = BatchingEngine(
                worker_id,
                fleet.capacity_blocks,
                BLOCK_SIZE,
                fleet.times,
                fleet.slowness[at % len(fleet.slowness)],
            )
        self._partition = self._selector.catalog.ready_partition(MODEL, "default")
        self._now = 0.0
        self._turn = 0
        self._order = count()  # makes equal times fall in the order in which they were planned
        # (time, order, engine); an entry whose time is not its engine's `due` is void
        self._plan: list[tuple[float, int, BatchingEngine]] = []

    def run(
        self, requests: Sequence[SimulatedRequest], on_request: Callable[[int], None] | None = None
    ) -> None:
        """Serve them all, in order of arrival. `on_request` hears how many have arrived."""
        for number, request in enumerate(requests, 1):
            self._advance(request.arrived_at)
            self._arrive(f"{number}", request)
            if on_request is not None:
                on_request(number)
        self._advance(float("inf"))
        assert not len(self._partition.parked), "an idle fleet has room for every request"

    def _advance(self, until: float) -> None:
        while self._plan and self._plan[0][0] <= until:
            at, _, engine = heapq.heappop(self._plan)
            if engine.due == at:
                self._now = at
                self._iteration(engine)
        if until < float("inf"):
            self._now = until

    def _iteration(self, engine: BatchingEngine) -> None:
        made, selector, now = engine.finish(self._now), self._selector, self._now
        index, key = self._partition.index, (engine.worker_id, 0)
        if made.evicted:
            index.remove(*key, Tier.DEVICE, made.evicted)
        for request in made.first_tokens:
            at, end = request.hit, request.held
            parent = request.chain[at - 1] if at else None
            local = request.local_hashes[8 * at : 8 * end]
            index.store(*key, Tier.DEVICE, parent, request.chain[at:end], local)
            selector.prefill_complete(request.request_id, now, request.ttft_s)
        for request in made.ended:
            selector.free(request.request_id, now)
        self._start(engine)

    def _start(self, engine: BatchingEngine) -> None:
        engine.start(self._now)
        self._plan_end(engine)

    def _plan_end(self, engine: BatchingEngine) -> None:
        if engine.due is not None:
            heapq.heappush(self._plan, (engine.due, next(self._order), engine))

    def _arrive(self, request_id: str, request: SimulatedRequest) -> None:
        request.request_id = request_id
        local, selector = request.local_hashes, self._selector
        sequence = u64s(len(request.chain)).pack(*request.chain)
        asked = SelectionRequest(
            Prompt(request.isl_tokens, local, len(request.chain), sequence[:8], sequence),
            selector.terms,
            books=True,
            reservation_id=request_id,
        )
        if self._policy.rule is not None:
            worker_id = self._policy.rule(self._partition, request, self._turn, self._now)
            asked.pinned = PinnedWorker(worker_id, 0)
            self._turn += 1

        def answered(_: Parked | None, answer: Placement | Exception) -> None:
            if isinstance(answer, Exception):
                raise answer
            self._dispatch(request, answer.worker_id)

        answer = selector.select(self._partition, asked, self._now, answered)
        if isinstance(answer, Placement):
            answered(None, answer)

    def _dispatch(self, request: SimulatedRequest, worker_id: int) -> None:
        request.worker_id = worker_id
        engine = self.engines[worker_id]
        planned = engine.due
        engine.submit(request, self._now)
        if planned is None:
            self._start(engine)
        elif engine.due != planned:
            self._plan_end(engine)


def outcome(
    name: str,
    requests: Sequence[SimulatedRequest],
    engines: Iterable[BatchingEngine],
    within_s: float,
) -> Outcome:
    """The figures of a run that is over."""
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
