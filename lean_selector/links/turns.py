"""Run long work in time slices, between the other work of the event loop.

Sockets are read and KV events are applied on the thread that serves HTTP. To keep HTTP fast, all
sources of one kind of work share one short slice per iteration of the event loop. Code that reads
another replica's long answer pauses after each slice (`Pauses`)."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable

logger = logging.getLogger("lean_selector.kv_events")

# One millisecond for all sources, plus the last message: requests are delayed by at most 2 ms.
SLICE_S = 0.001

Drain = Callable[[float], bool]  # takes a deadline (perf_counter); True: work is left
Failed = Callable[[Exception], None]  # takes what a drain raised


class Turns:
    """Runs queued functions in time slices of the event loop. Not thread-safe."""

    def __init__(self, slice_s: float = SLICE_S) -> None:
        self._slice_s = slice_s
        self._waiting: OrderedDict[Drain, Failed] = OrderedDict()
        self._is_scheduled = False

    def start(self, drain: Drain, failed: Failed) -> None:
        """Call `drain` in time slices until it returns False, or raises: then call `failed`. A
        function that is queued already is not queued twice."""
        self._waiting[drain] = failed
        self._schedule(asyncio.get_running_loop())

    async def run(self, drain: Drain) -> None:
        """Call `drain(deadline)` in time slices while it returns True; raise its exceptions."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def step(deadline: float) -> bool:
            more = not ended.done() and drain(deadline)
            if not (more or ended.done()):
                ended.set_result(None)
            return more

        def failed(error: Exception) -> None:
            if ended.done():  # the caller was cancelled before the work failed
                logger.error("a turn of a cancelled source failed", exc_info=error)
            else:
                ended.set_exception(error)

        self.start(step, failed)
        await ended

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._waiting and not self._is_scheduled:
            self._is_scheduled = True
            loop.call_soon(self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_scheduled = False
        deadline = time.perf_counter() + self._slice_s
        while self._waiting:
            drain, failed = self._waiting.popitem(last=False)
            try:
                if drain(deadline):
                    self._waiting[drain] = failed
            except Exception as error:  # an internal error
                failed(error)
            if time.perf_counter() >= deadline:
                break
        self._schedule(loop)


class Pauses:
    """`await pauses()` lets the event loop run, unless the last pause ended less than 1 ms ago."""

    def __init__(self) -> None:
        self._slice_ends = time.perf_counter() + SLICE_S

    async def __call__(self) -> None:
        if time.perf_counter() >= self._slice_ends:
            await asyncio.sleep(0)
            self._slice_ends = time.perf_counter() + SLICE_S
