"""The worker catalog: registered workers, their partitions, and whether they can be scheduled.

A partition is a pair of model_name and tenant_id. Worker ids are unique across partitions. A worker
is `schedulable` if its record has all required fields and has the `block_size` and `is_eagle` of
its partition. Otherwise the worker is registered as `incomplete`, and the HTTP answer lists the
reasons (spec selection.md section 2; decisions D3, D6, D10). The catalog opens no sockets: a
`SourceSink` subscribes to the workers' events."""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol

import msgspec
from msgspec import UNSET

from lean_selector.core.errors import BadRequest, NotFound, NoWorkers
from lean_selector.core.load.shapes import Reservation
from lean_selector.core.numbers import MAX_RANKS, RANK_LIMIT
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.shapes import (
    BOTH,
    BY_RANK,
    DECODE,
    PartitionKey,
    Source,
    WorkerRecord,
    WorkerSpec,
)
from lean_selector.core.settings import Dialect
from lean_selector.core.zmq_endpoints import (
    check_endpoint,
    replay_endpoint_for,
)

# -- what a worker needs to be scheduled -----------------------------------------------------------
# What a record needs so that its worker can be scheduled, and the sources of its events.
#
# A field that is missing or disagrees with the partition is a reason not to schedule the worker,
# and not an error of the request (spec selection.md section 2; D3, D6, D10). The words and order of
# the reasons are documented. These functions change nothing.

MAX_ENTRIES = MAX_RANKS  # D28; for each list and map of a record


def check_limits(spec: WorkerSpec) -> None:
    """Raise BadRequest if a worker has too many ranks, taints, topology domains or endpoints."""
    size = spec.data_parallel_size
    if size is not None and size > MAX_RANKS:
        raise BadRequest(f"data_parallel_size {size} exceeds the maximum {MAX_RANKS}")
    for field in (*BY_RANK, "taints", "topology_domains"):
        count = len(getattr(spec, field))
        if count > MAX_ENTRIES:
            raise BadRequest(f"{field}: {count} entries exceed the maximum {MAX_ENTRIES}")


def judged(
    spec: WorkerSpec, partition: Partition | None, settings: RouterSettings
) -> tuple[list[str], dict[int, Source]]:
    """Return the reasons why a worker cannot be scheduled, and the KV-event source of each rank; no
    sources if there is a reason. `partition` is the worker's partition; None if there is none."""
    reasons = _missing(spec, settings)
    if reasons:
        return reasons, {}
    refusal = _mismatch(spec, partition, settings)
    if refusal is None:
        try:
            return [], _sources_of(spec, settings)
        except ValueError as error:
            refusal = str(error)
    return [f"reconciliation failed: {refusal}"], {}


def _missing(spec: WorkerSpec, settings: RouterSettings) -> list[str]:
    """Return what the worker's record lacks, as texts for the API in the documented order."""
    reasons = []
    if not spec.endpoint:
        reasons.append("endpoint is required")
    if not spec.block_size:
        reasons.append("block_size must be greater than 0")
    if spec.data_parallel_size == 0:
        reasons.append("data_parallel_size must be greater than 0")
    needs_batch = settings.queue_threshold is not None and spec.worker_role != DECODE
    if spec.max_num_batched_tokens is None and needs_batch:
        reasons.append("max_num_batched_tokens is required while queueing is enabled")
    if spec.ranks.stop > RANK_LIMIT:
        reasons.append("data parallel range overflows u32")
    elif _listens_to(spec, settings):
        reasons += [
            f"kv_events endpoint is required for dp_rank {dp_rank}"
            for dp_rank in spec.ranks
            if not spec.kv_events_endpoint_of(dp_rank)
        ]
        one_rank_only = settings.dialect.replays_one_rank_only
        if one_rank_only and spec.replay_endpoint is not None and len(spec.ranks) > 1:
            reasons.append("replay_endpoint is supported only for data_parallel_size 1")
    return reasons


