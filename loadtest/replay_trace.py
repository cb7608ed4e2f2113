"""Plays a Mooncake-format trace against the selection service and keeps the score.

Owns the trace's format (one JSON object a line: timestamp in ms, input_length, output_length,
hash_ids of 512-token blocks) and the pace. Engines, lifecycle and comparison are the demo's.

With --speed it is an open loop: requests come at the times of the trace, however fast they are
served. Without it is a closed one: the next request comes as soon as one ends, which asks for the
most that the service can do. Its choices were made for other times than the trace's then, so no
times to first token are told.

    python loadtest/replay_trace.py --trace mooncake_conversation.jsonl.gz --requests 2000
"""

import argparse
import asyncio
import gzip
import math
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from io import BufferedIOBase
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec
import uvloop

from lean_selector.tools.service_process import (
    HttpClient,
    ServiceError,
    ServiceProcess,
    answering_service,
    check_port,
    wait_until_healthy,
)
from lean_selector.tools.simulated_engines import (
    EngineSpeed,
    Request,
    SimulatedEngine,
    hit_rate,
    make_request,
)
from lean_selector.tools.traffic import Player, compare, table

T = TypeVar("T")

TRACE_BLOCK_TOKENS = 512
MODEL_NAME = "replay-trace"
# At full speed: enough to keep the service busy, few enough that its answers are not queueing
# for our own loop. At the trace's speed: the most that 16 workers hold of it at once is near 600.
UNDER_WAY_AT_MAX, UNDER_WAY_TIMED = 32, 2_048
TOO_MANY_ERRORS = 100
LOOK_S = 0.25
REPORT_S = 2.0


class TraceLine(msgspec.Struct):
    """One line of the trace file."""

    timestamp: float  # ms since the trace began
    input_length: int  # tokens
    output_length: int  # tokens
    hash_ids: list[int]  # of all blocks of 512 tokens, the last one possibly partial


def prompt_tokens(line: TraceLine) -> list[int]:
    """Tokens of the prompt: equal hash ids have equal tokens. Raises ValueError for a bad line."""
    if not 0 < line.input_length <= len(line.hash_ids) * TRACE_BLOCK_TOKENS:
        raise ValueError(f"input_length {line.input_length} for {len(line.hash_ids)} hash_ids")
    tokens: list[int] = []
    for hash_id in line.hash_ids:
        first = hash_id * TRACE_BLOCK_TOKENS % 2**32
        tokens += range(first, first + TRACE_BLOCK_TOKENS)
    return tokens[: line.input_length]


def open_trace(path: Path) -> BufferedIOBase:
    """The lines of a trace, gzip or not. Raises OSError."""
    with path.open("rb") as probe:
        packed = probe.read(2) == b"\x1f\x8b"
    return gzip.open(path) if packed else path.open("rb")


def read_trace(path: Path, block_size: int, limit: int) -> Iterator[tuple[float, Request]]:
    """Arrival in seconds and request of the first `limit` lines, one at a time.

    The tokens of the output are not in the trace, so no engine caches them. Raises ServiceError
    naming the line that cannot be read.
    """
    decode = msgspec.json.Decoder(TraceLine).decode
    try:
        with open_trace(path) as lines:
            for number, text in enumerate(islice(lines, limit), 1):
                try:
                    line = decode(text)
                    tokens = prompt_tokens(line)
                except ValueError as error:  # msgspec's are among them
                    raise ServiceError(f"{path}:{number}: {error}") from error
                output_blocks = line.output_length // block_size
                name = f"trace-{number}"
                yield (
                    line.timestamp / 1e3,
                    make_request(name, tokens, len(tokens), output_blocks, block_size),
                )
    except OSError as error:
        raise ServiceError(f"cannot read the trace: {error}") from error


