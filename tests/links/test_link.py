"""A link against real ZMQ sockets, and against listeners that are none."""

import asyncio
import contextlib
import itertools
import re
import resource
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio

from lean_selector import tasks
from lean_selector.http.allowed_endpoints import AllowedEndpoints
from lean_selector.links import link as module
from lean_selector.links import links as links_module
from lean_selector.links.link import Link, LinkState, Message, Opening, check_link
from lean_selector.links.links import Backlogs, Links
from lean_selector.links.names import Address, Resolver
from lean_selector.links.turns import Turns
from tests.support.on_loop import DEADLINE_S, on_loop, until

# What ZMTP 3 begins with, the NULL mechanism.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
MAX_BYTES = 1 << 20


class Heard:
    """A link and what it brought."""

    def __init__(
        self,
        endpoint: str,
        links: Links | None = None,
        kind: int = zmq.SUB,
        opening: Opening = lambda socket: socket.setsockopt(zmq.SUBSCRIBE, b""),
        **options: Any,
    ) -> None:
        self.messages: list[Message] = []
        self.states: list[LinkState] = []
        self.on_state: Callable[[LinkState], None] = self.states.append
        self.takes = True
        self.link = Link(
            links or Links(),
            endpoint,
            kind,
            opening,
            self._on_message,
            lambda: self.on_state(self.link.state),
            max_message_bytes=MAX_BYTES,
            **options,
        )

    def _on_message(self) -> None:
        while self.takes and (message := self.link.take()) is not None:
            self.messages.append(message)

    async def __aenter__(self) -> "Heard":
        self.link.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        task = self.link.close()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)


@contextlib.asynccontextmanager
async def publisher(endpoint: str = "tcp://127.0.0.1:*") -> AsyncIterator[zmq.asyncio.Socket]:
    """XPUB is PUB, and shows who subscribes."""
    context = zmq.asyncio.Context()
    pub = context.socket(zmq.XPUB)
    pub.setsockopt(zmq.LINGER, 0)
    pub.setsockopt(zmq.SNDHWM, 100_000)
    pub.setsockopt(zmq.IPV6, "[" in endpoint)
    pub.bind(endpoint)
    try:
        yield pub
    finally:
        context.destroy(linger=0)


def endpoint_of(pub: zmq.asyncio.Socket) -> str:
    return pub.getsockopt_string(zmq.LAST_ENDPOINT)


def port_of(pub: zmq.asyncio.Socket) -> int:
    return int(endpoint_of(pub).rpartition(":")[2])


def documented() -> set[tuple[str, str]]:
    """The changes of state in the table of the module's docstring."""
    rows = re.findall(
        r"^    ([A-Z]+)  .*?  ((?:[A-Z]+(?:, )?)+)", module.__doc__ or "", re.MULTILINE
    )
    return {(state, each) for state, following in rows for each in following.split(", ")}


