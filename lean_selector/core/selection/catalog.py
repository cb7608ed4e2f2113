"""The worker catalog: who is registered, in which partition, and whether it may be scheduled.

A partition is the pair (model_name, tenant_id); worker ids are unique across partitions. A worker
is `schedulable` when nothing in its record is missing and it agrees with its partition; a change
that breaks that makes it `incomplete`, with its reasons, and is not an error of the request (spec
selection.md section 2; decisions D3, D6, D10). Knows nothing of sockets: the sources a worker's
events come from are handed to an injected `SourceSink`.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import UNSET

from lean_selector.core.errors import NotFound
from lean_selector.core.load.shapes import Reservation
from lean_selector.core.selection.http_places import HttpPlaces
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.registration import check_limits, judged
from lean_selector.core.selection.settings import RouterSettings
from lean_selector.core.selection.workers import (
    BY_RANK,
    PartitionKey,
    Source,
    WorkerRecord,
    WorkerSpec,
)

MAX_REMEMBERED = 1024  # models and tenants, beside those that have workers

# Of a record, beside the maps from ranks: what is left out where it is absent.
_LEFT_OUT = ("router_hint_worker_type", "kv_event_source_mode")

SCHEDULABLE, INCOMPLETE, UNSCHEDULABLE = "schedulable", "incomplete", "unschedulable"


class SourceSink(Protocol):
    """Whoever subscribes to engines. After `unsubscribe` returns, nothing more of it arrives."""

    def subscribe(
        self, partition: Partition, worker_id: int, dp_rank: int, source: Source
    ) -> None: ...

    def unsubscribe(self, worker_id: int, dp_rank: int) -> None: ...


class Worker:
    """A registered worker. `reasons` is empty exactly when it is schedulable."""

    __slots__ = ("lifecycle", "reasons", "sources", "spec")

    def __init__(self, spec: WorkerSpec, reasons: list[str], sources: dict[int, Source]) -> None:
        self.spec = spec
        self.reasons = reasons
        self.sources = sources
        self.lifecycle = INCOMPLETE if reasons else SCHEDULABLE

    def record(self) -> WorkerRecord:
        return WorkerRecord(**self.shown(WorkerRecord.__struct_fields__))

    def shown(self, fields: Sequence[str]) -> dict[str, Any]:
        """These fields of a record, as the API shows them; an absent one is UNSET where it is left
        out, and None where it is null."""
        spec, shown = self.spec, dict[str, Any]()
        for name in fields:
            if name == "lifecycle":
                shown[name] = self.lifecycle
            elif name == "not_schedulable_reasons":
                shown[name] = self.reasons or UNSET
            elif name in BY_RANK:
                by_rank = getattr(spec, name)
                shown[name] = {str(rank): by_rank[rank] for rank in sorted(by_rank)} or UNSET
            elif name in _LEFT_OUT:
                value = getattr(spec, name)
                shown[name] = UNSET if value is None else value
            else:
                shown[name] = getattr(spec, name)
        shown["taints"] = sorted(spec.taints)
        shown["topology_domains"] = dict(sorted(spec.topology_domains.items()))
        return shown


def _place(worker: Worker) -> tuple[str, str, int]:
    return *worker.spec.key, worker.spec.worker_id


class Catalog:
    """All workers and partitions. Every method either completes or raises with nothing changed."""

    def __init__(
        self,
        settings: RouterSettings,
        sources: SourceSink,
        *,
        new_partition: Callable[[PartitionKey, int, bool], Partition],
        on_dropped: Callable[[Partition, list[Reservation]], None],
        on_discarded: Callable[[Partition], None] = lambda partition: None,
        check: Callable[[WorkerSpec], None] = lambda spec: None,
    ) -> None:
        """`check` raises BadRequest for what is not to be registered. `on_dropped` hears of the
        reservations that went with a rank, `on_discarded` of recovered partitions whose blocks are
        dropped for their block size (D3)."""
        self._settings = settings
        self._sources = sources
        self.new_partition = new_partition
        self._on_dropped = on_dropped
        self._on_discarded = on_discarded
        self._check = check
        self.workers: dict[int, Worker] = {}
        self.places = HttpPlaces()  # of the same workers
        self.revision = 0  # grows whenever what `workers` shows changes
        # Every model and tenant that ever had a worker here, while there are not too many.
        self.known: dict[PartitionKey, None] = {}
        self._order: list[tuple[str, str, int]] = []  # all workers, as `matching` sorts them
        self.partitions: dict[PartitionKey, Partition] = {}

    # -- reading -------------------------------------------------------------------------------

    def matching(self, model_name: str | None, tenant_id: str | None) -> list[Worker]:
        """Workers by exact filters, sorted by (model_name, tenant_id, worker_id)."""
        return [
            self.workers[worker_id]
            for model, tenant, worker_id in self._order
            if (model_name is None or model == model_name)
            and (tenant_id is None or tenant == tenant_id)
        ]

    def scopes(self) -> set[PartitionKey]:
        """Every model and tenant that a registered worker names, schedulable or not."""
        return {worker.spec.key for worker in self.workers.values()}

    def served_models(self) -> list[str]:
        """The models that have schedulable workers, of any tenant, sorted."""
        return sorted({key[0] for key, each in self.partitions.items() if each.workers})

    def served_tenants(self, model_name: str) -> list[str]:
        """The tenants of a model that have schedulable workers, sorted."""
        found = self.partitions.items()
        return sorted(key[1] for key, each in found if key[0] == model_name and each.workers)

    def schedulable_count(self) -> int:
        return sum(len(partition.workers) for partition in self.partitions.values())

    # -- changing ------------------------------------------------------------------------------

    def upsert(self, spec: WorkerSpec) -> Worker:
        """Registers a worker, or replaces its record whole, also across partitions."""
        check_limits(spec)
        self._check(spec)
        return self._install(spec)

    def recovered_partition(self, key: PartitionKey, block_size: int) -> Partition | None:
        """Where blocks that a peer knew of go; None when the partition has another block size.

        A partition made for them waits for its first complete worker.
        """
        partition = self.partitions.get(key)
        if partition is None:
            partition = self.partitions[key] = self.new_partition(key, block_size, False)
            partition.established = False
        return partition if partition.block_size == block_size else None

    def discard_waiting(self) -> None:
        """Forgets partitions that were made for recovered blocks and have none left."""
        for key, partition in list(self.partitions.items()):
            if not partition.established and not partition.unclaimed():
                del self.partitions[key]

    def patch(self, worker_id: int, changes: dict[str, object]) -> Worker:
        """Overwrites the fields in `changes`; raises NotFound for an unknown worker."""
        worker = self._known(worker_id)
        spec = msgspec.structs.replace(worker.spec, **changes)
        check_limits(spec)
        self._check(spec)
        return self._install(spec)

    def remove(self, worker_id: int) -> Worker:
        """Forgets a worker, its ranks, their reservations and its index entries (D3).

        Returns its last state, `unschedulable`. Raises NotFound for an unknown worker.
        """
        worker = self._known(worker_id)
        self._withdraw(worker)
        self._forget(worker)
        self._leave(worker.spec.key, worker_id)
        worker.lifecycle, worker.reasons = UNSCHEDULABLE, []
        return worker

    def _known(self, worker_id: int) -> Worker:
        worker = self.workers.get(worker_id)
        if worker is None:
            raise NotFound(f"worker {worker_id} not found")
        return worker

    def _install(self, spec: WorkerSpec) -> Worker:
        worker_id = spec.worker_id
        reasons, sources = judged(spec, self.partitions.get(spec.key), self._settings)
        new = Worker(spec, reasons, sources)
        old = self.workers.get(worker_id)
        if old is not None and (reasons or old.reasons or old.spec.key != spec.key):
            self._withdraw(old)
            old = None
        self._keep(new)
        if not reasons:
            self._publish(new, {} if old is None else old.sources)
        for key, partition in list(self.partitions.items()):
            if worker_id in partition.members and key != spec.key:
                self._leave(key, worker_id)
        return new

    def _keep(self, worker: Worker) -> None:
        known = self.workers.get(worker.spec.worker_id)
        if known is not None and known.spec.key != worker.spec.key:
            self._forget(known)
            known = None
        if known is None:
            insort(self._order, _place(worker))
        else:
            self.places.remove(known.spec)
        self.places.put(worker.spec)
        self.workers[worker.spec.worker_id] = worker
        self.revision += 1
        self._remember(worker.spec.key)

    def _remember(self, key: PartitionKey) -> None:
        if key not in self.known:
            self.known[key] = None
            if len(self.known) > MAX_REMEMBERED:
                current = self.scopes()
                for old in list(self.known):
                    if old not in current and len(self.known) > MAX_REMEMBERED:
                        del self.known[old]

    def _forget(self, worker: Worker) -> None:
        self.places.remove(worker.spec)
        del self.workers[worker.spec.worker_id]
        del self._order[bisect_left(self._order, _place(worker))]
        self.revision += 1

    def _publish(self, worker: Worker, subscribed: dict[int, Source]) -> None:
        """Puts a schedulable worker into its partition: ranks, sources, bounds, candidates."""
        spec = worker.spec
        assert spec.block_size is not None
        partition = self.partitions.get(spec.key)
        if partition is None or not partition.established:
            if partition is None or partition.block_size != spec.block_size:
                if partition is not None:
                    self._on_discarded(partition)
                    partition.abandon()
                partition = self.new_partition(spec.key, spec.block_size, bool(spec.is_eagle))
                self.partitions[spec.key] = partition
            partition.is_eagle = bool(spec.is_eagle)
            partition.established = True
        worker_id = spec.worker_id
        for dp_rank, source in subscribed.items():
            if worker.sources.get(dp_rank) != source:
                self._sources.unsubscribe(worker_id, dp_rank)
                partition.index.clear(worker_id, dp_rank)
        dropped = partition.put_worker(spec)
        for dp_rank, source in sorted(worker.sources.items()):
            if subscribed.get(dp_rank) != source:
                self._sources.subscribe(partition, worker_id, dp_rank, source)
        if dropped:
            self._on_dropped(partition, dropped)

    def _withdraw(self, worker: Worker) -> None:
        """Takes a worker out of its partition, with its load and its index entries."""
        worker_id = worker.spec.worker_id
        for dp_rank in worker.sources:
            self._sources.unsubscribe(worker_id, dp_rank)
        worker.sources = {}
        partition = self.partitions.get(worker.spec.key)
        if partition is not None and worker_id in partition.workers:
            dropped = partition.remove_worker(worker_id)
            partition.index.drop_worker(worker_id)
            self._on_dropped(partition, dropped)

    def _leave(self, key: PartitionKey, worker_id: int) -> None:
        """The worker's record no longer names the partition; the last member takes it along.

        A member is a worker that has been schedulable here, so that changing the only worker's
        block size does not free the partition's, and deleting it does (D3). Workers that were
        refused for the old size get their chance then.
        """
        partition = self.partitions.get(key)
        if partition is None or worker_id not in partition.members:
            return
        partition.members.discard(worker_id)
        if partition.members:
            return
        del self.partitions[key]
        partition.abandon()
        for worker in self.matching(*key):  # none of them is schedulable: it would be a member
            self._install(worker.spec)
