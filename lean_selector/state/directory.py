"""A state directory: who may write there, and files that appear in it whole or not at all.

One process holds it, by a lock on the file `lock`; the kernel lets go of it when the process ends,
however that ends. Every method waits for the disk. Knows nothing of what is in the files.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from typing import Final

from lean_selector.state.seal import Seal
from lean_selector.state.shapes import Stamp

LOCK: Final = "lock"
_PATIENCE_S: Final = 0.5
_TOKEN_BYTES: Final = 48  # always as many, so that a full disk has room for the next one


class Held(Exception):
    """Another process holds the directory; the message says which, as far as it is known."""


class StateDirectory:
    """`take` it first. `write` may be called from any thread, the others from one at a time."""

    def __init__(self, path: str) -> None:
        self.path: Final = os.path.abspath(path)
        self._lock_path: Final = os.path.join(self.path, LOCK)
        self._fd: int | None = None
        self._token = b""  # what we wrote into the lock file when we last took it
        self._is_missing = False  # it could not be made
        self._is_wanted = False  # nobody is to take it for us after we let go
        self._taking = threading.Lock()
        self.generation = 0  # another one: what was written before may not be here

    # -- who writes here -------------------------------------------------------------------------

    def create(self) -> None:
        """Makes the directory where there is none. Raises OSError; a `write` tries again then."""
        self._is_missing = True
        os.makedirs(self.path, mode=0o700, exist_ok=True)
        self._is_missing = False

    def take(self) -> None:
        """From here on ours. Raises Held, or OSError."""
        token = (b"%d %b" % (os.getpid(), secrets.token_hex(16).encode())).ljust(_TOKEN_BYTES - 1)
        fd = self._locked()
        try:
            os.pwrite(fd, token + b"\n", 0)
        except OSError:
            os.close(fd)
            raise
        self._fd, self._token, self._is_wanted = fd, token + b"\n", True
        self.generation += 1

    def wish(self) -> None:
        """It could not be taken; the next `write` tries again."""
        self._is_wanted = True

    def let_go(self) -> None:
        """A successor may take it. What is still being written stops short of its name."""
        self._is_wanted = False
        # A disk that hangs may have this for good: then the end of the process lets go.
        if self._taking.acquire(timeout=_PATIENCE_S):
            self._close()
            self._taking.release()

    def _close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def take_again(self) -> bool:
        """Takes it once more if nobody has held it since we let go; else leaves all as it is."""
        if self._fd is not None or not self._token:
            return self._fd is not None
        try:
            fd = self._locked()
            if os.pread(fd, _TOKEN_BYTES + 1, 0) == self._token:
                self._fd, self._is_wanted = fd, True
                return True
            os.close(fd)
        except (Held, OSError):
            pass
        return False

    def _locked(self) -> int:
        while True:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if self._is_at_path(fd):
                    return fd
            except BlockingIOError:
                holder = os.pread(fd, _TOKEN_BYTES, 0).split()
                os.close(fd)
                is_known = bool(holder) and holder[0].isdigit()
                who = f"process {holder[0].decode()}" if is_known else "another process"
                raise Held(f"{self.path} is in use by {who}") from None
            except OSError:
                os.close(fd)
                raise
            os.close(fd)  # it was replaced meanwhile

    def _is_at_path(self, fd: int) -> bool:
        try:
            at_path = os.stat(self._lock_path)
        except FileNotFoundError:
            return False
        return os.path.samestat(at_path, os.fstat(fd))

    @contextlib.contextmanager
    def _ours(self) -> Iterator[None]:
        """Nobody else takes it meanwhile. Raises OSError."""
        with self._taking:
            try:
                self._hold()
                yield
            finally:
                if not self._is_wanted:  # whoever let go of it meanwhile could not wait
                    self._close()

    def _hold(self) -> None:
        """The disk may have gone, and another one, or the same, have come. Raises OSError."""
        if not self._is_wanted:
            raise OSError(errno.EBUSY, "the directory was let go")
        if self._fd is not None and self._is_at_path(self._fd):
            return
        self._close()
        if self._is_missing:
            self.create()
        try:
            self.take()
        except Held as error:
            raise OSError(errno.EBUSY, str(error)) from None

    def check(self, names: Iterable[str]) -> None:
        """It is still there, and ours; and whether these files are. Raises OSError."""
        with self._ours():
            pass
        if not all(os.path.exists(os.path.join(self.path, name)) for name in names):
            self.generation += 1

    # -- files -----------------------------------------------------------------------------------

    def read(self, name: str) -> bytes | None:
        """A whole file; None where there is none. Raises OSError."""
        try:
            with open(os.path.join(self.path, name), "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None

    def set_aside(self, name: str) -> str:
        """Renames a file, over one that was set aside before; its new path. Raises OSError."""
        aside = os.path.join(self.path, f"{name}.damaged")
        os.rename(os.path.join(self.path, name), aside)
        return aside

    def keep_copy(self, name: str) -> str:
        """Links a file as it is beside itself, over one that was kept before, for it will be
        written anew; its second path. Raises OSError."""
        copy = os.path.join(self.path, f"{name}.unfit")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(copy)
        os.link(os.path.join(self.path, name), copy)
        return copy

    def write(self, name: str, parts: Iterable[bytes], stamp: Stamp) -> int:
        """A file of these parts and their seal, in the place of the one that was; its bytes.

        On disk when it returns. Raises OSError, and whatever `parts` raises; then the one that was
        is still there.
        """
        path = os.path.join(self.path, name)
        new = f"{path}.new"
        with self._ours():
            fd = _created(new)
        try:
            try:
                size = _fill(fd, parts, stamp)
                os.fsync(fd)
            finally:
                os.close(fd)
            with self._ours():
                os.rename(new, path)
        except BaseException:
            with contextlib.suppress(OSError), self._ours():
                os.unlink(new)
            raise
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        return size


def _created(path: str) -> int:
    """Open for writing, and nobody else's: whoever held the directory before may not have ended
    what it wrote under that name."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _fill(fd: int, parts: Iterable[bytes], stamp: Stamp) -> int:
    seal, size = Seal(), 0
    for part in parts:
        seal.add(part)
        size += _write(fd, part)
    return size + _write(fd, seal.end(stamp))


def _write(fd: int, part: bytes) -> int:
    written = 0
    while written < len(part):
        written += os.write(fd, memoryview(part)[written:])
    return written
