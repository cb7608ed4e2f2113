"""A state directory: its lock, and its files, which are written atomically and with a checksum."""

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterable
from typing import Annotated, Final, Literal

import msgspec
from xxhash import xxh3_64

from lean_selector.core.load.shapes import BusyThreshold
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

_END = '"}\n'
_TAIL_BYTES = 16 + len(_END)  # with the XXH3-64 in hexadecimal


class _LastLine(msgspec.Struct):
    wall_s: float  # since 1970


_decode = msgspec.json.Decoder(_LastLine).decode


class Damaged(ValueError):
    """A state file has invalid content, such as a wrong checksum; the message has the reason."""


def sealed(text: Iterable[bytes], written_at: float) -> list[bytes]:
    """Return the content of a state file that was written at the Unix time `written_at`."""
    covered = [*text, b'\n{"wall_s":%.3f,"xxh3":"' % written_at]
    checksum = xxh3_64()
    for part in covered:
        checksum.update(part)
    return [*covered, f"{checksum.hexdigest()}{_END}".encode()]


def opened(content: bytes) -> tuple[bytes, float]:
    """Verifies the checksum. Return the text and when it was written. Raises Damaged."""
    covered = content[:-_TAIL_BYTES]
    if content[-_TAIL_BYTES:] != f"{xxh3_64(covered).hexdigest()}{_END}".encode():
        raise Damaged("its end is missing, or its checksum is wrong")
    text, _, line = covered.rpartition(b"\n")
    try:
        return text, _decode(line + b'"}').wall_s
    except msgspec.DecodeError as error:
        raise Damaged(f"its last line: {error}") from None


# -- the directory ---------------------------------------------------------------------------------
# Every method blocks on the disk.

CATALOG: Final = "catalog"
RESERVATIONS: Final = "reservations"


class DirectoryHeld(OSError):
    """Another process has locked the directory. The message names the process."""


class StateDirectory:
    """A state directory. Only the process that holds the lock, from `take` to its end or `close`,
    may write; if `take` failed, the first write takes the lock. A file is written by one thread at
    a time."""

    def __init__(self, path: str) -> None:
        self.path: Final = os.path.abspath(path)
        self._lock: int | None = None  # the descriptor of the locked file
        self._taking: Final = threading.Lock()

    def at(self, name: str) -> str:
        return os.path.join(self.path, name)

    def take(self) -> None:
        """Creates the directory if missing, and locks it. Raises DirectoryHeld or OSError."""
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        lock = os.open(self.at("lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.pwrite(lock, b"%-19d\n" % os.getpid(), 0)
        except BlockingIOError:
            holder = os.pread(lock, 20, 0).decode(errors="replace").strip()
            os.close(lock)
            raise DirectoryHeld(f"{self.path} is in use by process {holder}") from None
        except OSError:
            os.close(lock)
            raise
        self._lock = lock

    def close(self) -> None:
        """Unlocks the directory. Nothing may be written afterwards."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def read(self, name: str) -> bytes | None:
        """Return the content of a file; None if the file does not exist. Raises OSError."""
        try:
            with open(self.at(name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def set_aside(self, name: str) -> str:
        """Renames a file to NAME.damaged. Return the new path. Raises OSError."""
        aside = self.at(f"{name}.damaged")
        os.rename(self.at(name), aside)
        return aside

    def keep_copy(self, name: str) -> str:
        """Keeps a copy (a hard link) of a file that will be overwritten, as NAME.unfit, in place of
        an older copy. Return its path. Raises OSError."""
        copy = self.at(f"{name}.unfit")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(copy)
        os.link(self.at(name), copy)
        return copy

    def write(self, name: str, content: Iterable[bytes]) -> None:
        """Replaces a file. On return it is on disk. After an error (OSError), the old file is
        unchanged, unless only the directory's fsync failed."""
        with self._taking:
            if self._lock is None:
                self.take()
        new = self.at(f"{name}.new")
        with open(new, "wb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.writelines(content)
            file.flush()
            os.fsync(file.fileno())
        os.rename(new, self.at(name))
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
