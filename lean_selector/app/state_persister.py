"""Saves workers, thresholds and peers after each change, and reservations at an interval.

Text is made on the loop, in slices; it is written in a thread."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Protocol

from lean_selector.app.state_files import CATALOG, RESERVATIONS, StateDirectory, sealed
from lean_selector.core.load.slots import Slots
from lean_selector.core.replication.ledger import ReplicaTarget
from lean_selector.parts import Part
from lean_selector.tasks import in_thread, supervise
from lean_selector.wire.exposition import Families, by, table
from lean_selector.wire.replica_snapshot import encode_snapshot, live_lines

# The slots object distinguishes a partition from a later one of the same name.
Revision = list[tuple[Slots, int]]


@dataclass(frozen=True)
class LiveReservations:
    """The live reservations of all partitions, as the text of a state file. `router_id` is this
    replica's id. `sequence` returns the last published event's number."""

    targets: Callable[[], Iterable[ReplicaTarget]]
    router_id: int
    sequence: Callable[[], int]

    def revision(self) -> Revision:
        """Return a value that changes if and only if a reservation changes."""
        return [(target.slots, target.slots.revision) for target in self.targets()]

    def parts(self, now: float) -> Iterator[bytes]:
        """Yields the text of the state file, which has each reservation's age at time `now`."""
        lines = live_lines(self.targets(), self.router_id, now)
        return encode_snapshot(self.router_id, self.sequence(), lines)


log = logging.getLogger("lean_selector.state")

SLICE_S: Final = 0.001  # per turn of the loop, as for KV events
INTERVAL_S: Final = 1.0  # between two writes of live reservations
RETRY_S: Final = 1.0  # after a failure to write the catalog
COST_PAUSE: Final = 10  # reservations are being saved for a tenth of the time at most


class Contents(Protocol):
    """What the file `catalog` contains: workers, thresholds and peers, but no reservations."""

    @property
    def revision(self) -> int: ...

    def text(self) -> bytes: ...


@dataclass(eq=False)
class StateFile:
    """One of the two files, and what became of its last writes."""

    name: str
    state: Callable[[], object]  # equal to an earlier one if and only if the text is
    parts: Callable[[float], Iterable[bytes]]  # of the text, at this time
    saved: object = None  # the state on disk
    saved_at: float = 0.0
    job: "asyncio.Future[None] | None" = None  # the last write
    fault: str | None = None
    writes: int = 0
    failures: int = 0
    bytes: int = 0  # of the last write