def _listens_to(spec: WorkerSpec, settings: RouterSettings) -> bool:
    """Whether to subscribe to the worker's KV events. If so, event endpoints are required."""
    named = spec.kv_events_endpoint or spec.kv_events_endpoints
    return settings.use_kv_events and (settings.needs_kv_events or bool(named))


def _mismatch(
    spec: WorkerSpec, partition: Partition | None, settings: RouterSettings
) -> str | None:
    if partition is None or not partition.established:
        return None
    where = f"for {settings.dialect.scope(*spec.key)}"
    if partition.block_size != spec.block_size:
        return (
            f"block_size mismatch {where}: "
            f"existing={partition.block_size} requested={spec.block_size}"
        )
    if partition.is_eagle != bool(spec.is_eagle):
        existing, requested = str(partition.is_eagle).lower(), str(bool(spec.is_eagle)).lower()
        return f"is_eagle mismatch {where}: existing={existing} requested={requested}"
    return None


def _sources_of(spec: WorkerSpec, settings: RouterSettings) -> dict[int, Source]:
    """Return the KV-event source of each rank. Raises ValueError if an event endpoint is invalid.
    Endpoints for ranks that the worker does not have are validated, and then ignored (D28)."""
    sources: dict[int, Source] = {}
    if not _listens_to(spec, settings):
        return sources
    ranks: Iterable[int] = sorted(spec.kv_events_endpoints) or spec.ranks
    for dp_rank in ranks:
        endpoint = spec.kv_events_endpoint_of(dp_rank)
        assert endpoint is not None
        where = f"worker {spec.worker_id} dp_rank {dp_rank}"
        try:
            check_endpoint(endpoint)
        except ValueError as error:
            raise ValueError(f"invalid kv_events endpoint for {where}: {error}") from None
        try:
            source = Source(endpoint, _replay_endpoint_of(spec, dp_rank))
        except ValueError as error:
            if settings.dialect.replays_one_rank_only:
                where = f"worker {spec.worker_id}"
            raise ValueError(f"invalid replay endpoint for {where}: {error}") from None
        if dp_rank in spec.ranks:
            sources[dp_rank] = source
    return sources


def _replay_endpoint_of(spec: WorkerSpec, dp_rank: int) -> str | None:
    """Return the endpoint that replays a rank's events. A rank without an endpoint of its own uses
    the worker's, with the port raised by (rank - first rank), as in vLLM. Return None if there is
    no endpoint, if the rank is below the first, or (as in Dynamo) if the port would be too high.
    Raises ValueError for an invalid endpoint."""
    own = spec.replay_endpoints.get(dp_rank)
    endpoint = spec.replay_endpoint if own is None else own
    if endpoint is None:
        return None
    check_endpoint(endpoint)
    offset = dp_rank - spec.ranks.start
    if own is not None or offset < 0:
        return own
    try:
        return replay_endpoint_for(endpoint, offset)
    except ValueError:
        return None


MAX_REMEMBERED = 1024  # models and tenants without workers

# Fields that the API omits when absent, besides the maps by rank.
_LEFT_OUT = ("router_hint_worker_type", "kv_event_source_mode", "disaggregation")

SCHEDULABLE, INCOMPLETE, UNSCHEDULABLE = "schedulable", "incomplete", "unschedulable"
DRAINING = "draining"


class SourceSink(Protocol):
    """Subscribes to the KV events of engines. `unsubscribe` ends a rank's
    subscription, and returns this rank and all other ranks that the received events named."""

    def subscribe(
        self, partition: Partition, worker_id: int, dp_rank: int, source: Source
    ) -> None: ...

    def unsubscribe(self, worker_id: int, dp_rank: int) -> Collection[int]: ...


