"""A scripted HTTP server on the loop of a test, also over TLS with an authority of its own.

And the service's client, to ask it.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from lean_selector.http.outbound import OutboundClient
from lean_selector.http.trust import Credentials, TokenFile, Trust
from lean_selector.links.names import Resolver

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Served:
    """Where a server is, and what it was asked."""

    def __init__(self, port: int, is_secure: bool, host: str) -> None:
        self.port = port
        self.url = f"{'https' if is_secure else 'http'}://{host}:{port}"
        self.requests: list[bytes] = []  # heads, and the bodies that their lengths name

    def paths(self) -> list[str]:
        return [request.split(b" ", 2)[1].decode() for request in self.requests]


def client(token: TokenFile | None = None, trust: Trust | None = None) -> OutboundClient:
    return OutboundClient(Resolver().resolve, Credentials(token, trust))


@asynccontextmanager
async def serving(
    serve: Serve, context: ssl.SSLContext | None = None, host: str = "127.0.0.1"
) -> AsyncIterator[Served]:
    """`serve` is called after each request was read; the connection ends when it returns."""
    under_way: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        under_way.add(task)
        try:
            served.requests.append(await _request(reader))
            await serve(reader, writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            under_way.discard(task)
            writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    served = Served(server.sockets[0].getsockname()[1], context is not None, host)
    try:
        yield served
    finally:
        server.close()
        for task in list(under_way):
            task.cancel()
        await asyncio.gather(*under_way, return_exceptions=True)


async def _request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return head + await reader.readexactly(int(line.split(b":")[1]))
    return head


def says(*parts: bytes) -> Serve:
    """Each part in a write of its own."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return serve


async def hangs(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


def response(body: bytes, status: str = "200 OK", headers: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\n{headers}content-length: {len(body)}\r\n\r\n".encode() + body


def chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


CHUNKED = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