@on_loop
async def test_the_state_changes_as_the_table_says_and_in_no_other_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each link has what it should connect to only after its first failure, and loses it."""
    monkeypatch.setattr("lean_selector.links.names.HOLDS_S", 0.0)
    monkeypatch.setattr(module, "RETRY_FIRST_S", 0.02)
    monkeypatch.setattr(module, "LOOK_FIRST_S", 0.02)
    addresses: list[str] = []
    links = Links(resolver=names(engine=addresses, none=[]))
    seen: set[tuple[str, str]] = set()

    def hearing(endpoint: str, **options: Any) -> Heard:
        heard = Heard(endpoint, links, **options)
        before = heard.link.state.name

        def note(state: LinkState) -> None:
            nonlocal before
            seen.add((before, state.name))
            before = state.name

        heard.on_state = note
        return heard

    async def comes_to(heard: Heard, state: LinkState) -> None:
        await until(lambda: heard.link.state is state)

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with publisher() as pub:
        port, endpoint = port_of(pub), endpoint_of(pub)
        async with hearing(endpoint) as straight, hearing(endpoint, once=True) as replay:
            await comes_to(straight, LinkState.CONNECTED)
            await comes_to(replay, LinkState.CONNECTED)
            pub.context.destroy(linger=0)
            await comes_to(straight, LinkState.RETRYING)
            await comes_to(replay, LinkState.CLOSED)
            async with publisher(endpoint):
                await comes_to(straight, LinkState.CONNECTED)
    async with hearing(f"tcp://engine:{port}") as named:
        await comes_to(named, LinkState.RETRYING)
        addresses.append("127.0.0.1")
        await until(lambda: named.link.error == "Connection refused")
        async with publisher(endpoint):  # libzmq finds it
            await comes_to(named, LinkState.CONNECTED)
    for once in ("tcp://none:1", "tcp://127.0.0.1:1"):
        async with hearing(once, once=True) as failing:
            await comes_to(failing, LinkState.CLOSED)
    server = await asyncio.start_server(hang_up, "127.0.0.1", port)
    async with hearing(endpoint) as other, hearing(endpoint, once=True) as replay:
        await until(lambda: other.link.retries >= 2)
        await comes_to(replay, LinkState.CLOSED)
    server.close()
    assert seen == {(state, after) for state, after in documented() if state != "any"}


@on_loop
async def test_messages_of_a_publisher_arrive_in_order() -> None:
    async with publisher() as pub, Heard(endpoint_of(pub)) as heard:
        assert await pub.recv() == b"\x01"
        sent = [[b"", str(n).encode(), b"p" * n] for n in range(600)]
        for frames in sent:
            await pub.send_multipart(frames)
        await until(lambda: len(heard.messages) == 600)
        assert heard.messages == sent
        assert heard.states == [LinkState.CONNECTED]
        assert (heard.link.waiting, heard.link.waiting_bytes, heard.link.error) == (0, 0, None)


@on_loop
async def test_the_heartbeats_of_a_peer_are_answered() -> None:
    async with publisher() as other:
        pub = other.context.socket(zmq.XPUB)
        pub.setsockopt(zmq.HEARTBEAT_IVL, 20)
        pub.setsockopt(zmq.HEARTBEAT_TIMEOUT, 100)
        monitor = pub.get_monitor_socket(zmq.Event.DISCONNECTED)
        pub.bind("tcp://127.0.0.1:*")
        async with Heard(endpoint_of(pub)) as heard:
            await pub.recv()
            # Longer than the time-out, after which who does not answer is cut off.
            assert not await monitor.poll(300)
            assert heard.states == [LinkState.CONNECTED]


@on_loop
async def test_a_listener_that_appears_is_heard_without_waiting_for_an_attempt_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """libzmq tries again itself, at least twice a second, however long nothing listened."""
    monkeypatch.setattr(module, "LOOK_FIRST_S", 0.001)
    async with publisher() as pub:
        endpoint = endpoint_of(pub)
    async with Heard(endpoint) as heard:
        await until(lambda: heard.link.retries >= 5)
        assert (heard.link.state, heard.link.error) == (LinkState.RETRYING, "Connection refused")
        trying = heard.link._socket
        assert trying is not None
        assert int(trying.getsockopt(zmq.RECONNECT_IVL)) <= 100
        assert int(trying.getsockopt(zmq.RECONNECT_IVL_MAX)) < 500
        async with publisher(endpoint) as pub:
            assert await pub.recv() == b"\x01"
            await until(lambda: heard.link.state is LinkState.CONNECTED)
            assert heard.link._socket is trying
            assert heard.link.retries == 0


@on_loop
async def test_a_monitor_is_taken_down_before_what_hears_it_is_closed() -> None:
    """libzmq's thread would wait for ever to tell a PAIR that is gone."""
    order: list[tuple[str, object]] = []
    disable, close = zmq.Socket.disable_monitor, zmq.Socket.close

    def disabling(self: "zmq.Socket[bytes]") -> None:
        disable(self)
        order.append(("disable", self.type))

    def closing(self: "zmq.Socket[bytes]", linger: int | None = None) -> None:
        order.append(("close", self.type))
        close(self, linger)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zmq.Socket, "disable_monitor", disabling)
        patch.setattr(zmq.Socket, "close", closing)
        async with publisher() as pub, Heard(endpoint_of(pub)) as heard:
            await until(lambda: heard.link.state is LinkState.CONNECTED)
        assert order[:3] == [("disable", zmq.SUB), ("close", zmq.PAIR), ("close", zmq.SUB)]
        order.clear()
        async with Heard("tcp://127.0.0.1:1") as refused:
            await until(lambda: refused.link.error)
    assert order == [("disable", zmq.SUB), ("close", zmq.PAIR), ("close", zmq.SUB)]