@dataclass(eq=False)
class Worker:
    """A registered worker. `reasons` says why the worker cannot be scheduled, and is empty if it
    can. A draining worker finishes its requests and gets no new ones."""

    spec: WorkerSpec
    reasons: list[str]
    sources: dict[int, Source]
    is_draining: bool = False

    def __post_init__(self) -> None:
        ready = DRAINING if self.is_draining else SCHEDULABLE
        self.lifecycle = INCOMPLETE if self.reasons else ready

    def shown(self, dialect: Dialect) -> dict[str, Any]:
        """Return the fields of the worker's record as the API shows them. A field without a value
        is UNSET if the API omits the field, and None otherwise."""
        spec, shown = self.spec, dict[str, Any]()
        for name in WorkerRecord.__struct_fields__:
            if name in dialect.lacks:
                continue
            if name == "lifecycle":
                shown[name] = self.lifecycle
            elif name == "not_schedulable_reasons":
                shown[name] = self.reasons or UNSET
            elif name == "routing_group":
                shown[name] = spec.tenant_id
            elif name in BY_RANK:
                by_rank = getattr(spec, name)
                shown[name] = {str(rank): by_rank[rank] for rank in sorted(by_rank)} or UNSET
            elif name == "worker_role":
                shown[name] = UNSET if spec.worker_role == BOTH else spec.worker_role
            elif name in _LEFT_OUT:
                value = getattr(spec, name)
                shown[name] = UNSET if value is None else value
            else:
                shown[name] = getattr(spec, name)
        shown["taints"] = sorted(spec.taints)
        shown["topology_domains"] = dict(sorted(spec.topology_domains.items()))
        return shown


def _order_key(worker: Worker) -> tuple[str, str, int]:
    return *worker.spec.key, worker.spec.worker_id


