"""One request and its answer on one connection, as an asyncio protocol.

The answer is taken in pieces; while too much waits to be taken, nothing more is read. It is over
with the message, or with the connection where the head names no length.
"""

import asyncio
from collections import deque
from typing import Final, cast

import httptools

from lean_selector.outbound.failure import OutboundFailed

MOST_HEAD_BYTES: Final = 64 * 1024
# Of the body, that wait to be taken. What the kernel hands over at once comes on top.
MOST_WAITING_BYTES: Final = 256 * 1024


class Exchange(asyncio.Protocol):
    """`request` is sent when the connection stands. The failures that it tells are one clear line,
    without saying what was asked."""

    def __init__(self, request: bytes) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._request: Final = request
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._head_bytes = 0
        self._has_head = False
        self._pieces: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_paused = False
        self._is_over = False
        self._failure: str | None = None
        self._news: asyncio.Future[None] | None = None

    # -- what the caller asks ------------------------------------------------------------------

    async def head(self) -> None:
        """Returns when `status` and `headers` are those of the answer. Raises OutboundFailed."""
        while not self._has_head:
            await self._wait()

    async def piece(self) -> bytes | None:
        """The next bytes of the body, None at its end. Raises OutboundFailed."""
        while not self._pieces:
            if self._is_over:
                return None
            await self._wait()
        taken = self._pieces.popleft()
        self._waiting_bytes -= len(taken)
        if self._is_paused and self._waiting_bytes <= MOST_WAITING_BYTES // 2:
            self._is_paused = False
            if self._transport is not None:
                self._transport.resume_reading()
        return taken

    def close(self) -> None:
        """At once: whatever still comes belongs to nobody."""
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    async def _wait(self) -> None:
        if self._failure is not None:
            raise OutboundFailed(self._failure)
        self._news = asyncio.get_running_loop().create_future()
        try:
            await self._news
        finally:
            self._news = None

    def _tell(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _fail(self, failure: str) -> None:
        if not self._is_over and self._failure is None:
            self._failure = failure
        self._tell()

    # -- what the loop tells -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not an assert: uvloop's transports do not derive from asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._is_over or self._failure is not None:
            return
        if not self._has_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"what came is not HTTP: {error}")
        except httptools.HttpParserUpgrade:
            self._fail("the other side changed the protocol")
        if not self._has_head and self._head_bytes > MOST_HEAD_BYTES:
            self._fail(f"the head of the answer has more than {MOST_HEAD_BYTES} bytes")
        self._look_after()
        self._tell()

    def _look_after(self) -> None:
        """After each piece: no more is read of what failed, or while too much waits."""
        if self._transport is None:
            return
        if self._failure is not None:
            self.close()
        elif self._waiting_bytes > MOST_WAITING_BYTES and not self._is_over:
            self._is_paused = True
            self._transport.pause_reading()

    def eof_received(self) -> None:
        self._ended("the connection ended")

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._ended("the connection ended" if exc is None else f"the connection was lost: {exc}")

    def _ended(self, reason: str) -> None:
        if self._is_over or self._failure is not None:
            return
        if not self._has_head:
            self._fail(f"{reason} before an answer")
        elif "content-length" in self.headers or "transfer-encoding" in self.headers:
            self._fail(f"{reason} amid the answer")
        else:
            self._is_over = True
            self._tell()

    # -- what the parser tells -----------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._has_head:  # else a trailer
            self.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # informational: the answer is still to come
            self.headers = {}
        else:
            self.status = status
            self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._waiting_bytes += len(body)

    def on_message_complete(self) -> None:
        if self._has_head:
            self._is_over = True
