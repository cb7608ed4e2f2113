"""A simulated engine in virtual time: continuous batching, chunked prefill, a bounded cache.

Scheduling is as in vLLM. In each iteration, every running request decodes one token, and a bounded
number of prompt tokens is computed, in order of arrival. A prompt starts when its blocks fit in the
cache beside the blocks in use. Output is not cached, because traces have no output tokens."""

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from lean_selector.tools.simulated_engines import BlockCache


class IterationTimes(msgspec.Struct, frozen=True):
    """How long an iteration of an engine takes. The defaults fit an 8B model on one large GPU."""

    base_s: float = 0.008
    prompt_token_s: float = 1 / 14_000
    running_request_s: float = 0.000_08
    context_token_s: float = 4e-9  # per token in the context of a running request
    most_prompt_tokens: int = 4_096
    most_running: int = 256


@dataclass(eq=False)
class SimulatedRequest:
    """A request of a trace, and its outcome. Times are in seconds since the trace's start."""

    arrived_at: float
    isl_tokens: int
    output_tokens: int
    local_hashes: bytes  # of full blocks
    chain: Sequence[int]  # their sequence hashes

    def __post_init__(self) -> None:
        self.output_tokens = max(1, self.output_tokens)
        # Of a pair: the prefill of this request elsewhere, or the request of which this is the
        # prefill.
        self.leg: SimulatedRequest | None = None
        self.whole: SimulatedRequest | None = None
        self.pinned: int | None = None  # the worker that it must go to
        self.allowed: frozenset[int] | None = None
        self.request_id = ""
        self.fairness_id = ""
        self.worker_id = -1
        self.held = 0  # leading blocks in the cache while it runs
        self.hit = 0  # of those, blocks that were cached when it started
        self.found_tokens = 0  # prompt tokens that the index predicted as cached when it was placed
        self.hit_tokens = 0  # cached prompt tokens, which are not computed
        self.to_compute = -1  # remaining prompt tokens; -1 until it starts
        self.first_token_at = self.ended_at = math.nan

    def prefill_elsewhere(self, now: float) -> "SimulatedRequest":
        """Return what an engine has to do that only prefills this request."""
        leg = SimulatedRequest(now, self.isl_tokens, 1, self.local_hashes, self.chain)
        leg.request_id, leg.whole, self.leg = self.request_id, self, leg
        return leg

    @property
    def ttft_s(self) -> float:
        return self.first_token_at - self.arrived_at

    @property
    def token_gap_s(self) -> float:
        """The mean time between two output tokens, in seconds."""
        return (self.ended_at - self.first_token_at) / max(1, self.output_tokens - 1)


class Iteration(msgspec.Struct):
    """The results of one iteration. Successive iterations that only decode count as one."""

    evicted: list[int] = []
    first_tokens: list[SimulatedRequest] = []
    ended: list[SimulatedRequest] = []


@dataclass(eq=False)
class BatchingEngine:
    """A simulated engine. `due`: when the current iteration ends; None if the engine is idle.

    `slowness` multiplies the duration of each iteration of this engine."""

    worker_id: int
    capacity_blocks: int
    block_size: int
    times: IterationTimes
    slowness: float = 1.0

    def __post_init__(self) -> None:
        self.cache = BlockCache(self.capacity_blocks)
        self.due: float | None = None
        self.computed_tokens = 0
        self._waiting: deque[SimulatedRequest] = deque()
        # (iteration in which it ends, serial, request)
        self._running: list[tuple[int, int, SimulatedRequest]] = []
        self._context_tokens = 0  # of the running requests
        self._iterations = 0
        self._serial = 0
        self._now: Iteration = Iteration()
        self._began_at = self._each_s = 0.0
        self._count = 1  # iterations until `due`
        self._is_decoding_only = False

    def submit(self, request: SimulatedRequest, now: float) -> None:
        """Queues a request. A running row of decode iterations ends after its current iteration."""
        self._waiting.append(request)
        if self.due is not None and self._is_decoding_only:
            self._count = min(self._count, max(1, math.ceil((now - self._began_at) / self._each_s)))
            self.due = self._began_at + self._count * self._each_s

    def start(self, now: float) -> None:
        """Starts an iteration, if a request is queued or running."""
        times, made = self.times, Iteration()
        left = times.most_prompt_tokens
        while self._waiting and left:
            request = self._waiting[0]
            if request.to_compute < 0 and not self._admit(request, made):
                break
            taken = min(left, request.to_compute)
            request.to_compute -= taken
            left -= taken
            if not request.to_compute:
                made.first_tokens.append(self._waiting.popleft())
        prompt_tokens = times.most_prompt_tokens - left
        if not prompt_tokens and not self._running:
            self.due = None
            return
        self.computed_tokens += prompt_tokens
        self._each_s = self.slowness * (
            times.base_s
            + times.prompt_token_s * prompt_tokens
            + times.running_request_s * len(self._running)
            + times.context_token_s * self._context_tokens
        )
        self._is_decoding_only = not prompt_tokens
        self._count = 1 if prompt_tokens else self._running[0][0] - self._iterations
        self._now, self._began_at = made, now
        self.due = now + self._count * self._each_s

    def _admit(self, request: SimulatedRequest, made: Iteration) -> bool:
        """Caches a prompt. Return False if too many requests run, or the cache has no room."""
        busy = len(self._running) + len(made.first_tokens)
        if busy and (busy >= self.times.most_running or not self.cache.has_room_for(request.chain)):
            return False
        placed = self.cache.hold(request.chain)
        made.evicted += placed.evicted
        request.hit, request.held = placed.hit, placed.hit + placed.stored
        # The last token is always computed, because its output is the first token of the answer.
        request.hit_tokens = min(placed.hit * self.block_size, request.isl_tokens - 1)
        request.to_compute = request.isl_tokens - request.hit_tokens
        if request.leg is not None:  # its blocks were transferred, all but the last token's
            request.hit_tokens, request.to_compute = request.leg.hit_tokens, 1
        return True

    def finish(self, now: float) -> Iteration:
        """Ends the current iteration, and returns its results. Call method `start` next."""
        made = self._now
        self._iterations += self._count
        self._context_tokens += self._count * len(self._running)
        while self._running and self._running[0][0] <= self._iterations:
            made.ended.append(heapq.heappop(self._running)[2])
        for request in made.first_tokens:
            request.first_token_at = now
            self._context_tokens += request.isl_tokens + 1
            if request.output_tokens == 1:
                made.ended.append(request)
                continue
            self._serial += 1
            ends = self._iterations + request.output_tokens - 1
            heapq.heappush(self._running, (ends, self._serial, request))
        for request in made.ended:
            request.ended_at = now
            self._context_tokens -= request.isl_tokens + request.output_tokens
            self.cache.release(request.chain[: request.held])
        return made
