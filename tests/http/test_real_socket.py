"""The same over real sockets on uvloop: what only a kernel and an event loop can show.

What TLS must not change is told over either.
"""

import asyncio
import contextlib
import logging
import os
import resource
import socket
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from lean_selector.http import listener as listener_module
from lean_selector.http.listener import ACCEPTS_PER_TURN, UnixPath
from lean_selector.http.response import encode_response
from tests.http.live_server import GET, MIB, Opened, Server, answer, on_tcp, served, served_over_tls
from tests.support.on_loop import on_loop, until

POST = b"POST /a HTTP/1.1\r\nhost: x\r\n"
TCP_SYN_SENT = 2  # the first byte of struct tcp_info
either = pytest.mark.parametrize("opened", [served, served_over_tls], ids=["TCP", "TLS"])
Opens = Callable[[], Opened]


@either
@on_loop
async def test_requests_of_every_framing_come_back_in_order_and_what_waits_holds_those_behind_it(
    opened: Opens,
) -> None:
    async with opened() as server:
        reader, writer = await server.connect()
        writer.write(b"".join(b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n" % i for i in range(1000)))
        bodies = [(await answer(reader))[2] for _ in range(1000)]
        assert bodies == [b"/%d 0" % i for i in range(1000)]
        writer.write(POST + b"expect: 100-continue\r\ncontent-length: 5\r\n\r\n")
        assert (await answer(reader))[0] == 100
        writer.write(b"hello" + POST + b"transfer-encoding: chunked\r\n\r\n")
        for _ in range(20):
            writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        assert (await answer(reader))[2] == b"/a 5"
        assert (await answer(reader))[2] == b"/a %d" % (20 * 65536)
        for size, status in ((8 * MIB, 200), (8 * MIB + 1, 413)):
            writer.write(POST + b"content-length: %d\r\n\r\n" % size + bytes(size))
            assert (await answer(reader))[0] == status
        writer.write(b"GET /park HTTP/1.1\r\nhost: x\r\n\r\n" + GET)
        parked = await server.parked.get()
        server.connections.start_draining()
        server.connections.sweep(2.0)
        parked.resolve(encode_response(200, b"at last"))
        assert (await answer(reader))[2] == b"at last"
        _, head, body = await answer(reader)
        assert body == b"/a 0"
        assert b"connection: close" in head
        assert await reader.read() == b""


@either
@on_loop
async def test_a_client_that_is_still_sending_can_read_why_it_was_refused(opened: Opens) -> None:
    async with opened() as server:
        reader, writer = await server.connect()
        # Answered at once, with 9 MiB of the body still on their way: a close would reset them.
        writer.write(b"POST /a HTTP/1.1\r\nhost: x\r\ncontent-length: 99999999999\r\n\r\n")
        with contextlib.suppress(ConnectionError):  # over TLS it is told while it sends
            for _ in range(9):
                writer.write(bytes(MIB))
                await writer.drain()
        status, head, body = await answer(reader)
        assert (status, body) == (413, b'{"error":"too large"}')
        assert b"connection: close" in head
        assert await reader.read() == b""
        writer.close()
        await until(lambda: not server.connections.open)


@pytest.mark.parametrize("how", ["close", "reset", "half-close"])
@pytest.mark.parametrize("sent", [b"", GET * 1_000], ids=["reading", "not reading"])
@on_tcp
async def test_a_hang_up_can_be_asked_for_before_it_is_read(
    server: Server, how: str, sent: bytes
) -> None:
    """All of it in one turn of the loop, which reads nothing meanwhile."""
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(b"GET /park HTTP/1.1\r\nhost: x\r\n\r\n")
        parked = await server.parked.get()
        while sent and server.protocols[0].transport.is_reading():
            client.sendall(sent)
            await asyncio.sleep(0)
        assert parked.has_client()
        if how == "half-close":
            client.shutdown(socket.SHUT_WR)
        else:
            if how == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
        assert not parked.has_client()
        assert not parked.has_client()
        await server.hung_up.wait()
        await until(lambda: not server.connections.open)


@on_tcp
async def test_a_request_that_the_loop_has_not_got_to_keeps_an_idle_connection_open(
    server: Server,
) -> None:
    """By time-out as by draining: it lies in the kernel when the sweep looks."""
    for drains in (False, True):
        reader, writer = await server.connect()
        writer.write(GET)
        await answer(reader)
        # At once: the writer would wait for the end of this turn, and the server would read.
        os.write(writer.get_extra_info("socket").fileno(), GET)
        if drains:
            server.connections.start_draining()
        server.connections.sweep(server.connections.now + 100.0)
        assert (await answer(reader))[2] == b"/a 0"
        writer.close()


@on_tcp
async def test_a_connection_has_no_delay_and_its_host_is_noticed_by_the_kernel_when_it_vanishes(
    server: Server,
) -> None:
    reader, writer = await server.connect()
    writer.write(GET)
    await answer(reader)
    (protocol,) = server.protocols
    accepted = protocol.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
    names = ("NODELAY", "KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT")
    options = [getattr(socket, f"TCP_{name}") for name in names]
    set_to = [accepted.getsockopt(socket.IPPROTO_TCP, option) for option in options]
    no_delay, idle_s, every_s, probes, timeout_ms = set_to
    assert (no_delay, idle_s + every_s * probes, timeout_ms) == (1, 30, 30_000)


# How connections come in (D27).


@on_tcp
async def test_a_burst_of_newcomers_is_let_in_within_a_few_turns_of_the_loop(
    server: Server,
) -> None:
    """So that turns, however long each, do not keep them waiting one by one."""
    newcomers = 4 * ACCEPTS_PER_TURN
    clients = [socket.socket() for _ in range(newcomers)]
    for client in clients:
        client.connect(("127.0.0.1", server.port))
    turns = 0
    while len(server.connections.open) < newcomers:
        await asyncio.sleep(0)  # one turn
        turns += 1
    for client in clients:
        client.close()
    assert turns < newcomers / 8


@on_tcp
async def test_who_connected_before_the_listener_closes_is_answered(
    server: Server, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    await server.listen(path)
    clients = []
    for family, address in ((socket.AF_INET, ("127.0.0.1", server.port)), (socket.AF_UNIX, path)):
        for _ in range(3 * ACCEPTS_PER_TURN):
            client = socket.socket(family)
            client.connect(address)  # the kernel's doing: the loop has no turn meanwhile
            client.sendall(GET)
            client.setblocking(False)
            clients.append(client)
    for listener in server.listeners:
        listener.stop_inviting()
        listener.close()
    loop = asyncio.get_running_loop()
    for client in clients:
        assert (await loop.sock_recv(client, 1000)).startswith(b"HTTP/1.1 200 ")
        client.close()


@on_tcp
async def test_a_listener_that_stops_inviting_lets_nobody_in(
    server: Server, tmp_path: Path
) -> None:
    path = str(tmp_path / "s")
    await server.listen(path)
    for listener in server.listeners:
        listener.stop_inviting()
    with socket.socket(socket.AF_UNIX) as late, pytest.raises(FileNotFoundError):
        late.connect(path)
    with socket.socket() as late:
        late.setblocking(False)
        late.connect_ex(("127.0.0.1", server.port))
        # On loopback a handshake ends within connect(2), if at all.
        assert late.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO) == TCP_SYN_SENT


@on_tcp
async def test_want_of_descriptors_is_logged_once_counted_and_waited_for(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "ACCEPT_PAUSE_S", 0.01)
    caplog.set_level(logging.INFO)
    newcomer = socket.socket()
    newcomer.setblocking(False)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.dup(0)
    os.close(spare)  # the lowest number that is free
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (spare, hard))
        newcomer.connect_ex(("127.0.0.1", server.port))
        await until(lambda: server.connections.accept_failures >= 3)
        assert not server.connections.open
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(newcomer, GET)
    assert (await loop.sock_recv(newcomer, 1000)).startswith(b"HTTP/1.1 200 ")
    newcomer.close()
    said = [record.getMessage() for record in caplog.records]
    assert said == ["no connection can be accepted", "connections are accepted again"]


# The path of a UNIX socket.


def test_a_path_belongs_to_its_successor_once_it_has_taken_it_even_by_force(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    first, second = UnixPath(path), UnixPath(path)
    for takes_over in (first.let_go, lambda: os.unlink(path)):
        with first.take():
            with pytest.raises(OSError, match="Address already in use"):
                second.take()
            takes_over()
            assert not os.path.exists(path)
            with second.take():
                first.let_go()
                assert os.path.exists(path)
                second.let_go()
                assert not os.path.exists(path)


def test_taking_a_path_leaves_nothing_beside_it(tmp_path: Path) -> None:
    with UnixPath(str(tmp_path / "s")).take():
        assert os.listdir(tmp_path) == ["s"]
    with pytest.raises(OSError, match="too long"):
        UnixPath(str(tmp_path / ("s" * 200))).take()
    assert os.listdir(tmp_path) == ["s"]


@on_tcp
async def test_a_connection_that_a_bug_keeps_from_opening_is_told_to_the_loop(
    server: Server,
) -> None:
    failed: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failed.append(context["exception"]))
    del server.protocols  # so that making one fails
    await server.connect()
    await until(lambda: failed)
    server.protocols = []
    reader, writer = await server.connect()
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await answer(reader))[0] == 200
    assert [type(error) for error in failed] == [AttributeError]