@on_loop
async def test_while_the_loop_stands_still_libzmq_holds_few_messages_of_bounded_size() -> None:
    async with publisher() as pub, Heard(endpoint_of(pub)) as heard:
        await pub.recv()
        made = heard.link._socket
        assert made is not None
        assert 16 <= int(made.getsockopt(zmq.RCVHWM)) <= 64
        assert made.getsockopt(zmq.MAXMSGSIZE) == 2 * MAX_BYTES


@on_loop
async def test_after_a_message_that_is_too_large_it_connects_again() -> None:
    async with publisher() as pub, Heard(endpoint_of(pub)) as heard:
        await pub.recv()
        await pub.send(b"last")
        await pub.send(bytes(2 * MAX_BYTES + 1))
        assert await pub.recv() == b"\x00"
        assert await pub.recv() == b"\x01"
        await pub.send(b"next")
        await until(lambda: heard.messages == [[b"last"], [b"next"]])


@on_loop
async def test_a_unix_socket_is_reached_too(tmp_path: Path) -> None:
    for endpoint in (f"ipc://{tmp_path}/s", f"ipc://@lean-selector-{tmp_path.name}"):
        async with publisher(endpoint) as pub, Heard(endpoint) as heard:
            await pub.recv()
            await pub.send(b"x")
            await until(lambda: heard.messages == [[b"x"]])


def names(**addresses: list[str]) -> Resolver:
    def look_up(name: str) -> list[Address]:
        found: list[Address] = []
        for ip in addresses[name]:
            family = socket.AF_INET6 if ":" in ip else socket.AF_INET
            found.append((family, (ip, 0, 0, 0) if ":" in ip else (ip, 0)))
        return found

    return Resolver(look_up)


@on_loop
async def test_a_listener_that_appears_at_any_address_of_a_name_is_found_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_FIRST_S", 1000.0)
    monkeypatch.setattr(module, "OTHERS_S", 0.01)
    for late in ("127.0.0.1", "127.0.0.3"):
        links = Links(resolver=names(engine=["127.0.0.1", "127.0.0.2", "127.0.0.3"]))
        async with publisher() as pub:
            port = port_of(pub)
        async with Heard(f"tcp://engine:{port}", links) as heard:
            await until(lambda: heard.link.retries >= 2)
            assert heard.link.error == "Connection refused"
            async with publisher(f"tcp://{late}:{port}") as pub:
                assert await pub.recv() == b"\x01"
                await until(lambda: heard.link.state is LinkState.CONNECTED)


@on_loop
async def test_what_listens_at_another_address_of_a_name_and_is_no_engine_is_passed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "RETRY_FIRST_S", 0.01)
    monkeypatch.setattr(module, "OTHERS_S", 0.01)

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    addresses = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
    async with publisher(f"tcp://{addresses[2]}:*") as pub:
        others = [await asyncio.start_server(hang_up, ip, port_of(pub)) for ip in addresses[:2]]
        links = Links(resolver=names(engine=addresses))
        async with Heard(f"tcp://engine:{port_of(pub)}", links):
            assert await pub.recv() == b"\x01"
        for other in others:
            other.close()


@on_loop
async def test_a_name_gains_an_address_while_another_refuses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lean_selector.links.names.HOLDS_S", 0.0)
    monkeypatch.setattr(module, "LOOK_FIRST_S", 0.01)
    addresses = ["127.0.0.1"]
    async with publisher() as pub:
        port = port_of(pub)
    async with Heard(f"tcp://engine:{port}", Links(resolver=names(engine=addresses))) as heard:
        await until(lambda: heard.link.error == "Connection refused")
        addresses.append("127.0.0.2")
        async with publisher(f"tcp://127.0.0.2:{port}") as pub:
            assert await pub.recv() == b"\x01"


@on_loop
async def test_a_name_is_looked_up_again_when_its_connection_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lean_selector.links.names.HOLDS_S", 0.0)
    addresses = ["127.0.0.1"]
    async with publisher("tcp://127.0.0.1:*") as first:
        port = port_of(first)
        async with Heard(f"tcp://engine:{port}", Links(resolver=names(engine=addresses))) as heard:
            await first.recv()
            addresses[:] = ["127.0.0.2"]  # it moves
            async with publisher(f"tcp://127.0.0.2:{port}") as second:
                first.context.destroy(linger=0)
                assert await second.recv() == b"\x01"
                await second.send(b"moved")
                await until(lambda: heard.messages == [[b"moved"]])


