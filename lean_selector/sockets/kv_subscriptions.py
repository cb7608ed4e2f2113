"""All sources of KV events: one listener per worker rank, made and ended as the catalog says.

Shares one ZMQ context and one budget of time per loop turn between the listeners. Keeps the counts
of listeners that ended, so that totals only grow. Knows nothing of what an event means.
"""

import asyncio

import zmq.asyncio

from lean_selector.core.catalog import Source
from lean_selector.core.kv_ingest import EventCounts, KvIngest
from lean_selector.core.partition import Partition
from lean_selector.sockets.ingest_turns import IngestTurns
from lean_selector.sockets.kv_listener import KvListener, SourceStatus


class KvSubscriptions:
    """The catalog's SourceSink. Used from the loop's thread only."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self._context = context
        self._turns = IngestTurns()
        self._listeners: dict[tuple[int, int], KvListener] = {}
        self._ending: set[asyncio.Future[list[None | BaseException]]] = set()
        self._ended_counts = EventCounts()

    def subscribe(
        self, partition: Partition, worker_id: int, dp_rank: int, source: Source
    ) -> None:
        """Starts listening; an engine that is not there yet is connected to when it comes."""
        listener = KvListener(
            self._context,
            KvIngest(partition.index, worker_id, dp_rank),
            source.endpoint,
            source.replay_endpoint,
            self._turns,
        )
        assert (worker_id, dp_rank) not in self._listeners
        self._listeners[worker_id, dp_rank] = listener
        listener.start()

    def unsubscribe(self, worker_id: int, dp_rank: int) -> None:
        """Ends a listener; what it indexed stays, and nothing of it arrives any more."""
        listener = self._listeners.pop((worker_id, dp_rank))
        self._ended_counts.add(listener.ingest.counts)
        ending = listener.stop()
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    def statuses(self) -> list[SourceStatus]:
        """Every source, sorted by worker and rank."""
        return [listener.status() for _, listener in sorted(self._listeners.items())]

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
