"""A small HTTP/1.1 keep-alive client for the simulated traffic, whose answers it measures."""

import asyncio
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

# Longer than any answer should take; a request parked in the service's queue may come close.
ANSWER_TIMEOUT_S = 60.0


class ServiceError(Exception):
    """The service did not answer, or not with the status that was expected. A readable line."""


class _Connection(asyncio.Protocol):
    """One keep-alive connection. reply is pending exactly while a request is under way."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.reply: asyncio.Future[tuple[int, bytes]] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._body = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an assert: uvloop's transports do not derive from asyncio's.
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._fail(exc or ConnectionResetError("the service closed the connection"))

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(error)
            self.close()

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        body, self._body = bytes(self._body), bytearray()
        reply, self.reply = self.reply, None
        if reply is not None and not reply.done():
            reply.set_result((self._parser.get_status_code(), body))
        if not self._parser.should_keep_alive():
            self.close()

    def _fail(self, error: Exception) -> None:
        reply, self.reply = self.reply, None
        if reply is not None and not reply.done():
            reply.set_exception(error)

    def close(self) -> None:
        if self.transport is not None:
            self.transport.close()
            self.transport = None


class HttpClient:
    """Requests to one service. As many connections as the caller has requests under way."""

    def __init__(self, url: str) -> None:
        """url: `http://host:port`. Raises ServiceError for anything else."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = None
        if parts.scheme != "http" or parts.hostname is None or port is None:
            raise ServiceError(f"not an http://host:port URL: {url}")
        self._host, self._port = parts.hostname, port
        self._idle: list[_Connection] = []
        name = f"[{self._host}]" if ":" in self._host else self._host  # IPv6
        self._head_end = f" HTTP/1.1\r\nhost: {name}:{self._port}\r\n".encode()

    async def request(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Status and body of the answer. body, if any, is sent as JSON.

        Raises ServiceError when there is no answer, whatever the reason.
        """
        head = method.encode() + b" " + path.encode() + self._head_end
        if body:
            head += b"content-type: application/json\r\n"
        if body or method == "POST":
            head += b"content-length: %d\r\n" % len(body)
        try:
            connection = await self._connect()
            assert connection.transport is not None
            reply: asyncio.Future[tuple[int, bytes]]
            connection.reply = reply = asyncio.get_running_loop().create_future()
            connection.transport.write(head + b"\r\n" + body)
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    answer = await reply
            except BaseException:
                connection.close()  # what it answers later belongs to nobody
                raise
        except TimeoutError as error:
            raise ServiceError(f"{method} {path}: no answer in {ANSWER_TIMEOUT_S:.0f} s") from error
        except (OSError, httptools.HttpParserError) as error:
            raise ServiceError(f"{method} {path}: {error}") from error
        self._idle.append(connection)
        return answer

    async def call(self, method: str, path: str, body: object = None) -> bytes:
        """The body of a 2xx answer; raises ServiceError with the service's words otherwise."""
        encoded = b"" if body is None else msgspec.json.encode(body)
        status, answer = await self.request(method, path, encoded)
        if not 200 <= status < 300:
            text = answer.decode(errors="replace")[:300]
            raise ServiceError(f"{method} {path}: {status} {text}")
        return answer

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.transport is not None:
                return connection
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._host, self._port)
        return connection

    def close(self) -> None:
        """Close the idle connections; call it when no request is under way."""
        while self._idle:
            self._idle.pop().close()
