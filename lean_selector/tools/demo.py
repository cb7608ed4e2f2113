"""`lean-selector demo`: the service as a child process, with simulated engines and traffic.

Registers the engines, plays traffic until the time is over or a signal arrives, ends the running
requests, stops the service, and prints a summary: what the engines had cached, and what they would
have had if they had got the same requests in turn."""

import argparse
import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Sequence

import uvloop

from lean_selector.tools.service_process import (
    ServiceError,
    ServiceProcess,
    answering_service,
    check_port,
    within,
)
from lean_selector.tools.simulated_engines import EngineSpeed, SimulatedEngine, hit_rate
from lean_selector.tools.top import Screen, drawing
from lean_selector.tools.traffic import (
    BLOCK_SIZE,
    Player,
    conversations,
    percentile,
)

USERS_PER_WORKER = 10
# Room for each conversation on one engine, but not on every engine.
CAPACITY_BLOCKS = 2_000
MAX_WORKERS = 64  # each has three threads and two sockets, in one process
REDRAW_S = 0.25
DRAIN_S = 3.0  # for running requests at the end, whose delays are cut short


# -- the command line ------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    workers = within(int, 1, MAX_WORKERS)
    seconds = within(float, 0.001, 86_400)
    parser.add_argument(
        "--seconds", type=seconds, help="default: until Ctrl-C on a terminal, else 20"
    )
    parser.add_argument(
        "--workers", type=workers, default=4, help=f"engines, 1 to {MAX_WORKERS}; default: 4"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the traffic; default: 0")
    parser.add_argument("--port", type=int, default=0, help="of the service; default: a free one")


def main(argv: Sequence[str]) -> int:
    """Runs the demo. Return 1 if there were errors, and otherwise 0, also after one Ctrl-C or
    SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="lean-selector demo",
        description=(
            "Show the service choosing workers for multi-turn traffic on simulated engines."
        ),
    )
    add_arguments(parser)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            summary, errors = runner.run(Demo(parser.parse_args(argv)).run())
        print("\n".join(summary), flush=True)
    except ServiceError as error:
        print(f"lean-selector demo: {error}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        print("lean-selector demo: stopped at once", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output is gone; avoid an error message of the interpreter at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 1 if errors else 0


# -- a run -----------------------------------------------------------------------------------------


class Demo:
    """One run of the demo. The first Ctrl-C or SIGTERM ends the run early, with a summary."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._stop = asyncio.Event()
        self._screen = Screen(sys.stdout) if sys.stdout.isatty() else None
        self._seconds = options.seconds or (20.0 if self._screen is None else float("inf"))
        self._next_line_s = 1.0  # without a terminal: one line a second
        self._engines: dict[int, SimulatedEngine] = {}

    async def run(self) -> tuple[list[str], int]:
        """Runs the demo. Return its summary and the number of errors. Raises ServiceError."""
        self._catch_signals()
        options, stopping = self._options, self._stop.is_set
        port = check_port(options.port)
        async with answering_service(port, stopping) as (client, service):
            if stopping():
                return ["stopped before the service was ready"], 0
            print(f"page: http://127.0.0.1:{port}/ui#decisions", flush=True)
            try:
                for worker_id in range(1, options.workers + 1):
                    self._engines[worker_id] = SimulatedEngine(
                        worker_id, CAPACITY_BLOCKS, BLOCK_SIZE, EngineSpeed(), self._pause
                    )
                player = Player(client, self._engines, stopping, "demo")
                await player.register_workers()
                await self._traffic(player, service)
            finally:
                for engine in self._engines.values():
                    engine.close()
                if self._screen is not None:
                    self._screen.close()
        return ["", *player.report()], player.error_count

    def _catch_signals(self) -> None:
        """Makes the first signal end the traffic, and a second signal cancel the run."""
        loop, running = asyncio.get_running_loop(), asyncio.current_task()
        assert running is not None

        def end() -> None:
            if self._stop.is_set():
                running.cancel()
            self._stop.set()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, end)

    async def _traffic(self, player: Player, service: ServiceProcess) -> None:
        """Runs the users' conversations until the time is over, then waits for running requests."""
        users = range(USERS_PER_WORKER * len(self._engines))
        tasks = [asyncio.create_task(self._user(player, user)) for user in users]
        try:
            await self._watch(player, service, tasks)
        finally:
            self._stop.set()
            _, late = await asyncio.wait(tasks, timeout=DRAIN_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _user(self, player: Player, user: int) -> None:
        for turn in conversations(self._options.seed, user):
            await self._pause(turn.thinking_s)
            if self._stop.is_set():
                return
            await player.play(turn.request)

    async def _watch(
        self, player: Player, service: ServiceProcess, tasks: Sequence[asyncio.Task[None]]
    ) -> None:
        """Redraws the output until the time is over. Raises errors of the service and `tasks`."""
        loop, seconds = asyncio.get_running_loop(), self._seconds
        started = drawn = loop.time()
        calls = 0
        while not self._stop.is_set() and drawn - started < seconds:
            await self._pause(min(REDRAW_S, started + seconds - drawn))
            service.check()
            if self._stop.is_set():
                return
            for task in tasks:
                if task.done():
                    task.result()
            now = loop.time()
            rate = (player.calls - calls) / max(now - drawn, 1e-3)
            drawn, calls = now, player.calls
            await self._draw(player, now - started, rate)

    async def _draw(self, player: Player, elapsed_s: float, calls_per_s: float) -> None:
        recent = sorted(list(player.latency_s["select_and_reserve"])[-1_000:])
        p50_ms, p99_ms = percentile(recent, 0.50) * 1e3, percentile(recent, 0.99) * 1e3
        totals = (
            f"{calls_per_s:6.0f} calls/s  {player.finished:6} turns"
            f"  cache hits {hit_rate(list(self._engines.values())):5.1%}"
            f"  select p50 {p50_ms:.2f} ms  p99 {p99_ms:.2f} ms"
        )
        if self._screen is None:
            if elapsed_s >= self._next_line_s:
                self._next_line_s = elapsed_s + 1.0
                print(f"{elapsed_s:5.1f} s {totals}  errors {player.error_count}", flush=True)
            return
        until = "" if self._seconds == float("inf") else f" of {self._seconds:.0f}"
        head = [
            f"lean-selector demo   {elapsed_s:5.1f}{until} s"
            f"   errors {player.error_count}   Ctrl-C ends it",
            totals,
            "",
        ]
        columns, lines = shutil.get_terminal_size()
        fleet = drawing(await player.fleet(), {}, columns, lines - len(head), colours=True)
        self._screen.draw([*(line[:columns] for line in head), *fleet])

    async def _pause(self, seconds: float) -> None:
        """Sleeps for `seconds`, or until the demo is stopped."""
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return