@on_loop
async def test_a_name_that_moves_to_where_we_may_not_connect_is_not_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("lean_selector.links.names.HOLDS_S", 0.0)
    addresses = ["127.0.0.2", "127.0.0.1"]  # the first was never allowed
    allowed = AllowedEndpoints(["127.0.0.1"])
    async with publisher("tcp://127.0.0.1:*") as first:
        port = port_of(first)
        links = Links(resolver=names(engine=addresses), allowed=allowed)
        async with (
            publisher(f"tcp://127.0.0.2:{port}") as second,
            Heard(f"tcp://engine:{port}", links) as heard,
        ):
            assert await first.recv() == b"\x01"
            addresses[:] = ["127.0.0.2"]  # as an attacker's DNS would have it
            first.context.destroy(linger=0)
            words = "127.0.0.2, which is not allowed by --allow-endpoint"
            await until(lambda: words in (heard.link.error or ""))
            assert not await second.poll(0)  # nobody has subscribed there


@on_loop
async def test_a_name_that_hangs_says_so_and_delays_no_other_link() -> None:

    release = threading.Event()

    def look_up(name: str) -> list[Address]:
        assert release.wait(DEADLINE_S)
        raise socket.gaierror(-3, "Temporary failure in name resolution")

    links = Links(resolver=Resolver(look_up))
    async with publisher() as pub, Heard("tcp://silent:1", links) as silent:
        await until(lambda: silent.link.state is LinkState.RESOLVING)
        async with Heard(endpoint_of(pub), links) as heard:
            await pub.recv()
            await pub.send(b"x")
            await until(lambda: heard.messages == [[b"x"]])
        assert silent.link.state is LinkState.RESOLVING
        release.set()
        await until(lambda: silent.link.state is LinkState.RETRYING)
        assert silent.link.error == "Temporary failure in name resolution"


@contextlib.asynccontextmanager
async def listener(answer: bytes) -> AsyncIterator[tuple[str, list[int]]]:
    """Something that is not ZMQ; the list has a number for each connection that came."""
    came: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        came.append(len(came))
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        port = server.sockets[0].getsockname()[1]
        yield f"tcp://127.0.0.1:{port}", came
    finally:
        server.close()


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", GREETING])
@on_loop
async def test_the_pauses_grow_before_a_listener_that_is_not_zmq(
    answer: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    really_sleep = asyncio.sleep

    async def sleep(pause_s: float) -> None:
        if module.RETRY_FIRST_S / 2 < pause_s < 1000.0:  # not those between probes
            pauses.append(pause_s)
        await really_sleep(0 if pause_s < 1000.0 else pause_s)

    monkeypatch.setattr(module, "LOOK_FIRST_S", 1000.0)
    async with listener(answer) as (endpoint, came), Heard(endpoint) as heard:
        with monkeypatch.context() as patch:
            patch.setattr(asyncio, "sleep", sleep)
            while len(came) < 12:
                await really_sleep(0.001)
        assert LinkState.CONNECTED not in heard.states
        assert heard.link.error
    expected = [min(module.RETRY_FIRST_S * 2**n, module.RETRY_LIMIT_S) for n in range(11)]
    for pause_s, about_s in zip(pauses, expected, strict=False):
        assert 0.8 * about_s <= pause_s <= 1.2 * about_s


@on_loop
async def test_a_listener_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.005)
    monkeypatch.setattr(module, "RETRY_FIRST_S", 0.005)
    monkeypatch.setattr(module, "_PROBE_S", 0.05)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        async with Heard(f"tcp://127.0.0.1:{silent.getsockname()[1]}") as heard:
            while not heard.link.retries:
                time.sleep(0.01)  # noqa: ASYNC251 - all that can be due is due
                await asyncio.sleep(0)
            assert heard.link.error == "it accepts connections and sends nothing"


