"""The two framings of a request body: by content length, and chunked.

The classes find the end of a body and store the body. A body above the limit is read to the end,
but not stored. The classes follow RFC 9112 sections 6.2 and 7.1 strictly: any violation of the
grammar is an error, because a proxy in front may interpret the body differently. Both classes have
the same interface. No I/O."""

import re
from typing import Final

from lean_selector.http.head import HttpError, Limits

# A chunk size of 15 digits cannot overflow; no real chunk needs more than 8.
_CHUNK_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,15})([ \t]*+(?:;[\t\x20-\x7e\x80-\xff]*+)?+)")
# How nearly every chunk starts.
_PLAIN_CHUNK: Final = re.compile(rb"([0-9A-Fa-f]{1,7})\r\n")
_TRAILER: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t\x20-\x7e\x80-\xff]*+")

_MAX_LINE_BYTES = 4096
# Limit in bytes for all chunk extensions of a body together. Nobody uses them in practice. Node has
# the same limit since CVE-2024-22019.
_MAX_EXTENSION_BYTES = 16 * 1024

# Chunks or lines that one call parses. A one-byte chunk takes a microsecond or more, and 256 KiB
# can contain 43 690 of them.
_MOST_CHUNKS = 512

_SIZE, _DATA, _DATA_END, _TRAILERS = range(4)


class _Kept:
    """Base class that stores a body. A single piece is stored without a copy. Further pieces are
    appended to a bytearray, because appending to bytes copies the whole body each time."""

    __slots__ = ("_max_bytes", "content", "error", "is_done", "is_too_large", "wire_bytes")

    def __init__(self, limits: Limits) -> None:
        self._max_bytes = limits.max_body_bytes
        self.content: bytes | bytearray = (
            b""  # 0 <= len(content) <= max_body_bytes; b"" if too large
        )
        self.is_too_large = False
        self.is_done = False
        self.error: HttpError | None = None
        self.wire_bytes = 0  # bytes read from the connection, framing included

    def _keep(self, piece: bytes) -> None:
        if self.is_too_large:
            return
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


class SizedBody(_Kept):
    """A request body with a content length of `length` bytes, at least 1."""

    __slots__ = ("_left",)

    def __init__(self, length: int, limits: Limits) -> None:
        super().__init__(limits)
        self._left = length
        self.is_too_large = length > limits.max_body_bytes

    def feed(self, data: bytes, at: int) -> int:
        """Consume body bytes, starting at data[at]. Returns the offset of the first unread byte."""
        stop = min(len(data), at + self._left)
        # A whole piece is stored without a copy; a slice would be a copy in the compiled form.
        self._keep(data if stop - at == len(data) else data[at:stop])
        self._left -= stop - at
        self.wire_bytes += stop - at
        self.is_done = self._left == 0
        return stop


class ChunkedBody(_Kept):
    """A chunked body. Trailers are read and dropped. Trailers of more than max_head_bytes in total
    are an error."""

    __slots__ = (
        "_extension_bytes",
        "_left",
        "_line",
        "_max_trailer_bytes",
        "_state",
        "_trailer_bytes",
    )

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._state = _SIZE
        self._left = 0  # bytes of the current chunk that are still to come
        self._line = bytearray()  # an incomplete line
        self._extension_bytes = 0
        self._trailer_bytes = 0
        self._max_trailer_bytes = limits.max_head_bytes

    def feed(self, data: bytes, at: int) -> int:
        """Consume body bytes, starting at data[at]. Returns the offset of the first unread byte.
        Sets `error` for an invalid body. Stops after _MOST_CHUNKS chunks: pass the rest later."""
        begin, steps = at, 0
        while at < len(data) and not self.is_done and self.error is None and steps < _MOST_CHUNKS:
            steps += 1
            if self._state == _DATA:
                stop = min(len(data), at + self._left)
                self._keep(data[at:stop])
                self._left -= stop - at
                at = stop
                if self._left == 0:
                    self._state = _DATA_END
                continue
            if self._state == _SIZE and not self._line:
                at, taken = self._take_whole(data, at)
                steps += taken
            stop = data.find(b"\n", at) + 1
            self._line += data[at : stop or len(data)]
            at = stop or len(data)
            if len(self._line) > _MAX_LINE_BYTES:
                self.error = HttpError(400, "line too long in a chunked body")
            elif stop:
                line = bytes(self._line)
                self._line.clear()
                if line.endswith(b"\r\n"):
                    self._take_line(line[:-2])
                else:
                    self.error = HttpError(400, "bare line feed in a chunked body")
        self.wire_bytes += at - begin
        return at

    def _take_whole(self, data: bytes, at: int) -> tuple[int, int]:
        """Consume complete chunks without extensions. Returns the offset of the next chunk, and the
        number of chunks. For chunks of one byte, this is five times as fast as `feed`'s loop."""
        pieces: list[bytes] = []
        begins = _PLAIN_CHUNK.match
        while len(pieces) < _MOST_CHUNKS:
            size = begins(data, at)
            if size is None:
                break
            start = size.end()
            stop = start + int(size[1], 16)
            if stop == start or data[stop : stop + 2] != b"\r\n":
                break  # the next chunk is the last one, incomplete, or malformed
            pieces.append(data[start:stop])
            at = stop + 2
        if pieces:
            self._keep(b"".join(pieces))
        return at, len(pieces)

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
