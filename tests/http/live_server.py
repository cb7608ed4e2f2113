"""A server of the HTTP room on the loop of a test, over real sockets, also over TLS."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from lean_selector.http.connections import Connections
from lean_selector.http.head import Limits, Request
from lean_selector.http.listener import Listener, UnixPath, inet_socket
from lean_selector.http.protocol import HttpProtocol
from lean_selector.http.response import PendingReply, encode_response
from lean_selector.http.tls import TlsAcceptor
from tests.support.certificates import Authority
from tests.support.on_loop import inside, until

MIB = 1024 * 1024
GET = b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n"
TOO_LARGE = encode_response(413, b'{"error":"too large"}')

OURS = Authority()

Reader = asyncio.StreamReader
Writer = asyncio.StreamWriter
Opened = AbstractAsyncContextManager["Server"]


class Server:
    """A server on a free port, and an app: /park waits, the rest echo."""

    def __init__(
        self, context: ssl.SSLContext | None = None, believing: ssl.SSLContext | None = None
    ) -> None:
        """`context`: TLS is spoken on TCP, with clients who have that of `believing`."""
        loop = asyncio.get_running_loop()
        self.connections = Connections(loop.call_soon, Limits(max_body_bytes=8 * MIB))
        self.door: TlsAcceptor | None = None
        if context is not None:
            self.door = TlsAcceptor(context, self.connections, self.new_protocol)
        self._believing = believing
        self.protocols: list[HttpProtocol] = []
        self.parked: asyncio.Queue[PendingReply] = asyncio.Queue()
        self.hung_up = asyncio.Event()
        self.handled = 0
        self.port = 0
        self.listeners: list[Listener] = []
        self.clients: list[Writer] = []

    def app(self, request: Request) -> bytes | PendingReply:
        self.handled += 1
        if request.body_too_large:
            return TOO_LARGE
        if request.path == b"/park":
            reply = PendingReply(self.hung_up.set)
            self.parked.put_nowait(reply)
            return reply
        return encode_response(200, b"%b %d" % (request.path, len(request.body)))

    def new_protocol(self) -> HttpProtocol:
        protocol = HttpProtocol(self.app, self.connections)
        self.protocols.append(protocol)
        return protocol

    async def connect(
        self, unix_path: str | None = None, context: ssl.SSLContext | None = None
    ) -> tuple[Reader, Writer]:
        if unix_path is None:
            context = context or self._believing
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=context)
        else:
            reader, writer = await asyncio.open_unix_connection(unix_path)
        self.clients.append(writer)
        return reader, writer

    async def listen(self, unix_path: str | None = None) -> None:
        if unix_path is None:
            tcp = inet_socket("127.0.0.1", 0)
            self.port = tcp.getsockname()[1]
            new_protocol = self.new_protocol if self.door is None else self.door.new_connection
            listener = Listener(tcp, new_protocol, self.connections)
        else:
            path = UnixPath(unix_path)
            listener = Listener(path.take(), self.new_protocol, self.connections, path)
        listener.start()
        self.listeners.append(listener)

    async def close(self) -> None:
        """Leave no handle open: uvloop waits for them, without a limit, when its loop closes."""
        for listener in self.listeners:
            listener.close()
        for client in self.clients:
            client.transport.abort()
        self.connections.abort()
        await until(lambda: all(listener.is_done for listener in self.listeners))
        await until(lambda: not self.connections.open and not self.connections.greeting)


@asynccontextmanager
async def served(
    context: ssl.SSLContext | None = None, believing: ssl.SSLContext | None = None
) -> AsyncIterator[Server]:
    server = Server(context, believing)
    try:
        await server.listen()
        yield server
    finally:
        await server.close()


def served_over_tls(context: ssl.SSLContext | None = None) -> Opened:
    """`context` is the server's own, if it is to have another than the usual one."""
    return served(OURS.server() if context is None else context, OURS.client())


on_tcp, on_tls = inside(served), inside(served_over_tls)


async def answer(reader: Reader) -> tuple[int, bytes, bytes]:
    """One response: status, head, body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0] or b"0")
    return int(head[9:12]), head, await reader.readexactly(length)