class Pace:
    """Plays requests at the times of a trace, `speed` times as fast, and at most `under_way` at
    once; at an infinite speed, each as soon as there is room for it."""

    def __init__(self, speed: float, under_way: int) -> None:
        self._speed = speed
        self._room = asyncio.Semaphore(under_way)
        self.held_back = 0  # requests that came when as many were under way as may be
        self.late_s = 0.0  # the most that a request came behind its time

    async def play(
        self,
        lines: Iterable[tuple[float, Request]],
        play: Callable[[int, float, Request], Coroutine[None, None, None]],
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Until all have been played by `play(turn, arrival_s, request)`, or those that had begun
        when it was over."""
        tasks: set[asyncio.Task[None]] = set()

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            self._room.release()

        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            for turn, (arrival_s, request) in enumerate(lines):
                due = started + arrival_s / self._speed
                await asyncio.sleep(max(0.0, due - loop.time()))
                self.held_back += self._room.locked()
                await self._room.acquire()
                self.late_s = max(self.late_s, loop.time() - due)
                if is_over():
                    break
                task = asyncio.create_task(play(turn, arrival_s, request))
                tasks.add(task)
                task.add_done_callback(ended)
            if tasks:
                await asyncio.wait(tasks)
        finally:
            left = list(tasks)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)


def run(name: str, main: Coroutine[None, None, T]) -> T | None:
    """What it returns; None after a line on stderr that says why it did not come to its end.

    SIGTERM is like Ctrl-C: the way out passes every `finally`, so no child outlives us.
    """

    async def cancellable() -> T:
        running = asyncio.current_task()
        assert running is not None
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
        return await main

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(cancellable())
    except ServiceError as error:
        print(f"{name}: {error}", file=sys.stderr)
    except (KeyboardInterrupt, asyncio.CancelledError):
        print(f"{name}: interrupted", file=sys.stderr)
    return None


class Replay:
    """One run over one trace."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._timed = math.isfinite(options.speed)
        speed = EngineSpeed().times(options.speed if self._timed else 1.0)
        sleep = asyncio.sleep if self._timed else None
        self._engines = {
            worker_id: SimulatedEngine(
                worker_id, options.capacity_blocks, options.block_size, speed, sleep
            )
            for worker_id in range(1, options.workers + 1)
        }
        self._most_pending = 0  # requests in the service's queue, the most seen
        self._most_pending_tokens = 0
        self._pace = Pace(options.speed, options.under_way)
        self._halted = False

    async def run(self) -> tuple[list[str], bool]:
        """The report and whether all was well. Raises ServiceError."""
        try:
            async with self._service() as (client, service):
                player = Player(client, self._engines, lambda: self._halted, MODEL_NAME)
                await player.register_workers()
                try:
                    started = time.monotonic()
                    await self._play(player, service)
                    elapsed_s = time.monotonic() - started
                    left = await player.load_left()
                finally:
                    if service is None:
                        await player.unregister_workers()
        finally:
            for engine in self._engines.values():
                engine.close()
        return self._report(player, left, elapsed_s), not player.error_count and not left

    @asynccontextmanager
    async def _service(self) -> AsyncIterator[tuple[HttpClient, ServiceProcess | None]]:
        """The service at --url, or one started for this run."""
        options = self._options
        if options.url is not None:
            with closing(HttpClient(options.url)) as client:
                await wait_until_healthy(client, None, lambda: False)
                yield client, None
            return
        async with answering_service(check_port(0), options.cmd) as started:
            yield started

    async def _play(self, player: Player, service: ServiceProcess | None) -> None:
        watch = asyncio.create_task(self._watch(player, service))
        options = self._options
        try:
            await self._pace.play(
                read_trace(options.trace, options.block_size, options.requests),
                lambda _, arrival_s, request: player.play(request, arrival_s),
                lambda: watch.done() or player.error_count >= TOO_MANY_ERRORS,
            )
        finally:
            self._halted = True
            await watch

    async def _watch(self, player: Player, service: ServiceProcess | None) -> None:
        """Look at the queue until halted, and say how far it is now and then. Raises ServiceError
        when the service has ended."""
        loop = asyncio.get_running_loop()
        started, report_s = loop.time(), REPORT_S
        while not self._halted:
            await asyncio.sleep(LOOK_S)
            if service is not None:
                service.check()
            for part in await player.loads():
                self._most_pending = max(self._most_pending, part.pending_count)
                self._most_pending_tokens = max(self._most_pending_tokens, part.pending_isl_tokens)
            done, elapsed_s = player.finished, loop.time() - started
            if elapsed_s >= report_s:
                report_s = elapsed_s + REPORT_S
                hits = hit_rate(list(self._engines.values()))
                print(
                    f"{done}/{self._options.requests}  {done / elapsed_s:.0f} requests/s"
                    f"  hits {hits:.1%}",
                    file=sys.stderr,
                    flush=True,
                )

    def _report(self, player: Player, left: int, elapsed_s: float) -> list[str]:
        options = self._options
        lines = [
            f"{player.finished} requests in {elapsed_s:.1f} s: "
            f"{player.finished / elapsed_s:.0f} requests/s, {player.calls / elapsed_s:.0f} calls/s"
            f" on {options.workers} workers of {options.capacity_blocks} blocks",
            *player.report(left),
            f"queue of the service, at most: {self._most_pending} requests,"
            f" {self._most_pending_tokens} tokens",
        ]
        lines.append(self._loop())
        if self._timed:
            lines.append(f"latest start behind the trace: {self._pace.late_s:.2f} s")
        if player.recorded:
            outcomes = compare(
                player.recorded,
                list(self._engines),
                options.capacity_blocks,
                options.block_size,
                EngineSpeed(),
            )
            is_open = self._timed and not self._pace.held_back
            requests = len(player.recorded)
            lines += ["", *table(outcomes, requests, with_times=is_open)]
        return lines

    def _loop(self) -> str:
        """What the times of this run stand for."""
        under_way = self._options.under_way
        if not self._timed:
            return f"closed loop: {under_way} requests under way, the next one when one has ended"
        if held_back := self._pace.held_back:
            return f"no open loop: {held_back} requests were held back, {under_way} being under way"
        speed = self._options.speed
        return f"open loop: requests at the times of the trace, at {speed:g} times its speed"


def _speed(text: str) -> float:
    value = 0.0 if text == "max" else float(text)
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError("must be a factor above 0, or max")
    return value or math.inf


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("must be greater than 0")
    return value


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; exits with 2 when it is wrong."""
    parser = argparse.ArgumentParser(description="Play a trace against the selection service.")
    parser.add_argument("--trace", type=Path, required=True, help="JSON lines, gzip or not")
    target = parser.add_mutually_exclusive_group()
    target.add_argument("--url", help="a running service on this machine; default: start one")
    target.add_argument("--cmd", help="start this as the service, {port} replaced")
    parser.add_argument(
        "--speed", type=_speed, default=math.inf, help="time factor; 0 or max (default): no waits"
    )
    parser.add_argument("--requests", type=_positive, default=2_000, help="default: 2000")
    parser.add_argument("--workers", type=_positive, default=16, help="default: 16")
    parser.add_argument("--block-size", type=_positive, default=16, help="tokens; default: 16")
    parser.add_argument(
        "--capacity-blocks", type=_positive, default=20_000, help="of each engine; default: 20000"
    )
    parser.add_argument(
        "--under-way",
        type=_positive,
        help=f"most requests at once; default: {UNDER_WAY_AT_MAX} at full speed, "
        f"else {UNDER_WAY_TIMED}",
    )
    args = parser.parse_args(argv)
    args.under_way = args.under_way or (
        UNDER_WAY_TIMED if math.isfinite(args.speed) else UNDER_WAY_AT_MAX
    )
    return args


def main(argv: Sequence[str]) -> int:
    """0 when every request was played without error and no load is left, else 1."""
    ended = run("replay_trace", Replay(parse_options(argv)).run())
    if ended is None:
        return 1
    report, good = ended
    print("\n".join(report))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
