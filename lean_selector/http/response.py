"""Builds responses as bytes, from prebuilt heads. Also defines answers that are sent later.

Makes status lines, framing headers and the cached `date` header. Independent of the meaning of a
body. The protocol decides when a connection closes, and adds the `connection` header to a finished
response. Header names are lower case, as in Dynamo (spec: selection.md section 1.1). No I/O
and no clock: the owner of the event loop calls `date_header.set` about once a second."""

from collections.abc import Callable
from email.utils import formatdate
from http import HTTPStatus
from typing import Final

JSON: Final = b"application/json"

Response = bytes | bytearray  # complete; a bytearray if made in parts, to avoid a copy

_STATUS_LINES: Final = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode())
    for status in HTTPStatus
}
_STATUS_LINES[529] = b"HTTP/1.1 529 Overloaded\r\n"  # not registered, but in use


class DateHeader:
    """The `date` line of all responses; one object per process. Empty until the first `set`. When
    the line changes, the prebuilt heads are dropped, because they contain the old line."""

    def __init__(self) -> None:
        self.line = b""
        self._second = -1

    def set(self, unix_time: float) -> None:
        """Set the time, in seconds since 1970; cheap within the same second."""
        second = int(unix_time)
        if second != self._second:
            self._second = second
            self.line = b"date: %b\r\n" % formatdate(second, usegmt=True).encode()
            _json_heads.clear()


# Status -> the head up to the content-length; at most one entry per HTTPStatus.
_json_heads: Final[dict[int, bytes]] = {}
date_header: Final = DateHeader()


def _start_of_head(status: int, content_type: bytes) -> bytes:
    type_line = b"content-type: %b\r\n" % content_type if content_type else b""
    return b"%b%b%b" % (_STATUS_LINES[status], type_line, date_header.line)


def encode_response(
    status: int, body: bytes, content_type: bytes = JSON, extra: bytes = b""
) -> bytes:
    r"""Return one complete HTTP/1.1 response.

    If content_type is empty, the header is omitted. `extra` is whole header lines, each ended by
    CRLF (`b"allow: GET,HEAD\r\n"`). Raises KeyError for an unknown status."""
    if content_type == JSON:
        head = _json_heads.get(status)
        if head is None:
            head = _json_heads[status] = _start_of_head(status, content_type)
    else:
        head = _start_of_head(status, content_type)
    return b"".join((head, extra, b"content-length: %d\r\n\r\n" % len(body), body))


class GrowingResponse:
    """A 200 answer of unknown length, whose body is added in parts.

    The content-length is written at the end, into a header field of fixed width. So the body is not
    copied. Copying 100 MB would take a quarter of a second."""

    _WIDTH = 20  # digits of 2**64; blanks before a value are allowed (RFC 9110, 5.5)

    def __init__(self, content_type: bytes = JSON) -> None:
        start, blank = _start_of_head(200, content_type), b" " * self._WIDTH
        self._data = bytearray(start + b"content-length:%b\r\n\r\n" % blank)
        self._head_bytes = len(self._data)

    def add(self, part: bytes) -> None:
        self._data += part

    def finish(self) -> Response:
        """Return the whole response. No part may be added afterwards."""
        length = b"%*d" % (self._WIDTH, len(self._data) - self._head_bytes)
        end = self._head_bytes - len(b"\r\n\r\n")
        self._data[end - self._WIDTH : end] = length
        return self._data


def status_of(response: Response) -> bytes:
    """Return the three digits of a response's status."""
    return bytes(response[9:12])  # after b"HTTP/1.1 "


def without_body(response: Response) -> Response:
    """Return the answer to HEAD: the head of the answer to GET, including its content-length."""
    return response[: response.index(b"\r\n\r\n") + 4]


def with_connection(response: Response, option: bytes) -> bytes:
    """Return the response with `connection: <option>` after its status line."""
    after_status = response.index(b"\r\n") + 2
    status, rest = response[:after_status], response[after_status:]
    return b"".join((status, b"connection: ", option, b"\r\n", rest))


# -- an answer that is sent later ------------------------------------------------------------------
# Defines which callbacks its end calls, in which order. Independent of HTTP and transports.


class PendingReply:
    """An answer that is sent later. The app returns this object, and calls its `resolve` once.

    If the client disconnects first, `on_disconnect` is called once, and `resolve` does nothing. A
    client that half-closes, as `nc -N` does after its request, counts as disconnected. But if
    the app works on the answer already (`is_being_made`), such a client still gets the answer."""

    def __init__(
        self, on_disconnect: Callable[[], object] | None = None, *, is_being_made: bool = False
    ) -> None:
        """`is_being_made`: the app is already making the answer, over several loop iterations."""
        self.on_disconnect = on_disconnect
        self.is_being_made = is_being_made
        self.response: Response | None = None
        self.held_bytes = 0  # memory that the app meanwhile holds for the request, if much
        self._observers: list[tuple[Callable[[Response], None], Callable[[], None]]] = []
        self._send: Callable[[Response], None] | None = None
        self._has_client: Callable[[], bool] | None = None

    def has_client(self) -> bool:
        """Whether the client still waits, as far as this host knows: a disconnect may have arrived
        without being read yet. If it has, the connection is closed."""
        return self._has_client is None or self._has_client()

    def observe(
        self, on_answer: Callable[[Response], None], on_hang_up: Callable[[], None]
    ) -> None:
        """Register two callbacks, of which one will be called once: `on_answer` with the response
        (immediately if the response exists), or `on_hang_up` after a disconnect. Observers are
        called in the order of registration, before `on_disconnect`."""
        if self.response is not None:
            on_answer(self.response)
        else:
            self._observers.append((on_answer, on_hang_up))

    def resolve(self, response: Response) -> None:
        """Send the complete response. Requests of the connection that are queued behind this one
        are handled later, not in this call."""
        assert self.response is None, "a reply is resolved once"
        self.response = response
        self.on_disconnect = None
        observers, self._observers = self._observers, []
        for on_answer, _ in observers:
            on_answer(response)
        send, self._send, self._has_client = self._send, None, None
        if send is not None:
            send(response)

    def deliver_to(self, send: Callable[[Response], None], has_client: Callable[[], bool]) -> None:
        """For the protocol: set the function that sends the response, and the one that tells
        whether the client still waits for it."""
        self._send = send
        self._has_client = has_client

    def hang_up(self) -> None:
        """For the protocol: report that the client has disconnected."""
        self._send = self._has_client = None
        on_disconnect, self.on_disconnect = self.on_disconnect, None
        observers, self._observers = self._observers, []
        for _, on_hang_up in observers:
            on_hang_up()
        if on_disconnect is not None:
            on_disconnect()
