"""The messages of Envoy's ext_proc and of gRPC's health check, as far as an endpoint picker needs.

Read: ProcessingRequest and HealthCheckRequest. Written: ProcessingResponse and HealthCheckResponse.
Field numbers are those of Envoy 1.40. Protocol buffers consist of fields: a tag (field number and
wire type) and a value. Unknown fields are skipped, and of a repeated scalar the last one counts.
Nothing here recurses, so no nesting in a message can exhaust the stack."""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from typing import Final

# What a ProcessingRequest has. The response to a message has a number that is lower by one.
REQUEST_HEADERS: Final = 2
RESPONSE_HEADERS: Final = 3
REQUEST_BODY: Final = 4
RESPONSE_BODY: Final = 5
REQUEST_TRAILERS: Final = 6
RESPONSE_TRAILERS: Final = 7

# BodySendMode
NONE: Final = 0
STREAMED: Final = 1
BUFFERED: Final = 2
FULL_DUPLEX: Final = 4

MOST_PIECE: Final = 62_000  # bytes of a body; some data planes take messages of 64 KiB at most
DESTINATION: Final = b"x-gateway-destination-endpoint"
_LB: Final = b"envoy.lb"

_VARINT: Final = 0
_FIXED64: Final = 1
_BYTES: Final = 2
_FIXED32: Final = 5
_MOST_TAG: Final = (1 << 32) - 1
_U64: Final = (1 << 64) - 1


class Malformed(ValueError):
    """A message is no valid protocol buffer. The text says why."""


