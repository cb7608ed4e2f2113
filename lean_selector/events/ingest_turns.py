"""Long work in slices, between other work of the loop.

Ingest of events runs beside HTTP in one thread: all sources together get one short slice of each
turn of the loop, one after another. Indexes free memory in slices of their own; reading a peer's
answer pauses by the clock.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from lean_selector.core.index.kv_index import KvIndex

logger = logging.getLogger("lean_selector.kv_events")

# One millisecond for all sources, plus the message begun last: the pause that a request meets stays
# within 2 ms.
SLICE_S = 0.001
SWEEP_SLICE_S = 0.0005  # per turn of the loop, besides the slice for events
_SWEEP_STEPS = 4  # between two looks at the clock

Drain = Callable[[float], bool]  # works until the deadline (perf_counter); True when more is left
Done = Callable[[Exception | None], None]  # called when nothing is left, or with drain's exception


class IngestTurns:
    """One per process. To be used from its loop's thread only."""

    def __init__(self, slice_s: float = SLICE_S) -> None:
        self._slice_s = slice_s
        self._waiting: deque[tuple[Drain, Done]] = deque()
        self._is_scheduled = False

    def start(self, drain: Drain, done: Done) -> None:
        """Call drain in turns until nothing is left, or it raises; then done."""
        self._waiting.append((drain, done))
        if not self._is_scheduled:
            self._schedule(asyncio.get_running_loop())

    async def run(self, drain: Drain) -> None:
        """Await `start`; raises what drain raises. If cancelled, drain is not called again."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: Exception | None) -> None:
            if ended.done():
                if error is not None:  # it was cancelled by what then failed
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
            except Exception as error:  # an internal error, for the source to report
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
    """Lets every index that dropped something free its memory. One per process. An index hides
    dropped blocks at once, and frees them in steps. An index of a removed partition is kept until
    then: otherwise all of it would be freed at once."""

    def __init__(self) -> None:
        self._turns = IngestTurns(SWEEP_SLICE_S)

    def start(self, index: KvIndex) -> None:
        """Free its memory from now on; for `KvIndex.on_sweep`."""

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
    """Awaited regularly, yields to the loop when a slice is over. State may have changed after
    each."""

    def __init__(self) -> None:
        self._slice_ends = time.perf_counter() + SLICE_S

    async def __call__(self) -> None:
        if time.perf_counter() >= self._slice_ends:
            await asyncio.sleep(0)
            self._slice_ends = time.perf_counter() + SLICE_S
