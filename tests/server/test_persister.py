"""When a state directory is written, who waits for it, and what a disk that hangs holds up."""

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from lean_selector.core.load.shapes import Booking
from lean_selector.core.load.slots import Slots
from lean_selector.server import state_persister
from lean_selector.server.state_files import (
    CATALOG,
    RESERVATIONS,
    DiskHangs,
    DiskThread,
    StateDirectory,
    opened,
)
from lean_selector.server.state_persister import (
    HANGS_AFTER_S,
    LAST_S,
    SHARE,
    SLICE_S,
    STEPS,
    LiveBookings,
    Persister,
)
from tests.server.kept_selector import is_free
from tests.support.on_loop import on_loop, until


class Target:
    model_name, tenant_id, block_size = "m", "t", 16

    def __init__(self) -> None:
        self.begin_anew()

    def begin_anew(self) -> None:
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
        self.ended = self.checks = 0

    def check(self, names: Iterable[str]) -> None:
        self.checks += 1
        super().check(names)

    def write(self, name: str, parts: Iterable[bytes], written_at: float) -> int:
        self.written.append((name, time.monotonic()))
        self.answers.wait()
        try:
            return super().write(name, parts, written_at)
        finally:
            self.ended += 1


class Long(LiveBookings):
    """It takes longer than a disk may, in many slices of which none does."""

    def parts(self, now: float) -> Iterator[bytes]:
        yield from super().parts(now)
        for _ in range(25):
            time.sleep(LAST_S / 20)
            began = time.thread_time()
            while time.thread_time() - began < 2 * SLICE_S:
                pass
            for _ in range(STEPS):
                yield b" "


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
        self.persister = Persister(
            self.disk, self.catalog, bookings, self.faults.append, interval_s
        )
        self.persister.begin_with(None)
        self.persister.start()

    def change(self, text: str) -> bool:
        """As a call that changes the catalog, and is to be answered."""
        self.catalog.now = text.encode()
        self.persister.note()
        return self.persister.when_saved(lambda: self.answered.append(text))

    def on_disk(self, name: str) -> bytes:
        return opened(Path(self.disk.path, name).read_bytes())[0]

    def book(self, request_id: str = "r") -> None:
        self.target.slots.book(Booking(request_id, 1, 0), b"", 1.0)

    async def hangs(self) -> None:
        """A change waits for a disk that does not answer."""
        self.disk.answers.clear()
        assert self.change("second")
        await until(lambda: len(self.disk.written) == 2, "it is being written")


async def at_rest(path: Path, lives: type[LiveBookings] = LiveBookings) -> Kept:
    kept = Kept(path, lives=lives)
    await until(lambda: kept.persister.writes[CATALOG] == 1, "the first catalog is written")
    return kept


@on_loop
async def test_an_answer_waits_until_its_change_is_on_disk(tmp_path: Path) -> None:
    kept = await at_rest(tmp_path)
    await kept.hangs()
    assert kept.answered == []
    kept.disk.answers.set()
    await until(lambda: kept.answered == ["second"], "it is answered")
    assert kept.on_disk(CATALOG) == b"second"
    await kept.persister.close()


@on_loop
async def test_changes_that_come_together_are_written_together(tmp_path: Path) -> None:
    kept = await at_rest(tmp_path)
    names = [f"change {number}" for number in range(100)]
    kept.disk.answers.clear()
    assert kept.change(names[0])
    await until(lambda: len(kept.disk.written) == 2, "the first is being written")
    assert all(kept.change(name) for name in names[1:])
    kept.disk.answers.set()
    await until(lambda: kept.answered == names, "all are answered, in order")
    assert len(kept.disk.written) == 3
    assert kept.on_disk(CATALOG) == names[-1].encode()
    await kept.persister.close()


@on_loop
async def test_what_is_on_disk_already_is_not_written_again(tmp_path: Path) -> None:
    kept = await at_rest(tmp_path)
    assert kept.change("first")
    await until(lambda: kept.answered == ["first"], "it is answered")
    assert len(kept.disk.written) == 1
    await kept.persister.close()


@on_loop
async def test_a_change_that_nobody_noted_is_seen(tmp_path: Path) -> None:
    """As one of a discovery."""
    kept = await at_rest(tmp_path)
    kept.catalog.now, kept.catalog.revision = b"found", 1
    kept.persister.tick(time.monotonic())
    await until(lambda: kept.on_disk(CATALOG) == b"found", "it is written")
    await kept.persister.close()


@on_loop
async def test_nobody_waits_for_a_disk_that_hangs(tmp_path: Path) -> None:
    kept = await at_rest(tmp_path)
    await kept.hangs()
    kept.persister.tick(time.monotonic() + HANGS_AFTER_S / 2)
    assert kept.answered == []
    kept.persister.tick(time.monotonic() + HANGS_AFTER_S + 1)
    assert kept.answered == ["second"]
    assert str(kept.faults[-1]).startswith("catalog: the disk has not answered for ")
    assert not kept.change("third")  # nothing is to be waited for
    kept.disk.answers.set()
    await until(lambda: kept.faults[-1] is None, "it is written again")
    await until(lambda: kept.on_disk(CATALOG) == b"third", "with what came meanwhile")
    await kept.persister.close()


