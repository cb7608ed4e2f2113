"""Polls the health of workers: GET of a path of theirs, a bounded number at once.

What they answer goes to the core's `WorkerHealth`, which ejects a worker after several failures in
a row. Polls are spread over the interval, and each is moved a little by chance.
"""

import asyncio
import heapq
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, Protocol

from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.selector import WorkerHealth
from lean_selector.http.allowed_endpoints import url_at
from lean_selector.http.outbound import OutboundAnswer, OutboundFailed
from lean_selector.tasks import watched

MOST_AT_ONCE: Final = 64
JITTER: Final = 0.1  # of the interval, to either side
_LOOKS_EVERY_S: Final = 0.5  # for workers that came
_MOST_BYTES: Final = 1 << 20
_LONGEST_FAULT: Final = 200


class Asks(Protocol):
    """What makes our requests; see `OutboundClient`."""

    def get(self, url: str, *, timeout_s: float, most_bytes: int) -> Awaitable[OutboundAnswer]: ...


@dataclass(eq=False)
class WorkerPolls:
    """Only from the thread of the loop. `run` until it is cancelled, then `close`."""

    catalog: Catalog
    health: WorkerHealth
    client: Asks
    rng: random.Random
    interval_s: float
    path: str
    timeout_s: float  # for a whole answer
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._revision = -1  # of the catalog that `_due` knows
        self._due: list[tuple[float, int]] = []  # a heap; of each worker one entry counts
        self._next: dict[int, float] = {}  # the time of that entry
        self._running: dict[int, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()

    def soon(self, worker_id: int) -> None:
        """Something else was heard of it: it is asked at once, not when it is its turn."""
        self._take_in()  # it may just have come
        if worker_id in self._next:
            self._schedule(worker_id, self.clock())
            self._wake.set()

    async def run(self) -> None:
        while True:
            self._wake.clear()
            self._take_in()
            wait_s = self._begin_due()
            try:
                async with asyncio.timeout(min(wait_s, _LOOKS_EVERY_S)):
                    await self._wake.wait()
            except TimeoutError:
                pass

    async def close(self) -> None:
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- when ----------------------------------------------------------------------------------

    def _take_in(self) -> None:
        """Workers that came get a turn of theirs, those that are gone lose it."""
        if self._revision == self.catalog.revision:
            return
        self._revision = self.catalog.revision
        known = {
            worker_id
            for worker_id, worker in self.catalog.workers.items()
            if not worker.reasons and url_at(worker.spec.endpoint, self.path)
        }
        for worker_id in self._next.keys() - known:
            del self._next[worker_id]
        now = self.clock()
        for worker_id in sorted(known - self._next.keys()):
            self._schedule(worker_id, now + self.rng.random() * self.interval_s)

    def _schedule(self, worker_id: int, at: float) -> None:
        self._next[worker_id] = at
        heapq.heappush(self._due, (at, worker_id))

    def _begin_due(self) -> float:
        """Begins the polls whose time has come; returns how long nothing is due, in seconds."""
        while self._due and len(self._running) < MOST_AT_ONCE:
            at, worker_id = self._due[0]
            now = self.clock()
            if self._next.get(worker_id) == at and at > now:
                return at - now
            heapq.heappop(self._due)
            if self._next.get(worker_id) == at and worker_id not in self._running:
                part = 1.0 + JITTER * (2.0 * self.rng.random() - 1.0)
                self._schedule(worker_id, now + part * self.interval_s)
                self._begin(worker_id)
            elif self._next.get(worker_id) == at:  # the last one still waits for its answer
                self._schedule(worker_id, now + self.interval_s)
        return _LOOKS_EVERY_S

    def _begin(self, worker_id: int) -> None:
        task = watched("worker poll", self._poll(worker_id))
        self._running[worker_id] = task
        task.add_done_callback(lambda _: self._ended(worker_id))

    def _ended(self, worker_id: int) -> None:
        del self._running[worker_id]
        if len(self._running) == MOST_AT_ONCE - 1:
            self._wake.set()

    # -- one poll ------------------------------------------------------------------------------

    async def _poll(self, worker_id: int) -> None:
        worker = self.catalog.workers.get(worker_id)
        url = None if worker is None else url_at(worker.spec.endpoint, self.path)
        if url is None:
            return
        fault: str | None = None
        try:
            answer = await self.client.get(url, timeout_s=self.timeout_s, most_bytes=_MOST_BYTES)
            if not 200 <= answer.status < 300:
                fault = f"{url}: status {answer.status}"
        except OutboundFailed as error:
            fault = error.message.removeprefix("GET ")
        if self.catalog.workers.get(worker_id) is worker:  # and not another by now
            shown = None if fault is None else fault[:_LONGEST_FAULT]
            self.health.polled(worker_id, shown, self.clock())
