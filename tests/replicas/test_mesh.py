"""Replica sync over real sockets on the loopback, between two of ours."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq
import zmq.asyncio

from lean_selector.core.errors import BadRequest, Conflict
from lean_selector.core.replication.events import Verdict
from lean_selector.core.replication.shapes import EventKind
from lean_selector.links.pub_socket import ReplicaSyncError
from lean_selector.replicas.mesh import (
    HIGH_WATER_MARK,
    MAX_DUE_PER_TURN,
    MAX_EVENTS_PER_TURN,
    ReplicaSync,
)
from lean_selector.wire.replica_frames import MAX_EVENT_BYTES, MAX_HASHES, TOPIC, encode_event
from tests.replicas.sync_replica import ANY_PORT, EVENT, Replica
from tests.support.on_loop import inside, on_loop, until
from tests.support.reservations import changed, replica_event
from tests.support.running_service import free_port


class Mesh:
    """Replicas of one test, closed with it."""

    def __init__(self) -> None:
        self.context = zmq.asyncio.Context()
        self.replicas: list[Replica] = []

    def replica(
        self, bind: int | str = ANY_PORT, high_water_mark: int = HIGH_WATER_MARK
    ) -> Replica:
        self.replicas.append(Replica(self.context, bind, high_water_mark))
        return self.replicas[-1]

    def replica_that_knows_a_stranger(self) -> tuple[Replica, zmq.asyncio.Socket]:
        """And what it knows: a PUB that is no replica."""
        stranger = self.context.socket(zmq.PUB)
        stranger.bind(ANY_PORT)
        self.replica().sync.register_peer(stranger.getsockopt_string(zmq.LAST_ENDPOINT))
        return self.replicas[-1], stranger

    async def pair(self) -> tuple[Replica, Replica]:
        """Two of them; the second hears the first."""
        a, b = self.replica(), self.replica()
        await b.connect_to(a)
        return a, b


@asynccontextmanager
async def mesh() -> AsyncIterator[Mesh]:
    made = Mesh()
    try:
        yield made
    finally:
        for replica in made.replicas:
            await replica.sync.close()
        made.context.term()


in_mesh = inside(mesh)


@in_mesh
async def test_events_arrive_in_the_order_they_were_published(made: Mesh) -> None:
    a, b = await made.pair()
    events = [
        changed(EVENT, kind=kind, request_id=str(n), sequence_hashes=b"")
        if kind is EventKind.ADD
        else replica_event(kind, "llama", "t1", 16, str(n), 7, 0, 1)
        for n in range(MAX_EVENTS_PER_TURN)
        for kind in EventKind
    ]
    for event in events:
        a.sync.publish(event)
    await until(lambda: len(b.heard) == len(events))
    assert b.heard == events
    assert b.sync.undecodable == 0
    assert a.heard == []  # directions are separate


@in_mesh
async def test_a_burst_leaves_the_loop_its_turns(made: Mesh) -> None:
    a, b = await made.pair()
    longest = len_before = 0

    async def watch() -> None:
        nonlocal longest, len_before
        while True:
            longest = max(longest, len(b.heard) - len_before)
            len_before = len(b.heard)
            await asyncio.sleep(0)

    for n in range(20 * MAX_EVENTS_PER_TURN):
        a.sync.publish(changed(EVENT, request_id=str(n)))
    watching = asyncio.create_task(watch())
    await until(lambda: len(b.heard) == 20 * MAX_EVENTS_PER_TURN)
    watching.cancel()
    assert 0 < longest < 20 * MAX_EVENTS_PER_TURN


@in_mesh
async def test_frames_that_are_no_events_are_counted_and_nothing_else(
    made: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    b, stranger = made.replica_that_knows_a_stranger()
    good = encode_event(EVENT)

    def heard() -> bool:
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(stranger.underlying)
        plain.send_multipart([TOPIC, good])
        return bool(b.heard)

    await until(heard)
    for frames in ([TOPIC], [TOPIC, b"nonsense"], [TOPIC + b".1", good], [TOPIC, good, b""]):
        await stranger.send_multipart(frames)
    await until(lambda: b.sync.undecodable == 4)
    assert b.sync.received == 4 + len(b.heard)
    stranger.close(0)
    assert [r.message.split(": 1;")[0] for r in caplog.records] == [
        "replica events dropped (undecodable)"
    ]


@in_mesh
async def test_what_is_too_big_is_refused_on_either_side_and_counted_apart(
    made: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = await made.pair()
    plain: zmq.Socket[bytes] = zmq.Socket.shadow(a.sync._pub.socket.underlying)
    plain.send_multipart([TOPIC, bytes(MAX_EVENT_BYTES + 1)])
    many = changed(EVENT, sequence_hashes=bytes(8 * (MAX_HASHES + 1)))
    plain.send_multipart([TOPIC, encode_event(many)])
    await until(lambda: b.sync.too_big == 2)
    blocks = MAX_EVENT_BYTES // 9 + 1
    huge = changed(EVENT, sequence_hashes=b"\xff" * 8 * blocks)
    told = changed(EVENT, router_id=a.router_id)
    a.sync.publish(told)
    a.sync.publish(huge)
    a.sync.publish(told)
    await until(lambda: b.heard == [told, told])
    assert a.sync.refused == b.sync.heard.missed == 1
    assert b.sync.undecodable == 0
    texts = [record.getMessage() for record in caplog.records]
    assert any(text.startswith("replica events dropped (too big): 1;") for text in texts)
    assert any(text.startswith("replica events dropped (too big for peers): 1;") for text in texts)


@in_mesh
async def test_a_fault_of_the_listener_does_not_end_the_listening(
    made: Mesh, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = await made.pair()
    hear, b.sync._on_event = b.sync._on_event, lambda event, now: Verdict(99)
    a.sync.publish(EVENT)
    await until(lambda: bool(caplog.records))
    b.sync._on_event = hear
    for _ in range(2):  # of which the first one fails before it is told
        a.sync.publish(EVENT)
    fails, missed = iter([True]), b.sync.heard.event
    b.sync.heard.event = lambda *given: 1 // 0 if next(fails, False) else missed(*given)  # type: ignore[method-assign]
    await until(lambda: b.heard == [EVENT, EVENT])
    assert "replica event failed: ADD 'r' of model='llama'" in caplog.text
    assert "message of replica peer" in caplog.text


@in_mesh
async def test_drops_that_speak_of_a_missing_registration_are_logged_once_with_a_count(
    made: Mesh, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await made.pair()
    b.verdict = Verdict.UNKNOWN_PARTITION
    for _ in range(5):
        a.sync.publish(EVENT)
    await until(lambda: len(b.heard) == 5)
    assert len(caplog.records) == 1
    monkeypatch.setattr("lean_selector.replicas.mesh.WARN_EVERY_S", 0.0)
    a.sync.publish(EVENT)
    await until(lambda: len(caplog.records) == 2)
    b.verdict = Verdict.DUPLICATE
    a.sync.publish(EVENT)
    await until(lambda: len(b.heard) == 7)
    assert [r.getMessage() for r in caplog.records] == [
        f"replica events dropped (unknown partition): {count}; the last: "
        "ADD 'r' of model='llama' tenant='t1' block_size=16 worker=7 dp_rank=0 from router 1"
        for count in (1, 5)
    ]


@in_mesh
async def test_a_peer_that_does_not_read_costs_the_others_nothing(made: Mesh) -> None:
    a, reader = made.replica(high_water_mark=100), made.replica()
    await reader.connect_to(a)
    sleeper = made.context.socket(zmq.SUB)
    sleeper.setsockopt(zmq.RCVHWM, 1)
    sleeper.setsockopt(zmq.RCVBUF, 4096)
    sleeper.setsockopt(zmq.LINGER, 0)
    sleeper.subscribe(TOPIC)
    sleeper.connect(a.sync.bound_endpoint)
    plain: zmq.Socket[bytes] = zmq.Socket.shadow(sleeper.underlying)

    def sleeper_is_there() -> bool:
        a.sync.publish(EVENT)
        return bool(plain.poll(0))

    await until(sleeper_is_there)
    big = changed(EVENT, sequence_hashes=bytes(range(8, 16)) * 8000)
    rounds = 0
    while not a.sync.overflows:
        a.sync.publish(big)
        rounds += 1
        assert rounds < 10_000
        await until(lambda: reader.heard.count(big) == rounds)  # noqa: B023 - at once
    for _ in range(10):  # nor afterwards
        a.sync.publish(big)
    await until(lambda: reader.heard.count(big) == rounds + 10)
    sleeper.close()


# -- peers -----------------------------------------------------------------------------------------


@in_mesh
async def test_peers_are_listed_sorted_registered_once_and_limited_in_number(
    made: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lean_selector.replicas.mesh.MAX_PEERS", 2)
    sync = made.replica().sync
    assert [sync.register_peer(f"tcp://{peer}") for peer in ("b:2", "a:1", "b:2")] == [1, 1, 0]
    assert sync.peers() == ["tcp://a:1", "tcp://b:2"]
    with pytest.raises(Conflict, match="no more than 2"):
        sync.register_peer("tcp://c:3")
    assert [sync.deregister_peer("tcp://b:2") for _ in range(2)] == [True, False]
    assert sync.register_peer("tcp://c:3")
    with pytest.raises(BadRequest, match="missing scheme"):
        sync.deregister_peer("nonsense")


@pytest.mark.parametrize(
    ("endpoint", "text"),
    [
        ("nonsense", "invalid ZMQ endpoint `nonsense`: missing scheme"),
        ("tcp://h:0", "invalid ZMQ endpoint `tcp://h:0`: port must be greater than zero"),
        ("tcp://*:5555", "failed to register replica peer `tcp://*:5555`"),
        ("tcp://127.0.0.1:+5", "failed to register replica peer `tcp://127.0.0.1:+5`"),
        ("tcp://user@h:1", "failed to register replica peer `tcp://user@h:1`"),
        ("tcp://é:1", "failed to register replica peer `tcp://é:1`"),
        ("tcp://me:1", "peer endpoint matches this replica's advertised endpoint"),
    ],
)
@on_loop
async def test_an_endpoint_that_cannot_be_a_peer_is_refused_in_the_documented_words(
    endpoint: str, text: str
) -> None:
    context = zmq.asyncio.Context()
    sync = ReplicaSync(
        context, ANY_PORT, [], lambda *_: Verdict.OWN, router_id=1, advertise="tcp://me:1"
    )
    with pytest.raises(BadRequest) as raised:
        sync.register_peer(endpoint)
    assert (raised.value.message, sync.peers()) == (text, [])
    await sync.close()
    context.term()


@in_mesh
async def test_nothing_is_heard_of_a_peer_after_it_was_deregistered(made: Mesh) -> None:
    a, b, c = made.replica(), made.replica(), made.replica()
    await c.connect_to(a)
    await c.connect_to(b)
    c.sync._peers[a.sync.bound_endpoint].link.dropped = 3
    assert c.sync.deregister_peer(a.sync.bound_endpoint)
    assert c.sync.dropped == 3
    a.sync.publish(EVENT)
    await c.hear_one_from(b)  # by now the other would have been heard
    assert EVENT not in c.heard


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
@in_mesh
async def test_the_state_of_a_connection_is_followed_through_a_restart_of_the_peer(
    made: Mesh, host: str
) -> None:
    port = free_port()
    endpoint = f"tcp://{host}:{port}"
    b = made.replica()
    b.sync.register_peer(endpoint)
    b.sync.register_peer("tcp://127.0.0.1:1")

    def state() -> str:
        (peer,) = (p for p in b.sync.peer_states() if p.endpoint == endpoint)
        return peer.state

    assert state() == "connecting"
    for _ in range(3):
        a = made.replica(port)
        await until(lambda: state() == "connected")
        await b.hear_one_from(a)
        await a.sync.close()
        made.replicas.remove(a)
        await until(lambda: state() == "disconnected")
    nobody, somebody = b.sync.peer_states()
    assert (nobody.state, nobody.endpoint) == ("connecting", "tcp://127.0.0.1:1")
    assert nobody.retries > 0
    assert somebody.since_s < nobody.since_s
    before = somebody.retries
    await until(lambda: b.sync.peer_states()[1].retries > before)
    b.sync.deregister_peer(endpoint)
    assert len(b.sync.peer_states()) == 1


@in_mesh
async def test_an_ipv6_peer_in_brackets_works(made: Mesh) -> None:
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        a = made.replica("tcp://[::1]:*")
    except ReplicaSyncError as error:
        pytest.skip(str(error))
    b = made.replica()
    await b.connect_to(a)
    await b.connect_to(made.replica())


# -- start and end ---------------------------------------------------------------------------------


@on_loop
async def test_a_peer_of_the_start_that_is_no_endpoint_is_one_clear_error() -> None:
    context = zmq.asyncio.Context()
    with pytest.raises(ReplicaSyncError) as raised:
        ReplicaSync(context, ANY_PORT, ["b:1"], lambda *_: Verdict.OWN, router_id=1)
    context.term()  # would hang if a socket had been left open
    assert str(raised.value) == (
        "invalid replica peer endpoint `b:1`: invalid ZMQ endpoint `b:1`: missing scheme"
    )


@on_loop
async def test_close_drops_what_is_queued_for_a_peer() -> None:
    # A context of its own, that ends last: libzmq 4.3.5 aborts when a peer goes away in the
    # very moment a PUB with half a message on its way is closed (session_base.cpp:233).
    sleepers = zmq.asyncio.Context()
    sleeper = sleepers.socket(zmq.SUB)
    sleeper.setsockopt(zmq.RCVHWM, 1)
    sleeper.subscribe(TOPIC)
    plain: zmq.Socket[bytes] = zmq.Socket.shadow(sleeper.underlying)

    async with mesh() as made:
        a = made.replica()
        sleeper.connect(a.sync.bound_endpoint)

        def sleeper_is_there() -> bool:
            a.sync.publish(EVENT)
            return bool(plain.poll(0))

        await until(sleeper_is_there)
        for _ in range(50_000):
            a.sync.publish(EVENT)
    sleeper.close(0)
    sleepers.term()


@in_mesh
async def test_what_waits_to_be_sent_is_bounded_and_what_is_refused_is_counted(
    made: Mesh, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("lean_selector.replicas.mesh.MAX_OUTBOX", 300)
    a, b = await made.pair()
    before = a.sync.published
    for n in range(310):
        a.sync.publish(changed(EVENT, request_id=str(n)))
    assert a.sync.published == before  # nothing is sent before the turn ends
    assert a.sync.refused == 10
    await until(lambda: len(b.heard) == 300)
    assert [event.spec.request_id for event in b.heard] == [str(n) for n in range(300)]
    assert a.sync.published == before + 300
    a.sync.publish(EVENT)
    await until(lambda: len(b.heard) == 301)
    assert "the outbox is full" in caplog.text


@in_mesh
async def test_what_a_turn_brings_is_sent_at_its_end_and_of_a_burst_a_part(
    made: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lean_selector.replicas.mesh.SLICE_S", 0.0)  # it is over at once
    sync = made.replica().sync

    async def sent_after(count: int) -> int:
        before = sync.published
        for n in range(count):
            sync.publish(changed(EVENT, request_id=str(n)))
        await asyncio.sleep(0)
        return sync.published - before

    assert [await sent_after(count) for count in (1, 1_000, 1)] == [1, 1_000, 1]
    assert await sent_after(MAX_DUE_PER_TURN + 20) == MAX_DUE_PER_TURN
    assert sync.waiting == 20
    # The others wait their turns, and hold up nothing that comes: as many go as have come.
    assert [await sent_after(count) for count in (0, 5, 7)] == [1, 5, 7]
    await until(lambda: sync.published == sync.sequence == 2_058)