@dataclass(eq=False)
class Catalog:
    """All registered workers and all partitions. A method that raises has changed nothing.

    `check` raises BadRequest for workers that must not be registered. `on_dropped` is called with
    the reservations of removed ranks. `on_discarded` is called with a partition whose blocks,
    copied from a peer, are dropped because the first worker has another block size."""

    settings: RouterSettings
    sources: SourceSink
    new_partition: Callable[[PartitionKey, int, bool], Partition]
    on_dropped: Callable[[Partition, list[Reservation]], None]
    on_discarded: Callable[[Partition], None] = lambda partition: None
    check: Callable[[WorkerSpec], None] = lambda spec: None

    def __post_init__(self) -> None:
        self.workers: dict[int, Worker] = {}
        self.revision = 0  # incremented on each visible change of `workers`
        # Every model and tenant that had a worker here, up to a limit.
        self.known: dict[PartitionKey, None] = {}
        self.partitions: dict[PartitionKey, Partition] = {}
        self.refusals = Refusals(self)

    # -- reading -----------------------------------------------------------------------------------

    def matching(self, model_name: str | None, tenant_id: str | None) -> list[Worker]:
        """Return workers of this model and tenant (None: any), sorted by (model, tenant, id)."""
        found = [
            worker
            for worker in self.workers.values()
            if model_name in (None, worker.spec.model_name)
            and tenant_id in (None, worker.spec.tenant_id)
        ]
        return sorted(found, key=_order_key)

    def ready_partition(self, model_name: str, tenant_id: str) -> Partition:
        """Return the partition if it has schedulable workers. Otherwise raises Unavailable."""
        partition = self.partitions.get((model_name, tenant_id))
        if partition is not None and partition.workers:
            return partition
        raise self.refusals.refused((model_name, tenant_id))

    def scopes(self) -> set[PartitionKey]:
        """Return the model and tenant of each registered worker, schedulable or not."""
        return {worker.spec.key for worker in self.workers.values()}

    def served(self) -> list[PartitionKey]:
        """Return the models and tenants that have schedulable workers, sorted."""
        return sorted(key for key, each in self.partitions.items() if each.workers)

    def schedulable_count(self) -> int:
        return sum(len(partition.workers) for partition in self.partitions.values())

    def can_serve(self) -> bool:
        """Whether any partition has workers that can serve a request, alone or in pairs."""
        return any(each.everyone & ~each.prefill_only for each in self.partitions.values())

    def missing_roles(self) -> list[str]:
        """Return the roles that no worker of some partition with workers has or includes."""
        return sorted({role for each in self.partitions.values() for role in each.missing_roles()})

    # -- changing ----------------------------------------------------------------------------------

    def upsert(self, spec: WorkerSpec, *, anew: bool = False) -> Worker:
        """Register a worker, or replace the whole record of the registered worker with this id.

        `anew`: as DELETE and POST in one, because its engine restarted with other blocks. The
        worker's reservations and blocks go (D3). A draining worker still drains."""
        check_limits(spec)
        self.check(spec)
        old = self.workers.get(spec.worker_id)
        is_draining = old is not None and old.is_draining and old.spec.endpoint == spec.endpoint
        if anew and old is not None:
            self.remove(spec.worker_id)
        return self._install(spec, is_draining)

    def recovered_partition(self, key: PartitionKey, block_size: int) -> Partition | None:
        """Return or create the partition for blocks copied from a peer; None if the partition has
        another block size. A new partition serves no requests until a worker registers."""
        partition = self.partitions.get(key)
        if partition is None:
            partition = self.partitions[key] = self.new_partition(key, block_size, False)
        return partition if partition.block_size == block_size else None

    def discard_waiting(self) -> None:
        """Remove partitions that were created for a peer's blocks and have no blocks left."""
        for key, partition in list(self.partitions.items()):
            if not partition.established and not partition.unclaimed():
                del self.partitions[key]

    def patch(self, worker_id: int, changes: dict[str, object]) -> Worker:
        """Change the fields given in `changes`. Raises NotFound for an unknown worker.

        A `lifecycle` of `draining` starts draining, and `schedulable` ends it. The lifecycle is not
        part of the record, so a worker still drains after discovery has sent its record again."""
        worker = self._known(worker_id)
        lifecycle = changes.get("lifecycle")
        fields = {name: value for name, value in changes.items() if name != "lifecycle"}
        spec = msgspec.structs.replace(worker.spec, **fields) if fields else worker.spec
        check_limits(spec)
        self.check(spec)
        if lifecycle in (DRAINING, SCHEDULABLE):
            worker.is_draining = lifecycle == DRAINING
        return self._install(spec, worker.is_draining and worker.spec.endpoint == spec.endpoint)

    def remove(self, worker_id: int) -> Worker:
        """Remove a worker, its ranks, its reservations, and its blocks in the index (D3). Return
        the worker, with lifecycle `unschedulable`. Raises NotFound for an unknown worker."""
        worker = self._known(worker_id)
        self._withdraw(worker)
        del self.workers[worker_id]
        self.revision += 1
        self.leave(worker.spec.key, worker_id)
        worker.lifecycle, worker.reasons = UNSCHEDULABLE, []
        return worker

    def _known(self, worker_id: int) -> Worker:
        worker = self.workers.get(worker_id)
        if worker is None:
            raise NotFound(f"worker {worker_id} not found")
        return worker

    def _install(self, spec: WorkerSpec, is_draining: bool) -> Worker:
        worker_id = spec.worker_id
        reasons, sources = judged(spec, self.partitions.get(spec.key), self.settings)
        old = self.workers.get(worker_id)
        left = None if old is None or old.spec.key == spec.key else old.spec.key
        new = Worker(spec, reasons, sources, is_draining)
        if old is not None and (reasons or old.reasons or left is not None):
            self._withdraw(old)
            old = None
        self.workers[worker_id] = new
        self.revision += 1
        self._remember(spec.key)
        if not reasons:
            self._publish(new, {} if old is None else old.sources)
        if left is not None:
            self.leave(left, worker_id)
        return new

    def _remember(self, key: PartitionKey) -> None:
        if key not in self.known:
            self.known[key] = None
            if len(self.known) > MAX_REMEMBERED:
                current = self.scopes()
                for old in list(self.known):
                    if old not in current and len(self.known) > MAX_REMEMBERED:
                        del self.known[old]

    def _publish(self, worker: Worker, subscribed: dict[int, Source]) -> None:
        """Add or update a schedulable worker in its partition, and subscribe to its events."""
        spec = worker.spec
        assert spec.block_size is not None
        partition = self.partitions.get(spec.key)
        if partition is not None and partition.block_size != spec.block_size:
            assert not partition.established, "the worker would be incomplete"
            self.on_discarded(partition)
            partition.abandon()
            partition = None
        if partition is None:
            partition = self.new_partition(spec.key, spec.block_size, bool(spec.is_eagle))
            self.partitions[spec.key] = partition
        worker_id = spec.worker_id
        for dp_rank, source in subscribed.items():
            if worker.sources.get(dp_rank) != source:
                spoken_for = self.sources.unsubscribe(worker_id, dp_rank)
                # A loop, because `set - dict.keys()` would visit all keys for each source.
                others = [n for n in spoken_for if n not in worker.sources and n not in subscribed]
                partition.index.clear(worker_id, dp_rank, *others)
                for each in (dp_rank, *others):
                    partition.emptied(worker_id, each)
        dropped = partition.put_worker(spec, worker.is_draining)
        for dp_rank, source in sorted(worker.sources.items()):
            if subscribed.get(dp_rank) != source:
                self.sources.subscribe(partition, worker_id, dp_rank, source)
        if dropped:
            self.on_dropped(partition, dropped)

    def _withdraw(self, worker: Worker) -> None:
        """Remove a worker from its partition, with its reservations and its blocks in the index."""
        worker_id = worker.spec.worker_id
        for dp_rank in worker.sources:
            self.sources.unsubscribe(worker_id, dp_rank)
        worker.sources = {}
        partition = self.partitions.get(worker.spec.key)
        if partition is not None and worker_id in partition.workers:
            dropped = partition.remove_worker(worker_id)
            partition.index.drop_worker(worker_id)
            self.on_dropped(partition, dropped)

    def leave(self, key: PartitionKey, worker_id: int) -> None:
        """Remove a worker from `members`, the workers that were schedulable in the partition at
        some time. If the record of no other member has the partition's block size and is_eagle,
        remove the partition, and check again the workers that were refused for these (D3)."""
        partition = self.partitions.get(key)
        if partition is None or not partition.established:
            return
        partition.members.discard(worker_id)
        for member in partition.members:
            worker = self.workers.get(member)  # None if it could not be restored
            if worker is not None and not _mismatch(worker.spec, partition, self.settings):
                return
        del self.partitions[key]
        partition.abandon()
        for worker in self.matching(*key):  # none of them is schedulable, or it would hold it
            self._install(worker.spec, worker.is_draining)


