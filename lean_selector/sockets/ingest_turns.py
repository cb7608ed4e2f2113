"""Turns of the loop shared out among the sources that have messages waiting.

Ingest runs beside HTTP in one thread: all sources together get one short slice of each turn of the
loop, one after another, and the loop looks at its other sockets in between. Knows nothing of what a
source does with its slice.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

# One millisecond for all sources, and what the message begun last still takes: the pause that a
# request can meet stays within 2 ms.
SLICE_S = 0.001

Drain = Callable[[float], bool]  # works until the deadline (perf_counter); True when more is left
Done = Callable[[Exception | None], None]  # nothing is left, or drain raised this


class IngestTurns:
    """One per process. Only from the thread of its loop."""

    def __init__(self, slice_s: float = SLICE_S) -> None:
        self._slice_s = slice_s
        self._waiting: deque[tuple[Drain, Done]] = deque()
        self._is_scheduled = False

    def start(self, drain: Drain, done: Done) -> None:
        """Call drain in turns until it says that nothing is left, or raises; then done."""
        self._waiting.append((drain, done))
        if not self._is_scheduled:
            self._schedule(asyncio.get_running_loop())

    async def run(self, drain: Drain) -> None:
        """The same for a task; raises what drain raises. Cancelled, drain is not called again."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: Exception | None) -> None:
            if error is not None:
                ended.set_exception(error)
            elif not ended.done():
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
            except Exception as error:  # a bug of ours, for the source to report
                done(error)
            else:
                if more:
                    self._waiting.append((drain, done))
                else:
                    done(None)
            if time.perf_counter() >= deadline:
                break
        self._schedule(loop)
