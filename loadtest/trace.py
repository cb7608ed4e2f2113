"""Traces in the Mooncake format, and requests at their times.

A line is a JSON object: timestamp in ms, input_length, output_length, hash_ids of 512-token blocks.
"""

import asyncio
import gzip
import random
import signal
import sys
from collections.abc import Callable, Coroutine, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec
import uvloop

from lean_selector.tools.service_process import ServiceError
from lean_selector.tools.simulated_engines import EngineRequest, make_request

T = TypeVar("T")

TRACE_BLOCK_TOKENS = 512
MADE_UP_REQUESTS = 12_000  # about as many as the published conversation trace has


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


def trace_lines(path: Path | None, limit: int | None = None) -> Iterator[TraceLine]:
    """The first `limit` lines of a trace, gzip or not; made up without a path.

    Raises ServiceError, which names a line that cannot be read.
    """
    if path is None:
        yield from islice(made_up_lines(), limit)
        return
    decode = msgspec.json.Decoder(TraceLine).decode
    try:
        with path.open("rb") as probe:
            opened = gzip.open if probe.read(2) == b"\x1f\x8b" else open
        with opened(path, "rb") as lines:
            for number, text in enumerate(islice(lines, limit), 1):
                try:
                    yield decode(text)
                except ValueError as error:
                    raise ServiceError(f"{path}:{number}: {error}") from error
    except OSError as error:
        raise ServiceError(f"cannot read the trace: {error}") from error


def made_up_lines() -> Iterator[TraceLine]:
    """Conversations over one system prompt, long as those of the published trace, seeded."""
    rng = random.Random("versus")
    fresh = 1
    talks: list[list[int]] = []
    for number in range(MADE_UP_REQUESTS):
        goes_on = talks and rng.random() < 0.5
        talk = talks.pop(rng.randrange(len(talks))) if goes_on else [0]  # 0: the system prompt
        grown = rng.randint(1, 24)
        talk = talk + list(range(fresh, fresh + grown))
        fresh += grown
        if len(talk) < 120:
            talks.append(talk)
        yield TraceLine(number * 300.0, len(talk) * TRACE_BLOCK_TOKENS - 200, 300, talk)


def read_trace(
    path: Path, block_size: int, limit: int | None = None
) -> Iterator[tuple[float, EngineRequest]]:
    """Arrival in seconds and request of the first `limit` lines, one at a time.

    The tokens of the output are not in the trace, so no engine caches them. Raises ServiceError.
    """
    for number, line in enumerate(trace_lines(path, limit), 1):
        try:
            tokens = prompt_tokens(line)
        except ValueError as error:
            raise ServiceError(f"{path}:{number}: {error}") from error
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
