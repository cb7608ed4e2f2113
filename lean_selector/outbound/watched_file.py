"""A small file that others replace while we run, as a token: read again when it has changed."""

import os
from typing import Final

MOST_BYTES: Final = 1 << 20


class WatchedFile:
    """Its bytes as they are now. A look costs a stat, which follows links as those of secrets."""

    def __init__(self, path: str, most_bytes: int = MOST_BYTES, *, keeps: bool = True) -> None:
        """Not `keeps`: what it holds is not kept here, and read only when it is new."""
        self.path: Final = path
        self._keeps = keeps
        self._most_bytes = most_bytes
        self._known: tuple[int, int, int] | None = None
        self._bytes = b""

    def read(self) -> tuple[bytes, bool]:
        """What it holds, and whether it changed since the last read. Raises OSError.

        Unchanged and not kept: nothing.
        """
        status = os.stat(self.path)
        known = status.st_mtime_ns, status.st_ino, status.st_size
        if known == self._known:
            return self._bytes, False
        with open(self.path, "rb") as file:
            found = file.read(self._most_bytes + 1)
        if len(found) > self._most_bytes:
            raise OSError(f"{self.path} has more than {self._most_bytes} bytes")
        self._known = known
        if self._keeps:
            self._bytes = found
        return found, True

    def forget(self) -> None:
        """The next read is of the file, however it looks."""
        self._known = None
