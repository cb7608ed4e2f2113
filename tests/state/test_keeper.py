"""When a state directory is written, who waits for it, and what a disk that hangs holds up."""

import asyncio
import contextlib
import resource
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from lean_selector.core.load.booking import Booking
from lean_selector.core.load.slots import Slots
from lean_selector.state.directory import Held, StateDirectory
from lean_selector.state.keeper import CATALOG, HANGS_AFTER_S, RESERVATIONS, SHARE, Keeper
from lean_selector.state.live_bookings import LiveBookings
from lean_selector.state.seal import opened
from lean_selector.state.shapes import Stamp
from tests.on_loop import DEADLINE_S, on_loop, until

STAMP = Stamp(1.0, 1.0, "b")


class Target:
    model_name, tenant_id, block_size = "m", "t", 16

    def __init__(self) -> None:
        self.slots = Slots()
        self.slots.add_rank(1, 0)


class Catalog:
    """One whose text a test writes."""

    revision = 0

    def __init__(self) -> None:
        self.now = b"first"

    def text(self) -> bytes:
        return self.now


class Disk(StateDirectory):
    """One that answers when it is let, and remembers what was written."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.answers = threading.Event()
        self.answers.set()
        self.written: list[tuple[str, float]] = []
        self.ended = 0

    def write(self, name: str, parts: Iterable[bytes], stamp: Stamp) -> int:
        self.written.append((name, time.monotonic()))
        self.answers.wait()
        try:
            return super().write(name, parts, stamp)
        finally:
            self.ended += 1


class Slow(LiveBookings):
    """It takes a while to say what lives."""

    COST_S = 0.015

    def parts(self, now: float) -> Iterator[bytes]:
        began = time.thread_time()
        while time.thread_time() - began < self.COST_S:
            pass
        yield from super().parts(now)


class Kept:
    def __init__(
        self, path: Path, interval_s: float = 3600.0, lives: type[LiveBookings] = LiveBookings
    ) -> None:
        self.target, self.catalog, self.disk = Target(), Catalog(), Disk(path)
        self.faults: list[str | None] = []
        self.answered: list[str] = []
        self.disk.take()
        bookings = lives(lambda: [self.target], 7, lambda: 0)
        self.keeper = Keeper(self.disk, self.catalog, bookings, interval_s, self.faults.append)
        self.keeper.begin_with(None)
        self.keeper.start()

    async def at_rest(self) -> None:
        await until(lambda: self.keeper.writes[CATALOG] == 1, "the first catalog is written")

    def change(self, text: str) -> bool:
        """As a call that changes the catalog, and is to be answered."""
        self.catalog.now = text.encode()
        self.keeper.note()
        return self.keeper.when_saved(lambda: self.answered.append(text))

    def on_disk(self, name: str) -> bytes:
        return opened(Path(self.disk.path, name).read_bytes())[0]


@on_loop
async def test_an_answer_waits_until_its_change_is_on_disk(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    await kept.at_rest()
    kept.disk.answers.clear()
    assert kept.change("second")
    await until(lambda: len(kept.disk.written) == 2, "it is being written")
    assert kept.answered == []
    kept.disk.answers.set()
    await until(lambda: kept.answered == ["second"], "it is answered")
    assert kept.on_disk(CATALOG) == b"second"
    await kept.keeper.close()


@on_loop
async def test_changes_that_come_together_are_written_together(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    await kept.at_rest()
    names = [f"change {number}" for number in range(100)]
    kept.disk.answers.clear()
    assert kept.change(names[0])
    await until(lambda: len(kept.disk.written) == 2, "the first is being written")
    assert all(kept.change(name) for name in names[1:])
    kept.disk.answers.set()
    await until(lambda: kept.answered == names, "all are answered, in order")
    assert len(kept.disk.written) == 3
    assert kept.on_disk(CATALOG) == names[-1].encode()
    await kept.keeper.close()


@on_loop
async def test_what_is_on_disk_already_is_not_written_again(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    await kept.at_rest()
    assert kept.change("first")
    await until(lambda: kept.answered == ["first"], "it is answered")
    assert len(kept.disk.written) == 1
    await kept.keeper.close()


@on_loop
async def test_a_change_that_nobody_noted_is_seen(tmp_path: Path) -> None:
    """As one of a discovery."""
    kept = Kept(tmp_path)
    await kept.at_rest()
    kept.catalog.now, kept.catalog.revision = b"found", 1
    kept.keeper.look(time.monotonic())
    await until(lambda: kept.on_disk(CATALOG) == b"found", "it is written")
    await kept.keeper.close()


@on_loop
async def test_nobody_waits_for_a_disk_that_hangs(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    await kept.at_rest()
    kept.disk.answers.clear()
    assert kept.change("second")
    await until(lambda: len(kept.disk.written) == 2, "it is being written")
    kept.keeper.look(time.monotonic() + HANGS_AFTER_S / 2)
    assert kept.answered == []
    kept.keeper.look(time.monotonic() + HANGS_AFTER_S + 1)
    assert kept.answered == ["second"]
    assert str(kept.faults[-1]).startswith("catalog: the disk has not answered for ")
    assert not kept.change("third")  # nothing is to be waited for
    kept.disk.answers.set()
    await until(lambda: kept.faults[-1] is None, "it is written again")
    await until(lambda: kept.on_disk(CATALOG) == b"third", "with what came meanwhile")
    await kept.keeper.close()


@on_loop
async def test_a_disk_that_hangs_keeps_nothing_from_its_end(tmp_path: Path) -> None:
    kept = Kept(tmp_path)
    await kept.at_rest()
    kept.disk.answers.clear()
    assert kept.change("second")
    await until(lambda: len(kept.disk.written) == 2, "it is being written")
    await kept.keeper.close()
    assert kept.answered == ["second"]
    other = StateDirectory(str(tmp_path))
    other.take()  # it was let go
    kept.disk.answers.set()
    await until(lambda: kept.disk.ended == 2, "its thread has ended")
    assert kept.on_disk(CATALOG) == b"first"  # nothing is written afterwards
    other.let_go()


@on_loop
async def test_what_lives_costs_no_more_than_its_share(tmp_path: Path) -> None:
    kept = Kept(tmp_path, interval_s=0.05, lives=Slow)
    number = 0

    def times() -> list[float]:
        nonlocal number
        kept.target.slots.book(Booking(f"r{number}", 1, 0), b"", 1.0)
        number += 1
        return [at for name, at in kept.disk.written if name == RESERVATIONS]

    await until(lambda: len(times()) >= 3, "it is written three times")
    first, second, third, *_ = times()
    assert min(second - first, third - second) > 0.9 * Slow.COST_S / SHARE
    await kept.keeper.close()


@on_loop
async def test_while_nothing_changes_nothing_is_written(tmp_path: Path) -> None:
    kept = Kept(tmp_path, interval_s=0.05)
    await until(lambda: kept.keeper.writes[RESERVATIONS] == 1, "it is written once")
    assert kept.keeper.age_s() == 0.0
    kept.target.slots.book(Booking("r", 1, 0), b"", 1.0)
    assert kept.keeper.age_s() > 0.0
    await until(lambda: kept.keeper.writes[RESERVATIONS] == 2, "it is written again")
    written = list(kept.disk.written)
    for _ in range(4):
        await asyncio.sleep(0.05)
    assert kept.disk.written == written
    await kept.keeper.close()


@on_loop
async def test_files_that_somebody_deletes_come_back(tmp_path: Path) -> None:
    kept = Kept(tmp_path, interval_s=0.05)
    await until(lambda: kept.keeper.writes[RESERVATIONS] == 1, "both are there")
    for name in (CATALOG, RESERVATIONS):
        (tmp_path / name).unlink()
        await until(lambda name=name: (tmp_path / name).exists(), "it is there again")  # type: ignore[misc]
    await kept.keeper.close()


# -- the directory -----------------------------------------------------------------------------


def held(path: Path) -> StateDirectory:
    directory = StateDirectory(str(path))
    directory.take()
    return directory


def test_one_holds_it_and_the_next_after_it(tmp_path: Path) -> None:
    first = held(tmp_path)
    with pytest.raises(Held, match=r"is in use by process \d+"):
        StateDirectory(str(tmp_path)).take()
    first.let_go()
    second = held(tmp_path)
    assert not first.take_again()
    with pytest.raises(OSError, match="the directory was let go"):
        first.write("x", [b"y"], STAMP)
    second.let_go()
    assert not first.take_again()  # somebody has held it
    assert second.take_again()
    second.let_go()


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
    directory.let_go()


def test_what_is_still_being_written_harms_no_successor(tmp_path: Path) -> None:
    """A slow disk may have it for longer than the one who writes may wait."""
    first = held(tmp_path)
    later: list[StateDirectory] = []

    def parts() -> Iterator[bytes]:
        yield b"one half"
        first.let_go()
        later.append(held(tmp_path))
        later[0].write("x", [b"the successor's"], STAMP)
        yield b"the other half"

    with pytest.raises(OSError, match="the directory was let go"):
        first.write("x", parts(), STAMP)
    assert opened((tmp_path / "x").read_bytes()) == (b"the successor's", STAMP)
    later[0].let_go()


def test_who_fails_after_it_let_go_leaves_what_a_successor_writes(tmp_path: Path) -> None:
    first = held(tmp_path)
    first_writes, second_writes = threading.Event(), threading.Event()

    def of_the_first() -> Iterator[bytes]:
        yield b"one half"
        first_writes.set()
        second_writes.wait(DEADLINE_S)

    def write() -> None:
        with contextlib.suppress(OSError):
            first.write("x", of_the_first(), STAMP)

    def of_the_second() -> Iterator[bytes]:
        yield b"the successor's"
        second_writes.set()
        thread.join(DEADLINE_S)

    thread = threading.Thread(target=write)
    thread.start()
    assert first_writes.wait(DEADLINE_S)
    first.let_go()
    second = held(tmp_path)
    second.write("x", of_the_second(), STAMP)
    assert opened((tmp_path / "x").read_bytes()) == (b"the successor's", STAMP)
    second.let_go()


def test_a_lock_file_of_garbage_is_somebodys_all_the_same(tmp_path: Path) -> None:
    directory = held(tmp_path)
    (tmp_path / "lock").write_bytes(b"\xff" * 48)
    with pytest.raises(Held, match="is in use by another process"):
        StateDirectory(str(tmp_path)).take()
    directory.let_go()


def test_who_gives_up_in_the_middle_leaves_the_file_that_was(tmp_path: Path) -> None:
    directory = held(tmp_path)
    directory.write("x", [b"before"], STAMP)

    def parts() -> Iterator[bytes]:
        yield b"half"
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        directory.write("x", parts(), STAMP)
    assert opened((tmp_path / "x").read_bytes()) == (b"before", STAMP)
    directory.let_go()


def test_a_lock_file_that_was_replaced_is_taken_anew(tmp_path: Path) -> None:
    directory = held(tmp_path)
    (tmp_path / "lock").unlink()
    directory.write("x", [b"y"], STAMP)
    with pytest.raises(Held):
        StateDirectory(str(tmp_path)).take()
    directory.let_go()


def test_a_directory_that_another_holds_now_is_not_written(tmp_path: Path) -> None:
    """It was deleted under us, and made by another process."""
    directory = held(tmp_path)
    (tmp_path / "lock").unlink()
    other = held(tmp_path)
    with pytest.raises(OSError, match="is in use by process"):
        directory.write("x", [b"y"], STAMP)
    other.let_go()