@on_loop
async def test_a_link_that_found_no_descriptor_is_opened_when_there_is_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with publisher() as pub:
        endpoint = endpoint_of(pub)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        Links()  # everything is imported
        with none_left(soft, hard):
            heard = Heard(endpoint)
            heard.link.start()
            await until(lambda: heard.link.retries >= 1)
            assert heard.link.error == "Too many open files"
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_exit(heard.__aexit__)
            await pub.recv()
            await pub.send(b"x")
            await until(lambda: heard.messages == [[b"x"]])


@contextlib.contextmanager
def none_left(soft: int, hard: int) -> Iterator[None]:
    """No more descriptors, within."""
    taken: list[socket.socket] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        while True:
            try:
                taken.append(socket.socket())
            except OSError:
                break
        yield
    finally:
        for each in taken:
            each.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@on_loop
async def test_beyond_its_bound_a_backlog_loses_its_oldest_and_counts_them() -> None:
    async with publisher() as pub, Heard(endpoint_of(pub), max_backlog_bytes=50_000) as heard:
        await pub.recv()
        heard.takes = False
        for n in range(1000):
            await pub.send_multipart([b"%03d" % n, bytes(744)])
        link = heard.link
        await until(lambda: link.waiting and link.dropped + link.waiting == 1000)
        assert link.waiting == 50_000 // (3 + 744 + module.MESSAGE_OVERHEAD)
        assert 0 < link.waiting_bytes <= 50_500
        first = link.take()
        assert first is not None
        assert first[0] == b"%03d" % link.dropped
        while link.take() is not None:
            pass
        assert link.waiting_bytes == 0


@on_loop
async def test_beyond_the_bound_of_all_the_greediest_gives_way() -> None:
    waiting = Backlogs(limit=200_000)
    links = Links(waiting=waiting)
    async with (
        publisher() as loud,
        publisher() as quiet,
        Heard(endpoint_of(loud), links) as a,
        Heard(endpoint_of(quiet), links) as b,
    ):
        a.takes = b.takes = False
        await loud.recv()
        await quiet.recv()
        await quiet.send(b"few")
        await until(lambda: b.link.waiting == 1)
        for _ in range(1000):
            await loud.send(bytes(744))
        await until(lambda: a.link.dropped + a.link.waiting == 1000)
        assert a.link.dropped > 700
        assert b.link.dropped == 0
        assert waiting.bytes <= waiting.limit
        assert waiting.bytes == a.link.waiting_bytes + b.link.waiting_bytes
    assert waiting.bytes == 0  # what is closed holds nothing


@on_loop
async def test_a_replay_that_is_too_much_gives_way_itself_and_takes_nothing_from_others() -> None:
    waiting = Backlogs(limit=200_000)
    links = Links(waiting=waiting)
    async with publisher() as live:
        router = live.context.socket(zmq.ROUTER)
        router.bind("tcp://127.0.0.1:*")

        def ask(dealer: "zmq.Socket[bytes]") -> None:
            dealer.send_multipart([b"", b"all"], zmq.NOBLOCK)

        replay = Heard(endpoint_of(router), links, zmq.DEALER, ask, once=True)
        async with Heard(endpoint_of(live), links) as heard, replay:
            heard.takes = replay.takes = False
            await live.recv()
            for n in range(3):
                await live.send(b"%d" % n)
            await until(lambda: heard.link.waiting == 3)
            identity, *_ = await router.recv_multipart()
            for n in range(600):
                await router.send_multipart([identity, b"%03d" % n, bytes(1000)])
            await until(lambda: replay.link.state is LinkState.CLOSED)  # at once, not when idle
            assert replay.link.has_overflowed
            assert (heard.link.waiting, heard.link.dropped) == (3, 0)
            assert waiting.bytes <= waiting.limit
            kept = [message[0] for message in iter(replay.link.take, None)]
            assert kept == [b"%03d" % n for n in range(len(kept))]  # from the start, in order
            assert len(kept) > 50


