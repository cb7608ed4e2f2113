"""An answer that comes line by line, for as long as the other side has something to tell."""

import asyncio
from collections import deque
from typing import Final

from lean_selector.outbound.exchange import Exchange
from lean_selector.outbound.failure import OutboundFailed


class Lines:
    """The lines of one answer, in order. What is not asked for is not read."""

    def __init__(self, exchange: Exchange, silence_s: float, most_bytes: int) -> None:
        """`silence_s` bounds the wait for more, `most_bytes` a line."""
        self._exchange: Final = exchange
        self._silence_s = silence_s
        self._most_bytes = most_bytes
        self._ready: deque[bytes] = deque()
        self._rest = bytearray()
        self._is_over = False

    async def next(self) -> bytes | None:
        """A line without its end, None after the last one. Raises OutboundFailed."""
        while not self._ready:
            if self._is_over:
                return None
            try:
                async with asyncio.timeout(self._silence_s):
                    piece = await self._exchange.piece()
            except TimeoutError:
                raise OutboundFailed(f"nothing came for {self._silence_s:g} s") from None
            self._take(piece)
        return self._ready.popleft()

    def _take(self, piece: bytes | None) -> None:
        if piece is None:
            self._is_over = True
            if self._rest:
                self._ready.append(bytes(self._rest))
            return
        first, newline, others = piece.partition(b"\n")
        self._rest += first
        if len(self._rest) > self._most_bytes:
            raise OutboundFailed(f"a line has more than {self._most_bytes} bytes")
        if newline:
            *whole, last = others.split(b"\n")
            self._ready.append(bytes(self._rest))
            self._ready.extend(whole)
            self._rest = bytearray(last)
