"""Encodes complete responses, mostly JSON. Large answers, such as dumps, are made in slices. If
requests arrive while a dump is being made, one further dump is made afterwards for all of them."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from lean_selector.core.errors import SelectorError
from lean_selector.core.selection.queue import Waiting
from lean_selector.core.selection.shapes import Placement
from lean_selector.http.response import (
    JSON,
    GrowingResponse,
    PendingReply,
    Response,
    encode_response,
)
from lean_selector.wire.scalars import json_escape, json_form
from lean_selector.wire.selection_bodies import ErrorBody


def is_json(content_type: bytes | None) -> bool:
    """Whether the media type is `application/json` or `application/*+json`, case-insensitively."""
    if not content_type:
        return False
    media = content_type.partition(b";")[0].strip().lower()
    return media == JSON or (media.startswith(b"application/") and media.endswith(b"+json"))


# -- answers ---------------------------------------------------------------------------------------

INTERNAL_ERROR = ErrorBody("internal error")
_LONGEST_WARNING: Final = 2000  # characters; proxies refuse headers above some 8 KiB

_log = logging.getLogger("lean_selector.http")


class Reply:
    """The result of a handler that sets the status of the answer, or adds warnings. Warnings are
    sent in the header `x-warning`."""

    def __init__(self, status: int, body: object, warnings: Sequence[str] = ()) -> None:
        self.status = status
        self.body = body
        self.warnings = warnings


class Queued:
    """The result of a handler whose request waits in the queue of the selector."""

    def __init__(
        self,
        waiting: Waiting,
        shape: Callable[[Placement], object],
        clock: Callable[[], float],
        held_bytes: int,
    ) -> None:
        """`shape` makes the body of the answer; `held_bytes` is what the request's data take."""
        self._waiting = waiting
        self._shape = shape
        self._clock = clock
        self.held_bytes = held_bytes

    def on_answer(self, tell: Callable[[object], None]) -> None:
        """Sets the function that gets the body, or the exception, when the answer is there."""

        def answered(placed: Placement | Exception) -> None:
            body: object = placed
            if isinstance(placed, Placement):
                try:
                    body = self._shape(placed)
                except Exception as error:
                    body = error
            tell(body)

        self._waiting.on_answer = answered

    def cancel(self) -> None:
        """Takes the request out of the queue, or frees what was reserved for it just now."""
        self._waiting.cancel(self._clock())

    def wait_with(self, pending: "LaterReply") -> None:
        """Makes the request wait as long as the client of `pending` does."""
        pending.on_disconnect = self.cancel
        pending.held_bytes = self.held_bytes
        self._waiting.has_client = pending.has_client

    def reply(self) -> "LaterReply":
        """Return the answer over HTTP."""
        pending = LaterReply()
        self.wait_with(pending)
        self.on_answer(pending.answer_with)
        return pending


class LaterReply(PendingReply):
    """The result of a handler that cannot answer at once."""

    def __init__(self, *, is_being_made: bool = False) -> None:
        super().__init__(is_being_made=is_being_made)
        self.fault: Exception | None = None  # why no worker was chosen, for the meters

    def answer_with(self, body: object) -> None:
        """Answers 200 with this body, or with the status and message of a SelectorError. Any other
        exception is logged and answered with status 500."""
        if isinstance(body, SelectorError):
            self.answer(body.status, ErrorBody(body.message))
        elif isinstance(body, Exception):
            _log.error("a request that waited could not be answered", exc_info=body)
            self.answer(500, INTERNAL_ERROR)
        else:
            self.answer(200, body)

    def answer(self, status: int, body: object) -> None:
        self.resolve(reply(status, body))


Answer = bytes | LaterReply


