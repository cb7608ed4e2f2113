"""The answers to GET /metrics, made in slices of the loop's turns, one at a time.

A fleet of 512 ranks has thousands of samples, at a microsecond or so each: nobody else may wait for
all of them. What the text says is the business of `metrics` and of the families it is given.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator

from lean_selector.http1.protocol import PendingReply
from lean_selector.http1.response import encode_response
from lean_selector.metrics import CONTENT_TYPE, Exposition, exposition_text
from lean_selector.services.gate import Answer, Route, error_reply, plain

SLICE_S = 0.001  # as KV events; what a request meets at most is this and one more piece of text
PIECES_PER_LOOK = 16  # at the clock: about 20 us

_log = logging.getLogger("lean_selector.metrics")


class MetricsAnswers:
    """Only from the thread of the loop."""

    def __init__(
        self,
        families: Callable[[], Exposition],
        call_soon: Callable[[Callable[[], None]], object],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`call_soon` is the loop's. `families` is asked at each scrape."""
        self._families = families
        self._call_soon = call_soon
        self._clock = clock
        self._waiting: deque[PendingReply] = deque()  # one per connection at most, the first served
        self._pieces: Iterator[str] = iter(())
        self._text: list[str] = []

    def routes(self) -> tuple[Route, ...]:
        return (("GET", "/metrics", plain(self.answer)),)

    def answer(self) -> Answer:
        pending = PendingReply()
        self._waiting.append(pending)
        if len(self._waiting) == 1:
            self._begin()
        return pending

    def _begin(self) -> None:
        self._pieces, self._text = exposition_text(self._families()), []
        self._go_on()

    def _go_on(self) -> None:
        slice_ends = self._clock() + SLICE_S
        text = self._text
        try:
            for number, piece in enumerate(self._pieces):
                text.append(piece)
                if not number % PIECES_PER_LOOK and self._clock() >= slice_ends:
                    self._call_soon(self._go_on)
                    return
            response = encode_response(200, "".join(text).encode(), CONTENT_TYPE)
        except Exception:  # the gate has let go of the request, so its rule is applied here
            _log.exception("a scrape failed")
            response = error_reply(500, "internal error")
        self._pieces, self._text = iter(()), []
        self._waiting.popleft().resolve(response)
        if self._waiting:
            self._call_soon(self._begin)
