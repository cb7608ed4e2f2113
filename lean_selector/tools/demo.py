"""`lean-selector demo`: the service as a child process, simulated engines, live traffic.

Start, register, play until time or a signal, drain, stop, summarise. Whatever happens, the child
process and the sockets are gone when it returns.
"""

import argparse
import asyncio
import os
import shlex
import signal
import sys
from collections.abc import Sequence

import uvloop

from lean_selector.tools.demo_view import LineView, ScreenView, Snapshot, WorkerRow
from lean_selector.tools.engines import EngineSpeed, Options, SimulatedEngine, hit_rate
from lean_selector.tools.http_client import HttpClient, ServiceError
from lean_selector.tools.service_process import (
    HOST,
    ServiceProcess,
    check_port,
    running_service,
    service_command,
    wait_until_healthy,
)
from lean_selector.tools.traffic import (
    BLOCK_SIZE,
    Player,
    compare,
    conversations,
    percentile,
    table,
)

USERS_PER_WORKER = 10
# Room for the conversations once over all engines, not for each of them on every engine.
CAPACITY_BLOCKS = 2_000
MAX_WORKERS = 64  # three threads and two sockets each, in one process
REDRAW_S = 0.25
DRAIN_S = 3.0  # for requests under way at the end; their waits are cut short


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the demo."""
    parser.add_argument("--seconds", type=_positive_seconds, default=20.0, help="default: 20")
    parser.add_argument(
        "--workers", type=_worker_count, default=4, help=f"engines, 1 to {MAX_WORKERS}; default: 4"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the traffic; default: 0")
    parser.add_argument("--port", type=int, default=0, help="of the service; default: a free one")
    parser.add_argument(
        "--cmd",
        help="start this as the service instead, {port} replaced (default: lean-selector itself)",
    )


def _positive_seconds(text: str) -> float:
    value = float(text)
    if not 0 < value <= 86_400:
        raise argparse.ArgumentTypeError("must be above 0 and at most a day")
    return value


def _worker_count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_WORKERS:
        raise argparse.ArgumentTypeError(f"must be between 1 and {MAX_WORKERS}")
    return value


def main(argv: Sequence[str]) -> int:
    """Run the demo; 0 after a run without errors, also one ended by Ctrl-C or SIGTERM, else 1."""
    parser = argparse.ArgumentParser(
        prog="lean-selector demo",
        description="Watch the service choose workers for multi-turn traffic on simulated engines.",
    )
    add_arguments(parser)
    args = parser.parse_args(argv)
    options = Options(args.seconds, args.workers, args.seed, args.port, args.cmd)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            summary, errors = runner.run(Demo(options).run())
        print("\n".join(summary), flush=True)
    except ServiceError as error:
        print(f"lean-selector demo: {error}", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        print("lean-selector demo: stopped at once", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # Whoever read our output is gone; keep the interpreter from tripping over it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return 1 if errors else 0


class Demo:
    """One run. Signals only set `_stop`; everything else follows from that."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._stop = asyncio.Event()
        self._speed = EngineSpeed()
        self._view = ScreenView(sys.stdout) if sys.stdout.isatty() else LineView(sys.stdout)

    async def run(self) -> tuple[list[str], int]:
        """The summary's lines and the number of errors. Raises ServiceError."""
        self._catch_signals()
        port = check_port(self._options.port)
        template = self._options.command
        command = (
            shlex.split(template.replace("{port}", str(port)))
            if template
            else service_command(port)
        )
        client = HttpClient(f"http://{HOST}:{port}")
        async with running_service(command) as service:
            await wait_until_healthy(client, service, self._stop.is_set)
            if self._stop.is_set():
                return ["stopped before the service was ready"], 0
            try:
                return await self._play(client, service)
            finally:
                self._view.close()
                client.close()

    def _catch_signals(self) -> None:
        """The first signal ends the traffic, a second one cancels whatever is still going on."""
        loop, running = asyncio.get_running_loop(), asyncio.current_task()
        assert running is not None

        def end() -> None:
            if self._stop.is_set():
                running.cancel()
            self._stop.set()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, end)

    async def _play(self, client: HttpClient, service: ServiceProcess) -> tuple[list[str], int]:
        engines = {
            worker_id: SimulatedEngine(
                worker_id, CAPACITY_BLOCKS, BLOCK_SIZE, self._speed, self._pause
            )
            for worker_id in range(1, self._options.workers + 1)
        }
        player = Player(client, engines, self._stop.is_set, "demo")
        try:
            await player.register_workers()
            await self._traffic(player, engines, service)
            left = await player.load_left()
        finally:
            for engine in engines.values():
                engine.close()
        return self._summary(player, engines, left), player.error_count

    async def _traffic(
        self, player: Player, engines: dict[int, SimulatedEngine], service: ServiceProcess
    ) -> None:
        """Users converse until the time is over; then what is under way comes to its end."""
        users = range(USERS_PER_WORKER * len(engines))
        tasks = [asyncio.create_task(self._user(player, user)) for user in users]
        try:
            await self._watch(player, engines, service, tasks)
        finally:
            self._stop.set()
            _, late = await asyncio.wait(tasks, timeout=DRAIN_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _user(self, player: Player, user: int) -> None:
        loop = asyncio.get_running_loop()
        for turn in conversations(self._options.seed, user):
            await self._pause(turn.thinking_s)
            if self._stop.is_set():
                return
            await player.play(turn.request, loop.time())

    async def _watch(
        self,
        player: Player,
        engines: dict[int, SimulatedEngine],
        service: ServiceProcess,
        tasks: Sequence[asyncio.Task[None]],
    ) -> None:
        """Redraw until the time is over. Raises what ended the service or a user's task."""
        loop = asyncio.get_running_loop()
        started = drawn = loop.time()
        calls = 0
        while not self._stop.is_set() and drawn - started < self._options.seconds:
            await self._pause(min(REDRAW_S, started + self._options.seconds - drawn))
            service.check()
            for task in tasks:
                if task.done() and not self._stop.is_set():
                    task.result()
            if self._stop.is_set():
                return
            now = loop.time()
            rate = (player.calls - calls) / max(now - drawn, 1e-3)
            drawn, calls = now, player.calls
            self._view.draw(await self._snapshot(player, engines, now - started, rate))

    async def _snapshot(
        self,
        player: Player,
        engines: dict[int, SimulatedEngine],
        elapsed_s: float,
        calls_per_s: float,
    ) -> Snapshot:
        loads = {row.worker_id: row for part in await player.loads() for row in part.loads}
        rows = []
        for worker_id, engine in engines.items():
            load = loads.get(worker_id)
            rows.append(
                WorkerRow(
                    worker_id=worker_id,
                    prefill_tokens=load.potential_prefill_tokens if load else 0,
                    decode_blocks=load.potential_decode_blocks if load else 0,
                    requests=load.active_requests if load else 0,
                    cached_blocks=len(engine.cache),
                    capacity_blocks=engine.cache.capacity,
                )
            )
        recent = sorted(list(player.latency_s["select_and_reserve"])[-1_000:])
        return Snapshot(
            elapsed_s=elapsed_s,
            seconds=self._options.seconds,
            workers=rows,
            calls_per_s=calls_per_s,
            finished=player.finished,
            hit_rate=hit_rate(list(engines.values())),
            select_p50_s=percentile(recent, 0.50),
            select_p99_s=percentile(recent, 0.99),
            errors=player.error_count,
        )

    def _summary(self, player: Player, engines: dict[int, SimulatedEngine], left: int) -> list[str]:
        lines = ["", *player.report(left)]
        if player.recorded:
            outcomes = compare(
                player.recorded, list(engines), CAPACITY_BLOCKS, BLOCK_SIZE, self._speed
            )
            lines += ["", *table(outcomes, len(player.recorded))]
        return lines

    async def _pause(self, seconds: float) -> None:
        """Sleep, or until the run ends."""
        try:
            async with asyncio.timeout(seconds):
                await self._stop.wait()
        except TimeoutError:
            return


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
