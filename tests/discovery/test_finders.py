"""What looks for workers and peers: names in DNS, files that others write."""

import asyncio
import itertools
import os
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

from lean_selector.discovery.discoveries import Discoveries
from lean_selector.discovery.finders import DnsFinder, FileFinder, Sighting, SocketAddress
from lean_selector.discovery.particulars import (
    Found,
    FoundEndpoint,
    peer_target_of,
    target_of,
)
from lean_selector.discovery.peer_roster import PeerRoster
from lean_selector.tasks import supervise
from tests.support.on_loop import on_loop, until

V4, V6 = socket.AF_INET, socket.AF_INET6


class Looking:
    """A finder that runs, what it is answered, and what it found last."""

    def __init__(self) -> None:
        self.sighting = Sighting("dns")
        self.addresses: list[SocketAddress] | OSError = []
        self.urls: list[str] = []
        target = target_of("dns:vllm:8000")
        self.finder = DnsFinder(self.sighting, target, 0.001, self._resolve, self._found)

    async def _resolve(self, name: str, port: int) -> list[SocketAddress]:
        assert (name, port) == ("vllm", 8000)
        if isinstance(self.addresses, OSError):
            raise self.addresses
        return self.addresses

    def _found(self, endpoints: Iterable[FoundEndpoint], leaving: Iterable[FoundEndpoint]) -> None:
        assert not list(leaving)
        self.urls = [endpoint.url for endpoint in endpoints]

    async def finds(self, *urls: str) -> None:
        await until(lambda: self.urls == list(urls), lambda: f"{self.urls} != {urls}")

    async def fails(self, reason: str) -> None:
        await until(lambda: reason in (self.sighting.error or ""), lambda: str(self.sighting.error))


@asynccontextmanager
async def looking() -> AsyncIterator[Looking]:
    it = Looking()
    running = supervise("finder", it.finder.run)
    try:
        yield it
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@on_loop
async def test_each_address_of_a_name_is_a_worker() -> None:
    async with looking() as it:
        it.addresses = [(V4, ("10.0.0.2", 8000)), (V4, ("10.0.0.1", 8000))]
        await it.finds("http://10.0.0.1:8000", "http://10.0.0.2:8000")
        # By both families one worker is known by the older.
        it.addresses = [(V6, ("fd00::1", 8000, 0, 0)), (V4, ("10.0.0.3", 8000))]
        await it.finds("http://10.0.0.3:8000")
        it.addresses = [(V6, ("fd00::1", 8000, 0, 0))]
        await it.finds("http://[fd00::1]:8000")


@on_loop
async def test_a_name_that_fails_changes_nothing() -> None:
    async with looking() as it:
        it.addresses = [(V4, ("10.0.0.1", 8000))]
        await it.finds("http://10.0.0.1:8000")
        it.addresses = socket.gaierror(-2, "Name or service not known")
        await it.fails("Name or service not known")
        it.addresses = []
        await it.fails("the answer has no addresses")
        assert it.urls == ["http://10.0.0.1:8000"]
        assert it.sighting.state == "failing"
        it.addresses = [(V4, ("10.0.0.1", 8000))]
        await until(lambda: it.sighting.state == "watching")


# -- files -----------------------------------------------------------------------------------------


def put(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


@on_loop
async def test_a_file_that_cannot_be_read_is_a_failure_until_it_is_mended(tmp_path: Path) -> None:
    path = tmp_path / "workers.yaml"
    found: list[list[str | None]] = []
    sighting = Sighting(f"file:{path}")

    def on_found(told: Found) -> None:
        found.append([entry.endpoint for entry in told.entries])

    put(path, "[{endpoint: 'http://a:1'}]")
    running = asyncio.create_task(FileFinder(sighting, str(path), 0.001, on_found).run())
    await until(lambda: found == [["http://a:1"]])
    for text, reason in (
        ("[{endpoint: 'http://a:1', topology_domains: {on: rack1}}]", "a key is not text"),
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


@on_loop
async def test_a_file_is_read_anew_after_a_failure_that_nobody_expected(tmp_path: Path) -> None:
    put(tmp_path / "workers.json", "[]")
    told: list[Found] = []

    def on_found(found: Found) -> None:
        told.append(found)
        if len(told) == 1:
            raise RuntimeError("a bug")

    finder = FileFinder(Sighting("file"), str(tmp_path / "workers.json"), 0.001, on_found)
    assert isinstance((await asyncio.gather(finder.run(), return_exceptions=True))[0], RuntimeError)
    again = asyncio.create_task(finder.run())
    await until(lambda: len(told) == 2 and not again.done())


# -- what runs for each ----------------------------------------------------------------------------


class NoMesh:
    """Takes every peer."""

    def peers(self) -> list[str]:
        return []

    def register_peer(self, endpoint: str) -> bool:
        return True

    def deregister_peer(self, endpoint: str) -> bool:
        return True

    def catch_up_from(self, urls: list[str]) -> None:
        pass


@on_loop
async def test_a_finder_that_fails_of_a_bug_is_failing_until_it_finds_again() -> None:
    tries = itertools.count()
    mended = asyncio.Event()

    async def resolve(name: str, port: int) -> list[SocketAddress]:
        if next(tries) == 0:
            raise RuntimeError("a bug")
        await mended.wait()
        return [(socket.AF_INET, ("10.0.0.1", port))]

    discoveries = Discoveries(resolve, 0.001)
    discoveries.find_peers([peer_target_of("dns:peers:9092")], PeerRoster(NoMesh(), 0, None, 0, 0))
    discoveries.start()

    def seen() -> tuple[str, str | None, int]:
        found = discoveries.report().discoveries[0]
        return found.state, found.last_error, found.failures

    await until(lambda: seen() == ("failing", "RuntimeError: a bug", 1))
    mended.set()
    await until(lambda: seen() == ("watching", None, 1))
    await discoveries.close()
