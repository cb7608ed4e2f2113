"""Hundreds of clients that are slow on purpose, over real sockets: all of them are cleared in their
time, nothing is kept of them, and who is not slow never notices."""

import contextlib
import socket

from tests.http.live_server import GET, Server, answer, on_tcp
from tests.support.on_loop import until

EACH, EACH_OF_THE_DEAF = 30, 5  # 8 MiB are written to each of these
POST = b"POST /a HTTP/1.1\r\nhost: x\r\n"
# What each kind begins with, and what it then sends of it, a piece every five seconds.
KINDS = {
    "says nothing": (b"", b""),
    "drips a header section": (POST, b"x: y\r\n"),
    "drips a body": (POST + b"content-length: 1000000\r\n\r\n{", b" "),
    "drips chunks": (POST + b"transfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
    "never reads": (GET.replace(b"/a", b"/large") * 20, b""),
}
# The longest that any of them may take: an idle connection, and then what lingers.
ALL_GONE_S = 120


def opened(port: int, first: bytes) -> socket.socket:
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    client.setblocking(False)
    client.send(first)
    return client


@on_tcp
async def test_slow_clients_are_cleared_and_hurt_nobody(server: Server) -> None:
    reader, writer = await server.connect()
    slow = [
        (opened(server.port, first), more) for first, more in KINDS.values() for _ in range(EACH)
    ]
    await until(lambda: len(server.connections.open) == len(slow) + 1)
    for second in range(0, ALL_GONE_S + 1, 5):
        for client, more in slow:
            with contextlib.suppress(OSError):  # it was hung up on, or takes no more
                client.send(more)
        writer.write(GET)
        assert (await answer(reader))[::2] == (200, b"/a 0")
        server.connections.sweep(float(second))
    await until(lambda: len(server.connections.open) == 1)
    await until(lambda: server.connections.held_bytes == 0)
    for client, _ in slow:
        client.close()
