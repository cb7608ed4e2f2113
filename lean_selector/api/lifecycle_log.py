"""Log lines for workers added, removed or ejected, for expired reservations, and for shedding.

About once a second, the state is compared with the state a second before. So a worker that changes
often causes at most one line per second."""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from lean_selector.core.load.shapes import Reservation
from lean_selector.core.selection.catalog import Worker
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.selector import Selector

_log = logging.getLogger("lean_selector.lifecycle")


class SelectorLog:
    """Logs changes of the selection service's state. Call method `log_changes` about every
    second."""

    def __init__(self, selector: Selector) -> None:
        self._selector = selector
        self._workers: dict[int, Worker] = {}
        # By model and tenant: the number of shed requests at the last look, and the number before
        # shedding began (None: not shedding).
        self._shedding: dict[tuple[str, str], tuple[int, int | None]] = {}
        self._expired: Counter[tuple[str, str]] = Counter()
        self._ejected: set[tuple[tuple[str, str], int]] = set()  # workers, by partition

    def expired(self, expired: Iterable[tuple[Partition, Reservation]]) -> None:
        """Counts reservations that expired. The next call of `log_changes` logs their number."""
        for partition, _ in expired:
            self._expired[partition.model_name, partition.tenant_id] += 1

    def log_changes(self) -> None:
        """Logs changes since the last call: of workers, shedding, ejections and expirations."""
        self._log_workers(self._selector.catalog.workers)
        self._log_shedding(self._selector.catalog.partitions)
        self._log_ejections(self._selector.catalog.partitions)
        for (model, tenant_id), count in self._expired.items():
            fields = {"model": model, "tenant_id": tenant_id, "count": count}
            _log.info("reservations expired", extra=fields)
        self._expired.clear()

    def _log_workers(self, workers: Mapping[int, Worker]) -> None:
        before = self._workers
        for worker_id, worker in workers.items():
            old = before.get(worker_id)
            if old is worker:
                continue
            level = logging.WARNING if worker.reasons else logging.INFO
            if old is None:
                _log.log(level, "worker registered", extra=_worker_fields(worker))
            elif (old.spec, old.reasons) != (worker.spec, worker.reasons):
                _log.log(level, "worker changed", extra=_worker_fields(worker))
        for worker_id, old in before.items():
            if worker_id not in workers:
                model, tenant_id = old.spec.key
                fields = {"worker_id": worker_id, "model": model, "tenant_id": tenant_id}
                _log.info("worker removed", extra=fields)
        self._workers = dict(workers)

    def _log_ejections(self, partitions: Mapping[tuple[str, str], Partition]) -> None:
        """Logs a line when the first rank of a worker is ejected, and a line when none of its ranks
        is ejected any more."""
        if not self._ejected and not any(each.health.out for each in partitions.values()):
            return
        now: set[tuple[tuple[str, str], int]] = set()
        for key, partition in partitions.items():
            for worker_id in sorted({rank[0] for rank in partition.health.out}):
                now.add((key, worker_id))
                if (key, worker_id) in self._ejected:
                    continue
                ranks = sorted(rank for rank in partition.health.out if rank[0] == worker_id)
                fields = {"worker_id": worker_id, "model": key[0], "tenant_id": key[1]}
                reason = partition.health.ranks[ranks[0]].reason
                extra = {**fields, "ranks": len(ranks), "reason": reason}
                _log.warning("worker ejected: it gets no requests", extra=extra)
        for key, worker_id in sorted(self._ejected - now):
            fields = {"worker_id": worker_id, "model": key[0], "tenant_id": key[1]}
            _log.warning("worker no longer ejected", extra=fields)
        self._ejected = now

    def _log_shedding(self, partitions: Mapping[tuple[str, str], Partition]) -> None:
        for key, partition in partitions.items():
            shed = sum(partition.shed.values())
            seen, since = self._shedding.get(key, (0, None))
            if seen > shed:  # a new partition of that name
                seen, since = 0, None
            fields: dict[str, object] = {"model": key[0], "tenant_id": key[1]}
            if shed > seen and since is None:
                since = seen
                _log.warning("shedding began: all workers are busy", extra=fields)
            elif shed == seen and since is not None and _has_room(partition):
                fields["requests_shed"] = shed - since
                since = None
                _log.warning("shedding ended", extra=fields)
            self._shedding[key] = shed, since
        for key in self._shedding.keys() - partitions.keys():
            del self._shedding[key]


def _has_room(partition: Partition) -> bool:
    return partition.busy.bit_count() < len(partition.slots.ranks)


def _worker_fields(worker: Worker) -> dict[str, object]:
    spec = worker.spec
    fields: dict[str, object] = {
        "worker_id": spec.worker_id,
        "model": spec.model_name,
        "tenant_id": spec.tenant_id,
        "lifecycle": worker.lifecycle,
        "endpoint": spec.endpoint,
        "ranks": len(spec.ranks),
    }
    if worker.reasons:
        # Every rank has the same reasons; the API shows all of them.
        fields["reasons"] = worker.reasons[:3]
    return fields
