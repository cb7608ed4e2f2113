"""A state directory: its lock, and its files, which are written atomically and with a checksum."""

import asyncio
import contextlib
import errno
import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from xxhash import xxh3_64

from lean_selector.core.load.shapes import BusyThreshold
from lean_selector.tasks import in_thread
from lean_selector.wire.discovery_states import KeptWorker

# -- shapes ----------------------------------------------------------------------------------------

_U32 = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
_Id = Annotated[int, msgspec.Meta(ge=0)]


class PartitionRow(msgspec.Struct, frozen=True):
    """A saved partition (model and tenant): its block size and its workers."""

    model_name: str
    tenant_id: str
    block_size: _U32
    is_eagle: bool
    members: list[_Id]


class StoredThreshold(msgspec.Struct, frozen=True):
    """The saved busy thresholds of a model and tenant."""

    model_name: str
    tenant_id: str
    threshold: BusyThreshold


class CatalogFile(msgspec.Struct, frozen=True, kw_only=True):
    """The file `catalog`: all saved state except live reservations. A worker is a WorkerSpec
    (selector) or a WorkerRow (slot tracker)."""

    version: Literal[1]
    service: Literal["selector", "slot_tracker"]
    partitions: list[PartitionRow] = []
    thresholds: list[StoredThreshold] = []
    found: list[KeptWorker] = []
    peers_added: list[str] = []  # over HTTP, in addition to those from flags
    peers_removed: list[str] = []  # over HTTP, of those from flags
    workers: list[msgspec.Raw] = []


# -- the last line of a file: when it was written, and a checksum ----------------------------------

_END = b'"}\n'
_SUM_BYTES = 16  # XXH3-64 in hexadecimal


class _LastLine(msgspec.Struct):
    wall_s: float  # since 1970


_decode = msgspec.json.Decoder(_LastLine).decode


class Damaged(ValueError):
    """A state file has invalid content, such as a wrong checksum; the message has the reason."""


class Checksum:
    """The checksum of a state file: `add` each part of the file, then append `end` to the file."""

    def __init__(self) -> None:
        self._sum = xxh3_64()

    def add(self, part: bytes) -> None:
        self._sum.update(part)

    def end(self, written_at: float) -> bytes:
        line = b'\n{"wall_s":%.3f,"xxh3":"' % written_at
        self._sum.update(line)
        return line + self._sum.hexdigest().encode() + _END


def opened(sealed: bytes) -> tuple[bytes, float]:
    """Verifies the checksum at the end of a file's content. Returns the text before it, and the
    wall-clock time at which the file was written. Raises Damaged."""
    at = len(sealed) - len(_END) - _SUM_BYTES
    if at <= 0 or not sealed.endswith(_END):
        raise Damaged("its end is missing")
    covered = sealed[:at]
    if xxh3_64(covered).hexdigest().encode() != sealed[at : at + _SUM_BYTES]:
        raise Damaged("its checksum is wrong")
    text, _, line = covered.rpartition(b"\n")
    try:
        return text, _decode(line + _END).wall_s
    except msgspec.DecodeError as error:
        raise Damaged(f"its last line: {error}") from None


# -- the directory ---------------------------------------------------------------------------------
# A process owns the directory by locking the file `lock`; the kernel unlocks it when the process
# ends, and no thread can write any more. Every method blocks on the disk.

CATALOG: Final = "catalog"
RESERVATIONS: Final = "reservations"
LOCK: Final = "lock"
_PID: Final = b"%-19d\n"  # of fixed size, so that another id fits even if the disk is full


class DirectoryHeld(Exception):
    """Another process has locked the directory. The message names the process if it is known."""


