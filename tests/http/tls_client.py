"""A TLS client that does what the loop's own does not: alerts, farewells, bytes one by one."""

import asyncio
import contextlib
import ssl

from tests.http.live_server import Reader, Writer


class TlsMemory:
    """A client's half of TLS in memory. What it is to send, its methods return."""

    def set_up(self, context: ssl.SSLContext) -> None:
        self.incoming, self.outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_hostname="127.0.0.1")

    def flight(self) -> bytes:
        """What its handshake sends next."""
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.do_handshake()
        return self.outgoing.read()

    def sealed(self, data: bytes, record_bytes: int = 16 * 1024) -> bytes:
        """`data` as it goes over the wire."""
        for at in range(0, len(data), record_bytes):
            self.tls.write(data[at : at + record_bytes])
        return self.outgoing.read()

    def farewell(self) -> bytes:
        """Nothing more will be sent; the answers are still read."""
        with contextlib.suppress(ssl.SSLError):
            self.tls.unwrap()
        return self.outgoing.read()


class TlsClient(TlsMemory):
    """On a bare connection."""

    def __init__(self, reader: Reader, writer: Writer, context: ssl.SSLContext) -> None:
        self._reader, self.writer = reader, writer
        self.set_up(context)

    async def shake_hands(self) -> None:
        """Raises SSLError when it does not believe the server, which it tells it."""
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                self.writer.write(self.outgoing.read())
                await self._more()
            else:
                return
            finally:
                self.writer.write(self.outgoing.read())

    async def _more(self) -> None:
        data = await self._reader.read(65536)
        if not data:
            raise ConnectionResetError("the server has closed")
        self.incoming.write(data)

    def say_farewell(self) -> None:
        self.writer.write(self.farewell())

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
