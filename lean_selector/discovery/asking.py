"""Asks the engines that were found, each again and again: until it answers, and whether it changed.

An engine that is not up yet is asked again after a pause that doubles; one that has answered, now
and then, because it may have been started anew as something else.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final

from lean_selector.discovery.known_worker import KnownWorker, State
from lean_selector.discovery.particulars import Particulars
from lean_selector.outbound.failure import OutboundFailed
from lean_selector.tasks import supervise

MOST_AT_ONCE: Final = 16  # engines
AGAIN_FIRST_S: Final = 0.5
AGAIN_LIMIT_S: Final = 15.0


class Asking:
    """A task for each engine; bounded many ask at a time."""

    def __init__(
        self,
        ask: Callable[[str], Awaitable[Particulars]],
        on_heard: Callable[[KnownWorker, Particulars], None],
        on_failed: Callable[[KnownWorker, str], None],
        refresh_s: float,
        again_first_s: float = AGAIN_FIRST_S,
    ) -> None:
        """`ask(base_url)` raises OutboundFailed."""
        self._ask = ask
        self._on_heard = on_heard
        self._on_failed = on_failed
        self._refresh_s = refresh_s
        self._again_first_s = again_first_s
        self._turn = asyncio.Semaphore(MOST_AT_ONCE)
        self._ending: set[asyncio.Task[None]] = set()

    def begin(self, known: KnownWorker) -> None:
        if known.asking is None:
            known.asking = supervise("asking an engine", lambda: self._run(known))

    def end(self, known: KnownWorker) -> None:
        task, known.asking = known.asking, None
        if task is not None:
            task.cancel()
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    async def close(self) -> None:
        """When all have been ended."""
        await asyncio.gather(*self._ending, return_exceptions=True)

    async def _run(self, known: KnownWorker) -> None:
        pause_s = self._again_first_s
        while True:
            if known.state in (State.BY_HTTP, State.REMOVED):  # whoever registers it knows it
                await asyncio.sleep(self._refresh_s)
                continue
            try:
                async with self._turn:
                    engine = await self._ask(known.key)
            except OutboundFailed as error:
                self._on_failed(known, error.message)
                # All engines of a rack come up together.
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, AGAIN_LIMIT_S)
                continue
            pause_s = self._again_first_s
            self._on_heard(known, engine)
            await asyncio.sleep(self._refresh_s * random.uniform(0.8, 1.2))