@on_loop
async def test_a_disk_that_hangs_keeps_nothing_from_its_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_persister, "LAST_S", 0.05)
    kept = await at_rest(tmp_path)
    await kept.hangs()
    await kept.persister.close()
    assert kept.answered == ["second"]
    assert "state is not completely written" in caplog.text
    assert not is_free(tmp_path)  # its thread may still write, until the process ends
    kept.disk.answers.set()
    await until(lambda: kept.disk.ended == 2, "its thread has ended")
    kept.disk.close()


@on_loop
async def test_the_end_takes_as_long_as_the_disk_takes_something(tmp_path: Path) -> None:
    kept = await at_rest(tmp_path, Long)
    kept.book()
    await kept.persister.close()
    assert is_free(tmp_path)
    assert kept.persister.writes[RESERVATIONS] == 1
    assert b'"request_id":"r"' in kept.on_disk(RESERVATIONS)


@on_loop
async def test_what_lives_costs_no_more_than_its_share(tmp_path: Path) -> None:
    kept = Kept(tmp_path, interval_s=0.05, lives=Slow)
    number = 0

    def times() -> list[float]:
        nonlocal number
        kept.book(f"r{number}")
        number += 1
        return [at for name, at in kept.disk.written if name == RESERVATIONS]

    await until(lambda: len(times()) >= 3, "it is written three times")
    first, second, third, *_ = times()
    assert min(second - first, third - second) > 0.9 * Slow.COST_S / SHARE
    await kept.persister.close()


@on_loop
async def test_what_lives_is_written_once_an_interval(tmp_path: Path) -> None:
    pauses: list[float] = []
    real_sleep, real_monotonic = asyncio.sleep, time.monotonic

    async def sleep(delay: float) -> None:
        """What would take long is over at once, for the clock too."""
        if delay > 1.0:
            pauses.append(delay)
            kept.book(f"r{len(pauses)}")
        await real_sleep(0.0 if delay > 1.0 else delay)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(asyncio, "sleep", sleep)
        patches.setattr(time, "monotonic", lambda: real_monotonic() + sum(pauses))
        kept = Kept(tmp_path, interval_s=60.0)
        await until(lambda: kept.persister.writes[RESERVATIONS] >= 5, "it is written five times")
        await kept.persister.close()
    assert pauses[0] == 60.0
    assert all(0.0 < pause <= 60.0 for pause in pauses)


@on_loop
async def test_while_nothing_changes_nothing_is_written(tmp_path: Path) -> None:
    kept = Kept(tmp_path, interval_s=0.05)
    await until(lambda: kept.persister.writes[RESERVATIONS] == 1, "it is written once")
    assert kept.persister.age_s() == 0.0
    kept.book()
    assert kept.persister.age_s() > 0.0
    await until(lambda: kept.persister.writes[RESERVATIONS] == 2, "it is written again")
    written = list(kept.disk.written)
    checks = kept.disk.checks
    await until(lambda: kept.disk.checks >= checks + 3, "it has looked several times")
    assert kept.disk.written == written
    await kept.persister.close()


@on_loop
async def test_a_partition_that_takes_the_place_of_another_is_written(tmp_path: Path) -> None:
    """Also where as much has happened in it as in the other."""
    kept = Kept(tmp_path, interval_s=0.05)
    kept.book()
    await until(lambda: kept.persister.writes[RESERVATIONS] == 1, "the first is written")
    kept.target.begin_anew()
    kept.book("s")
    await until(lambda: kept.persister.writes[RESERVATIONS] == 2, "and the second")
    assert b'"request_id":"s"' in kept.on_disk(RESERVATIONS)
    await kept.persister.close()


@on_loop
async def test_the_age_is_not_that_of_a_file_in_which_nothing_had_changed(tmp_path: Path) -> None:
    kept = Kept(tmp_path, interval_s=0.05)
    await until(lambda: kept.persister.writes[RESERVATIONS] == 1, "it is written")
    later, checks = time.monotonic(), kept.disk.checks
    await until(lambda: kept.disk.checks >= checks + 2, "there was nothing to write")
    kept.book()
    assert kept.persister.age_s() <= time.monotonic() - later
    await kept.persister.close()


@on_loop
async def test_files_that_somebody_deletes_come_back(tmp_path: Path) -> None:
    kept = Kept(tmp_path, interval_s=0.05)
    await until(lambda: kept.persister.writes[RESERVATIONS] == 1, "both are there")
    for name in (CATALOG, RESERVATIONS):
        (tmp_path / name).unlink()
        await until(lambda name=name: (tmp_path / name).exists(), "it is there again")  # type: ignore[misc]
    await kept.persister.close()


@on_loop
async def test_a_disk_that_goes_on_taking_a_large_file_has_not_failed(tmp_path: Path) -> None:
    directory = StateDirectory(str(tmp_path))
    directory.take()
    file = DiskThread(directory, RESERVATIONS)
    begin, taken, go_on = threading.Event(), threading.Event(), threading.Event()

    def parts() -> Iterator[bytes]:
        begin.wait()
        yield b"a part"
        taken.set()
        go_on.wait()
        yield b"another"

    writing = asyncio.create_task(file.write(parts(), 1.0, patience_s=3600.0))
    await until(lambda: file.moved_at is not None, "it has begun")
    began = file.moved_at
    begin.set()
    await until(taken.is_set, "a part was taken")
    later = file.moved_at
    assert began is not None
    assert later is not None
    assert later > began
    with pytest.raises(DiskHangs):
        await file.idle(0.01)
    go_on.set()
    await writing
    assert file.moved_at is None
    assert opened((tmp_path / RESERVATIONS).read_bytes())[0] == b"a partanother"