# -- reading ---------------------------------------------------------------------------------------


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at `at`, and the position behind it. Raises IndexError."""
    byte = data[at]
    value, shift = byte & 0x7F, 7
    while byte >= 0x80:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        shift += 7
        if shift > 70:
            raise Malformed("a number has more than 10 bytes")
    return value & _U64, at + 1


def fields(data: bytes) -> Iterator[tuple[int, int, bytes]]:
    """Yields the number of each field, its value if it is a number, and its bytes otherwise. Raises
    Malformed."""
    at, end = 0, len(data)
    try:
        while at < end:
            tag = data[at]
            at += 1
            if tag >= 0x80:
                tag, at = _varint(data, at - 1)
            number, wire_type = tag >> 3, tag & 7
            if not number or tag > _MOST_TAG:
                raise Malformed("a field has no valid number")
            if wire_type == _BYTES:
                size = data[at]
                at += 1
                if size >= 0x80:
                    size, at = _varint(data, at - 1)
                stop = at + size
            elif wire_type == _VARINT:
                value, at = _varint(data, at)
                yield number, value, b""
                continue
            elif wire_type in (_FIXED64, _FIXED32):
                stop = at + (8 if wire_type == _FIXED64 else 4)
            else:
                raise Malformed(f"wire type {wire_type} is not supported")
            if stop > end:
                raise Malformed("a field is longer than its message")
            yield number, 0, data[at:stop]
            at = stop
    except IndexError:
        raise Malformed("a message is cut short") from None


class ProcessingRequest:
    """A message of the data plane. `payload` is its HttpHeaders, HttpBody or HttpTrailers, and
    `kind` says which; 0: none."""

    __slots__ = ("kind", "metadata", "modes", "observes", "payload")

    def __init__(self, data: bytes) -> None:
        """Raises Malformed."""
        self.kind = 0
        self.payload = b""
        self.metadata = b""  # a Metadata
        self.modes: tuple[int, int] | None = None  # of the bodies of request and response
        self.observes = False  # nobody waits for a response
        for number, value, content in fields(data):
            if REQUEST_HEADERS <= number <= RESPONSE_TRAILERS:
                self.kind, self.payload = number, content
            elif number == 8:
                self.metadata = content
            elif number == 10:
                self.observes = value != 0
            elif number == 11:
                modes = {which: mode for which, mode, _ in fields(content)}
                self.modes = modes.get(1, NONE), modes.get(2, NONE)


def body_of(payload: bytes) -> tuple[bytes, bool]:
    """Return the bytes of an HttpBody, and whether these end the stream."""
    body, is_last = b"", False
    for number, value, content in fields(payload):
        if number == 1:
            body = content
        elif number == 2:
            is_last = value != 0
    return body, is_last


def headers_of(payload: bytes) -> tuple[dict[bytes, bytes], bool]:
    """Return the headers of HttpHeaders, by name, and whether no body follows. Of a repeated
    header the last one counts."""
    found: dict[bytes, bytes] = {}
    is_last = False
    for number, value, content in fields(payload):
        if number == 1:  # HeaderMap
            for which, _, header in fields(content):
                if which != 1:
                    continue
                # Two short texts, `key` and `raw_value`, as nearly always
                size = len(header)
                at = 2 + header[1] if 3 < size < 0x80 and header[0] == 0x0A else size
                if at < size - 1 and header[at] == 0x1A and header[at + 1] == size - at - 2:
                    found[header[2:at]] = header[at + 2 :]
                    continue
                name = text = b""
                for part, _, piece in fields(header):
                    if part == 1:
                        name = piece
                    elif part in (2, 3) and piece:  # `value` or `raw_value`
                        text = piece
                found[name] = text
        elif number == 3:
            is_last = value != 0
    return found, is_last


def _each(data: bytes, number: int) -> Iterator[bytes]:
    """Yields the contents of a repeated field."""
    for each, _, content in fields(data):
        if each == number:
            yield content


def _last(data: bytes, number: int) -> bytes:
    """Return the content of a field, empty without it."""
    found = b""
    for content in _each(data, number):
        found = content
    return found


def _values(metadata: bytes, namespace: bytes, key: bytes) -> list[bytes] | None:
    """Return a text of a Metadata, or the texts of a list; None without it."""
    if key not in metadata:  # as mostly
        return None
    value = metadata
    for name in (namespace, key):  # a Metadata and a Struct are maps, in their field 1
        entries = {_last(entry, 1): _last(entry, 2) for entry in _each(value, 1)}
        if name not in entries:
            return None
        value = entries[name]
    # 3: a text, 6: a list
    return [*_each(value, 3), *(_last(each, 3) for each in _each(_last(value, 6), 1))]


def subset_of(metadata: bytes) -> list[bytes] | None:
    """Return the endpoints among which the data plane allows to choose; None for all. It names
    them in a list, or in a text with commas."""
    told = _values(metadata, b"envoy.lb.subset_hint", DESTINATION + b"-subset")
    if told is None:
        return None
    return [each.strip() for each in b",".join(told).split(b",") if each.strip()]


def served_of(metadata: bytes) -> bytes | None:
    """Return the endpoint that has answered, if the data plane says so."""
    told = _values(metadata, _LB, DESTINATION + b"-served")
    return told[0] if told else None


# -- writing ---------------------------------------------------------------------------------------


@lru_cache(4096)
def _written(number: int) -> bytes:
    written = bytearray()
    while number >= 0x80:
        written.append(number & 0x7F | 0x80)
        number >>= 7
    written.append(number)
    return bytes(written)


def part(number: int, content: bytes) -> bytes:
    """Return a field with these bytes."""
    return _written(number << 3 | _BYTES) + _written(len(content)) + content


_fixed: Final = lru_cache(64)(part)  # of contents that are nearly always the same


def pieces(kind: int, body: bytes, is_last: bool) -> list[bytes]:
    """Return the BodyResponses to messages of this kind that send `body` on (FULL_DUPLEX): one at
    least if it is the last of the stream."""
    found = []
    for at in range(0, len(body) or is_last, MOST_PIECE):
        streamed = part(1, body[at : at + MOST_PIECE]) if body else b""
        if is_last and at + MOST_PIECE >= len(body):
            streamed += b"\x10\x01"
        found.append(part(kind - 1, part(1, part(3, part(3, streamed)))))
    return found


def unchanged(kind: int) -> bytes:
    """Return the response that lets a message of this kind pass as it is."""
    return part(kind - 1, b"")


def _mutation(headers: Mapping[bytes, bytes], removed: Iterable[bytes] = ()) -> bytes:
    """Return a HeaderMutation, which overwrites `headers` or adds them."""
    mutation = b"".join(
        [
            part(1, part(1, _fixed(1, name) + part(3, text)) + b"\x18\x02")
            for name, text in headers.items()
        ]
    )
    return mutation + b"".join([_fixed(2, name) for name in removed])


def destination(kind: int, headers: Mapping[bytes, bytes], removed: Iterable[bytes]) -> bytes:
    """Return the response to a message of this kind, headers or body, that changes the request's
    headers. One of these is DESTINATION, which is also in the dynamic metadata."""
    changes = part(2, _mutation(headers, removed))
    value = part(5, part(1, _fixed(1, DESTINATION) + part(2, part(3, headers[DESTINATION]))))
    metadata = part(8, part(1, _fixed(1, _LB) + part(2, value)))
    return part(kind - 1, part(1, changes + b"\x28\x01")) + metadata  # 5: clear_route_cache


def immediate(status: int, body: bytes, headers: Mapping[bytes, bytes]) -> bytes:
    """Return the response that answers the client in place of a worker."""
    code = b"\x08" + _written(status)
    return part(7, part(1, code) + part(2, _mutation(headers)) + part(3, body))


# -- health ----------------------------------------------------------------------------------------

SERVING: Final = b"\x08\x01"
NOT_SERVING: Final = b"\x08\x02"


def health_service(data: bytes) -> bytes:
    """Return the service whose health is asked for. Raises Malformed."""
    return _last(data, 1)