class CountedLinks(Links):
    """How many steps each turn took."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def _step(self) -> None:
        before = len(self._steps)
        super()._step()
        self.steps.append(before - len(self._steps))


@on_loop
async def test_many_links_are_opened_and_closed_a_few_per_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """4 096 at once must not hold the loop, so what one turn opens does not grow with them."""

    async def refused(self: Link) -> str | None:
        raise OSError("not now")

    monkeypatch.setattr(Link, "_connect", refused)
    links = CountedLinks()
    many = [Heard("tcp://127.0.0.1:1", links) for _ in range(400)]
    for each in many:
        each.link.start()
    await until(lambda: all(each.states for each in many))
    tasks = [task for each in many if (task := each.link.close()) is not None]
    assert len(tasks) == 400
    await asyncio.gather(*tasks, return_exceptions=True)
    assert max(links.steps) == links_module.STEPS_PER_TURN
    assert sum(links.steps) >= 800


@on_loop
async def test_a_link_that_is_closed_before_its_turn_is_never_opened() -> None:
    heard = Heard("tcp://127.0.0.1:1")
    heard.link.start()
    assert heard.link.close() is None
    tasks = asyncio.all_tasks()
    for _ in range(5):
        await asyncio.sleep(0)
    assert asyncio.all_tasks() == tasks


@on_loop
async def test_reading_is_put_off_when_a_turn_is_used_up() -> None:
    links = Links()
    links.reading = Turns(slice_s=0.0)  # each read is one too many
    async with publisher() as pub, Heard(endpoint_of(pub), links) as heard:
        await pub.recv()
        for n in range(2000):
            await pub.send(b"%d" % n)
        await until(lambda: len(heard.messages) == 2000)
        assert heard.messages[-1] == [b"1999"]


@on_loop
async def test_a_bug_of_who_is_told_leaves_no_second_connection_behind() -> None:
    told_of: list[LinkState] = []

    def tell(state: LinkState) -> None:
        told_of.append(state)
        if told_of.count(LinkState.CONNECTED) == 1 and state is LinkState.CONNECTED:
            raise RuntimeError("a bug")

    async with publisher() as pub, Heard(endpoint_of(pub)) as heard:
        heard.on_state = tell
        await until(lambda: told_of.count(LinkState.CONNECTED) == 2)
        sent = itertools.count()
        while len(heard.messages) < 5:  # the first ones may go before it has subscribed
            await pub.send(b"%d" % next(sent))
            await asyncio.sleep(0.01)
        assert len({message[0] for message in heard.messages}) == len(heard.messages)


@on_loop
async def test_nothing_arrives_after_close() -> None:
    async with publisher() as pub:
        heard = Heard(endpoint_of(pub))
        heard.link.start()
        await pub.recv()
        heard.takes = False
        await pub.send(b"x")
        await until(lambda: heard.link.waiting)
        task = heard.link.close()
        assert heard.link.take() is None
        assert task is not None
        await asyncio.gather(task, return_exceptions=True)
        assert await pub.recv() == b"\x00"  # and the other side sees it go
        assert heard.states == [LinkState.CONNECTED]


def test_what_no_one_can_connect_to_is_refused_at_once() -> None:
    for endpoint in (
        *("tcp://127.0.0.1:5", "tcp://[::1%lo]:5", "tcp://a-b.c_d:05"),
        *("ipc:///run/engine", "inproc://a"),
    ):
        check_link(endpoint)
    for endpoint in (
        *("tcp://*:5", "tcp://h:+5", "tcp://user@h:5", "tcp://é:5", f"ipc://{'x' * 108}"),
    ):
        with pytest.raises(ValueError, match=r"address|path"):
            check_link(endpoint)


@on_loop
async def test_what_only_a_process_of_its_own_reaches_says_so() -> None:
    async with Heard("inproc://a") as heard:
        await until(lambda: heard.link.error)
        assert heard.link.error == "inproc is not reachable outside of this process"


def fail() -> bool:
    raise RuntimeError("a bug")


@on_loop
async def test_what_stands_behind_a_message_that_failed_is_read_though_nothing_more_comes() -> None:
    failures = tasks.failures["zmq link"]
    links = Links()
    async with publisher() as pub, Heard(endpoint_of(pub), links) as heard:
        assert await pub.recv() == b"\x01"
        await until(lambda: heard.states == [LinkState.CONNECTED])
        heard.link.on_message = fail  # type: ignore[assignment] # it raises
        links.reading._is_scheduled = (
            True  # nothing is read meanwhile: what comes then stands in one queue
        )
        for number in range(5):
            await pub.send_multipart([b"", str(number).encode()])
        await until(lambda: links.reading._waiting)
        links.reading._turn(asyncio.get_running_loop())
        await until(lambda: heard.link.waiting == 5)
        assert tasks.failures["zmq link"] == failures + 1
