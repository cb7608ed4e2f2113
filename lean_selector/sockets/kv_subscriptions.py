"""All sources of KV events: one listener per worker rank, made and ended as the catalog says.

Shares the links of the process and one budget of time per loop turn between the listeners. Keeps
the counts of listeners that ended, so that totals only grow. Knows nothing of what an event means.
"""

import asyncio
import contextlib
from collections.abc import Iterator

import msgspec

from lean_selector.core.index.kv_index import RankKey
from lean_selector.core.index.kv_ingest import EventCounts, KvIngest
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.workers import Source
from lean_selector.sockets.ingest_turns import IngestTurns
from lean_selector.sockets.kv_listener import KvListener
from lean_selector.sockets.links import Links
from lean_selector.wire.kv_sources import KvSource, SourceStatus


class KvSubscriptions:
    """The catalog's SourceSink. Used from the loop's thread only."""

    def __init__(self, links: Links) -> None:
        self._links = links
        self._turns = IngestTurns()
        self._listeners: dict[RankKey, KvListener] = {}
        self._partitions: dict[RankKey, Partition] = {}  # of the same keys
        self.notes_of_ends: list[set[RankKey]] = []  # that `noting_ends` keeps
        self._ending: set[asyncio.Future[list[BaseException | None]]] = set()
        self._ended_counts = EventCounts()

    def subscribe(self, partition: Partition, worker_id: int, dp_rank: int, source: Source) -> None:
        """Starts listening; an engine that is not there yet is connected to when it comes.

        A rank that came with a recovered index goes on where that ends.
        """
        listener = KvListener(
            self._links,
            KvIngest(partition.index, worker_id, dp_rank),
            source.endpoint,
            source.replay_endpoint,
            self._turns,
        )
        rank = worker_id, dp_rank
        assert rank not in self._listeners
        watermark = partition.watermarks.pop(rank, None)
        if watermark is not None:
            listener.cursor.resume_at(watermark)
        self._listeners[rank] = listener
        self._partitions[rank] = partition
        listener.start()

    def unsubscribe(self, worker_id: int, dp_rank: int) -> None:
        """Ends a listener; what it indexed stays, and nothing of it arrives any more."""
        rank = worker_id, dp_rank
        listener = self._listeners.pop(rank)
        del self._partitions[rank]
        for ended in self.notes_of_ends:
            ended.add(rank)
        self._ended_counts.add(listener.ingest.counts)
        ending = listener.stop()
        listener.ingest.close()
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def statuses(
        self, model_name: str | None = None, tenant_id: str | None = None
    ) -> list[KvSource]:
        """Every source, or those of the partitions named, sorted by worker and rank."""
        found = []
        for rank, partition in sorted(self._partitions.items(), key=lambda item: item[0]):
            if model_name not in (None, partition.model_name):
                continue
            if tenant_id not in (None, partition.tenant_id):
                continue
            status = msgspec.structs.asdict(self._listeners[rank].status())
            status["model_name"], status["tenant_id"] = partition.model_name, partition.tenant_id
            found.append(KvSource(**status))
        return found

    def each_status(self) -> Iterator[tuple[Partition, SourceStatus]]:
        """Every source, sorted by worker and rank, looked at when it is asked for: a caller that
        pauses meanwhile misses those that end."""
        for rank in sorted(self._listeners):
            listener = self._listeners.get(rank)
            if listener is not None:
                yield self._partitions[rank], listener.status()

    def watermarks(self, partition: Partition) -> dict[RankKey, int]:
        """How far the index follows each source of a partition, where nothing before is missing."""
        watermarks = dict(partition.watermarks)
        for rank, of in self._partitions.items():
            watermark = self._listeners[rank].watermark if of is partition else None
            if watermark is not None:
                watermarks[rank] = watermark
        return watermarks

    def is_listening(self, rank: RankKey) -> bool:
        return rank in self._listeners

    def is_ahead(self, rank: RankKey) -> bool:
        """The rank's source has told something."""
        listener = self._listeners.get(rank)
        return listener is not None and listener.cursor.last_live is not None

    @contextlib.contextmanager
    def noting_ends(self) -> Iterator[set[RankKey]]:
        """The ranks whose source has ended since this began, kept up to date until it is left."""
        ended: set[RankKey] = set()
        self.notes_of_ends.append(ended)
        try:
            yield ended
        finally:
            self.notes_of_ends = [note for note in self.notes_of_ends if note is not ended]

    def counts(self) -> EventCounts:
        """Events of all sources since the start, ended ones included."""
        total = EventCounts()
        total.add(self._ended_counts)
        for listener in self._listeners.values():
            total.add(listener.ingest.counts)
        return total

    async def close(self) -> None:
        for key in list(self._listeners):
            self.unsubscribe(*key)
        await asyncio.gather(*self._ending)
