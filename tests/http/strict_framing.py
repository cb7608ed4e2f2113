"""Where requests end in a stream of bytes, by RFC 9112 alone and slowly: an oracle for the reader.

It knows nothing of limits, caches or pieces. What two readers could frame in different ways ends
the stream for it, so whatever the reader takes must be among what this takes.
"""

import re
from typing import NamedTuple

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
REQUEST_LINE = re.compile(rb"(%b) ([^ \r\n\0]+) HTTP/1\.([01])" % TOKEN)
FIELD_LINE = re.compile(rb"(%b):[ \t]*([^\r\n\0]*?)[ \t]*" % TOKEN)
CHUNK_LINE = re.compile(rb"([0-9A-Fa-f]{1,15})[ \t]*(?:;[^\r\n\0]*)?")


class Framed(NamedTuple):
    method: bytes
    target: bytes
    body: bytes


class _Incomplete(Exception):
    """The rest has not come."""


class _Ambiguous(Exception):
    """Nobody should read on."""


def framed(stream: bytes) -> list[Framed]:
    """The whole requests that the stream begins with."""
    requests: list[Framed] = []
    while True:
        while stream.startswith(b"\r\n"):
            stream = stream[2:]
        try:
            request, stream = _request(stream)
        except (_Incomplete, _Ambiguous):
            return requests
        requests.append(request)


def _request(stream: bytes) -> tuple[Framed, bytes]:
    line, rest = _line(stream)
    start = REQUEST_LINE.fullmatch(line)
    if start is None:
        raise _Ambiguous
    fields, rest = _fields(rest)
    lengths = [value for name, value in fields if name == b"content-length"]
    codings = [value.lower() for name, value in fields if name == b"transfer-encoding"]
    if codings:
        if lengths or codings != [b"chunked"] or start[3] == b"0":
            raise _Ambiguous
        body, rest = _chunks(rest)
    elif lengths:
        if len(lengths) > 1 or re.fullmatch(rb"[0-9]{1,18}", lengths[0]) is None:
            raise _Ambiguous
        body, rest = _taken(rest, int(lengths[0]))
    else:
        body = b""
    return Framed(start[1], start[2], body), rest


def _line(stream: bytes) -> tuple[bytes, bytes]:
    line, end, rest = stream.partition(b"\r\n")
    if not end:
        raise _Incomplete
    return line, rest


def _fields(stream: bytes) -> tuple[list[tuple[bytes, bytes]], bytes]:
    fields: list[tuple[bytes, bytes]] = []
    while True:
        line, stream = _line(stream)
        if not line:
            return fields, stream
        field = FIELD_LINE.fullmatch(line)
        if field is None:
            raise _Ambiguous
        fields.append((field[1].lower(), field[2]))


def _chunks(stream: bytes) -> tuple[bytes, bytes]:
    body = b""
    while True:
        line, stream = _line(stream)
        size = CHUNK_LINE.fullmatch(line)
        if size is None:
            raise _Ambiguous
        if int(size[1], 16) == 0:
            return body, _fields(stream)[1]
        chunk, stream = _taken(stream, int(size[1], 16))
        body += chunk
        end, stream = _taken(stream, 2)
        if end != b"\r\n":
            raise _Ambiguous


def _taken(stream: bytes, size: int) -> tuple[bytes, bytes]:
    if len(stream) < size:
        raise _Incomplete
    return stream[:size], stream[size:]
