"""Finds where the body of a message ends: after a content length, after the last chunk, or with the
connection. Both halves of HTTP read bodies with these classes.

`read` appends the contents of a body to a list, without framing; if there is no list, they are
dropped. Chunks follow RFC 9112 section 7.1 strictly: any violation of the grammar is an error,
because a proxy in front may interpret the body differently. No I/O."""

import re
from typing import Final

from lean_selector.http.head import CHUNKED, HttpError, Limits

# A chunk size of 15 digits cannot overflow; no real chunk needs more than 8.
_CHUNK_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})([ \t]*+(?:;[\t\x20-\x7e\x80-\xff]*+)?+)")
# How nearly every chunk starts.
_PLAIN_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,7})\r\n")
_TRAILER: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t\x20-\x7e\x80-\xff]*+")

_MAX_LINE_BYTES = 4096
# Limit in bytes for all chunk extensions of a body together. Nobody uses them in practice. Node has
# the same limit since CVE-2024-22019.
_MAX_EXTENSION_BYTES = 16 * 1024
_MAX_TRAILER_BYTES: Final = 64 * 1024

# Chunks or lines of a request that one call parses. A one-byte chunk takes a microsecond or more,
# and 256 KiB can contain 43 690 of them.
_MOST_CHUNKS: Final = 512

_SIZE, _DATA, _DATA_END, _TRAILERS = range(4)


class UnboundedBody:
    """A body that ends when the sender closes the connection."""

    def __init__(self) -> None:
        self.is_done = False
        self.error: HttpError | None = None

    def read(self, data: bytes, at: int, pieces: list[bytes] | None) -> int:
        """Consume the body's bytes in data[at:]. Return the offset of the first unread byte. Sets
        `is_done` at the body's end, and `error` if the body is invalid."""
        if pieces is not None and at < len(data):
            pieces.append(data[at:] if at else data)
        return len(data)


class SizedBody(UnboundedBody):
    """A body that has a content length of `length` bytes."""

    def __init__(self, length: int) -> None:
        self.error = None
        self._left = length
        self.is_done = length == 0

    def read(self, data: bytes, at: int, pieces: list[bytes] | None) -> int:
        stop = min(len(data), at + self._left)
        if pieces is not None and stop > at:
            # A whole piece is passed on without a copy; a slice is a copy in the compiled form.
            pieces.append(data if stop - at == len(data) else data[at:stop])
        self._left -= stop - at
        self.is_done = self._left == 0
        return stop


class ChunkedBody(UnboundedBody):
    """A chunked body. Trailers are read and dropped; too many of them are an error."""

    def __init__(
        self, max_trailer_bytes: int = _MAX_TRAILER_BYTES, most_chunks: int = 1 << 62
    ) -> None:
        """A call of `read` parses at most `most_chunks` chunks: pass the rest later."""
        super().__init__()
        self._state = _SIZE
        self._left = 0  # bytes of the current chunk that are still to come
        self._line = bytearray()  # an incomplete line
        self._extension_bytes = 0
        self._trailer_bytes = 0
        self._max_trailer_bytes = max_trailer_bytes
        self._most_chunks = most_chunks

    def read(self, data: bytes, at: int, pieces: list[bytes] | None) -> int:
        size, steps = len(data), self._most_chunks
        while at < size and steps > 0 and not self.is_done and self.error is None:
            if self._state == _SIZE and not self._line:
                while steps > 0:  # whole chunks without extensions: nearly all are
                    plain = _PLAIN_CHUNK.match(data, at)
                    if plain is None:
                        break
                    start = plain.end()
                    stop = start + int(plain[1], 16)
                    if data[stop : stop + 2] != b"\r\n":
                        break
                    at = stop + 2
                    if stop == start:  # the last chunk, without trailers
                        self.is_done = True
                        return at
                    if pieces is not None:
                        pieces.append(data[start:stop])
                    if at == size:
                        return at
                    steps -= 1
            steps -= 1
            at = self._step(data, at, pieces)
        return at

    def _step(self, data: bytes, at: int, pieces: list[bytes] | None) -> int:
        """Consume data of the current chunk, or bytes of a line."""
        if self._state == _DATA:
            stop = min(len(data), at + self._left)
            if pieces is not None:
                pieces.append(data[at:stop])
            self._left -= stop - at
            if self._left == 0:
                self._state = _DATA_END
            return stop
        stop = data.find(b"\n", at) + 1
        self._line += data[at : stop or len(data)]
        if len(self._line) > _MAX_LINE_BYTES:
            self.error = HttpError(400, "line too long in a chunked body")
        elif stop:
            line = bytes(self._line)
            self._line.clear()
            if line.endswith(b"\r\n"):
                self._take_line(line[:-2])
            else:
                self.error = HttpError(400, "bare line feed in a chunked body")
        return stop or len(data)

    def _take_line(self, line: bytes) -> None:
        if self._state == _SIZE:
            match = _CHUNK_SIZE.fullmatch(line)
            if match is None:
                self.error = HttpError(400, "malformed chunk size")
                return
            self._extension_bytes += len(match[2])
            if self._extension_bytes > _MAX_EXTENSION_BYTES:
                self.error = HttpError(400, "chunk extensions too long")
            self._left = int(match[1], 16)
            self._state = _DATA if self._left else _TRAILERS
        elif self._state == _DATA_END:
            if line:
                self.error = HttpError(400, "chunk data does not match its stated size")
            self._state = _SIZE
        elif not line:
            self.is_done = True
        else:
            self._trailer_bytes += len(line)
            if self._trailer_bytes > self._max_trailer_bytes:
                self.error = HttpError(431, "request trailers too large")
            elif _TRAILER.fullmatch(line) is None:
                self.error = HttpError(400, "malformed trailer")


class RequestBody:
    """A request's body as far as it has arrived. A body above the limit is read to the end, but not
    stored. A single piece is stored without a copy. Further pieces are appended to a bytearray,
    because appending to bytes copies the whole body each time."""

    def __init__(self, length: int, limits: Limits) -> None:
        """`length` is the content length, at least 1, or CHUNKED."""
        self._max_bytes = limits.max_body_bytes
        self.framing = (
            ChunkedBody(limits.max_head_bytes, _MOST_CHUNKS)
            if length == CHUNKED
            else SizedBody(length)
        )
        self.content: bytes | bytearray = b""  # at most max_body_bytes; b"" if too large
        self.is_too_large = length > limits.max_body_bytes
        self.wire_bytes = 0  # bytes read from the connection, framing included

    def feed(self, data: bytes, at: int) -> int:
        """Consume body bytes, starting at data[at]. Return the offset of the first unread byte."""
        pieces: list[bytes] | None = None if self.is_too_large else []
        stop = self.framing.read(data, at, pieces)
        self.wire_bytes += stop - at
        if pieces:
            self._keep(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        return stop

    def _keep(self, piece: bytes) -> None:
        if len(self.content) + len(piece) > self._max_bytes:
            self.is_too_large = True
            self.content = b""
        elif not self.content:
            self.content = piece
        elif isinstance(self.content, bytearray):
            self.content += piece
        else:
            self.content = bytearray(self.content)
            self.content += piece
