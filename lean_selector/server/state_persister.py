"""Saves workers, thresholds and peers after each change, and reservations at an interval.

Work on the loop is done in slices; blocking disk operations run in the threads of `DiskThread`."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, Protocol

from lean_selector.core.load.slots import Slots
from lean_selector.core.replication.events import ReplicaTarget
from lean_selector.parts import Part
from lean_selector.server.state_files import (
    CATALOG,
    RESERVATIONS,
    DiskHangs,
    DiskThread,
    StateDirectory,
)
from lean_selector.service.exposition import Families, by, table
from lean_selector.tasks import supervise
from lean_selector.wire.replica_snapshot import SNAPSHOT_END, SnapshotLines, snapshot_head

# The slots object distinguishes a partition from a later one of the same name.
Revision = list[tuple[Slots, int]]


class LiveBookings:
    """The live reservations of all partitions, as the text of a state file."""

    def __init__(
        self,
        targets: Callable[[], Iterable[ReplicaTarget]],
        router_id: int,
        sequence: Callable[[], int],
    ) -> None:
        """`router_id`: this replica's id. `sequence` returns the last published event's number."""
        self._targets: Final = targets
        self._router_id: Final = router_id
        self._sequence: Final = sequence
        self._lines: Final = SnapshotLines(router_id)

    def revision(self) -> Revision:
        """Returns a value that changes if and only if a reservation changes."""
        return [(target.slots, target.slots.revision) for target in self._targets()]

    def parts(self, now: float) -> Iterator[bytes]:
        """Yields the text of the state file, which has each reservation's age at time `now`."""
        lines = self._lines
        lines.begin()
        yield snapshot_head(self._router_id, self._sequence())
        end = b"\n"
        for target in list(self._targets()):
            for held in target.slots.by_touch():
                yield end + lines.line(target, held, now)
                end = b",\n"
        yield SNAPSHOT_END


log = logging.getLogger("lean_selector.state")

SLICE_S: Final = 0.001  # per turn of the loop, as for KV events
STEPS: Final = 32  # reservations between checks of the clock: 50 us
# Maximum share of a core for saving reservations. If a snapshot takes a larger share of the
# interval, the next one is delayed.
SHARE: Final = 0.03
INTERVAL_S: Final = 1.0  # between two writes of live reservations
RETRY_S: Final = 1.0  # after a failure
# If the disk accepts nothing for this long, waiting calls treat it as failed.
HANGS_AFTER_S: Final = 5.0
# Time for each step at exit: the process must end, and lost reservations expire anyway.
LAST_S: Final = 2.0


class Contents(Protocol):
    """What the file `catalog` contains: workers, thresholds and peers, but no reservations."""

    @property
    def revision(self) -> int: ...

    def text(self) -> bytes: ...


