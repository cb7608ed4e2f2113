"""Plays a Mooncake-format trace against the selection service and keeps the score.

Engines, lifecycle and comparison are the demo's. With --speed it is an open loop: requests come at
the times of the trace, however fast they are served. Without it is a closed one: the next request
comes as soon as one ends, which asks for the most that the service can do. Its choices were made
for other times than the trace's then, so no times to first token are told.

    python loadtest/replay_trace.py --trace mooncake_conversation.jsonl.gz --requests 2000
"""

import argparse
import asyncio
import math
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

if __name__ == "__main__":
    # Run as a file, Python looks for modules beside it; those here are named from the root.
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from lean_selector.tools.service_process import (
    HttpClient,
    answering_service,
    check_port,
    wait_until_healthy,
)
from lean_selector.tools.simulated_engines import EngineSpeed, SimulatedEngine, hit_rate
from lean_selector.tools.traffic import Player, compare, table
from loadtest.trace import Pace, read_trace, run

MODEL_NAME = "replay-trace"
# At full speed: enough to keep the service busy, few enough that its answers are not queueing
# for our own loop. At the trace's speed: the most that 16 workers hold of it at once is near 600.
UNDER_WAY_AT_MAX, UNDER_WAY_TIMED = 32, 2_048
TOO_MANY_ERRORS = 100
REPORT_S = 2.0


@asynccontextmanager
async def serving(options: argparse.Namespace) -> AsyncIterator[HttpClient]:
    """The service at --url, or one started for this run."""
    if options.url is None:
        async with answering_service(check_port(0), options.cmd) as (client, _):
            yield client
        return
    with closing(HttpClient(options.url)) as client:
        await wait_until_healthy(client, None, lambda: False)
        yield client


async def replay(options: argparse.Namespace) -> tuple[list[str], bool]:
    """The report and whether all was well. Raises ServiceError."""
    is_timed = math.isfinite(options.speed)
    speed = EngineSpeed().times(options.speed if is_timed else 1.0)
    sleep = asyncio.sleep if is_timed else None
    engines = {
        worker_id: SimulatedEngine(
            worker_id, options.capacity_blocks, options.block_size, speed, sleep
        )
        for worker_id in range(1, options.workers + 1)
    }
    pace = Pace(options.speed, options.under_way)
    try:
        async with serving(options) as client:
            player = Player(client, engines, lambda: False, MODEL_NAME)
            await player.register_workers()
            telling = asyncio.create_task(_tell(player, engines, options.requests))
            try:
                started = time.monotonic()
                await pace.play(
                    read_trace(options.trace, options.block_size, options.requests),
                    lambda _, arrival_s, request: player.play(request, arrival_s),
                    lambda: player.error_count >= TOO_MANY_ERRORS,
                )
                elapsed_s = time.monotonic() - started
                left = await player.load_left()
            finally:
                telling.cancel()
                if options.url is not None:
                    await player.unregister_workers()
    finally:
        for engine in engines.values():
            engine.close()
    lines = [
        f"{player.finished} requests in {elapsed_s:.1f} s: "
        f"{player.finished / elapsed_s:.0f} requests/s, {player.calls / elapsed_s:.0f} calls/s"
        f" on {options.workers} workers of {options.capacity_blocks} blocks",
        *player.report(left),
        _loop(options, pace),
    ]
    if is_timed:
        lines.append(f"latest start behind the trace: {pace.late_s:.2f} s")
    if requests := len(player.recorded):
        capacity, size = options.capacity_blocks, options.block_size
        outcomes = compare(player.recorded, list(engines), capacity, size, EngineSpeed())
        lines += ["", *table(outcomes, requests, with_times=is_timed and not pace.held_back)]
    return lines, not player.error_count and not left


async def _tell(player: Player, engines: dict[int, SimulatedEngine], requests: int) -> None:
    """How far it is, now and then."""
    began = time.monotonic()
    while True:
        await asyncio.sleep(REPORT_S)
        rate = player.finished / (time.monotonic() - began)
        hits = hit_rate(list(engines.values()))
        text = f"{player.finished}/{requests}  {rate:.0f} requests/s  hits {hits:.1%}"
        print(text, file=sys.stderr, flush=True)


def _loop(options: argparse.Namespace, pace: Pace) -> str:
    """What the times of this run stand for."""
    most = options.under_way
    if not math.isfinite(options.speed):
        return f"closed loop: {most} requests under way, the next one when one has ended"
    if pace.held_back:
        return f"no open loop: {pace.held_back} requests were held back, {most} being under way"
    return f"open loop: requests at the times of the trace, at {options.speed:g} times its speed"


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
    ended = run("replay_trace", replay(parse_options(argv)))
    if ended is None:
        return 1
    report, good = ended
    print("\n".join(report))
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