def sent(status: int, result: object) -> Answer:
    """Return the response for a handler's result: a body, a Reply, a Queued, a LaterReply, or
    bytes, which are a complete response already."""
    # Separate checks: mypyc compiles each one to a comparison of types.
    if isinstance(result, bytes) or isinstance(result, LaterReply):  # noqa: SIM101
        return result
    if isinstance(result, Reply):
        line = warning_line(result.warnings) if result.warnings else b""
        return reply(result.status, result.body, line)
    if isinstance(result, Queued):
        return result.reply()
    return encode_response(status, json_form(result), JSON)


def reply(status: int, body: object, extra: bytes = b"") -> bytes:
    """Encodes a complete response with a JSON body; `extra` has further header lines."""
    return encode_response(status, json_form(body), JSON, extra)


def warning_line(warnings: Sequence[str]) -> bytes:
    """Return the header line `x-warning`: the warnings joined by "; ". Characters outside
    printable ASCII are escaped, and a text that is too long ends with "..."."""
    pieces: list[str] = []
    room = _LONGEST_WARNING
    for letter in "; ".join(warnings):
        piece = printable(letter)
        room -= len(piece)
        if room < 0:
            pieces.append("...")
            break
        pieces.append(piece)
    return b"x-warning: %b\r\n" % "".join(pieces).encode("ascii")


def printable(text: str) -> str:
    """Escapes characters outside printable ASCII as JSON does, for use in a header."""
    return "".join(letter if " " <= letter <= "~" else json_escape(letter) for letter in text)


# -- answers that may be large ---------------------------------------------------------------------

SLICE_S = 0.001  # as for KV events: other requests wait at most this long, plus one part

CallSoon = Callable[[Callable[[], None]], object]


@dataclass(eq=False)
class SlicedAnswers:
    """Makes a large answer in slices, once for all waiting requests. Only for the loop's thread.

    `name` names the answer in the log. `parts` is called for each answer, and returns an iterator
    over the parts of its body. `call_soon` is the event loop's method."""

    name: str
    new_parts: Callable[[], Iterator[bytes]]
    call_soon: CallSoon
    content_type: bytes = JSON
    clock: Callable[[], float] = time.perf_counter

    def __post_init__(self) -> None:
        self._waiting: set[LaterReply] = set()  # requests for the next answer
        self._served: set[LaterReply] = set()  # requests for the current answer
        self._parts: Iterator[bytes] | None = None
        self._made: GrowingResponse | None = None  # set together with _parts

    def answer(self, *, at_once: bool) -> Answer:
        """Return a complete answer if `at_once` (for small bodies), and otherwise a LaterReply."""
        if at_once:
            return encode_response(200, b"".join(self.new_parts()), self.content_type)
        pending = LaterReply(is_being_made=True)
        pending.on_disconnect = lambda: self._hung_up(pending)
        self._waiting.add(pending)
        if self._parts is None and len(self._waiting) == 1:
            self.call_soon(self._begin)
        return pending

    def _hung_up(self, pending: LaterReply) -> None:
        self._waiting.discard(pending)
        self._served.discard(pending)

    def _begin(self) -> None:
        if self._parts is None and self._waiting:
            self._served, self._waiting = self._waiting, set()
            self._made = GrowingResponse(self.content_type)
            self._parts = self.new_parts()
            self._encode_parts()

    def _encode_parts(self) -> None:
        """Encodes parts for SLICE_S seconds. Sends the answer after the last part."""
        assert self._parts is not None
        assert self._made is not None
        slice_ends = self.clock() + SLICE_S
        try:
            for part in self._parts if self._served else ():
                self._made.add(part)
                if self.clock() >= slice_ends:
                    self.call_soon(self._encode_parts)
                    return
            response: Response | None = self._made.finish()
        except Exception:  # the gate is done with the request, so its rule is applied here
            _log.exception("%s failed", self.name)
            response = None
        self._made = self._parts = None
        served, self._served = self._served, set()
        for pending in served:
            if response is None:
                pending.answer(500, INTERNAL_ERROR)
            else:
                pending.resolve(response)
        if self._waiting:
            self.call_soon(self._begin)
