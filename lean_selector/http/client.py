"""The client side of HTTP/1.1: requests, answers, and keep-alive connections.

A connection has one request at a time. The connection finds the end of the answer's body (RFC 9112
section 6.3), and passes on each piece of the body as it arrives. Only an incomplete head is
buffered. No coroutine, task or timer is used: the event loop calls the methods of the connection,
and `Upstream.sweep` applies the timeouts."""

import asyncio
import re
from typing import Final, NamedTuple, Protocol, cast

import httptools

from lean_selector.http.body import ChunkedBody, SizedBody, UnboundedBody
from lean_selector.http.head import HeaderCollector
from lean_selector.http.urls import Url

MOST_HEAD_BYTES: Final = 64 * 1024
# uvicorn (in vLLM and SGLang) closes an idle connection after five seconds. We close it earlier,
# because a request that is sent at that moment must be repeated.
IDLE_S: Final = 3.5
_MOST_IDLE: Final = 256  # idle connections per upstream
# A request below this size is sent in one piece: joining costs less than a second TCP segment.
_JOINED_BYTES: Final = 64 * 1024
_WITHOUT_BODY: Final = (204, 304)
_MOST_INTERIM: Final = 16  # interim answers before the final one
_STATUS_LINE: Final = re.compile(rb"HTTP/1\.[01] [1-9][0-9]{2}(?: [\t -~\x80-\xff]*+)?+\r\n")


class MalformedAnswer(Exception):
    """The bytes from the server are not a usable HTTP answer. The text has the reason."""


# -- the head of an answer -------------------------------------------------------------------------


class AnswerHead(NamedTuple):
    """The head of an answer."""

    status: int
    start: bytes  # the status line without its CRLF, always of HTTP/1.1
    lines: bytes  # the header lines as received, with a CRLF before each
    body: UnboundedBody  # finds the end of the answer's body
    is_chunked: bool
    keeps: bool  # whether the connection can be reused after the body


# The header fields that tell where an answer ends.
_READ: Final = (b"connection", b"content-length", b"transfer-encoding")


