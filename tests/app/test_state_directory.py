"""A directory of one process at a time, and files that are there whole or not at all."""

import contextlib
import errno
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from lean_selector.app.host import StartError
from lean_selector.app.state import _take
from lean_selector.app.state_files import DirectoryHeld, StateDirectory, opened, sealed
from tests.app.kept_selector import is_free

STAMP = 1.0


def held(path: Path) -> StateDirectory:
    directory = StateDirectory(str(path))
    directory.take()
    return directory


def test_one_holds_it_and_the_next_after_it(tmp_path: Path) -> None:
    first = held(tmp_path)
    with pytest.raises(DirectoryHeld, match=r"is in use by process \d+"):
        StateDirectory(str(tmp_path)).take()
    first.close()
    held(tmp_path).close()


@contextlib.contextmanager
def room_for(size: int) -> Iterator[None]:
    """No file gets longer than that."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


class Faulty(StateDirectory):
    """One on a disk that cannot be locked."""

    errno: int | None = None

    def take(self) -> None:
        if self.errno is not None:
            raise OSError(self.errno, "fails")
        super().take()


def test_a_disk_that_is_read_only_at_the_start_is_locked_by_the_first_write(tmp_path: Path) -> None:
    directory = Faulty(str(tmp_path))
    directory.errno = errno.EROFS
    _take(directory, 0.0)
    with pytest.raises(OSError, match="fails"):
        directory.write("x", sealed([b"y"], STAMP))
    directory.errno = None
    other = held(tmp_path)
    with pytest.raises(DirectoryHeld):
        directory.write("x", sealed([b"y"], STAMP))
    other.close()
    assert not (tmp_path / "x").exists()
    directory.write("x", sealed([b"y"], STAMP))
    assert not is_free(tmp_path)
    directory.close()


@pytest.mark.parametrize(("name", "number"), [("", errno.EACCES), ("missing", errno.EROFS)])
def test_a_directory_that_is_missing_or_forbidden_stops_the_start(
    tmp_path: Path, name: str, number: int
) -> None:
    directory = Faulty(str(tmp_path / name))
    directory.errno = number
    with pytest.raises(StartError, match=str(tmp_path)):
        _take(directory, 0.0)


def test_a_disk_without_room_leaves_the_file_that_was(tmp_path: Path) -> None:
    directory = held(tmp_path)
    directory.write("x", sealed([b"before"], STAMP))
    with pytest.raises(OSError, match="File too large"), room_for(16):
        directory.write("x", sealed([b"af", b"ter"], STAMP))
    assert opened((tmp_path / "x").read_bytes()) == (b"before", STAMP)
    directory.write("x", sealed([b"af", b"ter"], STAMP))
    assert opened((tmp_path / "x").read_bytes()) == (b"after", STAMP)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "x"]
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600
    directory.close()
