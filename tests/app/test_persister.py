"""When a state directory is written, and who waits for it."""

import asyncio
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from lean_selector.app import state_persister
from lean_selector.app.state_files import CATALOG, RESERVATIONS, StateDirectory, opened
from lean_selector.app.state_persister import LiveReservations, Persister
from lean_selector.core.load.shapes import ReservationSpec
from lean_selector.core.load.slots import Slots
from tests.app.kept_selector import is_free
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
        self.fails = False
        self.written: list[str] = []
        self.takes_s = self.took_s = 0.0  # of a clock that a test gives

    def write(self, name: str, content: Iterable[bytes]) -> None:
        self.written.append(name)
        self.answers.wait()
        self.took_s += self.takes_s
        if self.fails:
            raise OSError(28, "No space left on device")
        super().write(name, content)


class Kept:
    def __init__(self, path: Path, interval_s: float = 3600.0) -> None:
        self.target, self.catalog, self.disk = Target(), Catalog(), Disk(path)
        self.faults: list[str | None] = []
        self.answered: list[str] = []
        self.disk.take()
        reservations = LiveReservations(lambda: [self.target], 7, lambda: 0)
        self.persister = Persister(
            self.disk, self.catalog, reservations, self.faults.append, interval_s
        )
        self.persister.start()

    def change(self, text: str) -> bool:
        """As a call that changes the catalog, and is to be answered."""
        self.catalog.now = text.encode()
        self.persister.note()
        return self.persister.when_saved(lambda: self.answered.append(text))

    def writes(self, name: str) -> int:
        return sum(file.writes for file in self.persister.files if file.name == name)

    def on_disk(self, name: str) -> bytes:
        return opened(Path(self.disk.path, name).read_bytes())[0]

    def book(self, request_id: str = "r") -> None:
        self.target.slots.book(ReservationSpec(request_id, 1, 0), b"", 1.0)

    async def hangs(self) -> None:
        """A change waits for a disk that does not answer."""
        self.disk.answers.clear()
        assert self.change("second")
        await until(lambda: len(self.disk.written) == 2, "it is being written")


async def at_rest(path: Path) -> Kept:
    kept = Kept(path)
    await until(lambda: kept.writes(CATALOG) == 1, "the first catalog is written")
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
async def test_a_slice_ends_at_any_reservation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of long prompts take long: each of them may be the last of its slice."""
    kept = await at_rest(tmp_path)
    monkeypatch.setattr(state_persister, "SLICE_S", 0.0)
    for number in range(9):
        kept.book(f"r{number}")
    file, turns, made = kept.persister.files[1], 0, list[int]()
    parts = file.parts

    def watched(now: float) -> Iterator[bytes]:
        for part in parts(now):
            made.append(turns)
            yield part

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    file.parts = watched
    counting = asyncio.ensure_future(others())
    await kept.persister.close()
    counting.cancel()
    assert len(made) > 9
    assert len(set(made)) == len(made)


@on_loop
async def test_a_change_that_nobody_noted_is_seen(tmp_path: Path) -> None:
    """As one of a discovery."""
    kept = await at_rest(tmp_path)
    kept.catalog.now, kept.catalog.revision = b"found", 1
    kept.persister.tick(time.monotonic())
    await until(lambda: kept.on_disk(CATALOG) == b"found", "it is written")
    await kept.persister.close()


@on_loop
async def test_while_nothing_changes_nothing_is_written_and_nothing_ages(tmp_path: Path) -> None:
    kept = Kept(tmp_path, interval_s=0.02)
    await until(lambda: kept.writes(RESERVATIONS) == 1, "it is written once")
    assert kept.persister.age_s() == 0.0
    kept.book()
    assert kept.persister.age_s() > 0.0
    await until(lambda: kept.writes(RESERVATIONS) == 2, "it is written again")
    written, before = list(kept.disk.written), time.monotonic()
    (_, live) = kept.persister.files
    await until(lambda: live.saved_at > before + 0.05, "it has looked several times")
    assert kept.disk.written == written
    kept.book("s")
    assert kept.persister.age_s() <= time.monotonic() - before - 0.05
    await kept.persister.close()


@on_loop
async def test_what_lives_is_being_written_for_a_tenth_of_the_time_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    real_sleep, real_monotonic = asyncio.sleep, time.monotonic
    kept = Kept(tmp_path, interval_s=60.0)

    async def sleep(delay: float) -> None:
        """What would take long is over at once, for the clock too."""
        if delay > 1.0:
            pauses.append(delay)
            kept.disk.takes_s = 9.0 * (len(pauses) == 2)
            kept.book(f"r{len(pauses)}")
        await real_sleep(0.0 if delay > 1.0 else delay)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: real_monotonic() + kept.disk.took_s)
    await until(lambda: kept.writes(RESERVATIONS) >= 3, "it is written three times")
    await kept.persister.close()
    assert pauses[:2] == [60.0, 60.0]
    assert 90.0 <= pauses[2] < 600.0


@on_loop
async def test_a_partition_that_takes_the_place_of_another_is_written(tmp_path: Path) -> None:
    """Also where as much has happened in it as in the other."""
    kept = Kept(tmp_path, interval_s=0.05)
    kept.book()
    await until(lambda: kept.writes(RESERVATIONS) == 1, "the first is written")
    kept.target.begin_anew()
    kept.book("s")
    await until(lambda: kept.writes(RESERVATIONS) == 2, "and the second")
    assert b'"request_id":"s"' in kept.on_disk(RESERVATIONS)
    await kept.persister.close()


@on_loop
async def test_a_disk_that_fails_is_told_of_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for it, and when it works again, both files are written: it may be another."""
    monkeypatch.setattr(state_persister, "RETRY_S", 0.02)
    kept = Kept(tmp_path, interval_s=0.02)
    await until(lambda: kept.writes(RESERVATIONS) == 1, "both are written")
    kept.disk.fails = True
    assert kept.change("second")
    await until(lambda: kept.answered == ["second"], "it is answered")
    assert kept.faults == ["catalog: No space left on device"]
    assert not kept.change("third")  # nothing is to be waited for
    for name in (CATALOG, RESERVATIONS):
        (tmp_path / name).unlink()
    kept.disk.fails = False
    await until(lambda: kept.writes(RESERVATIONS) == 2, "both are written again")
    assert kept.faults[-1] is None
    assert kept.on_disk(CATALOG) == b"third"
    await kept.persister.close()


@on_loop
async def test_the_end_waits_for_the_write_before_it(tmp_path: Path) -> None:
    kept = await at_rest(tmp_path)
    await kept.hangs()
    kept.change("third")
    kept.book()
    ending = asyncio.create_task(kept.persister.close())
    await asyncio.sleep(0.02)
    assert not is_free(tmp_path)
    kept.disk.answers.set()
    await ending
    assert is_free(tmp_path)
    assert kept.on_disk(CATALOG) == b"third"
    assert b'"request_id":"r"' in kept.on_disk(RESERVATIONS)
    assert kept.answered == ["second", "third"]
