"""Exchanges session bindings (the rank of each session) with other replicas, for all partitions.
Spec selection_16.md 6.1. This module opens no sockets and decodes no messages. Time is an argument,
in monotonic seconds."""

from collections.abc import Iterator
from typing import Final

from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.sessions.shapes import LiveSession, SessionEvent, SessionVerdict

# How long a received binding waits for its worker, which should register within seconds of a start.
HOLD_S: Final = 60.0
MAX_WAITING: Final = 65_536
_UNKNOWN = SessionVerdict.UNKNOWN_PARTITION, SessionVerdict.UNKNOWN_WORKER
_Waiting = list[tuple[float, LiveSession]]  # (time of receipt, binding)


class PeerSessions:
    """Applies session bindings that other replicas published, and counts them by SessionVerdict."""

    def __init__(self, catalog: Catalog, writer_id: int) -> None:
        """`writer_id` is this replica's id in the session bindings that it publishes."""
        self.counts = [0] * len(SessionVerdict)
        self._catalog = catalog
        self._writer_id = writer_id
        self._waiting: dict[int, _Waiting] = {}  # by worker; no list is empty
        self._waiting_count = 0

    def hear(self, event: SessionEvent, now: float, idle_s: float = 0.0) -> SessionVerdict:
        """Apply another replica's session binding, last used `idle_s` seconds ago."""
        verdict = self._hear(event, now, idle_s)
        self.counts[verdict] += 1
        return verdict

    def _hear(self, event: SessionEvent, now: float, idle_s: float) -> SessionVerdict:
        if event.writer_id == self._writer_id:
            return SessionVerdict.OWN
        key = event.model_name, event.tenant_id
        partition = self._catalog.partitions.get(key)
        if partition is None or not partition.established:
            return SessionVerdict.UNKNOWN_PARTITION
        if partition.sessions is None:
            return SessionVerdict.OFF
        worker = self._catalog.workers.get(event.worker_id)
        if worker is None or worker.spec.key != key:
            return SessionVerdict.UNKNOWN_WORKER
        return partition.sessions.hear(event, now, idle_s)

    def take(self, listed: LiveSession, now: float) -> SessionVerdict:
        """Apply a binding of a snapshot. If the worker is unknown, keep the binding for later."""
        verdict = self._hear(listed.event, now, listed.idle_s)
        if verdict in _UNKNOWN and self._waiting_count < MAX_WAITING:
            self._waiting.setdefault(listed.event.worker_id, []).append((now, listed))
            self._waiting_count += 1
        else:
            self.counts[verdict] += 1
        return verdict

    def admit_waiting(self, now: float, max_steps: int) -> bool:
        """Apply bindings whose worker has registered by now, and drop bindings whose worker stayed
        unknown too long. Handles at most `max_steps` bindings; returns True if more are due."""
        for worker_id, waiting in list(self._waiting.items()):
            is_known = worker_id in self._catalog.workers
            while waiting and (is_known or now - waiting[-1][0] >= HOLD_S):
                if not max_steps:
                    return True
                max_steps -= 1
                taken_at, listed = waiting.pop()
                self._waiting_count -= 1
                self.hear(listed.event, now, listed.idle_s + now - taken_at)
            if not waiting:
                del self._waiting[worker_id]
        return False

    def give_up_waiting(self) -> None:
        """Drop all bindings whose worker is still unknown."""
        self.counts[SessionVerdict.UNKNOWN_WORKER] += self._waiting_count
        self._waiting.clear()
        self._waiting_count = 0

    def live(self, now: float) -> Iterator[LiveSession]:
        """Yield the live bindings of all partitions, for a replica that requested a snapshot."""
        for partition in list(self._catalog.partitions.values()):
            if partition.sessions is not None:
                yield from partition.sessions.live(now)

    def tend(self, now: float, max_steps: int) -> None:
        """In each partition, expire at most `max_steps` bindings, and publish again at most
        `max_steps` bindings, before other replicas expire them. Call this about every second."""
        for partition in list(self._catalog.partitions.values()):
            if partition.sessions is not None:
                partition.sessions.sweep(now, max_steps)
                partition.sessions.keep_alive(now, max_steps)
