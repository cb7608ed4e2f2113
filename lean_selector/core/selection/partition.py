"""One partition, the pair (model_name, tenant_id): its index, its slots, its schedulable workers.

Nothing is shared between partitions. The first complete worker fixes `block_size` and `is_eagle`
(spec selection.md section 0); before that a partition may exist only because recovered blocks wait
in its index (`established` is False), and then it schedules nothing.
"""

from lean_selector.core.index.kv_index import KvIndex, RankKey
from lean_selector.core.load.busy_limits import OFF, BusyThreshold, RankLimits
from lean_selector.core.load.headroom import Headroom
from lean_selector.core.load.load_order import LoadOrder
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.load.reservation import Reservation
from lean_selector.core.load.slots import Slots
from lean_selector.core.replication.ledger import Ledger, Ledgers
from lean_selector.core.selection.parking import ParkedQueue
from lean_selector.core.selection.schedulable import SchedulableWorker
from lean_selector.core.selection.workers import WorkerSpec


class Partition:
    """State of one (model_name, tenant_id).

    `busy_ranks` are those above the threshold by what is booked on them. They are not in `order`,
    so the choice by load never comes upon them, and it costs nothing while there are none. `room`
    is there if requests may have to wait.
    """

    __slots__ = (
        "_limits",
        "block_size",
        "busy_ranks",
        "established",
        "index",
        "is_eagle",
        "ledger",
        "members",
        "model_name",
        "order",
        "parked",
        "prefill_tokens",
        "prompt_tokens",
        "room",
        "shed_bookings",
        "shed_selects",
        "slots",
        "tenant_id",
        "threshold",
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
        queue_threshold: float | None = None,
        ledgers: Ledgers | None = None,
    ) -> None:
        """`ledgers`: those of the process; None: nobody is told of what is booked here."""
        self.model_name = model_name
        self.tenant_id = tenant_id
        self.block_size = block_size
        self.is_eagle = is_eagle
        self.index = index
        self.established = True
        # Came with a recovered index: the last batch in it, by source not subscribed to since.
        self.watermarks: dict[RankKey, int] = {}
        self.order = LoadOrder(block_size, prefill_load_scale)
        self.slots = Slots(self.order.changed, index.bits)
        shared = Ledgers() if ledgers is None else ledgers
        self.ledger = Ledger(model_name, tenant_id, block_size, self.slots, shared)
        self.workers: dict[int, SchedulableWorker] = {}
        self.members: set[int] = (
            set()
        )  # ids whose record names this partition and was complete once
        self.parked = ParkedQueue(self.workers)
        self.room = None if queue_threshold is None else Headroom(queue_threshold)
        # Ever: of the prompts that were placed, and of them what was not cached; requests shed.
        self.prompt_tokens = self.prefill_tokens = 0
        self.shed_selects = self.shed_bookings = 0
        self.threshold = OFF
        self.busy_ranks: set[RankKey] = set()
        self._limits: dict[
            RankKey, RankLimits
        ] = {}  # every worker's ranks, while a threshold is set
        self._listen()

    def _listen(self) -> None:
        """Has changes of load told to whom they concern, and to nobody else."""
        told = self._judge if self.threshold.is_set else self.order.changed
        room, slots = self.room, self.slots
        if room is None:
            slots.on_load_change = told
            return
        room_changed = room.changed

        def tell_both(load: RankLoad) -> None:
            told(load)
            room_changed(load, slots.heard_at)

        slots.on_load_change = tell_both

    def set_threshold(self, threshold: BusyThreshold) -> None:
        """What makes a rank busy, from now on; every rank is judged again."""
        self.threshold = threshold
        self._listen()
        self._limits = {}
        for worker in self.workers.values():
            self._limit(worker)

    def _limit(self, worker: SchedulableWorker) -> None:
        """Gives a worker's ranks their limits, and their place in the order."""
        limits = self.threshold.limits(worker.total_kv_blocks, worker.max_num_batched_tokens)
        for load in worker.loads:
            if self.threshold.is_set:
                self._limits[load.key] = limits
                self._judge(load)
            elif load.bucket is None:
                self.busy_ranks.discard(load.key)
                self.order.add(load)
            if self.room is not None:
                self.room.put(load, worker.max_num_batched_tokens, limits, self.slots.heard_at)

    def _judge(self, load: RankLoad) -> None:
        """A rank's load or limits may have changed; those of no worker are not our concern."""
        limits = self._limits.get(load.key)
        if limits is None:
            return
        if limits.exceeded_by(load.active_prefill_tokens, load.active_decode_blocks):
            self.busy_ranks.add(load.key)
            if load.bucket is not None:
                self.order.remove(load)
        elif load.bucket is not None:
            self.order.changed(load)
        else:
            self.busy_ranks.discard(load.key)
            self.order.add(load)

    def is_rank_busy(self, load: RankLoad, now: float) -> bool:
        """True above the threshold at this moment: expected prefill progress only lowers a load."""
        return load.key in self.busy_ranks and self._limits[load.key].exceeded_by(
            load.prefill_tokens_at(now), load.active_decode_blocks
        )

    def is_worker_busy(self, worker: SchedulableWorker, now: float) -> bool:
        """True when every rank is busy ("Data-Parallel Rank Aggregation")."""
        return all(self.is_rank_busy(load, now) for load in worker.loads)

    def put_worker(self, spec: WorkerSpec) -> list[Reservation]:
        """Makes a worker a candidate, or changes one. Returns the reservations of ranks it lost."""
        worker_id = spec.worker_id
        old = self.workers.get(worker_id)
        dropped: list[Reservation] = []
        for load in () if old is None else old.loads:
            if load.dp_rank not in spec.ranks:
                dropped += self._drop_rank(load)
        loads = [self.slots.add_rank(worker_id, dp_rank) for dp_rank in spec.ranks]
        for load in loads:
            if load.bucket is None and load.key not in self.busy_ranks:
                self.order.add(load)
        bound = None if not spec.total_kv_blocks else 2 * spec.total_kv_blocks
        self.index.set_bound(worker_id, bound, None)
        worker = self.workers[worker_id] = SchedulableWorker(spec, loads)
        self.parked.worker_changed(old, worker)
        self._limit(worker)
        self.members.add(worker_id)
        return dropped

    def remove_worker(self, worker_id: int) -> list[Reservation]:
        """Takes a worker out. Returns the reservations that were on its ranks."""
        for rank in [rank for rank in self.watermarks if rank[0] == worker_id]:
            del self.watermarks[rank]
        dropped: list[Reservation] = []
        worker = self.workers.pop(worker_id)
        self.parked.worker_changed(worker, None)
        for load in worker.loads:
            dropped += self._drop_rank(load)
        return dropped

    def unclaimed(self) -> list[int]:
        """The workers whose blocks were recovered and who are not workers here (yet), sorted."""
        recovered = self.index.workers() | {worker_id for worker_id, _ in self.watermarks}
        return sorted(recovered - self.workers.keys())

    def forget_unclaimed(self, worker_id: int) -> int:
        """Drop what was recovered for such a worker, if it still is one; returns the blocks."""
        if worker_id in self.workers:
            return 0
        for rank in [rank for rank in self.watermarks if rank[0] == worker_id]:
            del self.watermarks[rank]
        return self.index.drop_worker(worker_id)

    def _drop_rank(self, load: RankLoad) -> list[Reservation]:
        if load.bucket is not None:
            self.order.remove(load)
        self.busy_ranks.discard(load.key)
        self._limits.pop(load.key, None)
        if self.room is not None:
            self.room.drop(load)
        return self.ledger.drop_rank(load.worker_id, load.dp_rank)