_NAMED: Final = 4  # tenants listed in an error; a model may have thousands


class Refusals:
    """Counts requests that were refused because no worker can serve their model and tenant."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._dialect = catalog.settings.dialect
        self.known: dict[PartitionKey, int] = {}  # by model and tenant
        # By model: requests refused because the tenant never had a worker, while other tenants have
        # workers of the model.
        self.misplaced: dict[str, int] = {}
        self.unknown = 0  # for unknown models, while any worker is registered
        self.unnamed = 0  # for unknown models, while no worker is registered

    def refused(self, key: PartitionKey) -> NoWorkers:
        """Count a request for a partition without schedulable workers, and return its error."""
        is_known, served = key in self._catalog.known, self._catalog.served()
        tenants = [tenant for model, tenant in served if model == key[0]]
        other_tenants = self._named(key[0], tenants) if tenants else None
        if is_known:
            self.known[key] = self.known.get(key, 0) + 1
        elif other_tenants is not None:
            self.misplaced[key[0]] = self.misplaced.get(key[0], 0) + 1
        elif served:
            self.unknown += 1
        else:
            self.unnamed += 1
        if served:
            message = f"no schedulable workers for {self._dialect.scope(*key)}"
        else:
            message = "no schedulable workers are available"
        models = sorted({model for model, _ in served})
        return NoWorkers(message, is_known or not served, models, other_tenants)

    def _named(self, model: str, tenants: list[str]) -> str:
        """Return a text that names other tenants that have schedulable workers of the model."""
        named, more = ", ".join(tenants[:_NAMED]), len(tenants) - _NAMED
        word = self._dialect.group_word
        others = f"{named} and {more} more" if more > 0 else named
        return f"model {model} has workers of another {word}: {others}"