class Persister(Part):
    """Writes the state files. `on_fault` is called with the reason when writing fails, and with
    None when writing succeeds again. Used only on the loop's thread."""

    def __init__(
        self,
        directory: StateDirectory,
        catalog: Contents,
        bookings: LiveBookings,
        on_fault: Callable[[str | None], None],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._directory = directory
        self._catalog = catalog
        self._bookings = bookings
        self._interval_s = interval_s
        self._on_fault = on_fault
        self._faults: dict[str, str] = {}  # by file
        self._files = {name: DiskThread(directory, name) for name in (CATALOG, RESERVATIONS)}
        self._tasks: list[asyncio.Task[None]] = []
        self._patience_s: float | None = None  # how long to wait for a disk that takes nothing
        self._changed = asyncio.Event()
        self._seen_revision = -1  # of the catalog
        self._change = 0  # increases with each change of the catalog
        self._saved_change = 0
        self._saved_text = b""
        self._generation = directory.generation  # of the directory when the files were saved
        # (change, callback), oldest first
        self._waiting: deque[tuple[int, Callable[[], None]]] = deque()
        self._saved_revision: Revision | None = None
        self._loop_spent_s = 0.0
        self._saved_at = time.monotonic()  # when the reservations on disk were current
        self.writes: Final = {CATALOG: 0, RESERVATIONS: 0}
        self.failures: Final = {CATALOG: 0, RESERVATIONS: 0}
        self.restored = 0  # reservations restored at start
        self.dropped = 0  # reservations that could not be restored

    # -- seen from outside -----------------------------------------------------------------------

    @property
    def fault(self) -> str | None:
        """Why changes cannot be written; None if there is no fault."""
        return next((f"{name}: {why}" for name, why in self._faults.items()), None)

    def spent_s(self) -> float:
        """Returns the processor time spent on saving, on the loop and in threads, in seconds."""
        return self._loop_spent_s + sum(file.spent_s for file in self._files.values())

    def age_s(self) -> float:
        """Returns how many seconds of reservation changes a crash would lose; 0 without changes."""
        if self._bookings.revision() == self._saved_revision:
            return 0.0
        return time.monotonic() - self._saved_at

    def families(self) -> Families:
        """Returns the metrics of the state directory."""
        return table({
            "state_failing": (lambda: int(self.fault is not None),
                "1 while the state directory cannot be written."),
            "state_age_seconds": (self.age_s,
                "Age of the live reservations on disk; 0 if nothing has changed since."),
            "state_writes_total": (lambda: by("file", self.writes),
                "Files that were written, by file."),
            "state_write_failures_total": (lambda: by("file", self.failures),
                "Files that could not be written, by file."),
            "state_file_bytes": (
                lambda: by("file", {name: file.bytes for name, file in self._files.items()}),
                "Size of the file written last, by file."),
            "state_cpu_seconds_total": (self.spent_s,
                "Processor time used to save state, of the loop and of its threads."),
            "state_restored_reservations": (
                lambda: by("result", {"live": self.restored, "dropped": self.dropped}),
                "Reservations on disk at start, by outcome."),
        })  # fmt: skip

    # -- the catalog -----------------------------------------------------------------------------

    def note(self) -> None:
        """Schedules saving, because workers, thresholds or peers may have changed."""
        self._change += 1
        self._seen_revision = self._catalog.revision
        self._changed.set()

    def when_saved(self, then: Callable[[], None]) -> bool:
        """Returns False if all catalog changes are saved, or the last write failed. Else returns
        True, and calls `then` when the changes are on disk, or writing them fails or hangs."""
        if self._saved_change == self._change or CATALOG in self._faults:
            return False
        self._waiting.append((self._change, then))
        return True

    def _tell_waiting(self, change: int) -> None:
        waiting = self._waiting
        while waiting and waiting[0][0] <= change:
            waiting.popleft()[1]()

    async def _keep_catalog(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            if not await self._save_catalog():
                self._changed.set()
                await asyncio.sleep(RETRY_S)

    async def _save_catalog(self) -> bool:
        change, file = self._change, self._files[CATALOG]
        try:
            began = time.thread_time()
            text = self._catalog.text()
            self._loop_spent_s += time.thread_time() - began
            if text != self._saved_text or CATALOG in self._faults:
                await self._write(file, [text])
                self._saved_text = text
                self.writes[CATALOG] += 1
        except OSError as error:
            self._failed(CATALOG, error)
            self._tell_waiting(change)
            return False
        except Exception:
            self._tell_waiting(change)
            raise
        self._saved_change = change
        self._succeeded(CATALOG)
        self._tell_waiting(change)
        return True

    # -- reservations ------------------------------------------------------------------------------

    async def _keep_reservations(self) -> None:
        pause_s = self._interval_s
        while True:
            await asyncio.sleep(pause_s)
            began, spent_s = time.monotonic(), self.spent_s()
            is_saved = await self._save_reservations()
            if self._generation != self._directory.generation:
                self._generation = self._directory.generation
                self._saved_revision, self._saved_text = None, b""  # the disk may be another one
                self.note()
            if not is_saved:
                pause_s = max(RETRY_S, self._interval_s)
                continue
            least_s = max(self._interval_s, (self.spent_s() - spent_s) / SHARE)
            pause_s = max(0.0, began + least_s - time.monotonic())

    async def _save_reservations(self) -> bool:
        revision = self._bookings.revision()
        file, began = self._files[RESERVATIONS], time.monotonic()
        try:
            if revision == self._saved_revision and RESERVATIONS not in self._faults:
                check = partial(self._directory.check, (CATALOG, RESERVATIONS))
                await file.run(check, self._patience_s)
                self._saved_at = began
                return True
            await self._write(file, self._bookings.parts(began))
        except OSError as error:
            self._failed(RESERVATIONS, error)
            return False
        self._saved_revision, self._saved_at = revision, began
        self.writes[RESERVATIONS] += 1
        self._succeeded(RESERVATIONS)
        return True

    # -- any file --------------------------------------------------------------------------------

    async def _write(self, file: DiskThread, parts: Iterable[bytes]) -> None:
        """Encodes the text in slices between other work of the loop, then writes the file. Raises
        OSError and DiskHangs."""
        written_at = time.time()
        slices: list[bytes] = []
        made: list[bytes] = []
        began = time.thread_time()
        for part in parts:
            made.append(part)
            if len(made) % STEPS == 0 and time.thread_time() - began >= SLICE_S:
                slices.append(b"".join(made))
                made.clear()
                self._loop_spent_s += time.thread_time() - began
                await asyncio.sleep(0)
                began = time.thread_time()
        slices.append(b"".join(made))
        self._loop_spent_s += time.thread_time() - began
        await file.write(slices, written_at, self._patience_s)

    # -- faults -------------------------------------------------------------------------

    def _failed(self, name: str, error: OSError) -> None:
        self.failures[name] += 1
        self._say(name, error.strerror or str(error))

    def _say(self, name: str, why: str) -> None:
        if name not in self._faults:
            log.warning("state is not written", extra={"file": name, "reason": why})
        self._faults[name] = why
        self._on_fault(self.fault)

    def _succeeded(self, name: str) -> None:
        if self._faults.pop(name, None) is not None:
            log.info("state is written again", extra={"file": name})
            self._on_fault(self.fault)

    def tick(self, now: float) -> None:
        """Call this periodically. Schedules saving if workers changed and nobody called `note`.
        If a catalog write hangs for HANGS_AFTER_S, calls the functions given to `when_saved`."""
        if self._catalog.revision != self._seen_revision:
            self.note()
        for name, file in self._files.items():
            if file.moved_at is not None and now - file.moved_at > HANGS_AFTER_S:
                self._say(name, f"the disk has not answered for {now - file.moved_at:.0f} s")
                if name == CATALOG:
                    self._tell_waiting(self._change)

    def begin_with(self, fault: str | None) -> None:
        """Schedules the first save. If locking the directory failed, `fault` says why."""
        if fault is not None:
            self._say(CATALOG, fault)
        self.note()

    # -- from the start to the end ---------------------------------------------------------------

    def start(self) -> None:
        self._tasks = [
            supervise("state catalog", self._keep_catalog),
            supervise("state reservations", self._keep_reservations),
        ]

    async def close(self) -> None:
        """Saves everything, then unlocks the directory. Gives up if the disk accepts nothing for
        LAST_S; then the end of the process unlocks the directory."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._patience_s = LAST_S
        try:
            for file in self._files.values():
                await file.idle(LAST_S)  # for the write that was in progress when the tasks ended
            await self._save_catalog()
            await self._save_reservations()
            self._directory.close()
        except DiskHangs:
            log.warning("state is not completely written", extra={"waited_s": LAST_S})
        finally:
            self._tell_waiting(self._change)
