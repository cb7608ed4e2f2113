"""One partition, the pair (model_name, tenant_id): its index, its slots, its schedulable workers.

Nothing is shared between partitions. The first complete worker fixes `block_size` and `is_eagle`
(spec selection.md section 0); before that a partition may exist only because recovered blocks wait
in its index (`established` is False), and then it schedules nothing.
"""

from typing import TYPE_CHECKING

from lean_selector.core.kv_index import KvIndex, RankKey
from lean_selector.core.load_order import LoadOrder
from lean_selector.core.parking import ParkedQueue
from lean_selector.core.slots import RankLoad, Reservation, Slots

if TYPE_CHECKING:
    from lean_selector.core.catalog import WorkerSpec

# The reference's capacity of a worker that does not state its own.
DEFAULT_MAX_BATCHED_TOKENS = 10_000_000


class SchedulableWorker:
    """What the scheduler needs of a worker, and nothing more."""

    __slots__ = (
        "endpoint",
        "loads",
        "max_num_batched_tokens",
        "ranks",
        "taints",
        "total_kv_blocks",
        "worker_id",
    )

    def __init__(self, spec: "WorkerSpec", loads: list[RankLoad]) -> None:
        self.worker_id = spec.worker_id
        self.endpoint = spec.endpoint or ""
        self.taints = spec.taints
        self.ranks = spec.ranks
        self.loads = loads  # one per rank, in rank order
        self.total_kv_blocks = spec.total_kv_blocks
        tokens = spec.max_num_batched_tokens
        self.max_num_batched_tokens = DEFAULT_MAX_BATCHED_TOKENS if tokens is None else tokens


class Partition:
    """State of one (model_name, tenant_id)."""

    __slots__ = (
        "block_size",
        "closed",
        "established",
        "index",
        "is_eagle",
        "members",
        "model_name",
        "order",
        "parked",
        "slots",
        "tenant_id",
        "watermarks",
        "workers",
    )

    def __init__(
        self,
        model_name: str,
        tenant_id: str,
        block_size: int,
        is_eagle: bool,
        index: KvIndex,
        prefill_load_scale: float = 1.0,
        *,
        established: bool = True,
    ) -> None:
        self.model_name = model_name
        self.tenant_id = tenant_id
        self.block_size = block_size
        self.is_eagle = is_eagle
        self.index = index
        self.established = established
        # Came with a recovered index: the last batch in it, by source not subscribed to since.
        self.watermarks: dict[RankKey, int] = {}
        self.closed = False  # gone from the catalog; only requests parked here still see it
        self.order = LoadOrder(block_size, prefill_load_scale)
        self.slots = Slots(self.order.changed)
        self.workers: dict[int, SchedulableWorker] = {}
        self.members: set[int] = (
            set()
        )  # ids whose record names this partition and was complete once
        self.parked = ParkedQueue()

    def put_worker(self, spec: "WorkerSpec") -> list[Reservation]:
        """Makes a worker a candidate, or changes one. Returns the reservations of ranks it lost."""
        worker_id = spec.worker_id
        old = self.workers.get(worker_id)
        dropped: list[Reservation] = []
        for load in () if old is None else old.loads:
            if load.dp_rank not in spec.ranks:
                dropped += self._drop_rank(load)
        loads = [self.slots.add_rank(worker_id, dp_rank) for dp_rank in spec.ranks]
        for load in loads:
            if load.bucket is None:
                self.order.add(load)
        bound = None if not spec.total_kv_blocks else 2 * spec.total_kv_blocks
        for dp_rank in {*spec.ranks, *spec.kv_events_endpoints}:
            self.index.set_bound(worker_id, dp_rank, bound, None)
        self.workers[worker_id] = SchedulableWorker(spec, loads)
        self.members.add(worker_id)
        return dropped

    def remove_worker(self, worker_id: int) -> list[Reservation]:
        """Takes a worker out. Returns the reservations that were on its ranks."""
        for rank in [rank for rank in self.watermarks if rank[0] == worker_id]:
            del self.watermarks[rank]
        dropped: list[Reservation] = []
        for load in self.workers.pop(worker_id).loads:
            dropped += self._drop_rank(load)
        return dropped

    def _drop_rank(self, load: RankLoad) -> list[Reservation]:
        self.order.remove(load)
        return self.slots.remove_rank(load.worker_id, load.dp_rank)
