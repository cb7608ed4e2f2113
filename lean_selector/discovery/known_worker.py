"""A worker that a discovery has named, and how far it has come."""

import asyncio
from collections.abc import Sequence
from enum import Enum
from typing import Final

from lean_selector.core.selection.workers import WorkerSpec
from lean_selector.discovery.particulars import Particulars
from lean_selector.discovery.worker_ids import worker_id_of


class State(Enum):
    ASKING = "asking"  # the engine has not said what it is yet
    REGISTERED = "registered"  # by us; whether it can be scheduled its record says
    BY_HTTP = "by_http"  # registered or changed over HTTP, which is the last word
    REMOVED = "removed"  # deleted over HTTP, and so away until it is found anew
    REFUSED = "refused"  # what was said of it cannot be registered


class KnownWorker:
    """One endpoint. `spec` is what we registered, exactly while it is ours."""

    __slots__ = (
        "asking",
        "discoveries",
        "engine",
        "entry",
        "error",
        "is_restored",
        "key",
        "leaves_at",
        "spec",
        "state",
        "warnings",
        "worker_id",
    )

    def __init__(self, key: str, entry: Particulars) -> None:
        self.key: Final = key  # of the endpoint
        self.discoveries: list[str] = []
        self.entry = entry
        self.worker_id = self.id_by(entry)
        self.engine: Particulars | None = None  # what it said of itself
        self.state = State.ASKING
        self.error: str | None = None
        self.spec: WorkerSpec | None = None
        self.leaves_at: float | None = None  # monotonic; while nobody names it
        self.asking: asyncio.Task[None] | None = None
        self.warnings: Sequence[str] = ()  # of its last registration, as the log has them
        self.is_restored = False  # nobody has named it since the process began

    def id_by(self, entry: Particulars) -> int:
        """By which it goes if `entry` speaks for it."""
        return worker_id_of(self.key) if entry.worker_id is None else entry.worker_id

    def takes(self, entry: Particulars) -> None:
        self.entry = entry
        self.worker_id = self.id_by(entry)
        self.is_restored = False
