"""Bodies of answers that pass through: where they end, and what of them is framing.

Keeps nothing of a body. Follows RFC 9112 section 6.3: an answer's body is framed by a length, in
chunks, or by the end of the connection. No I/O.
"""

import re
from typing import Final

from lean_selector.http.body import _SIZE, ChunkedBody
from lean_selector.http.head import HttpError, Limits

_SIZE_LINE: Final = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
# What is bounded in answers is the head; a body may be as long as it likes.
_LIMITS: Final = Limits(max_body_bytes=1 << 62, max_discard_bytes=1 << 62)


class SizedPassage:
    """`length` bytes."""

    __slots__ = ("error", "is_done", "left")

    def __init__(self, length: int) -> None:
        self.left = length
        self.is_done = length == 0
        self.error: HttpError | None = None

    def pass_on(self, data: bytes, payload: list[bytes] | None) -> int:
        """Where in `data` the body ends, or its length. What is no framing is added to `payload`,
        if that is wanted."""
        stop = min(len(data), self.left)
        self.left -= stop
        self.is_done = self.left == 0
        if payload is not None and stop:
            payload.append(data if stop == len(data) else data[:stop])
        return stop


class UnboundedPassage:
    """All that comes until the connection ends."""

    __slots__ = ("error", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self.error: HttpError | None = None

    def pass_on(self, data: bytes, payload: list[bytes] | None) -> int:
        if payload is not None:
            payload.append(data)
        return len(data)


class ChunkedPassage(ChunkedBody):
    """Chunks, as they come. Whole ones, such as a token of a stream, are passed by at a glance."""

    __slots__ = ("_payload",)

    def __init__(self) -> None:
        super().__init__(_LIMITS)
        self._payload: list[bytes] | None = None

    def pass_on(self, data: bytes, payload: list[bytes] | None) -> int:
        """As `SizedPassage.pass_on`. Stops where `error` is set."""
        self._payload = payload
        at, size = 0, len(data)
        while at < size and self._state == _SIZE and not self._line:
            line = _SIZE_LINE.match(data, at)
            if line is None:
                break
            begin = line.end()
            stop = begin + int(line[1], 16)
            if stop == begin or data[stop : stop + 2] != b"\r\n":
                break
            if payload is not None:
                payload.append(data[begin:stop])
            at = stop + 2
        if at < size:
            at = self.feed(data, at)
        return at

    def _keep(self, piece: bytes) -> None:
        if self._payload is not None:
            self._payload.append(piece)


Passage = SizedPassage | ChunkedPassage | UnboundedPassage
