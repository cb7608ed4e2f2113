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


class IngestTurns:
    """One per process. Only from the thread of its loop."""

    def __init__(self, slice_s: float = SLICE_S) -> None:
        self._slice_s = slice_s
        self._waiting: deque[tuple[Drain, asyncio.Future[None]]] = deque()
        self._is_scheduled = False

    async def run(self, drain: Drain) -> None:
        """Call drain in turns until it says that nothing is left; raises what it raises.

        Cancelled, it is not called again.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._waiting.append((drain, done))
        self._schedule(loop)
        await done

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_scheduled = False
        deadline = time.perf_counter() + self._slice_s
        for _ in range(len(self._waiting)):
            drain, done = self._waiting.popleft()
            if done.done():  # its source has closed
                continue
            try:
                more = drain(deadline)
            except Exception as error:  # a bug of ours, for the source to report
                done.set_exception(error)
            else:
                if more:
                    self._waiting.append((drain, done))
                else:
                    done.set_result(None)
            if time.perf_counter() >= deadline:
                break
        self._schedule(loop)
