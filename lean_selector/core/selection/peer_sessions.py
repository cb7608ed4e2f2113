"""Exchanges session bindings (the rank of each session) with other replicas, for all partitions.
Spec selection_16.md 6.1. This module opens no sockets and decodes no messages. Time is an argument,
in monotonic seconds."""

from collections.abc import Iterator

from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.sessions.shapes import LiveSession, SessionEvent, SessionVerdict


class PeerSessions:
    """Applies session bindings that other replicas published, and counts them by SessionVerdict."""

    def __init__(self, catalog: Catalog, writer_id: int) -> None:
        """`writer_id` is this replica's id in the session bindings that it publishes."""
        self.counts = [0] * len(SessionVerdict)
        self._catalog = catalog
        self._writer_id = writer_id

    def apply(self, event: SessionEvent, now: float, idle_s: float = 0.0) -> SessionVerdict:
        """Apply another replica's session binding, last used `idle_s` seconds ago."""
        verdict = self._apply(event, now, idle_s)
        self.counts[verdict] += 1
        return verdict

    def _apply(self, event: SessionEvent, now: float, idle_s: float) -> SessionVerdict:
        if event.writer_id == self._writer_id:
            return SessionVerdict.OWN
        key = event.model_name, event.routing_group
        partition = self._catalog.partitions.get(key)
        if partition is None or not partition.established:
            return SessionVerdict.UNKNOWN_PARTITION
        if partition.sessions is None:
            return SessionVerdict.OFF
        worker = self._catalog.workers.get(event.worker_id)
        if worker is None or worker.spec.key != key:
            return SessionVerdict.UNKNOWN_WORKER
        return partition.sessions.apply(event, now, idle_s)

    def live(self, now: float) -> Iterator[LiveSession]:
        """Yield the live bindings of all partitions, for a replica that requested a snapshot."""
        for partition in list(self._catalog.partitions.values()):
            if partition.sessions is not None:
                yield from partition.sessions.live(now)

    def expire_and_republish(self, now: float, max_steps: int) -> None:
        """In each partition, expire at most `max_steps` bindings, and publish again at most
        `max_steps` bindings, before other replicas expire them. Call this about every second."""
        for partition in list(self._catalog.partitions.values()):
            if partition.sessions is not None:
                partition.sessions.sweep(now, max_steps)
                partition.sessions.keep_alive(now, max_steps)
