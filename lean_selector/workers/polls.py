"""Health checks of workers: GET a path of each, with bounded concurrency.

Results go to the core's `WorkerHealth`, which ejects a worker after several consecutive failures.
Polls are spread over the interval, with jitter.
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
JITTER: Final = 0.1  # fraction of the interval, in either direction
_LOOKS_EVERY_S: Final = 0.5  # for new workers
_MOST_BYTES: Final = 1 << 20
_LONGEST_FAULT: Final = 200


class Asks(Protocol):
    """Makes the requests; see `OutboundClient`."""

    def get(self, url: str, *, timeout_s: float, most_bytes: int) -> Awaitable[OutboundAnswer]: ...


@dataclass(eq=False)
class WorkerPolls:
    """From the loop's thread only. `run` until cancelled, then `close`."""

    catalog: Catalog
    health: WorkerHealth
    client: Asks
    rng: random.Random
    interval_s: float
    path: str
    timeout_s: float  # for a whole response
    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._revision = -1  # revision of the catalog that `_due` reflects
        self._due: list[tuple[float, int]] = []  # a heap; one entry per worker is current
        self._next: dict[int, float] = {}  # the time of the current entry
        self._running: dict[int, asyncio.Task[None]] = {}
        self._wake = asyncio.Event()

    def soon(self, worker_id: int) -> None:
        """Poll a worker now, because something else was learned about it."""
        self._take_in()  # it may be new
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
        """Schedule new workers, and drop those that are gone."""
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
        """Start the polls that are due; return the seconds until the next one."""
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
            elif self._next.get(worker_id) == at:  # the last poll is still waiting for its response
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
        if self.catalog.workers.get(worker_id) is worker:  # not replaced meanwhile
            shown = None if fault is None else fault[:_LONGEST_FAULT]
            self.health.polled(worker_id, shown, self.clock())
