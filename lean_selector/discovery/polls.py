"""Health checks: GET a path at each worker, with a limit on the checks that run at the same time.

Results go to the core's `WorkerHealth`, which ejects a worker after several failures in a row. The
checks of different workers are spread over the interval, with jitter."""

import asyncio
import random
import time
from dataclasses import dataclass
from typing import Final

from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.worker_health import WorkerHealth
from lean_selector.http.outbound import OutboundClient, OutboundFailed
from lean_selector.http.urls import url_at
from lean_selector.parts import Part
from lean_selector.tasks import watched

MOST_AT_ONCE: Final = 64
JITTER: Final = 0.1  # fraction of the interval, in either direction
TIMEOUT_S: Final = 2.0
_MOST_BYTES: Final = 1 << 20
_LONGEST_FAULT: Final = 200


@dataclass(eq=False)
class WorkerPolls(Part):
    """Checks the health of workers."""

    catalog: Catalog
    health: WorkerHealth
    client: OutboundClient
    rng: random.Random
    interval_s: float
    path: str
    timeout_s: float = TIMEOUT_S  # for a whole response

    def __post_init__(self) -> None:
        self._revision = -1  # revision of the catalog when `_next` was updated
        self._next: dict[int, asyncio.TimerHandle] = {}  # worker id -> its next poll
        self._running: dict[int, asyncio.Task[None]] = {}
        self._turn = asyncio.Semaphore(MOST_AT_ONCE)

    def tick(self, now: float) -> None:
        self.follow_workers()

    def follow_workers(self) -> None:
        """Starts to check workers that can now be chosen, and ends the checks of other workers."""
        if self._revision == self.catalog.revision:
            return
        self._revision = self.catalog.revision
        known = {
            worker_id
            for worker_id, worker in self.catalog.workers.items()
            if not worker.reasons and url_at(worker.spec.endpoint, self.path)
        }
        for worker_id in self._next.keys() - known:
            self._next.pop(worker_id).cancel()
        for worker_id in sorted(known - self._next.keys()):
            self._schedule(worker_id, self.rng.random() * self.interval_s)

    def check_now(self, worker_id: int) -> None:
        """Checks a worker now, for example because the connection to its KV events was lost."""
        self.follow_workers()  # the worker may be new
        if worker_id in self._next:
            self._next[worker_id].cancel()
            self._begin(worker_id)

    async def close(self) -> None:
        for timer in self._next.values():
            timer.cancel()
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _schedule(self, worker_id: int, after_s: float) -> None:
        loop = asyncio.get_running_loop()
        self._next[worker_id] = loop.call_later(after_s, self._begin, worker_id)

    def _begin(self, worker_id: int) -> None:
        part = 1.0 + JITTER * (2.0 * self.rng.random() - 1.0)
        self._schedule(worker_id, part * self.interval_s)
        if worker_id not in self._running:  # the last poll may still wait for its response
            task = watched("worker poll", self._poll(worker_id))
            self._running[worker_id] = task
            task.add_done_callback(lambda _: self._running.pop(worker_id))

    # -- one poll ----------------------------------------------------------------------------------

    async def _poll(self, worker_id: int) -> None:
        worker = self.catalog.workers.get(worker_id)
        url = None if worker is None else url_at(worker.spec.endpoint, self.path)
        if url is None:
            return
        fault: str | None = None
        try:
            async with self._turn:
                answer = await self.client.get(
                    url, timeout_s=self.timeout_s, most_bytes=_MOST_BYTES
                )
            if not 200 <= answer.status < 300:
                fault = f"{url}: status {answer.status}"
        except OutboundFailed as error:
            fault = error.message.removeprefix("GET ")
        if self.catalog.workers.get(worker_id) is worker:  # the worker was not replaced meanwhile
            shown = None if fault is None else fault[:_LONGEST_FAULT]
            self.health.polled(worker_id, shown, time.monotonic())
