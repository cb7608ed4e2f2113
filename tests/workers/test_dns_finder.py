"""Names that stand for workers or peers: their addresses, and SRV records from a real server."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from lean_selector.tasks import supervise
from lean_selector.workers.finders import AskService, DnsFinder, Sighting, SocketAddress, SrvRecords
from lean_selector.workers.particulars import Place
from tests.support.name_server import name_server
from tests.support.on_loop import on_loop, until

V4, V6 = socket.AF_INET, socket.AF_INET6
NAME = "_http._tcp.vllm.svc"


class Looking:
    """A finder that runs, what it is answered, and what it found last."""

    def __init__(self, port: int | None, ask: AskService | None = None) -> None:
        self.sighting = Sighting("dns")
        self.addresses: list[SocketAddress] | OSError = []
        self.urls: list[str] = []
        self.finder = DnsFinder(
            self.sighting,
            "vllm" if port else NAME,
            port,
            False,
            0.001,
            self._resolve,
            ask,
            self._found,
        )

    async def _resolve(self, name: str, port: int) -> list[SocketAddress]:
        assert (name, port) == ("vllm", 8000)
        if isinstance(self.addresses, OSError):
            raise self.addresses
        return self.addresses

    def _found(self, places: Iterable[Place], leaving: Iterable[Place]) -> None:
        assert not list(leaving)
        self.urls = [place.url for place in places]

    async def finds(self, *urls: str) -> None:
        await until(lambda: self.urls == list(urls), lambda: f"{self.urls} != {urls}")

    async def fails(self, reason: str) -> None:
        await until(lambda: reason in (self.sighting.error or ""), lambda: str(self.sighting.error))


@asynccontextmanager
async def looking(port: int | None = 8000, ask: AskService | None = None) -> AsyncIterator[Looking]:
    it = Looking(port, ask)
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
        it.addresses = [(V4, ("10.0.0.3", 8000))]
        await it.finds("http://10.0.0.3:8000")


@on_loop
async def test_a_name_with_both_families_is_known_by_the_older() -> None:
    async with looking() as it:
        it.addresses = [(V6, ("fd00::1", 8000, 0, 0)), (V4, ("10.0.0.1", 8000))]
        await it.finds("http://10.0.0.1:8000")
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
        await it.fails("the answer names nobody")
        assert it.urls == ["http://10.0.0.1:8000"]
        assert it.sighting.state == "failing"
        it.addresses = [(V4, ("10.0.0.1", 8000))]
        await until(lambda: it.sighting.state == "watching")


@on_loop
async def test_srv_records_name_hosts_with_their_ports() -> None:
    async with name_server() as server:
        server.services[NAME] = [("vllm-1.vllm.svc", 8001), ("vllm-0.vllm.svc", 8000)]
        records = SrvRecords(["127.0.0.1"], server.port)
        async with looking(None, records.ask) as it:
            await it.finds("http://vllm-0.vllm.svc:8000", "http://vllm-1.vllm.svc:8001")
            server.services[NAME] = [("vllm-2.vllm.svc", 8000)]
            await it.finds("http://vllm-2.vllm.svc:8000")
            del server.services[NAME]
            await it.fails("does not exist")
            server.services[NAME] = []
            await it.fails("SRV of _http._tcp.vllm.svc")
            assert it.urls == ["http://vllm-2.vllm.svc:8000"]


@on_loop
async def test_a_question_that_is_cancelled_ends_also_as_its_answer_comes() -> None:
    async with name_server() as server:
        server.services[NAME] = [("vllm-0.vllm.svc", 8000)]
        records = SrvRecords(["127.0.0.1"], server.port)
        for turns in range(20):
            asking = asyncio.ensure_future(records.ask(NAME))
            for _ in range(turns):
                await asyncio.sleep(0)
            if asking.cancel():
                await asyncio.wait({asking})
                assert asking.cancelled()