@dataclass(eq=False)
class Persister(Part):
    """Writes the state files. `on_fault` is called with the reason when writing fails, and with
    None when writing succeeds again. Used only on the loop's thread."""

    directory: StateDirectory
    contents: Contents
    reservations: LiveReservations
    on_fault: Callable[[str | None], None]
    interval_s: float = INTERVAL_S

    def __post_init__(self) -> None:
        self._catalog = StateFile(CATALOG, self.contents.text, lambda _: [self.contents.text()])
        self._live = StateFile(RESERVATIONS, self.reservations.revision, self.reservations.parts)
        self._live.saved_at = time.monotonic()
        self.files = self._catalog, self._live
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._changed.set()  # the catalog is saved once at the start
        self._seen_revision = self.contents.revision
        self._waiting: list[Callable[[], None]] = []  # for the catalog to be on disk
        self.restored = 0  # reservations restored at start
        self.dropped = 0  # reservations that could not be restored

    # -- seen from outside -------------------------------------------------------------------------

    @property
    def fault(self) -> str | None:
        """Why changes cannot be written; None if there is no fault."""
        return next((f"{file.name}: {file.fault}" for file in self.files if file.fault), None)

    def age_s(self) -> float:
        """Return how many seconds of reservation changes a crash would lose; 0 without changes."""
        live = self._live
        return 0.0 if live.state() == live.saved else time.monotonic() - live.saved_at

    def families(self) -> Families:
        files = self.files
        return table({
            "state_failing": (lambda: int(self.fault is not None),
                "1 while the state directory cannot be written."),
            "state_age_seconds": (self.age_s,
                "Age of the live reservations on disk; 0 if nothing has changed since."),
            "state_writes_total": (
                lambda: by("file", {file.name: file.writes for file in files}),
                "Files that were written, by file."),
            "state_write_failures_total": (
                lambda: by("file", {file.name: file.failures for file in files}),
                "Files that could not be written, by file."),
            "state_file_bytes": (lambda: by("file", {file.name: file.bytes for file in files}),
                "Size of the file written last, by file."),
            "state_restored_reservations": (
                lambda: by("result", {"live": self.restored, "dropped": self.dropped}),
                "Reservations on disk at start, by outcome."),
        })  # fmt: skip

    # -- the catalog -------------------------------------------------------------------------------

    def note(self) -> None:
        """Schedules saving, because workers, thresholds or peers may have changed."""
        self._seen_revision = self.contents.revision
        self._changed.set()

    def tick(self, now: float) -> None:
        """Call this periodically. Schedules saving if workers changed and nobody called `note`."""
        if self.contents.revision != self._seen_revision:
            self.note()

    def when_saved(self, then: Callable[[], None]) -> bool:
        """Call this after `note`. Return False if the last write failed. Else returns True, and
        calls `then` when the changes are on disk, or writing them fails."""
        if self._catalog.fault is not None:
            return False
        self._waiting.append(then)
        return True

    async def _keep_catalog(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            waiting, self._waiting = self._waiting, []
            is_saved = False
            try:
                is_saved = await self._save(self._catalog)
            finally:
                if not is_saved:
                    self._changed.set()
                for then in waiting:
                    then()
            if not is_saved:
                await asyncio.sleep(RETRY_S)

    # -- any file ----------------------------------------------------------------------------------

    async def _keep_reservations(self) -> None:
        pause_s = self.interval_s
        while True:
            await asyncio.sleep(pause_s)
            began = time.monotonic()
            await self._save(self._live)
            pause_s = max(self.interval_s, COST_PAUSE * (time.monotonic() - began))

    async def _save(self, file: StateFile) -> bool:
        """Writes the file if its state has changed. Return False if that failed."""
        began, state = time.monotonic(), file.state()
        try:
            if state != file.saved:
                await self._write(file, began)
                file.saved = state
                file.writes += 1
        except OSError as error:
            file.failures += 1
            file.saved = None
            if file.fault is None:
                reason = error.strerror or str(error)
                log.warning("state is not written", extra={"file": file.name, "reason": reason})
                file.fault = reason
            self.on_fault(self.fault)
            return False
        file.saved_at = began
        if file.fault is not None:
            log.info("state is written again", extra={"file": file.name})
            file.fault = None
            self.on_fault(self.fault)
            other = self._live if file is self._catalog else self._catalog
            other.saved = None  # the disk may be another one
            self._changed.set()
        return True

    async def _write(self, file: StateFile, now: float) -> None:
        """Makes the text in slices between other work of the loop, then writes the file."""
        written_at = time.time()
        # Joined in slices: a thread that joins a long text, or handles many parts, delays the loop.
        slices, parts = list[bytes](), list[bytes]()
        slice_ends = time.perf_counter() + SLICE_S
        for part in file.parts(now):  # of a long prompt, one takes a third of a millisecond
            parts.append(part)
            if time.perf_counter() >= slice_ends:
                slices.append(b"".join(parts))
                parts.clear()
                await asyncio.sleep(0)
                slice_ends = time.perf_counter() + SLICE_S
        slices.append(b"".join(parts))

        def write() -> None:
            content = sealed(slices, written_at)
            self.directory.write(file.name, content)
            file.bytes = sum(map(len, content))

        file.job = in_thread(f"state {file.name}", write)
        await asyncio.shield(file.job)

    # -- from the start to the end -----------------------------------------------------------------

    def start(self) -> None:
        self._tasks = [
            supervise("state catalog", self._keep_catalog),
            supervise("state reservations", self._keep_reservations),
        ]

    async def close(self) -> None:
        """Saves everything, then unlocks the directory."""
        for task in self._tasks:
            task.cancel()
        jobs = [file.job for file in self.files if file.job is not None]
        await asyncio.gather(*self._tasks, *jobs, return_exceptions=True)
        for file in self.files:
            await self._save(file)
        self.directory.close()
        for then in self._waiting:
            then()
