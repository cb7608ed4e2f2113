"""The asyncio protocol of one connection: reads requests, calls the app, and writes the answers.

The app is a function that gets a request and returns the answer. This module handles the order
(answers are sent in the order of the requests, even if one answer comes late), back-pressure,
timeouts and closing. No task or timer is created per request: `Connections.sweep`, called about
once a second, applies the timeouts (spec: slot_tracker.md 1.2; decisions D11, D14 and D27)."""

import array
import asyncio
import fcntl
import logging
import select
import termios
from collections import deque
from collections.abc import Callable
from typing import Final, cast

from lean_selector.http.connections import TURN_S
from lean_selector.http.connections import Connections as Connections
from lean_selector.http.connections import ConnectionTimeouts as ConnectionTimeouts
from lean_selector.http.head import HeaderBlock, HttpError, Request
from lean_selector.http.reader import RequestReader
from lean_selector.http.response import (
    PendingReply,
    Response,
    encode_response,
    with_connection,
    without_body,
)

log = logging.getLogger(__name__)

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"

# One pass answers the requests of one `feed`, or up to this many bytes. Then other connections get
# their turn. (2 000 answers to /dump would not fit in memory.)
_MAX_PASS_BYTES = 256 * 1024

# Input up to this size, usually a whole request, is read in any turn of the loop. Larger input is
# deferred if the turn's time is spent (`Connections.put_off`).
_SMALL_READ_BYTES = 16 * 1024

# Bytes that wait for a later turn or behind a queued request. Above this, reading stops; then a
# disconnect goes unnoticed until the queued request is answered. Few clients pipeline, and those
# that do send only a few requests.
_MAX_WAITING_BYTES = 64 * 1024
_MAX_PENDING_BYTES = 1024 * 1024
_REQUEST_BYTES = 512  # memory that a request takes besides its text

# Bytes that a client may still send after its last answer. Closing a socket with unread input makes
# the kernel send RST, which discards what the client has not read of the answer.
_MAX_LINGER_BYTES = 64 * 1024 * 1024

# A slow client gets more time if its body comes at 16 KiB/s; 30 s alone would need 280 KB/s.
_MIN_BODY_BYTES_PER_S = 16 * 1024

# Why queued requests are not handled now: bits of HttpProtocol._holds.
_PENDING: Final = 1
_WRITE_PAUSED: Final = 2
_SCHEDULED: Final = 4
_ANSWERED_LAST: Final = 8
_ENDED: Final = 16


# Replaces the headers of a queued request, to free the memory of long values.
_HTTP10: Final = HeaderBlock(True, False, 0, None, None, None, False)
_HTTP11: Final = HeaderBlock(False, True, 0, None, None, None, False)

App = Callable[[Request], bytes | PendingReply]


