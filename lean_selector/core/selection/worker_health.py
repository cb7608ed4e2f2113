"""Health reports and polls, applied to partitions and their queues.

Replicas do not share ejections: each uses only the reports that it received and its own polls."""

from lean_selector.core.errors import NotFound, rank_text
from lean_selector.core.health.ejections import OK, REFUSED
from lean_selector.core.rank_bits import RankKey
from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.partition import Partition


class WorkerHealth:
    """Applies reported outcomes of requests, and health polls, to the workers of a catalog."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def record_outcome(
        self,
        worker_id: int,
        dp_rank: int | None,
        outcome: str,
        now: float,
        ttft_s: float | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        """Report that a request to this rank, or to the whole worker, was `refused`, `failed` or
        `ok`.

        `ttft_s` and `cached_tokens` (as counted by the engine) are added to totals, and have no
        other effect. Does nothing if the worker is `incomplete`. Raises NotFound."""
        found = self.ranks_of(worker_id, dp_rank)
        if found is None:
            return
        partition, keys = found
        counts = partition.slots.ranks[keys[0]].counts  # once, even for a whole worker
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
        if partition.record_outcome(keys, outcome, now):
            partition.queue.admit(now)

    def polled(self, worker_id: int, fault: str | None, now: float) -> None:
        """Record a health poll. `fault` is None if the poll succeeded. Ignores unknown workers."""
        if worker_id in self._catalog.workers:
            found = self.ranks_of(worker_id, None)
            if found is not None and found[0].poll(found[1], fault, now):
                found[0].queue.admit(now)

    def settle(self, now: float) -> None:
        """End the ejections of ranks whose ejection time is over."""
        for partition in self._catalog.partitions.values():
            partition.settle_health(now)

    def ranks_of(
        self, worker_id: int, dp_rank: int | None
    ) -> tuple[Partition, list[RankKey]] | None:
        """Return the worker's partition and the key of this rank, or of all the worker's ranks if
        `dp_rank` is None. Return None if the worker is `incomplete`. Raises NotFound."""
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
