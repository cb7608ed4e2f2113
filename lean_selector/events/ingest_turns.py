"""Long work in slices, with the loop's other work between two of them.

Ingest of events runs beside HTTP in one thread: all sources together get one short slice of each
turn of the loop, one after another. Indexes give their memory back in slices of their own; what
reads a peer's answer pauses by the clock.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from lean_selector.core.index.kv_index import KvIndex

logger = logging.getLogger("lean_selector.kv_events")

# One millisecond for all sources, and what the message begun last still takes: the pause that a
# request can meet stays within 2 ms.
SLICE_S = 0.001
SWEEP_SLICE_S = 0.0005  # of each turn of the loop, beside the slice for events
_SWEEP_STEPS = 4  # between two looks at the clock

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
        """Await `start`; raises what drain raises. Cancelled, drain is not called again."""
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


class IndexSweeps:
    """Has every index that dropped something give its memory back. One per process.

    An index hides at once what it drops, and takes it apart in steps. One whose partition is gone
    is kept until then: otherwise all of it would be freed in one go.
    """

    def __init__(self) -> None:
        self._turns = IngestTurns(SWEEP_SLICE_S)

    def start(self, index: KvIndex) -> None:
        """Give its memory back from now on; what `KvIndex.on_sweep` is for."""

        def drain(deadline: float) -> bool:
            while index.sweep(_SWEEP_STEPS):
                if time.perf_counter() >= deadline:
                    return True
            return False

        self._turns.start(drain, _swept)


def _swept(error: Exception | None) -> None:
    if error is not None:  # a bug of ours; what the index holds is as before
        logger.error("sweep of the index failed: %r", error)


class Pauses:
    """Awaited now and then, gives way when a slice is over. State may have changed whenever it
    did."""

    def __init__(self) -> None:
        self._slice_ends = time.perf_counter() + SLICE_S

    async def __call__(self) -> None:
        if time.perf_counter() >= self._slice_ends:
            await asyncio.sleep(0)
            self._slice_ends = time.perf_counter() + SLICE_S
