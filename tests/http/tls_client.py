"""A TLS client that does what the loop's own does not: alerts, farewells, bytes one by one."""

import asyncio
import contextlib
import ssl

from tests.http.live_server import Reader, Writer


class TlsClient:
    """On a bare connection. What it sends goes out when it says so."""

    def __init__(self, reader: Reader, writer: Writer, context: ssl.SSLContext) -> None:
        self._reader, self.writer = reader, writer
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname="127.0.0.1")

    async def shake_hands(self) -> None:
        """Raises SSLError when it does not believe the server, which it tells it."""
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                self.writer.write(self._outgoing.read())
                await self._more()
            else:
                return
            finally:
                self.writer.write(self._outgoing.read())

    def hello(self) -> bytes:
        """The first flight of a handshake."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()
        return self._outgoing.read()

    async def _more(self) -> None:
        data = await self._reader.read(65536)
        if not data:
            raise ConnectionResetError("the server has closed")
        self._incoming.write(data)

    def sealed(self, data: bytes) -> bytes:
        """`data` as it goes over the wire; all before it has gone there."""
        self.tls.write(data)
        return self._outgoing.read()

    def say_farewell(self) -> None:
        """Nothing more will be sent; the answers are still read."""
        with contextlib.suppress(ssl.SSLError):
            self.tls.unwrap()
        self.writer.write(self._outgoing.read())

    async def read(self) -> bytes:
        """Some bytes; none when the server has said that no more comes."""
        while True:
            try:
                return self.tls.read(65536)
            except ssl.SSLWantReadError:
                await self._more()
            except ssl.SSLZeroReturnError:
                return b""

    async def read_all(self) -> bytes:
        whole = b""
        while piece := await self.read():
            whole += piece
        return whole


async def raw(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", port)