class HttpProtocol(asyncio.Protocol):
    transport: asyncio.Transport

    def __init__(self, app: App, connections: Connections) -> None:
        # The same for all connections of a server.
        self._app = app
        self._connections = connections
        # Constant while the connection lives.
        self._reader = RequestReader(
            connections.limits, connections.header_blocks, connections.refuses
        )
        self._holds = 0  # 0: queued requests are handled
        self._reading_paused = False
        self._got_eof = False
        self.since = connections.now  # when the current state began; timeouts count from here
        # bytes that were unwritten at the last sweep, because the client does not read
        self._unwritten_bytes = 0
        self._linger_bytes = 0  # bytes received and dropped since the last answer
        self.held_bytes = 0  # memory of unanswered requests; 0 if none waits
        # Requests that are not handled yet (of one `feed` at most), and the request with a pending
        # answer. While input is queued here or in the reader, a hold is set.
        self._queue: deque[Request] = deque()
        self._pending: PendingReply | None = None
        self._pending_request: Request | None = None
        self._pending_bytes = 0  # memory of the pending request

    # called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport does not inherit from asyncio.Transport
        self.transport = cast(asyncio.Transport, transport)
        self._connections.admit(self)

    def data_received(self, data: bytes) -> None:
        reader, holds = self._reader, self._holds
        if holds & _ENDED:
            self._linger_bytes += len(data)
            if self._linger_bytes > _MAX_LINGER_BYTES:
                self.transport.abort()
            return
        connections = self._connections
        if holds:
            reader.hold(data)
        elif not reader.is_unfinished and len(data) <= _SMALL_READ_BYTES:  # the usual case
            self.since = connections.now
            requests: list[Request] = []
            reader.read_heads(data, 0, requests)
            if len(requests) == 1 and not reader.waiting:
                reply = self._answer(requests[0])
                if reply is not None:
                    self.transport.write(reply)
                if self._holds & ~_PENDING or reader.notice or self._got_eof:
                    self.settle()
            else:
                self._queue.extend(requests)
                self._serve()
        elif connections.spent_s >= TURN_S:
            reader.hold(data)
            self._schedule()
        else:
            began = connections.clock()
            self._take(data)
            connections.spent_s += connections.clock() - began
        if self._holds or reader.is_unfinished or self.held_bytes:
            self._update_reading()
            connections.make_room()

    def eof_received(self) -> bool:
        """The client will send nothing more. Return True to keep the transport open for writing, if
        answers are still to be sent."""
        self._got_eof = True
        pending = self._pending
        if pending is not None and not pending.is_being_made:
            self._hang_up()  # D11: a client that half-closes has probably given up on this answer
            self._holds |= _ENDED
            return False
        return self._has_more or pending is not None

    def pause_writing(self) -> None:
        self._holds |= _WRITE_PAUSED
        self.since = self._connections.now
        self._unwritten_bytes = self.transport.get_write_buffer_size()
        self._update_reading()

    def resume_writing(self) -> None:
        self._holds &= ~_WRITE_PAUSED
        self.since = self._connections.now
        self._proceed()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.forget(self)
        self._holds |= _ENDED
        self._hang_up()
        self._free_queued()

    # called by Connections

    def expire(self, now: float) -> None:
        """Close the connection if a timeout (see ConnectionTimeouts) has passed."""
        connections = self._connections
        timeouts, is_draining = connections.timeouts, connections.is_draining
        age_s = now - self.since
        if self._holds & (_ENDED | _WRITE_PAUSED):
            unwritten = self.transport.get_write_buffer_size()
            # While the server drains, a client that has its answer need only notice the close.
            is_read = is_draining and not self._reader.has_unread_input
            linger_s = timeouts.quiet_s if is_read else timeouts.linger_s
            if unwritten < self._unwritten_bytes:
                self.since = now  # the client reads, if slowly
            elif age_s > (timeouts.write_s if unwritten else linger_s):
                self.transport.abort()
            self._unwritten_bytes = unwritten
        elif self._holds:
            return  # the connection waits for the service, not for the client
        elif self._reader.is_unfinished:
            if age_s > timeouts.read_s + self._reader.received_bytes / _MIN_BODY_BYTES_PER_S:
                self._refuse(HttpError(408, "request not received in time"))
        else:
            is_quiet = is_draining and min(age_s, now - connections.quiet_from) > timeouts.quiet_s
            # If input is unread, a request has arrived that is not handled yet.
            if (age_s > timeouts.idle_s or is_quiet) and not _has_unread(self.transport):
                self._end(lingers=is_draining)

    def turn_away(self, reason: str) -> None:
        """Answer 503, drop queued and incomplete requests, and close the connection."""
        if not self._holds & (_ENDED | _ANSWERED_LAST) and not self.transport.is_closing():
            self._hang_up()
            self._refuse(HttpError(503, reason))

    def abort(self) -> None:
        self.transport.abort()

    def settle(self) -> None:
        """Close the connection, refuse bad input or send `100 Continue`, if one of these is due."""
        reader = self._reader
        if self._holds & _ENDED:
            return
        if self._holds & _ANSWERED_LAST:
            self._end(lingers=reader.has_unread_input or self._connections.is_draining)
        elif self._got_eof and self._pending is not None and not self._pending.is_being_made:
            self._hang_up()
            self._end(lingers=False)
        elif self._has_more or self._pending is not None:
            return
        elif reader.error is not None:
            self._refuse(reader.error)
        elif self._got_eof:
            self._end(lingers=False)
        elif reader.wants_continue:
            reader.wants_continue = reader.notice = False
            self.transport.write(_CONTINUE)

    # internals

    @property
    def _has_more(self) -> bool:
        return bool(self._queue) or bool(self._reader.waiting)

    def _take(self, data: bytes) -> None:
        """Read the waiting bytes and then `data`, up to a limit. Answer the completed requests."""
        begins = not self._reader.is_unfinished
        requests = self._reader.feed(data)
        if begins or requests:
            self.since = self._connections.now
        self._queue.extend(requests)
        self._serve()

    def _serve(self) -> None:
        queue = self._queue
        replies: list[Response] = []
        reply_bytes = 0
        while queue:
            reply = self._answer(queue.popleft())
            if reply is None:
                break
            replies.append(reply)
            reply_bytes += len(reply)
            if reply_bytes >= _MAX_PASS_BYTES:
                break
        if replies:
            self.transport.write(replies[0] if len(replies) == 1 else b"".join(replies))
        if not self._holds and self._has_more:
            self._schedule()
        if self._holds or self._reader.notice or self._got_eof:
            self.settle()

    def _answer(self, request: Request) -> Response | None:
        """Return the response to a request; None if the app will answer later."""
        try:
            answer = self._app(request)
        except Exception:
            log.exception("%r %r failed", request.method, request.path)
            answer = encode_response(500, b'{"error":"internal error"}')
        reply: Response
        if isinstance(answer, PendingReply):
            if answer.response is None:
                self._add_pending(answer, request)
                return None
            reply = answer.response
        else:
            reply = answer
        if (
            self._connections.is_draining
            or not request.keep_alive
            or request.headers.is_http10
            or request.method == b"HEAD"
        ):
            return self._framed(request, reply)
        return reply

    def _framed(self, request: Request, reply: Response) -> Response:
        """Return the reply, without its body for HEAD, and with a `connection` header if needed."""
        if request.method == b"HEAD":
            reply = without_body(reply)
        if self._is_last(request):
            self._holds |= _ANSWERED_LAST
            return with_connection(reply, b"close")
        if request.headers.is_http10:
            return with_connection(reply, b"keep-alive")
        return reply

    def _is_last(self, request: Request) -> bool:
        """Whether the connection ends after the answer to this request."""
        is_last = self._connections.is_draining and not (
            self._has_more or self._reader.is_unfinished
        )
        return is_last or not request.keep_alive

    def _add_pending(self, reply: PendingReply, request: Request) -> None:
        # Keep only the fields still needed; the app has read the body.
        headers = _HTTP10 if request.headers.is_http10 else _HTTP11
        pending = Request(request.method, b"", None, b"", headers)
        pending.keep_alive = request.keep_alive
        self._pending, self._pending_request = reply, pending
        self._pending_bytes = reply.held_bytes
        self._holds |= _PENDING  # `data_received` then updates reading
        reply.deliver_to(self._finish_pending, self._has_client)

    def _finish_pending(self, response: Response) -> None:
        """Write the answer that was pending, and schedule the queued requests for a later turn of
        the event loop."""
        request = self._pending_request
        assert request is not None
        self._drop_pending()
        if not self.transport.is_closing():
            self.transport.write(self._framed(request, response))
            self._after_pending()

    def _has_client(self) -> bool:
        if self.transport.is_closing():
            return False
        has_ended = _has_ended(self.transport)
        if has_ended:  # reading may be paused, so that the end would not be read
            self.transport.close()
        return not has_ended

    def _drop_pending(self) -> None:
        self._pending = self._pending_request = None
        self._pending_bytes = 0
        self._holds &= ~_PENDING
        self.since = self._connections.now

    def _after_pending(self) -> None:
        if self._has_more:
            self._schedule()
        self.settle()
        self._update_reading()

    def _hang_up(self) -> None:
        """Drop pending and queued requests, because the client will not read the answers."""
        self._queue.clear()
        self._reader.drop()
        pending = self._pending
        if pending is not None:
            self._pending = self._pending_request = None
            self._pending_bytes = 0
            try:
                pending.hang_up()
            except Exception:
                log.exception("on_disconnect failed")

    def _schedule(self) -> None:
        """Continue with queued requests in a later turn of the loop, after other connections."""
        self._holds |= _SCHEDULED
        self._connections.put_off(self._continue)
        self._update_reading()

    def _continue(self) -> None:
        self._holds &= ~_SCHEDULED
        self._proceed()

    def _proceed(self) -> None:
        """Continue with queued requests or unread bytes, unless a flag in `_holds` says to wait."""
        if not self._holds:
            if self._reader.waiting and not self._queue:
                self._take(b"")
            else:
                self._serve()
        self._update_reading()

    def _update_reading(self) -> None:
        """Pause reading if the client reads no answers, or too much of its input is unread."""
        holds, reader, pending_bytes = self._holds, self._reader, self._pending_bytes
        queued_bytes = sum(map(_size_of, self._queue)) if self._queue else 0
        if not (
            (queued_bytes or pending_bytes or self.held_bytes or reader.waiting)
            or (reader.is_unfinished or holds & _WRITE_PAUSED or self._reading_paused)
        ):
            return  # nothing is held
        most = _MAX_PENDING_BYTES if holds & _PENDING else _MAX_WAITING_BYTES
        pause = not holds & _ENDED and bool(
            holds & _WRITE_PAUSED or queued_bytes + len(reader.waiting) > most
        )
        held = reader.held_bytes + queued_bytes + pending_bytes
        self._connections.held_bytes += held - self.held_bytes
        self.held_bytes = held
        if pause != self._reading_paused and not self.transport.is_closing():
            self._reading_paused = pause
            if pause:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _refuse(self, error: HttpError) -> None:
        self.transport.write(
            encode_response(
                error.status, self._connections.refusal(error), extra=b"connection: close\r\n"
            )
        )
        self._end(lingers=True)

    def _end(self, lingers: bool) -> None:
        """Close the connection after the last write. `lingers`: half-close, and wait until the
        client closes."""
        self._holds |= _ENDED
        self._free_queued()
        self.since = self._connections.now
        self._unwritten_bytes = self.transport.get_write_buffer_size()
        if lingers and not self._got_eof and self.transport.can_write_eof():
            self.transport.write_eof()
            self._update_reading()
        else:
            self.transport.close()

    def _free_queued(self) -> None:
        self._queue.clear()
        self._reader.drop()
        self._connections.held_bytes -= self.held_bytes
        self.held_bytes = 0


def _size_of(request: Request) -> int:
    query = 0 if request.query is None else len(request.query)
    head = len(request.path) + query + len(request.section)
    return _REQUEST_BYTES + head + len(request.body)


def _has_ended(transport: asyncio.Transport) -> bool:
    """Whether the client has closed its end, or reset the connection, as far as the kernel knows.
    (Only Linux tells of a close that was not read yet.)"""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return False
    ends = select.poll()
    ends.register(sock.fileno(), getattr(select, "POLLRDHUP", 0))
    return bool(ends.poll(0))


def _has_unread(transport: asyncio.Transport) -> bool:
    """Whether the socket has unread input. Closing such a socket resets the connection."""
    sock = transport.get_extra_info("socket")
    if sock is None:
        return False
    waiting = array.array("i", [0])
    fcntl.ioctl(sock.fileno(), termios.FIONREAD, waiting)
    return waiting[0] > 0
