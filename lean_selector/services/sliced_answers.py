"""Answers that may be large, made in slices of the loop's turns, so that nobody else waits long.

One is made at a time, because each may be as large as the state that it tells of; whoever asks
meanwhile shares the next. One that nobody waits for any more is dropped.
"""

import logging
import time
from collections.abc import Callable, Iterator

from lean_selector.http.response import JSON, GrowingResponse, Response, encode_response
from lean_selector.services.replies import INTERNAL_ERROR, Answer, LaterReply

SLICE_S = 0.001  # as KV events: a request meets at most this pause, and what a part takes

CallSoon = Callable[[Callable[[], None]], object]

_log = logging.getLogger("lean_selector.http")


class SlicedAnswers:
    """Only from the thread of the loop."""

    def __init__(
        self,
        name: str,
        parts: Callable[[], Iterator[bytes]],
        call_soon: CallSoon,
        content_type: bytes = JSON,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`parts` begins a body; `name` is for the log; `call_soon` is the loop's."""
        self._name = name
        self._new_parts = parts
        self._call_soon = call_soon
        self._content_type = content_type
        self._clock = clock
        self._waiting: set[LaterReply] = set()  # for one that has not begun
        self._served: set[LaterReply] = set()  # for the one that is being made
        self._parts: Iterator[bytes] | None = None
        self._made: GrowingResponse | None = None  # set together with _parts

    def answer(self, *, at_once: bool) -> Answer:
        """`at_once`: the body is known to be small."""
        if at_once:
            return encode_response(200, b"".join(self._new_parts()), self._content_type)
        pending = LaterReply(is_being_made=True)
        pending.on_disconnect = lambda: self._hung_up(pending)
        self._waiting.add(pending)
        if self._parts is None and len(self._waiting) == 1:
            self._call_soon(self._begin)
        return pending

    def _hung_up(self, pending: LaterReply) -> None:
        self._waiting.discard(pending)
        self._served.discard(pending)

    def _begin(self) -> None:
        if self._parts is None and self._waiting:
            self._served, self._waiting = self._waiting, set()
            self._made = GrowingResponse(self._content_type)
            self._parts = self._new_parts()
            self._go_on()

    def _go_on(self) -> None:
        """Encode for one slice, then let the loop look at its other sockets."""
        assert self._parts is not None
        assert self._made is not None
        slice_ends = self._clock() + SLICE_S
        try:
            for part in self._parts if self._served else ():
                self._made.add(part)
                if self._clock() >= slice_ends:
                    self._call_soon(self._go_on)
                    return
            response: Response | None = self._made.finish()
        except Exception:  # the gate has let go of the request, so its rule is applied here
            _log.exception("%s failed", self._name)
            response = None
        self._made = self._parts = None
        served, self._served = self._served, set()
        for pending in served:
            if response is None:
                pending.answer(500, INTERNAL_ERROR)
            else:
                pending.finish(response)
        if self._waiting:
            self._call_soon(self._begin)
