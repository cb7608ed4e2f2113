"""Run long work in time slices, between the other work of the event loop.

KV events are applied on the thread that serves HTTP. To keep HTTP fast, the events of all engines
share one short slice per iteration of the event loop. The memory of KV indexes is freed in separate
slices. Code that reads another replica's long answer pauses after each slice (`Pauses`)."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from lean_selector.core.index.kv_index import KvIndex

logger = logging.getLogger("lean_selector.kv_events")

# One millisecond for all sources, plus the last message: requests are delayed by at most 2 ms.
SLICE_S = 0.001
SWEEP_SLICE_S = 0.0005  # per turn of the loop, in addition to the slice for events
_SWEEP_STEPS = 4  # between two checks of the clock

Drain = Callable[[float], bool]  # takes a deadline (perf_counter); True: work is left
# Called with None when no work is left, or with the exception that `drain` raised.
Done = Callable[[Exception | None], None]


class IngestTurns:
    """Runs queued functions in time slices of the event loop. Not thread-safe."""

    def __init__(self, slice_s: float = SLICE_S) -> None:
        self._slice_s = slice_s
        self._waiting: deque[tuple[Drain, Done]] = deque()
        self._is_scheduled = False

    def start(self, drain: Drain, done: Done) -> None:
        """Call `drain` in time slices until it returns False. Then call `done(error or None)`."""
        self._waiting.append((drain, done))
        if not self._is_scheduled:
            self._schedule(asyncio.get_running_loop())

    async def run(self, drain: Drain) -> None:
        """Call `drain(deadline)` in time slices while it returns True; raise its exceptions."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: Exception | None) -> None:
            if ended.done():
                if error is not None:  # the caller was cancelled before the work failed
                    logger.error("a turn of a cancelled source failed", exc_info=error)
            elif error is not None:
                ended.set_exception(error)
            else:
                ended.set_result(None)

        self.start(lambda deadline: not ended.done() and drain(deadline), done)
        await ended

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_scheduled = False
        deadline = time.perf_counter() + self._slice_s
        for _ in range(len(self._waiting)):
            drain, done = self._waiting.popleft()
            try:
                more = drain(deadline)
            except Exception as error:  # an internal error; `done` reports it
                done(error)
            else:
                if more:
                    self._waiting.append((drain, done))
                else:
                    done(None)
            if time.perf_counter() >= deadline:
                break
        self._schedule(loop)


class IndexSweeps:
    """Frees the memory of blocks that the KV indexes of this process have dropped. The memory is
    freed in time slices, because freeing a large index at once would stop the event loop."""

    def __init__(self) -> None:
        self._turns = IngestTurns(SWEEP_SLICE_S)

    def start(self, index: KvIndex) -> None:
        """Start to free the memory of the blocks that `index` has dropped, in time slices."""

        def drain(deadline: float) -> bool:
            while index.sweep(_SWEEP_STEPS):
                if time.perf_counter() >= deadline:
                    return True
            return False

        self._turns.start(drain, _swept)


def _swept(error: Exception | None) -> None:
    if error is not None:  # an internal error; the index is unchanged
        logger.error("sweep of the index failed: %r", error)


class Pauses:
    """`await pauses()` lets the event loop run, unless the last pause ended less than 1 ms ago."""

    def __init__(self) -> None:
        self._slice_ends = time.perf_counter() + SLICE_S

    async def __call__(self) -> None:
        if time.perf_counter() >= self._slice_ends:
            await asyncio.sleep(0)
            self._slice_ends = time.perf_counter() + SLICE_S
