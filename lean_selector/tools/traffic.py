"""Traffic for `lean-selector demo`: generated conversations, and a client that plays them."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count, cycle
from random import Random
from urllib.parse import quote

import msgspec

from lean_selector.tools.service_process import HttpClient, ServiceError
from lean_selector.tools.simulated_engines import (
    EngineModel,
    EngineRequest,
    RunningRequest,
    SimulatedEngine,
    hit_rate,
    make_request,
    mean_ttft_s,
)
from lean_selector.wire.fleet import Fleet

# -- made-up multi-turn conversations --------------------------------------------------------------
# The prompt of a turn is the whole conversation so far, so the engine of the previous turn has
# computed its prefix.

BLOCK_SIZE = 16  # tokens
VOCABULARY = range(32_000)
SYSTEM_PROMPTS = 4  # shared by all conversations
SYSTEM_TOKENS = 256
TURNS = (4, 12)
USER_TOKENS = (60, 400)
OUTPUT_TOKENS = (32, 160)
THINKING_S = (0.1, 0.6)


class ConversationTurn(msgspec.Struct, frozen=True):
    """One request of a conversation, and the pause of the user before the request."""

    thinking_s: float
    request: EngineRequest


def conversations(seed: int, user: int) -> Iterator[ConversationTurn]:
    """Yields the turns of one user without end. The turns depend only on `seed` and `user`."""
    for number in count():
        rng = Random(f"{seed}/{user}/{number}")
        system = f"{seed}/system/{rng.randrange(SYSTEM_PROMPTS)}"
        history = Random(system).choices(VOCABULARY, k=SYSTEM_TOKENS)
        for turn in range(rng.randint(*TURNS)):
            history += rng.choices(VOCABULARY, k=rng.randint(*USER_TOKENS))
            isl_tokens = len(history)
            history += rng.choices(VOCABULARY, k=rng.randint(*OUTPUT_TOKENS))
            filled = len(history) // BLOCK_SIZE - isl_tokens // BLOCK_SIZE
            name = f"demo-{user}-{number}-{turn}"
            request = make_request(name, history.copy(), isl_tokens, filled, BLOCK_SIZE)
            yield ConversationTurn(rng.uniform(*THINKING_S), request)


# -- answers of the service, as far as they are read -----------------------------------------------


class _Overlap(msgspec.Struct):
    gpu: int


class _Selection(msgspec.Struct):
    worker_id: int
    overlap: _Overlap


# -- playing requests ------------------------------------------------------------------------------

LATENCY_LIMIT = 200_000  # newest latencies per kind of call that percentiles use
ERROR_LIMIT = 5  # stored error texts; all errors are counted


def percentile(values: Sequence[float], fraction: float) -> float:
    """Return the value at a fraction of the sorted list (nearest rank); 0 for an empty list."""
    return values[min(len(values) - 1, int(len(values) * fraction))] if values else 0.0


class RoundRobin:
    """What engines like the given ones make of the same traffic in turn."""

    def __init__(self, engines: Sequence[EngineModel]) -> None:
        self.engines = [EngineModel(e.cache.capacity, e.block_size, e.speed) for e in engines]
        self._turns = cycle(self.engines)

    def begin(self, request: EngineRequest, now: float) -> tuple[EngineModel, RunningRequest]:
        engine = next(self._turns)
        return engine, engine.admit(request, now)[0]


class Player:
    """Plays requests as a gateway would: select_and_reserve, prefill on the chosen engine,
    prefill_complete, output_block per decoded block, DELETE, a report. Counts calls, results and
    errors."""

    def __init__(
        self,
        client: HttpClient,
        engines: Mapping[int, SimulatedEngine],
        stopping: Callable[[], bool],
        model_name: str,
    ) -> None:
        """model_name: name under which the engines are registered.

        stopping: if it returns True, decoding ends early, and reservations are freed."""
        self._client = client
        self._engines = engines
        self._stopping = stopping
        self._model_name = model_name
        self._in_turn = RoundRobin(list(engines.values()))
        self.calls = 0  # the service's answers to play()
        self.finished = 0  # completed requests
        self.expected_blocks = 0  # cached blocks that the service predicted on the chosen engines
        self.error_count = 0
        self.errors: list[str] = []
        self.latency_s: dict[str, deque[float]] = {
            kind: deque(maxlen=LATENCY_LIMIT)
            for kind in ("select_and_reserve", "prefill_complete", "output_block", "free", "report")
        }

    async def register_workers(self) -> None:
        """Registers every engine as a worker. Raises ServiceError."""
        for engine in self._engines.values():
            body = {"model_name": self._model_name, **engine.registration()}
            await self._client.call("POST", "/workers", body)

    async def fleet(self) -> Fleet:
        """Return the answer of GET /fleet."""
        return msgspec.json.decode(await self._client.call("GET", "/fleet"), type=Fleet)

    def report(self) -> list[str]:
        """Return the lines of the summary."""
        engines = list(self._engines.values())
        prompt_blocks = max(1, sum(engine.prompt_blocks for engine in engines))
        lines = [
            f"{self.finished} requests played, {self.calls} calls, {self.error_count} errors",
            *(f"  error: {text}" for text in self.errors),
            f"cache hits {hit_rate(engines):.1%} of {prompt_blocks} prompt blocks"
            f" (expected by the service: {self.expected_blocks / prompt_blocks:.1%})",
            "answer, as the client sees it      p50        p99      count",
        ]
        for kind, samples in self.latency_s.items():
            ordered = sorted(samples)
            p50, p99 = percentile(ordered, 0.50) * 1e3, percentile(ordered, 0.99) * 1e3
            lines.append(f"  {kind:<22} {p50:>9.2f} ms {p99:>7.2f} ms {len(ordered):>9}")
        in_turn = self._in_turn.engines
        return [
            *lines,
            f"the engines' time to first token  {mean_ttft_s(engines):.2f} s on average",
            f"  round-robin, same arrivals     {mean_ttft_s(in_turn):>6.2f} s, cache hits"
            f" {hit_rate(in_turn):.1%}",
        ]

    async def play(self, request: EngineRequest) -> None:
        """Plays one request to its end. The service's errors are counted and stored, not raised."""
        try:
            await self._play(request)
        except ServiceError as error:
            self.error_count += 1
            if len(self.errors) < ERROR_LIMIT:
                self.errors.append(str(error))
        else:
            self.finished += 1

    async def _play(self, request: EngineRequest) -> None:
        blocks = request.prompt_blocks
        body = {
            "model_name": self._model_name,
            "reservation_id": request.request_id,
            "block_hashes": request.block_hashes[:blocks],
            "sequence_hashes": request.sequence_hashes[:blocks],
            "isl_tokens": request.isl_tokens,
        }
        answer = await self._timed("select_and_reserve", "POST", "/select_and_reserve", body)
        selection = msgspec.json.decode(answer, type=_Selection)
        reservation = f"/reservations/{quote(request.request_id, safe='')}"
        try:
            ttft_s = await self._serve(request, selection, reservation)
        finally:
            await self._timed("free", "DELETE", reservation)
        report = {"outcome": "ok", "ttft_ms": max(0.0, 1e3 * ttft_s)}
        await self._timed("report", "POST", f"/workers/{selection.worker_id}/report", report)

    async def _serve(
        self, request: EngineRequest, selection: _Selection, reservation: str
    ) -> float:
        """Runs the request on the chosen engine, and reports each step to the service. Return the
        time to first token, in seconds."""
        engine = self._engines.get(selection.worker_id)
        if engine is None:
            raise ServiceError(f"the service chose worker {selection.worker_id}, which is not ours")
        self.expected_blocks += selection.overlap.gpu // engine.block_size
        began = asyncio.get_running_loop().time()
        other, same = self._in_turn.begin(request, began)
        running = await engine.prefill(request)
        ttft_s = running.prefill_done_at - began
        try:
            await self._timed("prefill_complete", "POST", f"{reservation}/prefill_complete")
            for index in range(request.output_blocks):
                if self._stopping():
                    break
                await engine.decode(running, index)
                other.decode_block(same, index)
                await self._timed("output_block", "POST", f"{reservation}/output_block", {})
        finally:
            engine.finish(running)
            other.finish(same)
        return ttft_s

    async def _timed(self, kind: str, method: str, path: str, body: object = None) -> bytes:
        started = time.perf_counter()
        answer = await self._client.call(method, path, body)
        self.latency_s[kind].append(time.perf_counter() - started)
        self.calls += 1
        return answer
