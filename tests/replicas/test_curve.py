"""Replicas that encrypt: who hears whom with which keys, and why not, over real sockets."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator

import pytest
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from lean_selector.links import link
from lean_selector.links.curve_keys import CurveGate, KeyPair
from lean_selector.replicas import mesh as replica_mesh
from lean_selector.wire.replica_frames import TOPIC
from lean_selector.wire.replica_shapes import PeerState
from tests.replicas.sync_replica import EVENT, Replica
from tests.support.key_files import new_pair
from tests.support.on_loop import on_loop, until
from tests.support.recording_proxy import RecordingProxy
from tests.support.reservations import changed

SECRET = "the id of a request that nobody else may read"
A, B, OTHER = new_pair(), new_pair(), new_pair()


class Encrypting(Replica):
    """It has a context of its own, for a context has one gate."""

    def __init__(self, pair: KeyPair | None, *peers: KeyPair) -> None:
        self.context = zmq.asyncio.Context()
        self.gate: CurveGate | None = None
        if pair is not None:
            admitted = tuple(each.public for each in peers)
            self.gate = CurveGate(AsyncioAuthenticator(self.context), pair, admitted)
        super().__init__(self.context, gate=self.gate)

    def peer(self) -> PeerState:
        return self.sync.peer_states()[0]


Keys = tuple[KeyPair | None, *tuple[KeyPair, ...]]  # its own pair, and those whom it admits


@contextlib.asynccontextmanager
async def two(one: Keys, other: Keys) -> AsyncIterator[tuple[Encrypting, Encrypting]]:
    made = Encrypting(*one), Encrypting(*other)
    try:
        yield made
    finally:
        for each in reversed(made):
            await each.sync.close()
            each.context.destroy(linger=0)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "RETRY_LIMIT_S", 0.02)
    monkeypatch.setattr(replica_mesh, "HEARTBEAT_S", 0.05)


@pytest.mark.parametrize(
    ("one", "other", "words", "refused"),
    [
        pytest.param(
            (A, B),
            (OTHER, A),
            f"it does not admit our public key {OTHER.public.decode()}",
            OTHER.public.decode(),
            id="an unknown client",
        ),
        pytest.param(
            (A, B), (B, OTHER), "its server key is not trusted", None, id="a wrong server key"
        ),
        pytest.param(
            (A, B),
            (None,),
            "it requires CURVE, but no keys are configured for it",
            None,
            id="no key at all",
        ),
        pytest.param(
            (None,),
            (B, A),
            "it does not encrypt, but keys are configured for it",
            None,
            id="an unencrypted peer",
        ),
    ],
)
@on_loop
async def test_with_wrong_keys_nothing_is_heard_and_both_tell_why(
    one: Keys, other: Keys, words: str, refused: str | None
) -> None:
    async with two(one, other) as (publisher, hearer):
        assert hearer.sync.register_peer(publisher.sync.bound_endpoint)
        await until(lambda: hearer.peer().last_error == words)
        assert hearer.peer().state == "connecting"
        again = hearer.peer().retries
        publisher.sync.publish(EVENT)
        await until(lambda: hearer.peer().retries > again + 2)
        await until(lambda: hearer.peer().last_error == words)  # a probe may be late
        assert hearer.heard == []
        if publisher.gate is not None:
            assert (publisher.gate.refused > 0) is (refused is not None)
            assert publisher.gate.last_refused == refused


@on_loop
async def test_attempts_that_fail_for_the_key_leave_no_descriptors_behind() -> None:
    async with two((A, B), (OTHER, B, OTHER, A)) as (one, other):
        assert other.sync.register_peer(one.sync.bound_endpoint)
        await until(lambda: other.peer().retries >= 3)
        before = len(os.listdir("/proc/self/fd"))
        await until(lambda: other.peer().retries >= 30)
        assert len(os.listdir("/proc/self/fd")) <= before + 12  # of attempts under way


@pytest.mark.parametrize("pairs", [(A, B), (None, None)], ids=["encrypted", "plain"])
@on_loop
async def test_on_the_wire_nothing_is_to_be_read_with_keys_and_everything_without(
    pairs: tuple[KeyPair | None, KeyPair | None],
) -> None:
    async with two((pairs[0], A, B), (pairs[1], A, B)) as (one, other):
        with RecordingProxy(int(one.sync.bound_endpoint.rpartition(":")[2])) as proxy:
            assert other.sync.register_peer(f"tcp://127.0.0.1:{proxy.port}")
            await other.hear_one_from(one)
            secret = changed(EVENT, router_id=one.router_id, request_id=SECRET)
            one.sync.publish(secret)
            await until(lambda: secret in other.heard)
            seen = await asyncio.to_thread(proxy.seen)
            words = (SECRET.encode(), b"llama", TOPIC)
            assert [word in seen for word in words] == [pairs[0] is None] * 3
            assert (b"CURVE" in seen) is (pairs[0] is not None)
