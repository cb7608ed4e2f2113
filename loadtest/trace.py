"""Requests of a trace in the Mooncake format, and requests at their times."""

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import uvloop

from lean_selector.tools.service_process import ServiceError
from lean_selector.tools.simulated_engines import EngineRequest, make_request
from lean_selector.tools.trace import prompt_tokens, trace_lines

T = TypeVar("T")


def read_trace(
    path: Path, block_size: int, limit: int | None = None
) -> Iterator[tuple[float, EngineRequest]]:
    """Arrival in seconds and request of the first `limit` lines, one at a time.

    The tokens of the output are not in the trace, so no engine caches them. Raises ServiceError.
    """
    for number, line in enumerate(trace_lines(path, limit), 1):
        tokens = prompt_tokens(line)
        name, output_blocks = f"trace-{number}", line.output_length // block_size
        request = make_request(name, tokens, len(tokens), output_blocks, block_size)
        yield line.timestamp / 1e3, request


# -- at the times of a trace ----------------------------------------------------------------------


async def play_at_its_times(
    lines: Iterable[tuple[float, EngineRequest]],
    speed: float,
    play: Callable[[int, float, EngineRequest], Coroutine[None, None, None]],
) -> float:
    """Begin `play(turn, arrival_s, request)` at each time of a trace, `speed` times as fast, and
    return when all have ended; the most in seconds that one began behind its time."""
    tasks: set[asyncio.Task[None]] = set()
    loop = asyncio.get_running_loop()
    started, late_s = loop.time(), 0.0
    try:
        for turn, (arrival_s, request) in enumerate(lines):
            due = started + arrival_s / speed
            await asyncio.sleep(max(0.0, due - loop.time()))
            late_s = max(late_s, loop.time() - due)
            task = asyncio.create_task(play(turn, arrival_s, request))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        if tasks:
            await asyncio.wait(tasks)
    finally:
        left = list(tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
    return late_s


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
