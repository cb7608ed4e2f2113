"""A file that lists workers, while others write it."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

from lean_selector.workers.finders import FileFinder, Sighting
from lean_selector.workers.particulars import Found
from tests.support.on_loop import on_loop, until


def put(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def finder_of(path: Path, on_found: Callable[[Found], None]) -> tuple[FileFinder, Sighting]:
    sighting = Sighting(f"file:{path}")
    return FileFinder(sighting, str(path), 0.001, on_found), sighting


@on_loop
async def test_a_file_that_cannot_be_read_is_a_failure_until_it_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "workers.yaml"
    found: list[list[str | None]] = []
    finder, sighting = finder_of(
        path, lambda told: found.append([entry.endpoint for entry in told.entries])
    )
    put(path, "[{endpoint: 'http://a:1'}]")
    running = asyncio.create_task(finder.run())
    await until(lambda: found == [["http://a:1"]])
    for text, reason in (
        ("[{endpoint: 'http://a:1', topology_domains: {on: rack1}}]", "true at `$.workers[0]"),
        ("workers: &a [*a]", "nested too deeply"),
    ):
        put(path, text)
        await until(lambda reason=reason: reason in str(sighting.error))  # type: ignore[misc]
        before = sighting.failures
        await until(lambda before=before: sighting.failures > before)  # type: ignore[misc]
        assert (sighting.state, sighting.count) == ("failing", 1)
    put(path, "[{endpoint: 'http://b:1'}]")
    await until(lambda: found == [["http://a:1"], ["http://b:1"]])
    await until(lambda: sighting.state == "watching")
    assert not running.done()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@on_loop
async def test_a_file_is_read_anew_after_a_failure_that_nobody_expected(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    put(path, "[]")
    told: list[Found] = []

    def on_found(found: Found) -> None:
        told.append(found)
        if len(told) == 1:
            raise RuntimeError("a bug")

    finder, _ = finder_of(path, on_found)
    assert isinstance((await asyncio.gather(finder.run(), return_exceptions=True))[0], RuntimeError)
    again = asyncio.create_task(finder.run())
    await until(lambda: len(told) == 2)
    again.cancel()
    await asyncio.gather(again, return_exceptions=True)