def head_of(text: bytes, answers_head: bool) -> AnswerHead | None:
    """Parse `HTTP/1.1 200 OK CRLF ... CRLF CRLF`. Return None for an interim answer (1xx).
    `answers_head`: the request's method was HEAD, so no body follows. Raises MalformedAnswer."""
    if _STATUS_LINE.match(text) is None:
        raise MalformedAnswer("the answer is not HTTP: it has no status line of HTTP/1.1")
    fields: dict[bytes, bytes] = {}

    def collect(name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in _READ:
            fields[name] = fields[name] + b"," + value if name in fields else value

    parser = httptools.HttpResponseParser(HeaderCollector(collect))
    try:
        parser.feed_data(text)
    except httptools.HttpParserUpgrade:
        raise MalformedAnswer("the other side changed the protocol") from None
    except httptools.HttpParserError as error:
        raise MalformedAnswer(f"the answer is not HTTP: {error}") from None
    status = parser.get_status_code()
    if status == 101:
        raise MalformedAnswer("the other side changed the protocol")
    if status < 200:
        return None
    options = fields.get(b"connection", b"").lower()
    is_http11 = parser.get_http_version() == "1.1"
    keeps, is_chunked = b"close" not in options and (is_http11 or b"keep-alive" in options), False
    coding, length = fields.get(b"transfer-encoding"), fields.get(b"content-length")
    if coding is not None:
        keeps &= is_http11  # chunks are not of HTTP/1.0 (RFC 9112 section 6.1)
    body: UnboundedBody
    if answers_head or status in _WITHOUT_BODY:
        body = SizedBody(0)
    elif coding is not None:
        if coding.strip().lower() != b"chunked":
            raise MalformedAnswer("the answer has a transfer coding that is not chunked")
        body, is_chunked = ChunkedBody(), True
    elif length is not None:
        if not length.strip().isdigit():
            raise MalformedAnswer("the answer has more than one length")
        body = SizedBody(int(length))
    else:
        body, keeps = UnboundedBody(), False
    first, _, rest = text.partition(b"\r\n")
    # A proxy sends its own version (RFC 9110 section 2.5): what it adds is of HTTP/1.1.
    start = b"HTTP/1.1" + first[8:] + (b" " if len(first) == 12 else b"")
    lines = b"\r\n" + rest[:-4] if len(rest) > 2 else b""
    return AnswerHead(status, start, lines, body, is_chunked, keeps)


# -- connections -----------------------------------------------------------------------------------


class Receiver(Protocol):
    """Callbacks for one answer. After `on_end` or `on_lost`, no further callback is called."""

    def on_head(self, head: AnswerHead) -> bool:
        """The head has arrived. Return True to get the body in `on_body` without chunk framing."""
        ...

    def on_body(self, data: bytes, is_last: bool) -> None:
        """A piece of the body, never empty. If `is_last`, the piece ends the answer, and `on_end`
        follows at once."""
        ...

    def on_end(self) -> None:
        """The answer is complete."""
        ...

    def on_lost(self, reason: str, is_stale: bool) -> None:
        """The rest of the answer will not come. `is_stale`: a reused connection ended before this
        answer began. Probably the server had just closed the connection."""
        ...


class ClientConnection(asyncio.Protocol):
    """A connection to a server, either idle or with one request."""

    def __init__(self, upstream: "Upstream") -> None:
        self.upstream = upstream
        self.requests = 0
        # When the connection was last active (read, sent or released), as the `now` of a sweep.
        self.heard_at = upstream.now
        self._transport: asyncio.Transport | None = None
        self._receiver: Receiver | None = None
        self._answers_head = False
        self._head = bytearray()
        self._interim = 0  # interim answers received for this request
        self._is_long = False  # whether the request's body is long
        self._body: UnboundedBody | None = None
        self._unframes = False
        self._keeps = False
        self._has_answer = False
        self._is_paused = False

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def _is_sent(self) -> bool:
        return self._transport is not None and self._transport.get_write_buffer_size() == 0

    @property
    def is_free(self) -> bool:
        return self._receiver is None

    @property
    def waits(self) -> bool:
        """Whether the connection waits for the server's answer: a request was sent, and reading is
        not paused."""
        return self._receiver is not None and not self._is_paused

    def send(
        self, head: bytes, body: bytes | bytearray, receiver: Receiver, answers_head: bool = False
    ) -> None:
        """Send a request. Set `answers_head` for the method HEAD. `receiver` gets the answer."""
        transport = self._transport
        assert transport is not None
        assert self._receiver is None, "one request at a time"
        self._receiver = receiver
        self._answers_head = answers_head
        self._body, self._has_answer, self._interim = None, False, 0
        self.requests += 1
        self.heard_at = self.upstream.now
        self._is_long = len(body) >= _JOINED_BYTES
        if self._is_long:
            transport.write(head)
            transport.write(body)
        else:
            transport.write(head + body)

    def pause(self) -> None:
        """Stop reading the answer until `resume` is called."""
        if not self._is_paused and self.is_open:
            self._is_paused = True
            assert self._transport is not None
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.heard_at = self.upstream.now
            if self.is_open:
                assert self._transport is not None
                self._transport.resume_reading()

    def drop(self) -> None:
        """Abort the connection; no callback follows. An LLM engine stops generating on an abort."""
        self._receiver = None
        self.upstream.closed(self)
        if self._transport is not None:
            self._transport.abort()

    def fail(self, reason: str) -> None:
        """Abort the connection, and call the receiver's `on_lost` with the reason."""
        receiver = self._receiver
        self.drop()
        if receiver is not None:
            receiver.on_lost(reason, False)

    # -- called by the loop ------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport does not inherit from asyncio.Transport
        self._transport = cast(asyncio.Transport, transport)
        self.upstream.open.add(self)

    def data_received(self, data: bytes) -> None:
        receiver, body = self._receiver, self._body
        if receiver is None:
            self.drop()  # data without a request
            return
        self.heard_at = self.upstream.now
        if body is None:
            self._has_answer = True
            rest = self._read_head(data)
            if rest is None:
                return
            data, body = rest, self._body
            if self._receiver is not receiver or body is None:
                return  # the receiver dropped the connection
        if self._unframes:
            pieces: list[bytes] = []
            stop = body.read(data, 0, pieces)
            if pieces:
                receiver.on_body(b"".join(pieces), body.is_done)
        else:
            stop = body.read(data, 0, None)
            if stop:
                receiver.on_body(data if stop == len(data) else data[:stop], body.is_done)
        if self._receiver is not receiver:
            return
        if body.error is not None:
            self.fail(f"the answer is not HTTP: {body.error.text}")
        elif body.is_done:
            self._end(receiver, stop == len(data))

    def eof_received(self) -> None:
        self._ended(None)  # the loop then closes the transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self.upstream.closed(self)
        self._ended(exc)

    # -- internals ---------------------------------------------------------------------------------

    def _ended(self, exc: Exception | None) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is None:
            return
        if exc is None and type(self._body) is UnboundedBody:
            receiver.on_end()
            return
        what = "the connection ended" if exc is None else f"the connection was lost: {exc}"
        when = "before an answer" if self._body is None else "amid the answer"
        receiver.on_lost(f"{what} {when}", self.requests > 1 and not self._has_answer)

    def _read_head(self, data: bytes) -> bytes | None:
        """Return the bytes after the answer's head. None: wait for more, or the answer failed."""
        receiver = self._receiver
        assert receiver is not None
        while True:
            seen = max(0, len(self._head) - 3)
            if self._head:
                self._head += data
                end = self._head.find(b"\r\n\r\n", seen) + 4
            else:
                end = data.find(b"\r\n\r\n") + 4
            if end == 3:
                if not self._head:
                    self._head += data
                if self._head[:5] != b"HTTP/"[: len(self._head)]:
                    self.fail("the answer is not HTTP")
                elif len(self._head) > MOST_HEAD_BYTES:
                    self.fail(f"the head of the answer has more than {MOST_HEAD_BYTES} bytes")
                return None
            if self._head:
                data = bytes(self._head)
                self._head.clear()
            if end > MOST_HEAD_BYTES:
                self.fail(f"the head of the answer has more than {MOST_HEAD_BYTES} bytes")
                return None
            try:
                head = head_of(data[:end], self._answers_head)
            except MalformedAnswer as error:
                self.fail(str(error))
                return None
            data = data[end:]
            if head is not None:
                break
            self._interim += 1
            if self._interim > _MOST_INTERIM:
                self.fail(f"more than {_MOST_INTERIM} interim answers")
                return None
        # An upstream that refuses a long body may not read it. Then the unread data would fill the
        # kernel's buffers.
        self._body = head.body
        self._keeps = head.keeps and not (self._is_long and head.status >= 400)
        self._unframes = receiver.on_head(head)
        if not data and not head.body.is_done:
            return None
        return data

    def _end(self, receiver: Receiver, is_clean: bool) -> None:
        """End the answer. `is_clean`: no bytes follow the answer. The connection is kept for reuse
        if `is_clean`, the server allows it, and the whole request was written."""
        self._receiver = self._body = None
        self.resume()
        if self._keeps and is_clean and self._is_sent and self.is_open:
            self.upstream.put_aside(self)
        else:
            self.drop()
        receiver.on_end()


class Upstream:
    """A server, and our connections to this server. Used only on the event loop's thread."""

    def __init__(self, text: str, number: int = 0, now: float = 0.0) -> None:
        """`text` is the base URL; `number` is the caller's id of the server. Raises ValueError."""
        self.text: Final = text.rstrip("/")
        self.number: Final = number
        self.url: Final = Url(self.text)
        self.host_line: Final = b"host: %b" % self.url.authority.encode()
        self.now = now  # monotonic seconds at the last sweep
        self.users = 0  # current requests, including those that wait for a connection
        self.open: set[ClientConnection] = set()
        self._idle: list[ClientConnection] = []

    @property
    def is_used(self) -> bool:
        return bool(self.open or self.users)

    def kept(self) -> ClientConnection | None:
        """Take the idle connection that was used most recently; None if no connection is idle."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    def closed(self, connection: ClientConnection) -> None:
        self.open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def put_aside(self, connection: ClientConnection) -> None:
        if len(self._idle) >= _MOST_IDLE:
            connection.drop()
            return
        connection.heard_at = self.now
        self._idle.append(connection)

    def sweep(self, now: float, silence_s: float) -> None:
        """Close connections that were idle for too long, or got no answer bytes in `silence_s`."""
        self.now = now
        for connection in list(self.open):
            age_s = now - connection.heard_at
            if connection.is_free:
                if age_s > IDLE_S:
                    connection.drop()
            elif connection.waits and age_s > silence_s:
                connection.fail(f"it sent nothing for {silence_s:g} s")

    def close(self) -> None:
        for connection in list(self.open):
            connection.drop()
