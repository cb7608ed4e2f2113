"""Replicas that encrypt: who hears whom with which keys, and why not, over real sockets."""

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Callable

import pytest
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from lean_selector.core.replication.events import Verdict
from lean_selector.core.replication.shapes import EventKind, ReplicaEvent
from lean_selector.events import link
from lean_selector.events.curve_keys import CurveGate, KeyPair, new_pair
from lean_selector.events.links import Links
from lean_selector.replicas import mesh as replica_mesh
from lean_selector.replicas.mesh import ReplicaSync
from lean_selector.wire.replica_frames import TOPIC
from tests.support.bookings import changed, replica_event
from tests.support.on_loop import on_loop, until
from tests.support.recording_proxy import RecordingProxy

SECRET = "the id of a request that nobody else may read"
EVENT = replica_event(EventKind.ADD, "llama", "t1", 16, SECRET, 7, 0, 1)
ANY_PORT = "tcp://127.0.0.1:*"
_ROUTER_IDS = itertools.count(1)
A, B, OTHER = new_pair(), new_pair(), new_pair()


class Replica:
    """A ReplicaSync with a context of its own, for a context has one gate."""

    def __init__(self, pair: KeyPair | None, *peers: KeyPair) -> None:
        self.heard: list[ReplicaEvent] = []
        self.router_id = next(_ROUTER_IDS)
        self.context = zmq.asyncio.Context()
        links = Links(self.context)
        self.gate: CurveGate | None = None
        if pair is not None:
            peer_keys = tuple(each.public for each in peers)
            self.gate = CurveGate(AsyncioAuthenticator(self.context), pair, peer_keys)
        self.sync = ReplicaSync(
            self.context,
            ANY_PORT,
            [],
            self._hear,
            router_id=self.router_id,
            links=links,
            gate=self.gate,
        )
        self.sync.start()

    @property
    def port(self) -> int:
        return int(self.sync.bound_endpoint.rpartition(":")[2])

    def _hear(self, event: ReplicaEvent, now: float) -> Verdict:
        self.heard.append(event)
        return Verdict.APPLIED

    def knows(self, other: "Replica") -> None:
        assert self.sync.register_peer(other.sync.bound_endpoint)

    async def hears(self, other: "Replica") -> None:
        """Waits until something that the other publishes from now on arrives."""
        marker = changed(EVENT, router_id=other.router_id, request_id=f"{next(_ROUTER_IDS)}")

        def has_heard() -> bool:
            other.sync.publish(marker)
            return any(event.booking == marker.booking for event in self.heard)

        await until(has_heard)

    def error(self) -> str:
        return self.sync.peer_states()[0].last_error or ""

    async def close(self) -> None:
        await self.sync.close()
        self.context.destroy(linger=0)


@contextlib.asynccontextmanager
async def two(one: Replica, other: Replica) -> AsyncIterator[tuple[Replica, Replica]]:
    """`other` knows `one`."""
    try:
        other.knows(one)
        yield one, other
    finally:
        await other.close()
        await one.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "RETRY_LIMIT_S", 0.02)
    monkeypatch.setattr(replica_mesh, "HEARTBEAT_S", 0.05)


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        pytest.param(
            lambda: Replica(A, B),
            lambda: Replica(OTHER, A),
            f"it does not admit our public key {OTHER.public.decode()}",
            id="an unknown client",
        ),
        pytest.param(
            lambda: Replica(A, B),
            lambda: Replica(B, OTHER),
            "its server key is not trusted",
            id="a wrong server key",
        ),
        pytest.param(
            lambda: Replica(A, B),
            lambda: Replica(None),
            "it requires CURVE, but no keys are configured for it",
            id="no key at all",
        ),
        pytest.param(
            lambda: Replica(None),
            lambda: Replica(B, A),
            "it does not encrypt, but keys are configured for it",
            id="an unencrypted peer",
        ),
    ],
)
@on_loop
async def test_with_wrong_keys_nothing_is_heard_and_the_peer_tells_why(
    one: Callable[[], Replica], other: Callable[[], Replica], words: str
) -> None:
    async with two(one(), other()) as (publisher, hearer):
        await until(lambda: hearer.error() == words)
        state = hearer.sync.peer_states()[0]
        assert state.state == "connecting"
        again = state.retries
        publisher.sync.publish(EVENT)
        await until(lambda: hearer.sync.peer_states()[0].retries > again + 2)
        await until(lambda: hearer.error() == words)  # a probe may be late, and tells less
        assert hearer.heard == []


@on_loop
async def test_who_refuses_tells_whom() -> None:
    async with two(Replica(A, B), Replica(OTHER, A)) as (one, other):
        await until(lambda: other.error() != "")
        assert one.gate is not None
        assert one.gate.refused >= 1
        assert one.gate.last_refused == OTHER.public.decode()


@on_loop
async def test_attempts_that_fail_for_the_key_leave_no_descriptors_behind() -> None:
    async with two(Replica(A, B), Replica(OTHER, B, OTHER, A)) as (_, other):
        await until(lambda: other.sync.peer_states()[0].retries >= 3)
        before = len(os.listdir("/proc/self/fd"))
        await until(lambda: other.sync.peer_states()[0].retries >= 30)
        assert len(os.listdir("/proc/self/fd")) <= before + 12  # of attempts under way


@pytest.mark.parametrize("pairs", [(A, B), (None, None)], ids=["encrypted", "plain"])
@on_loop
async def test_on_the_wire_nothing_is_to_be_read_with_keys_and_everything_without(
    pairs: tuple[KeyPair | None, KeyPair | None],
) -> None:
    one, other = Replica(pairs[0], A, B), Replica(pairs[1], A, B)
    try:
        with RecordingProxy(one.port) as proxy:
            assert other.sync.register_peer(f"tcp://127.0.0.1:{proxy.port}")
            await other.hears(one)
            secret = changed(EVENT, router_id=one.router_id)
            one.sync.publish(secret)
            await until(lambda: any(e.booking.request_id == SECRET for e in other.heard))
            seen = await asyncio.to_thread(proxy.seen)
            words = (SECRET.encode(), b"llama", TOPIC)
            assert [word in seen for word in words] == [pairs[0] is None] * 3
            assert (b"CURVE" in seen) is (pairs[0] is not None)
    finally:
        await other.close()
        await one.close()