class StateDirectory:
    """A state directory. Call `take` first. Any thread may call `write`; the other methods may be
    called by one thread at a time."""

    def __init__(self, path: str) -> None:
        self.path: Final = os.path.abspath(path)
        self._lock_path: Final = os.path.join(self.path, LOCK)
        self._fd: int | None = None
        self._is_missing = False  # the directory could not be created
        self._holding = threading.Lock()
        self.generation = 0  # changes when earlier files may be missing

    # -- the lock --------------------------------------------------------------------------------

    def create(self) -> None:
        """Creates the directory if missing. Raises OSError; a later `write` will try again."""
        self._is_missing = True
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        self._is_missing = False

    def take(self) -> None:
        """Locks the directory. Raises DirectoryHeld or OSError; a later `write` will try again."""
        fd = self._locked()
        try:
            os.pwrite(fd, _PID % os.getpid(), 0)
        except OSError:
            os.close(fd)
            raise
        self._fd = fd
        self.generation += 1

    def close(self) -> None:
        """Unlocks the directory. Nothing may be written afterwards."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _locked(self) -> int:
        while True:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_at_path(fd):
                    return fd
            except BlockingIOError:
                holder = os.pread(fd, 64, 0).split()
                os.close(fd)
                is_known = bool(holder) and holder[0].isdigit()
                who = f"process {holder[0].decode()}" if is_known else "another process"
                raise DirectoryHeld(f"{self.path} is in use by {who}") from None
            except OSError:
                os.close(fd)
                raise
            os.close(fd)  # the lock file was replaced meanwhile

    def _is_at_path(self, fd: int) -> bool:
        try:
            at_path = os.stat(self._lock_path)
        except FileNotFoundError:
            return False
        return os.path.samestat(at_path, os.fstat(fd))

    def _hold(self) -> None:
        """Locks the directory, unless we still hold the lock. A lock is lost, for example, if
        another directory is mounted at the path. Raises OSError."""
        with self._holding:
            if self._fd is not None and self._is_at_path(self._fd):
                return
            self.close()
            if self._is_missing:
                self.create()
            try:
                self.take()
            except DirectoryHeld as error:
                raise OSError(errno.EBUSY, str(error)) from None

    def check(self, names: Iterable[str]) -> None:
        """Renews a lost lock. If the lock was lost or a file of `names` is missing, increases
        `generation`, so that the caller saves all files again. Raises OSError."""
        self._hold()
        if not all(os.path.exists(os.path.join(self.path, name)) for name in names):
            self.generation += 1

    # -- files -----------------------------------------------------------------------------------

    def read(self, name: str) -> bytes | None:
        """Returns the content of a file; None if the file does not exist. Raises OSError."""
        try:
            with open(os.path.join(self.path, name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def set_aside(self, name: str) -> str:
        """Renames a file to NAME.damaged. Returns the new path. Raises OSError."""
        aside = os.path.join(self.path, f"{name}.damaged")
        os.rename(os.path.join(self.path, name), aside)
        return aside

    def keep_copy(self, name: str) -> str:
        """Keeps a copy (a hard link) of a file that will be overwritten. Replaces an older copy.
        Returns the path of the copy. Raises OSError."""
        copy = os.path.join(self.path, f"{name}.unfit")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(copy)
        os.link(os.path.join(self.path, name), copy)
        return copy

    def write(self, name: str, parts: Iterable[bytes], written_at: float) -> int:
        """Replaces a file by `parts` and their checksum. Returns the size of the file in bytes.

        On return the file is on disk. Raises OSError, and exceptions of the iterator of `parts`.
        After an error the old file is unchanged, unless only the directory's fsync failed."""
        path = os.path.join(self.path, name)
        new = f"{path}.new"
        self._hold()
        fd = _created(new)
        try:
            try:
                size = _fill(fd, parts, written_at)
                os.fsync(fd)
            finally:
                os.close(fd)
            self._hold()
            os.rename(new, path)
        except BaseException:
            with contextlib.suppress(OSError):
                self._hold()
                os.unlink(new)
            raise
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return size


def _created(path: str) -> int:
    """Creates a file. Unlinks an older file first, because another process may be writing to it."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _fill(fd: int, parts: Iterable[bytes], written_at: float) -> int:
    checksum, size = Checksum(), 0
    for part in parts:
        checksum.add(part)
        size += _write(fd, part)
    return size + _write(fd, checksum.end(written_at))


def _write(fd: int, part: bytes) -> int:
    written = 0
    while written < len(part):
        written += os.write(fd, memoryview(part)[written:])
    return written


# -- writing in a thread ---------------------------------------------------------------------------

T = TypeVar("T")


class DiskHangs(Exception):
    """The disk has accepted no data for as long as the caller was willing to wait."""


class DiskThread:
    """Runs the disk operations of one file in threads, one at a time, so that a hanging disk blocks
    nothing else. Used only on the loop's thread."""

    def __init__(self, directory: StateDirectory, name: str) -> None:
        self._directory = directory
        self._name = name
        self._job: asyncio.Future[Any] | None = None  # the last one
        self._moved_at = 0.0
        self.spent_s = 0.0  # total processor time of the threads
        self.bytes = 0  # of the last file written

    @property
    def moved_at(self) -> float | None:
        """When the disk last accepted data, in monotonic seconds; None if no operation runs."""
        return None if self._job is None or self._job.done() else self._moved_at

    async def run(self, work: Callable[[], T], patience_s: float | None = None) -> T:
        """Runs `work` in a thread. Raises DiskHangs if the disk takes no data for `patience_s`."""
        assert self.moved_at is None, "one at a time"

        def timed() -> T:
            try:
                return work()
            finally:
                self.spent_s += time.thread_time()

        self._moved_at = time.monotonic()
        job = self._job = in_thread(f"state {self._name}", timed)
        # No caller may be left to retrieve the exception
        job.add_done_callback(asyncio.Future.exception)
        await self.idle(patience_s)
        result: T = job.result()
        return result

    async def idle(self, patience_s: float | None = None) -> None:
        """Waits until the last operation has ended. Raises DiskHangs."""
        job = self._job
        while job is not None and not job.done():
            await asyncio.wait({job}, timeout=patience_s)
            hung_s = 0.0 if job.done() else time.monotonic() - self._moved_at
            if patience_s is not None and hung_s >= patience_s:
                raise DiskHangs

    async def write(
        self, parts: Iterable[bytes], written_at: float, patience_s: float | None = None
    ) -> None:
        """Replaces the file. On return the new file is on disk. Raises OSError and DiskHangs."""

        def each() -> Iterator[bytes]:
            for part in parts:
                yield part
                self._moved_at = time.monotonic()

        self.bytes = await self.run(
            lambda: self._directory.write(self._name, each(), written_at), patience_s
        )
