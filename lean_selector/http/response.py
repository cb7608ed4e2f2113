"""Responses as bytes: prebuilt heads, one join per answer; and pending answers.

Makes status lines, framing headers and the cached `date`. Knows neither the meaning of a body nor
when a connection closes: the protocol adds `connection` to a finished response. Header names are
lower case, as in the reference (spec: selection.md section 1.1). No I/O and no clock: the owner of
the loop calls `date_header.set` about once a second."""

from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

JSON: Final = b"application/json"

Response = bytes | bytearray  # complete; a grown one is not copied again

_STATUS_LINES: Final = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}
_STATUS_LINES[529] = b"HTTP/1.1 529 Overloaded\r\n"  # not registered, but in use

# The end of a head for common lengths: formatting it costs as much as the rest of encode_response.
# 1 024 entries take 60 KB.
_LENGTH_ENDS: Final = tuple(b"content-length: %d\r\n\r\n" % length for length in range(1024))


class DateHeader:
    """The `date` line of every response; one per process. Empty until the first `set`. A change
    drops the heads built with the old one."""

    def __init__(self) -> None:
        self.line = b""
        self._second = -1

    def set(self, unix_time: float) -> None:
        """Set the wall clock, in seconds since 1970; cheap within the same second."""
        second = int(unix_time)
        if second != self._second:
            self._second = second
            self.line = b"date: %b\r\n" % formatdate(second, usegmt=True).encode()
            _json_heads.clear()


# Status -> head up to content-length; at most one per HTTPStatus.
_json_heads: Final[dict[int, bytes]] = {}
date_header: Final = DateHeader()


def _start_of_head(status: int, content_type: bytes) -> bytes:
    type_line = b"content-type: %b\r\n" % content_type if content_type else b""
    return b"%b%b%b" % (_STATUS_LINES[status], type_line, date_header.line)


def encode_response(
    status: int, body: bytes, content_type: bytes = JSON, extra: bytes = b""
) -> bytes:
    """One complete HTTP/1.1 response.

    An empty content_type leaves that header out. `extra` is whole header lines, each ended by CRLF
    (`b"allow: GET,HEAD\r\n"`). Raises KeyError for an unknown status."""
    if content_type == JSON:
        head = _json_heads.get(status)
        if head is None:
            head = _json_heads[status] = _start_of_head(status, content_type)
    else:
        head = _start_of_head(status, content_type)
    length = len(body)
    end = _LENGTH_ENDS[length] if length < 1024 else b"content-length: %d\r\n\r\n" % length
    return b"".join((head, extra, end, body))


class GrowingResponse:
    """A 200 answer of unknown length; its body is added in parts.

    The length is written last, into a field of fixed width, so an answer of 100 MB is not copied
    again, which would take a quarter of a second."""

    __slots__ = ("_data", "_head_bytes")

    _WIDTH = 20  # digits of 2**64; blanks before a value are allowed (RFC 9110, 5.5)

    def __init__(self, content_type: bytes = JSON) -> None:
        start, blank = _start_of_head(200, content_type), b" " * self._WIDTH
        self._data = bytearray(start + b"content-length:%b\r\n\r\n" % blank)
        self._head_bytes = len(self._data)

    def add(self, part: bytes) -> None:
        self._data += part

    def finish(self) -> Response:
        """The whole response; no part may be added afterwards."""
        length = b"%*d" % (self._WIDTH, len(self._data) - self._head_bytes)
        end = self._head_bytes - len(b"\r\n\r\n")
        self._data[end - self._WIDTH : end] = length
        return self._data


def status_of(response: Response) -> bytes:
    """The three digits of a response's status."""
    return bytes(response[9:12])  # after b"HTTP/1.1 "


def without_body(response: Response) -> Response:
    """The answer to HEAD: the head of the GET's answer, its content-length included."""
    return response[: response.index(b"\r\n\r\n") + 4]


def with_connection(response: Response, option: bytes) -> bytes:
    """The response with `connection: <option>` after its status line."""
    after_status = response.index(b"\r\n") + 2
    status, rest = response[:after_status], response[after_status:]
    return b"".join((status, b"connection: ", option, b"\r\n", rest))


# --------------------------------------------------------------------------------------------------
# An answer that is sent later, between the app that makes it and the connection that waits for it.
#
# Defines which callbacks its end calls, in which order. Knows neither HTTP bytes nor transports.


class PendingReply:
    """An answer that is sent later. The app stores it, returns it, and calls `resolve` once.

    If the client disconnects first, `on_disconnect` is called once, and `resolve` does nothing. A
    client that half-closes, as `nc -N` does after its request, counts as disconnected, unless the
    answer `is_being_made`: then it still gets the answer."""

    __slots__ = ("_observers", "_send", "held_bytes", "is_being_made", "on_disconnect", "response")

    def __init__(
        self, on_disconnect: Callable[[], object] | None = None, *, is_being_made: bool = False
    ) -> None:
        """`is_being_made`: the answer only waits for turns of the loop."""
        self.on_disconnect = on_disconnect
        self.is_being_made = is_being_made
        self.response: Response | None = None
        self.held_bytes = 0  # memory that the app holds for the request meanwhile, if much
        self._observers: list[tuple[Callable[[Response], None], Callable[[], None]]] = []
        self._send: Callable[[Response], None] | None = None

    def observe(
        self, on_answer: Callable[[Response], None], on_hang_up: Callable[[], None]
    ) -> None:
        """Call one of the two once at the end: `on_answer` with the response (at once if it
        exists), or `on_hang_up` on a disconnect. Observers are called in order, and before
        `on_disconnect`."""
        if self.response is not None:
            on_answer(self.response)
        else:
            self._observers.append((on_answer, on_hang_up))

    def resolve(self, response: Response) -> None:
        """Send the complete response. Requests queued behind it are handled later, outside of this
        call."""
        assert self.response is None, "a reply is resolved once"
        self.response = response
        self.on_disconnect = None
        observers, self._observers = self._observers, []
        for on_answer, _ in observers:
            on_answer(response)
        send, self._send = self._send, None
        if send is not None:
            send(response)

    def park(self, send: Callable[[Response], None]) -> None:
        """For the protocol: set where to send the response."""
        self._send = send

    def hang_up(self) -> None:
        """For the protocol: the client has disconnected."""
        self._send = None
        on_disconnect, self.on_disconnect = self.on_disconnect, None
        observers, self._observers = self._observers, []
        for _, on_hang_up in observers:
            on_hang_up()
        if on_disconnect is not None:
            on_disconnect()
