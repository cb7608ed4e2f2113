"""Workers that come and go behind a name, while a selector with real sockets is asked."""

import asyncio
import contextlib
import random
import socket
import time
from collections.abc import AsyncIterator

import pytest
import uvloop
import zmq.asyncio

from lean_selector.core.errors import NotFound
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import SelectionRequest
from lean_selector.events.links import Links
from lean_selector.events.subscriptions import KvSubscriptions
from lean_selector.http.outbound import OutboundClient
from lean_selector.server.discovery import find_workers
from lean_selector.server.selector_flags import Discover
from lean_selector.server.service_flags import Finder
from lean_selector.workers.discoveries import Discoveries, Surroundings
from lean_selector.workers.finders import SocketAddress, SrvRecords
from lean_selector.workers.particulars import target_of, worker_id_of
from tests.support.driven_selector import prompt_of
from tests.support.fake_engine import FakeEngine
from tests.support.name_server import NameServer, name_server
from tests.support.on_loop import until
from tests.support.running_service import free_port

NAME = "_http._tcp.vllm.svc"
GRACE_S = 0.05
FINDER = Finder(interval_s=0.01, grace_s=GRACE_S)


class Names:
    """Says which engines there are, as addresses of one name or as SRV records."""

    def __init__(self, kind: str, server: NameServer, port: int) -> None:
        self._kind = kind
        self._server = server
        self._engines: list[FakeEngine] = []
        self.target = target_of(f"dns:vllm:{port}" if kind == "addresses" else f"dns:{NAME}")

    async def resolve(self, name: str, port: int) -> list[SocketAddress]:
        if name == "vllm":
            return [(socket.AF_INET, (each.host, port)) for each in self._engines]
        host = "127.0.0.1" if name == "localhost" else name
        return [(socket.AF_INET, (host, port))]

    def name(self, *engines: FakeEngine) -> None:
        self._engines = list(engines)
        self._server.services[NAME] = [("localhost", each.port) for each in engines]

    def key(self, engine: FakeEngine) -> str:
        host = engine.host if self._kind == "addresses" else "localhost"
        return f"http://{host}:{engine.port}"


class Fleet:
    """A selector that finds its workers by name."""

    def __init__(self, names: Names, server: NameServer) -> None:
        self.names = names
        self._context = zmq.asyncio.Context()
        self.subscriptions = KvSubscriptions(Links(self._context))
        self.selector = Selector(RouterSettings(), self.subscriptions, random.Random(7))
        records = SrvRecords(["127.0.0.1"], server.port)
        world = Surroundings(names.resolve, FINDER.interval_s, records.ask, "", None)
        self.finding = Discoveries(world)
        find_workers(
            self.finding,
            [names.target],
            Discover(refresh_s=0.02),
            FINDER,
            self.selector,
            self.subscriptions,
            time.monotonic,
            OutboundClient(names.resolve),
            True,
        )
        self.selects = 0

    async def close(self) -> None:
        await self.finding.close()
        await self.subscriptions.close()
        self._context.destroy(linger=0)

    def book(self, reservation_id: str) -> int:
        partition = self.selector.ready_partition("m", "default")
        request = SelectionRequest(prompt_of([1, 2], 32), self.selector.terms)
        request.books, request.reservation_id = True, reservation_id
        return self.selector.select_now(partition, request, time.monotonic()).worker_id

    async def select(self) -> None:
        """One after another; whatever fails ends the test."""
        while True:
            self.book("now")
            with contextlib.suppress(NotFound):  # it went with its worker
                self.selector.free("now", time.monotonic())
            self.selects += 1
            await asyncio.sleep(0)

    async def has(self, *engines: FakeEngine) -> None:
        """Exactly these are registered, and exactly their sources subscribed."""
        expected = {
            worker_id_of(self.names.key(each)): f"tcp://{host}:{each.events_port}"
            for each in engines
            for host in [self.names.key(each).split("/")[2].rpartition(":")[0]]
        }

        def found() -> dict[int, str]:
            return {each.worker_id: each.endpoint for each in self.subscriptions.statuses()}

        await until(lambda: found() == expected, lambda: f"{found()} != {expected}")
        assert self.selector.catalog.workers.keys() == expected.keys()


@contextlib.asynccontextmanager
async def running(kind: str, port: int) -> AsyncIterator[tuple[Fleet, Names]]:
    async with name_server() as server:
        names = Names(kind, server, port)
        fleet = Fleet(names, server)
        try:
            yield fleet, names
        finally:
            await fleet.close()


@pytest.mark.parametrize("kind", ["addresses", "SRV records"])
def test_workers_come_change_and_go_while_selects_run(kind: str) -> None:
    async def story() -> None:
        port = free_port()
        with contextlib.ExitStack() as stack:
            stays, goes, comes = (
                stack.enter_context(
                    FakeEngine(host=f"127.0.0.{at}", port=port)
                    if kind == "addresses"
                    else FakeEngine()
                )
                for at in (1, 2, 3)
            )
            async with running(kind, port) as (fleet, names):
                names.name(stays)
                fleet.finding.start()
                await fleet.has(stays)
                held = [f"held-{at}" for at in range(5)]
                assert {fleet.book(each) for each in held} == {worker_id_of(names.key(stays))}
                selecting = asyncio.ensure_future(fleet.select())
                for named in ((stays, goes), (stays, goes, comes), (stays, comes), (stays,)):
                    names.name(*named)
                    await fleet.has(*named)
                before = fleet.selects
                await until(lambda: fleet.selects > before)
                assert not selecting.done(), "no select has failed"
                selecting.cancel()
                await asyncio.gather(selecting, return_exceptions=True)
                reservations = fleet.selector.ready_partition("m", "default").slots.reservations
                assert set(held) <= set(reservations)

    uvloop.run(story())
