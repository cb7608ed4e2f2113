"""Traffic in real time, faster than life, past a real service; the engines batch.

    python -m loadtest.whatif TRACE --log decisions.jsonl --flags "--policy dynamo"

prints what clients saw, in seconds of the trace. With --log it leaves the service's decision log,
of which `lean-selector replay` predicts what another policy would have brought.
"""

import argparse
import asyncio
import shlex
import sys
from pathlib import Path

import msgspec

from lean_selector.core.hashing import local_hashes, sequence_hashes_bytes
from lean_selector.publisher import KvEventPublisher
from lean_selector.tools.batching_engine import BatchingEngine, IterationTimes, SimulatedRequest
from lean_selector.tools.service_process import HOST, HttpClient
from lean_selector.tools.simulation import BLOCK_SIZE, outcome, requests_of
from lean_selector.tools.trace import trace_lines
from lean_selector.wire.decision_lines import DecisionLine
from loadtest.child_service import ChildService, free_port
from loadtest.traces import prompt_tokens


class RealTimeEngine:
    """A batching engine on the loop's clock, `speed` times as fast, with KV events."""

    def __init__(self, worker_id: int, capacity: int, slowness: float, speed: float) -> None:
        self.model = BatchingEngine(worker_id, capacity, BLOCK_SIZE, IterationTimes(), slowness)
        self.worker_id = worker_id
        self._speed = speed
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._first: dict[SimulatedRequest, asyncio.Future[None]] = {}
        self._ended: dict[SimulatedRequest, asyncio.Future[None]] = {}
        self._lines: dict[SimulatedRequest, DecisionLine] = {}
        self.publisher = KvEventPublisher(
            worker_id=worker_id, kv_block_size=BLOCK_SIZE, endpoint=f"tcp://{HOST}:0"
        )

    def now(self) -> float:
        return self._loop.time() * self._speed

    def submit(
        self, request: SimulatedRequest, line: DecisionLine
    ) -> tuple[asyncio.Future[None], asyncio.Future[None]]:
        self._lines[request] = line
        first = self._first[request] = self._loop.create_future()
        ended = self._ended[request] = self._loop.create_future()
        now = self.now()
        self.model.submit(request, now)
        if self.model.due is None:
            self.model.start(now)
        self._plan()
        return first, ended

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        due = self.model.due
        self._timer = None if due is None else self._loop.call_at(due / self._speed, self._turn)

    def _turn(self) -> None:
        due = self.model.due
        assert due is not None
        made = self.model.finish(due)
        with self.publisher.batch() as batch:
            batch.publish_removed(block_hashes=made.evicted)
            for request in made.first_tokens:
                at, end = request.hit, request.held
                line = self._lines.pop(request)
                stored = msgspec.structs.replace(line, hash_ids=line.hash_ids[at:end])
                batch.publish_stored(
                    token_ids=prompt_tokens(stored),
                    block_hashes=request.chain[at:end],
                    parent_hash=request.chain[at - 1] if at else None,
                )
        for request in made.first_tokens:
            self._first.pop(request).set_result(None)
        for request in made.ended:
            self._ended.pop(request).set_result(None)
        self.model.start(due)
        self._plan()


async def play(options: argparse.Namespace) -> None:
    lines = sorted(trace_lines(options.trace, options.requests), key=lambda line: line.timestamp)
    requests = requests_of(lines, options.load, options.spread)
    for request, line in zip(requests, lines, strict=True):  # as the service hashes events' tokens
        request.local_hashes = local_hashes(prompt_tokens(line), BLOCK_SIZE)
        chain = memoryview(sequence_hashes_bytes(request.local_hashes))
        request.chain = chain.cast("q").tolist()
    slowness = [float(each) for each in options.slowness.split(",")]
    engines = [
        RealTimeEngine(at + 1, options.capacity, slowness[at % len(slowness)], options.speed)
        for at in range(options.engines)
    ]
    port, loop = free_port(), asyncio.get_running_loop()
    command = [sys.executable, "-m", "lean_selector", "--port", str(port)]
    command += shlex.split(options.flags)
    if options.log is not None:
        command += ["--decision-log", str(options.log)]
    with ChildService(command, port) as child:
        client = HttpClient(f"http://{HOST}:{port}")
        for engine in engines:
            body = {
                "worker_id": engine.worker_id,
                "model_name": "m",
                "endpoint": f"http://{HOST}:{9_000 + engine.worker_id}",  # named, never contacted
                "block_size": BLOCK_SIZE,
                "max_num_batched_tokens": 4_096,
                "total_kv_blocks": options.capacity,
                "kv_events_endpoints": {"0": engine.publisher.endpoint},
            }
            await client.call("POST", "/workers", body)
        await asyncio.sleep(2.0)
        began = loop.time() + 1.0

        async def one(number: int) -> None:
            """A client's request, from its arrival to its last token."""
            request, name = requests[number], f"r{number}"
            await asyncio.sleep(began + request.arrived_at / options.speed - loop.time())
            request.arrived_at = engines[0].now()
            ask = {
                "model_name": "m",
                "reservation_id": name,
                "block_hashes": memoryview(request.local_hashes).cast("q").tolist(),
                "sequence_hashes": request.chain,
                "isl_tokens": request.isl_tokens,
            }
            answer = msgspec.json.decode(await client.call("POST", "/select_and_reserve", ask))
            first, ended = engines[answer["worker_id"] - 1].submit(request, lines[number])
            await first
            await client.call("POST", f"/reservations/{name}/prefill_complete")
            await ended
            for _ in range(request.output_tokens // BLOCK_SIZE):
                await client.call("POST", f"/reservations/{name}/output_block", {})
            await client.call("DELETE", f"/reservations/{name}")

        await asyncio.gather(*map(one, range(len(lines))))
        await asyncio.sleep(1.0)
        cpu_s = child.cpu_ns() / 1e9
    row = outcome(options.flags, requests, [engine.model for engine in engines], 2.0)
    late = f"; served {row.requests}; the service took {cpu_s:.2f} s of CPU"
    print(msgspec.json.encode(row).decode() + late, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, nargs="?")
    parser.add_argument("--log", type=Path, help="where the service leaves its decision log")
    parser.add_argument("--flags", default="", help="of the service")
    parser.add_argument("--requests", type=int, default=2_500)
    parser.add_argument("--load", type=float, default=1.0)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--capacity", type=int, default=3_000)
    parser.add_argument("--slowness", default="1")
    parser.add_argument("--spread", action="store_true", help="as `lean-selector simulate` does")
    parser.add_argument("--speed", type=float, default=6.0, help="seconds of the trace in a second")
    asyncio.run(play(parser.parse_args()))


if __name__ == "__main__":
    main()
