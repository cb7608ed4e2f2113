"""The subscriptions to KV events: one listener per rank of the registered workers.

The listeners share the process's connections, and one time budget per iteration of the event loop.
Event counts of ended listeners are kept, so that totals never decrease."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import Final

import msgspec

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.kv_ingest import EventCounts, KvIngest
from lean_selector.core.index.shapes import Watermark
from lean_selector.core.rank_bits import RankKey
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.shapes import Source
from lean_selector.core.zmq_endpoints import zmq_key
from lean_selector.events.kv_listener import KvListener, logger
from lean_selector.events.source_watch import GRACE_S
from lean_selector.links.links import Links
from lean_selector.links.turns import Turns
from lean_selector.tasks import supervise
from lean_selector.wire.selection_bodies import KvSource, SourceCondition, SourceStatus

# Simultaneous replays. When it starts, the selector requests a replay from every idle source. A
# running replay may hold MAX_BACKLOG_BYTES, and three descriptors while it connects.
MAX_REPLAYS: Final = 64
# Interval in seconds at which each source is checked. A check takes two microseconds.
CHECK_EVERY_S: Final = 1.0
CHECKS_PER_TURN: Final = 256
SWEEP_SLICE_S: Final = 0.0005  # per turn of the loop, in addition to the slice for events
_SWEEP_STEPS: Final = 4  # between two checks of the clock


class KvSubscriptions:
    """The subscriptions to the KV events of all ranks. Not thread-safe."""

    def __init__(self, links: Links, grace_s: float = GRACE_S) -> None:
        """A rank may be silent or unreachable for `grace_s` seconds without a warning (D35)."""
        self._links = links
        self._grace_s = grace_s
        self._turns = Turns()
        self._replays = asyncio.Semaphore(MAX_REPLAYS)
        self._held: set[RankKey] | None = None  # sources waiting for a recovery's end
        self._listeners: dict[RankKey, KvListener] = {}
        self._looking: asyncio.Task[None] | None = None
        self._partitions: dict[RankKey, Partition] = {}  # by the same keys
        # zmq_key -> ranks; no list is empty.
        self._by_endpoint: dict[str, list[RankKey]] = {}
        self._by_replay: dict[str, list[RankKey]] = {}
        self.notes_of_ends: list[set[RankKey]] = []  # the sets that `noting_ends` updates
        # Called with the id of a worker whose source lost its connection: the worker may be gone.
        self.on_lost: Callable[[int], None] = lambda worker_id: None
        self._ending: set[asyncio.Future[list[BaseException | None]]] = set()
        self._ended_counts = EventCounts()
        self._is_closed = False

    def subscribe(self, partition: Partition, worker_id: int, dp_rank: int, source: Source) -> None:
        """Subscribe to a rank's KV events; the engine may start later. If the rank's blocks were
        copied from another replica, continue with the first event that the copy lacks."""
        listener = KvListener(
            self._links,
            KvIngest(
                partition.index,
                worker_id,
                dp_rank,
                partition.emptied,
                partition.is_eagle,
                None if partition.routed is None else partition.routed.stored,
            ),
            source.endpoint,
            source.replay_endpoint,
            self._turns,
            replays=self._replays,
            has_work=partial(_has_work, partition, worker_id, dp_rank),
            on_lost=lambda: self.on_lost(worker_id),
            grace_s=self._grace_s,
        )
        rank = worker_id, dp_rank
        assert rank not in self._listeners
        self._listeners[rank] = listener
        self._partitions[rank] = partition
        self._by_endpoint.setdefault(zmq_key(source.endpoint), []).append(rank)
        if source.replay_endpoint is not None:
            self._by_replay.setdefault(zmq_key(source.replay_endpoint), []).append(rank)
        if self._held is not None and source.replay_endpoint is not None:
            self._held.add(rank)
        else:
            self._start(rank)
        if self._looking is None:
            self._looking = supervise("kv sources", self._check_all)

    def _start(self, rank: RankKey) -> None:
        listener = self._listeners[rank]
        mark = self._partitions[rank].take_watermark(rank)
        if mark is not None:
            listener.cursor.resume_at(mark.seq, mark.until, mark.unknown)
        listener.start()

    def hold(self) -> None:
        """Let new subscriptions with a replay endpoint wait from now on. The caller must enter a
        `holding` context later. The subscriptions connect when this context ends or times out."""
        if self._held is None:
            self._held = set()

    @contextlib.contextmanager
    def holding(self, at_most_s: float) -> Iterator[None]:
        """Until the context ends, or for `at_most_s`, new subscriptions with a replay endpoint do
        not connect, so that the ranks' blocks can first be copied from another replica."""
        self.hold()
        limit = asyncio.get_running_loop().call_later(at_most_s, self._release)
        try:
            yield
        finally:
            limit.cancel()
            self._release()

    def _release(self) -> None:
        held, self._held = self._held, None
        for rank in sorted(held or ()):
            self._start(rank)

    async def _check_all(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(CHECK_EVERY_S)
            for at, rank in enumerate(list(self._listeners), 1):
                loop.call_soon(self._check, rank)  # one that fails stops no other
                if at % CHECKS_PER_TURN == 0:
                    await asyncio.sleep(0)

    def _check(self, rank: RankKey) -> None:
        listener = self._listeners.get(rank)
        if listener is not None:
            listener.check_condition(time.monotonic())

    def unsubscribe(self, worker_id: int, dp_rank: int) -> Collection[int]:
        """End the subscription to a rank's KV events. The rank's blocks stay in the index. Return
        this rank and all other data-parallel ranks that the received events named."""
        rank = worker_id, dp_rank
        if self._is_closed and rank not in self._listeners:
            return ()
        listener = self._listeners.pop(rank)
        del self._partitions[rank]
        _leave(self._by_endpoint, listener.endpoint, rank)
        if listener.replay_endpoint is not None:
            _leave(self._by_replay, listener.replay_endpoint, rank)
        for ended in self.notes_of_ends:
            ended.add(rank)
        self._ended_counts.add(listener.ingest.counts)
        if self._held is not None:
            self._held.discard(rank)
        ending = listener.stop()
        spoken_for = listener.ingest.dp_ranks
        listener.ingest.close()
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return spoken_for

    def statuses(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[KvSource]:
        """Return the KV-event sources of a model and a tenant (None: of all), sorted by rank."""
        return [
            source
            for source in self.each_source()
            if model_name in (None, source.model_name) and tenant_id in (None, source.tenant_id)
        ]

    def each_source(self) -> Iterator[KvSource]:
        """Yield the state of every rank's KV-event source, sorted by worker and rank."""
        for partition, status in self.each_status():
            load = partition.slots.ranks.get((status.worker_id, status.dp_rank))
            yield KvSource(
                **msgspec.structs.asdict(status),
                model_name=partition.model_name,
                tenant_id=partition.tenant_id,
                index_accuracy=None if load is None else load.counts.index_accuracy,
            )

    def conditions(self, worker_id: int, dp_ranks: Iterable[int]) -> list[SourceCondition]:
        """Return the condition of the KV-event sources of a worker's ranks."""
        now = time.monotonic()
        listeners = (self._listeners.get((worker_id, dp_rank)) for dp_rank in sorted(dp_ranks))
        return [each.check_condition(now) for each in listeners if each is not None]

    def each_status(self) -> Iterator[tuple[Partition, SourceStatus]]:
        """Yield the partition and the state of every rank's KV-event source, sorted by worker and
        rank. A rank that is removed during the iteration may be left out."""
        for rank in sorted(self._listeners):
            listener = self._listeners.get(rank)
            if listener is not None:
                yield self._partitions[rank], listener.status()

    def watermarks(self, partition: Partition) -> dict[RankKey, Watermark]:
        """Return each rank's `watermark`. Ranks without one are left out."""
        ranks = [rank for rank, of in self._partitions.items() if of is partition]
        found = {rank: self.watermark(partition, rank) for rank in (*partition.watermarks, *ranks)}
        return {rank: mark for rank, mark in found.items() if mark is not None}

    def watermark(self, partition: Partition, rank: RankKey) -> Watermark | None:
        """Return which batches are in a rank's blocks; None if batches are missing after the first
        known one."""
        if self._partitions.get(rank) is not partition or rank in partition.watermarks:
            return partition.watermarks.get(rank)
        return self._listeners[rank].mark

    def listeners(self, key: str) -> Sequence[RankKey]:
        """Return the ranks whose KV-event endpoint is `key` (an endpoint in `zmq_key`'s form)."""
        return self._by_endpoint.get(key, ())

    def askers(self, key: str) -> Sequence[RankKey]:
        """Return the ranks whose replay endpoint is `key` (an endpoint in `zmq_key`'s form)."""
        return self._by_replay.get(key, ())

    def is_listening(self, rank: RankKey) -> bool:
        if rank not in self._listeners:
            return False
        return self._held is None or rank not in self._held

    def is_ahead(self, rank: RankKey) -> bool:
        """Whether the rank sent us KV events. If so, our blocks are newer than a peer's copy."""
        listener = self._listeners.get(rank)
        if listener is None:
            return False
        return listener.cursor.has_told or listener.cursor.watermark is not None

    @contextlib.contextmanager
    def noting_ends(self) -> Iterator[set[RankKey]]:
        """Yield a set. Ranks whose KV-event subscription ends during the `with` block are added."""
        ended: set[RankKey] = set()
        self.notes_of_ends.append(ended)
        try:
            yield ended
        finally:
            self.notes_of_ends = [note for note in self.notes_of_ends if note is not ended]

    def counts(self) -> EventCounts:
        """Count the KV events since the process started, including events of removed ranks."""
        total = EventCounts()
        total.add(self._ended_counts)
        for listener in self._listeners.values():
            total.add(listener.ingest.counts)
        return total

    async def close(self) -> None:
        """End all subscriptions, and wait until their tasks have ended."""
        self._is_closed = True
        if self._looking is not None:
            self._looking.cancel()
        for key in list(self._listeners):
            self.unsubscribe(*key)
        await asyncio.gather(*self._ending, return_exceptions=True)


class IndexSweeps:
    """Frees the memory of blocks that the KV indexes of this process have dropped. The memory is
    freed in time slices, because freeing a large index at once would stop the event loop."""

    def __init__(self) -> None:
        self._turns = Turns(SWEEP_SLICE_S)

    def start(self, index: KvIndex) -> None:
        """Start to free the memory of the blocks that `index` has dropped, in time slices."""

        def drain(deadline: float) -> bool:
            while index.sweep(_SWEEP_STEPS):
                if time.perf_counter() >= deadline:
                    return True
            return False

        self._turns.start(drain, _sweep_failed)


def _sweep_failed(error: Exception) -> None:  # an internal error; the index is unchanged
    logger.error("sweep of the index failed: %r", error)


def _leave(ranks: dict[str, list[RankKey]], endpoint: str, rank: RankKey) -> None:
    key = zmq_key(endpoint)
    sharing = ranks[key]
    sharing.remove(rank)
    if not sharing:
        del ranks[key]


def _has_work(partition: Partition, worker_id: int, dp_rank: int) -> bool:
    load = partition.slots.ranks.get((worker_id, dp_rank))
    return load is not None and load.active_requests > 0
