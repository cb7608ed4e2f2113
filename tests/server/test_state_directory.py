"""A directory of one process at a time, and files that are there whole or not at all."""

import contextlib
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from lean_selector.server.state_files import DirectoryHeld, StateDirectory, opened

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


def test_a_disk_without_room_leaves_the_file_that_was(tmp_path: Path) -> None:
    directory = held(tmp_path)
    directory.write("x", [b"before"], STAMP)
    with pytest.raises(OSError, match="File too large"), room_for(16):
        directory.write("x", [b"after"], STAMP)
    assert opened((tmp_path / "x").read_bytes()) == (b"before", STAMP)
    directory.write("x", [b"af", b"ter"], STAMP)
    assert opened((tmp_path / "x").read_bytes()) == (b"after", STAMP)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lock", "x"]
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o600
    directory.close()


def test_a_lock_file_of_garbage_is_somebodys_all_the_same(tmp_path: Path) -> None:
    directory = held(tmp_path)
    (tmp_path / "lock").write_bytes(b"\xff" * 48)
    with pytest.raises(DirectoryHeld, match="is in use by another process"):
        StateDirectory(str(tmp_path)).take()
    directory.close()


def test_who_gives_up_in_the_middle_leaves_the_file_that_was(tmp_path: Path) -> None:
    directory = held(tmp_path)
    directory.write("x", [b"before"], STAMP)

    def parts() -> Iterator[bytes]:
        yield b"half"
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        directory.write("x", parts(), STAMP)
    assert opened((tmp_path / "x").read_bytes()) == (b"before", STAMP)
    directory.close()


def test_a_directory_that_could_not_be_made_is_made_when_it_can_be(tmp_path: Path) -> None:
    """And not again: where it has gone, a disk has."""
    above = tmp_path / "above"
    above.touch()
    directory = StateDirectory(str(above / "state"))
    with pytest.raises(OSError, match="Not a directory"):
        directory.create()
    with pytest.raises(OSError, match="Not a directory"):
        directory.write("x", [b"y"], STAMP)
    above.unlink()
    directory.write("x", [b"y"], STAMP)
    (above / "state").rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="No such file"):
        directory.write("x", [b"y"], STAMP)
    assert not (above / "state").exists()


def test_a_lock_file_that_was_replaced_is_taken_anew(tmp_path: Path) -> None:
    directory = held(tmp_path)
    (tmp_path / "lock").unlink()
    directory.write("x", [b"y"], STAMP)
    with pytest.raises(DirectoryHeld):
        StateDirectory(str(tmp_path)).take()
    directory.close()


def test_a_directory_that_another_holds_now_is_not_written(tmp_path: Path) -> None:
    """It was deleted under us, and made by another process."""
    directory = held(tmp_path)
    (tmp_path / "lock").unlink()
    other = held(tmp_path)
    with pytest.raises(OSError, match="is in use by process"):
        directory.write("x", [b"y"], STAMP)
    other.close()
