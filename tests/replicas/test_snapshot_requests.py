"""When a replica copies what is live on its peers: what makes a catch-up due, and due again."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq.asyncio

from lean_selector import tasks
from lean_selector.core.replication.shapes import ReplicaEvent
from lean_selector.http.outbound import OutboundClient
from lean_selector.replicas import snapshot_requests
from lean_selector.replicas.snapshot_requests import CatchingUp
from lean_selector.wire.replica_snapshot import encode_snapshot, snapshot_line
from tests.replicas.sync_replica import Replica as Synced
from tests.support.on_loop import on_loop, until
from tests.support.one_partition import PEER, Replica
from tests.support.outbound_server import client, response, serving

LONG_S = 3600.0  # never over
SOON_S = 0.01


class Late:
    """A replica that knows no worker yet, and its peer, which has a reservation on one."""

    def __init__(self, peer_url: str, sync: Synced) -> None:
        self.replica = Replica(ranks=0, catches_up=True)
        assert self.replica.catch_up is not None
        self.targets = [self.replica.ledger]
        self.told: list[ReplicaEvent] = []
        self.catching_up = CatchingUp(
            self.replica.catch_up,
            sync.sync,
            [peer_url],
            lambda: self.targets,
            lambda event, _: self.told.append(event),
            client=self.client,
        )
        self.defects = 0  # so often asking fails by a mistake of ours

    def client(self, url: str) -> OutboundClient:
        if self.defects:
            self.defects -= 1
            raise ZeroDivisionError
        return client()

    def has_it(self) -> bool:
        return "r" in self.replica.slots.reservations


@asynccontextmanager
async def late(*failures: bytes) -> AsyncIterator[tuple[Late, list[bytes]]]:
    """It runs, connected to its peer, which gives these answers first. And what that was asked."""
    owner = Replica(PEER)
    owner.add("r")
    snapshot = b"".join(
        encode_snapshot(PEER, 1, (snapshot_line(each, 0.0) for each in owner.snapshot()))
    )
    answers = [*failures]

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(answers.pop(0) if answers else response(snapshot))

    context = zmq.asyncio.Context()
    async with serving(serve) as served:
        here, there = Synced(context), Synced(context)
        await here.connect_to(there)
        made = Late(served.url, here)
        running = tasks.supervise("catch-up", made.catching_up.run)
        try:
            yield made, served.requests
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            for each in (here, there):
                await each.sync.close()
            context.term()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SETTLE_S", "LOOK_S", "AGAIN_S"):
        monkeypatch.setattr(snapshot_requests, name, SOON_S)
    monkeypatch.setattr(snapshot_requests, "RETRY_S", LONG_S)


@on_loop
async def test_whenever_a_rank_is_registered_peers_are_asked() -> None:
    async with late() as (here, asked):
        await until(lambda: bool(asked))
        assert not here.has_it()
        here.replica.register(2)
        await until(here.has_it)
        here.replica.unregister()  # and back between two looks
        assert not here.has_it()
        here.replica.register(2)
        await until(here.has_it)
        # Its last worker goes, and with it the partition, and both come back.
        again = Replica(ranks=2)
        here.replica.ledger, here.replica.slots = again.ledger, again.slots
        here.targets[:] = [again.ledger]
        await until(here.has_it)
        assert not here.told


@on_loop
async def test_a_connected_peer_that_did_not_answer_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(snapshot_requests, "RETRY_S", SOON_S)
    failed = response(b"{}", "503 Service Unavailable")
    async with late(failed, response(b"no snapshot"), failed) as (here, _):
        here.replica.register(1)
        await until(here.has_it)


@on_loop
async def test_a_catch_up_that_failed_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "AGAIN_FIRST_S", SOON_S)
    async with late() as (here, _):
        here.defects = 2
        here.replica.register(1)
        await until(here.has_it)
        assert not here.defects
