"""What is heard of the health of workers, brought to their partitions and to who is parked there.

A replica knows of the ejections that were reported to it or that its own polls found: replicas tell
each other nothing of them.
"""

from collections.abc import Callable

from lean_selector.core.errors import NotFound, rank_text
from lean_selector.core.health.ejections import OK, REFUSED
from lean_selector.core.rank_bits import RankKey
from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.partition import Partition


class WorkerHealth:
    """Of all workers of a catalog."""

    def __init__(self, catalog: Catalog, admit: Callable[[Partition, float], None]) -> None:
        """`admit` lets those go who waited for what came back, or may now go elsewhere."""
        self._catalog = catalog
        self._admit = admit

    def report(
        self,
        worker_id: int,
        dp_rank: int | None,
        outcome: str,
        now: float,
        ttft_s: float | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        """A request to this rank, or to the worker as a whole, was `refused`, `failed` or `ok`.

        `ttft_s` and `cached_tokens`, the engine's own count, are only added up. A worker that is
        not schedulable has no ranks to eject. Raises NotFound.
        """
        found = self.ranks_of(worker_id, dp_rank)
        if found is None:
            return
        partition, keys = found
        counts = partition.slots.ranks[keys[0]].counts  # of a worker as a whole: once
        if outcome == OK:
            counts.ok += 1
        elif outcome == REFUSED:
            counts.refused += 1
        else:
            counts.failed += 1
        if ttft_s is not None:
            counts.ttft_s += ttft_s
            counts.ttft_count += 1
        if cached_tokens is not None:
            counts.cached_tokens += cached_tokens
        if partition.report(keys, outcome, now):
            self._admit(partition, now)

    def polled(self, worker_id: int, fault: str | None, now: float) -> None:
        """The worker was asked how it is: None is well. One that is gone is nobody's concern."""
        if worker_id in self._catalog.workers:
            found = self.ranks_of(worker_id, None)
            if found is not None and found[0].poll(found[1], fault, now):
                self._admit(found[0], now)

    def settle(self, now: float) -> None:
        """Lets come back whose time is over; who waits for them is looked at by the caller."""
        for partition in self._catalog.partitions.values():
            partition.settle_health(now)

    def ranks_of(
        self, worker_id: int, dp_rank: int | None
    ) -> tuple[Partition, list[RankKey]] | None:
        """The ranks that are meant, and where; None: the worker has none. Raises NotFound."""
        worker = self._catalog.workers.get(worker_id)
        if worker is None:
            raise NotFound(f"worker {worker_id} not found")
        if dp_rank is not None and dp_rank not in worker.spec.ranks:
            raise NotFound(f"Worker {rank_text(worker_id, dp_rank)} not found")
        partition = self._catalog.partitions.get(worker.spec.key)
        known = None if partition is None else partition.workers.get(worker_id)
        if partition is None or known is None:
            return None
        if dp_rank is not None:
            return partition, [(worker_id, dp_rank)]
        return partition, [load.key for load in known.loads]
