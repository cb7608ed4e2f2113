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
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from itertools import islice
from pathlib import Path

import msgspec
import uvloop

from lean_selector.tools.engines import (
    EngineSpeed,
    Request,
    SimulatedEngine,
    hit_rate,
    make_request,
)
from lean_selector.tools.service_process import (
    HttpClient,
    ServiceError,
    ServiceProcess,
    answering_service,
    check_port,
    wait_until_healthy,
)
from lean_selector.tools.traffic import Player, compare, table

TRACE_BLOCK_TOKENS = 512
MODEL_NAME = "replay-trace"
# At full speed: enough to keep the service busy, few enough that its answers are not queueing
# for our own loop. At the trace's speed: the most that 16 workers hold of it at once is near 600.
UNDER_WAY_AT_MAX, UNDER_WAY_TIMED = 32, 2_048
TOO_MANY_ERRORS = 100
REPORT_S = 0.25
PLAIN_REPORT_S = 2.0
BAR_WIDTH = 30


class TraceLine(msgspec.Struct):
    """One line of the trace file."""

    timestamp: float  # ms since the trace began
    input_length: int  # tokens
    output_length: int  # tokens
    hash_ids: list[int]  # of all blocks of 512 tokens, the last one possibly partial


class Options(msgspec.Struct, frozen=True):
    """The command line. speed is infinite for `max`."""

    trace: Path
    url: str | None
    command: str | None
    speed: float
    requests: int
    workers: int
    block_size: int
    capacity_blocks: int
    under_way: int


def prompt_tokens(line: TraceLine) -> list[int]:
    """Tokens of the prompt: equal hash ids have equal tokens. Raises ValueError for a bad line."""
    if not 0 < line.input_length <= len(line.hash_ids) * TRACE_BLOCK_TOKENS:
        raise ValueError(f"input_length {line.input_length} for {len(line.hash_ids)} hash_ids")
    tokens: list[int] = []
    for hash_id in line.hash_ids:
        first = hash_id * TRACE_BLOCK_TOKENS % 2**32
        tokens += range(first, first + TRACE_BLOCK_TOKENS)
    return tokens[: line.input_length]


def read_trace(path: Path, block_size: int, limit: int) -> Iterator[tuple[float, Request]]:
    """Arrival in seconds and request of the first `limit` lines, one at a time.

    The tokens of the output are not in the trace, so no engine caches them. Raises ServiceError
    naming the line that cannot be read.
    """
    decode = msgspec.json.Decoder(TraceLine).decode
    try:
        with path.open("rb") as probe:
            packed = probe.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as lines:
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


class Progress:
    """Tells stderr how far it is: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._terminal = sys.stderr.isatty()
        self._next_s = PLAIN_REPORT_S

    def show(self, done: int, elapsed_s: float, hits: float) -> None:
        """Called often; decides by itself when to write."""
        text = (
            f"{done}/{self._total}  {done / max(elapsed_s, 1e-3):.0f} requests/s  hits {hits:.1%}"
        )
        if self._terminal:
            full = done * BAR_WIDTH // max(1, self._total)
            bar = "#" * full + "." * (BAR_WIDTH - full)
            print(f"\r[{bar}] {text}\x1b[K", end="", file=sys.stderr, flush=True)
        elif elapsed_s >= self._next_s:
            self._next_s = elapsed_s + PLAIN_REPORT_S
            print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Leave the bar's line."""
        if self._terminal:
            print(file=sys.stderr)


class Replay:
    """One run over one trace."""

    def __init__(self, options: Options) -> None:
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
        self._held_back = 0  # requests that came when as many were under way as may be
        self._latest_start_s = 0.0  # behind the trace
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
        async with answering_service(check_port(0), options.command) as started:
            yield started

    async def _play(self, player: Player, service: ServiceProcess | None) -> None:
        watch = asyncio.create_task(self._watch(player, service))
        tasks: set[asyncio.Task[None]] = set()
        room = asyncio.Semaphore(self._options.under_way)

        def ended(task: asyncio.Task[None]) -> None:
            tasks.discard(task)
            room.release()

        started = time.monotonic()
        options = self._options
        try:
            for arrival_s, request in read_trace(
                options.trace, options.block_size, options.requests
            ):
                if self._timed:
                    due = started + arrival_s / options.speed
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                self._held_back += room.locked()
                await room.acquire()
                if self._timed:
                    self._latest_start_s = max(self._latest_start_s, time.monotonic() - due)
                if watch.done() or player.error_count >= TOO_MANY_ERRORS:
                    break
                task = asyncio.create_task(player.play(request, arrival_s))
                tasks.add(task)
                task.add_done_callback(ended)
            if tasks:
                await asyncio.wait(tasks)
        finally:
            self._halted = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(watch, *tasks)

    async def _watch(self, player: Player, service: ServiceProcess | None) -> None:
        """Look at the queue and the progress until halted. Raises when the service has ended."""
        progress = Progress(self._options.requests)
        started = time.monotonic()
        engines = list(self._engines.values())
        try:
            while not self._halted:
                await asyncio.sleep(REPORT_S)
                if service is not None:
                    service.check()
                for part in await player.loads():
                    self._most_pending = max(self._most_pending, part.pending_count)
                    self._most_pending_tokens = max(
                        self._most_pending_tokens, part.pending_isl_tokens
                    )
                progress.show(player.finished, time.monotonic() - started, hit_rate(engines))
        finally:
            progress.end()

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
            lines.append(f"latest start behind the trace: {self._latest_start_s:.2f} s")
        if player.recorded:
            outcomes = compare(
                player.recorded,
                list(self._engines),
                options.capacity_blocks,
                options.block_size,
                EngineSpeed(),
            )
            is_open = self._timed and not self._held_back
            requests = len(player.recorded)
            lines += ["", *table(outcomes, requests, with_times=is_open)]
        return lines

    def _loop(self) -> str:
        """What the times of this run stand for."""
        under_way = self._options.under_way
        if not self._timed:
            return f"closed loop: {under_way} requests under way, the next one when one has ended"
        if self._held_back:
            return (
                f"no open loop: {self._held_back} requests were held back,"
                f" {under_way} being under way"
            )
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


def parse_options(argv: Sequence[str]) -> Options:
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
    default = UNDER_WAY_TIMED if math.isfinite(args.speed) else UNDER_WAY_AT_MAX
    return Options(
        trace=args.trace,
        url=args.url,
        command=args.cmd,
        speed=args.speed,
        requests=args.requests,
        workers=args.workers,
        block_size=args.block_size,
        capacity_blocks=args.capacity_blocks,
        under_way=args.under_way or default,
    )


async def _run(options: Options) -> tuple[list[str], bool]:
    running = asyncio.current_task()
    assert running is not None
    # Like Ctrl-C: the way out passes every `finally`, so the child does not outlive us.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, running.cancel)
    return await Replay(options).run()


def main(argv: Sequence[str]) -> int:
    """0 when every request was played without error and no load is left, else 1."""
    options = parse_options(argv)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            report, good = runner.run(_run(options))
    except ServiceError as error:
        print(f"replay_trace: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("replay_trace: interrupted", file=sys.stderr)
        return 1
    print("\n".join(report))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
