"""Answers as complete responses, in the form that their request accepts.

JSON, or MessagePack where `accept` names it: chosen before anything is encoded. Only what is made
as JSON text before it is known who asks for it is transcoded, and only while it is short: dumps and
snapshots, which are made in slices, once for all who wait for them.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from lean_selector.core.errors import SelectorError
from lean_selector.http.head import Request
from lean_selector.http.response import (
    JSON,
    PendingReply,
    Response,
    date_header,
    encode_response,
    status_of,
)
from lean_selector.services.media_types import MSGPACK, names_msgpack
from lean_selector.wire.answer_forms import (
    LONGEST_TRANSCODED,
    json_form,
    messagepack_form,
    messagepack_of,
)
from lean_selector.wire.selection import ErrorBody

INTERNAL_ERROR = ErrorBody("internal error")
_JSON_LINE = b"\r\ncontent-type: " + JSON + b"\r\n"
_LONGEST_WARNING: Final = 2000  # characters; proxies refuse headers of more than some 8 KiB

Found = TypeVar("Found")

_log = logging.getLogger("lean_selector.http")


class Reply:
    """What a handler returns whose status depends on what it found, or that warns of something.

    `warnings` go into the header `x-warning`, and change nothing else.
    """

    __slots__ = ("body", "status", "warnings")

    def __init__(self, status: int, body: object, warnings: Sequence[str] = ()) -> None:
        self.status = status
        self.body = body
        self.warnings = warnings


class Standing:
    """A body that is always the same: encoded once, and framed once for each date and status."""

    __slots__ = ("_date", "_responses", "_text", "body")

    def __init__(self, body: object) -> None:
        self.body = body
        self._text = json_form(body)
        self._date = b""  # the line that the responses have
        self._responses: dict[int, bytes] = {}  # by status; a handler has one or two

    def response(self, status: int) -> bytes:
        """The whole answer, as JSON."""
        date = date_header.line
        if date is not self._date:
            self._date = date
            self._responses.clear()
        response = self._responses.get(status)
        if response is None:
            response = self._responses[status] = encode_response(status, self._text)
        return response


class LaterReply(PendingReply):
    """What a handler returns that answers later, once, in the form that its request accepts.

    A caller in this process sets `take`, and is told the status and the body instead, or the error.
    """

    __slots__ = ("is_packed", "take")

    def __init__(
        self, on_disconnect: Callable[[], None] | None = None, *, is_being_made: bool = False
    ) -> None:
        super().__init__(on_disconnect, is_being_made=is_being_made)
        self.is_packed = False  # the request accepts MessagePack
        self.take: Callable[[int, object], None] | None = None

    def answer_with(self, shape: Callable[[Found], object], found: Found) -> None:
        """200 and what `shape` makes of `found`. What it raises is answered here, as the gate
        would: whoever let a request go that waited goes on with the others, and with its turn."""
        try:
            body = shape(found)
        except Exception as error:
            self.refuse(error)
        else:
            self.answer(200, body)

    def refuse(self, error: Exception) -> None:
        """Tells why there is no answer; a caller in this process gets a SelectorError itself for
        the body. Any other is ours, and is logged."""
        if not isinstance(error, SelectorError):
            _log.error("a request that waited could not be answered", exc_info=error)
            self.answer(500, INTERNAL_ERROR)
        else:
            self.answer(error.status, ErrorBody(error.message) if self.take is None else error)

    def answer(self, status: int, body: object) -> None:
        if self.take is not None:
            try:
                self.take(status, body)
            except Exception:  # it is the taker's, as above
                _log.exception("an answer could not be taken")
            self.resolve(b"")
        elif self.is_packed:
            self.resolve(_packed(status, body))
        else:
            self.resolve(encode_response(status, json_form(body), JSON))

    def finish(self, response: Response) -> None:
        """A response that is made already, and perhaps shared with others."""
        packed = _repacked(response) if self.is_packed else None
        self.resolve(response if packed is None else packed)


Answer = bytes | LaterReply


def sent(request: Request, status: int, result: object) -> Answer:
    """What a handler returned, as the answer to its request: a body, or one of the above.

    Bytes are a finished response.
    """
    accept = request.headers.accept
    packs = accept is not None and names_msgpack(accept)
    # One by one: compiled, that is a comparison of types each.
    if isinstance(result, bytes) or isinstance(result, LaterReply):  # noqa: SIM101
        return _in_its_form(request, result)
    if isinstance(result, Reply):
        if result.warnings:
            return reply(request, result.status, result.body, warning_line(result.warnings))
        status, result = result.status, result.body
    if isinstance(result, Standing):
        if not packs:
            return result.response(status)
        result = result.body
    if packs:
        return _packed(status, result)
    return encode_response(status, json_form(result), JSON)


def reply(request: Request, status: int, body: object, extra: bytes = b"") -> bytes:
    """A finished answer; `extra` as in `encode_response`."""
    accept = request.headers.accept
    if accept is not None and names_msgpack(accept):
        return _packed(status, body, extra)
    return encode_response(status, json_form(body), JSON, extra)


def warning_line(warnings: Sequence[str]) -> bytes:
    """The header line `x-warning`, for the `extra` of `reply`: joined by "; ", in printable ASCII.

    What else is in them stands as `\\u00e9`, and what is too long ends in "...".
    """
    text = "; ".join(warnings)
    if len(text) > _LONGEST_WARNING:
        text = text[:_LONGEST_WARNING] + "..."
    return b"x-warning: %b\r\n" % printable(text).encode("ascii")


def printable(text: str) -> str:
    """A text as a header may hold it: what is not printable ASCII stands as `\\u00e9`."""
    return "".join(letter if " " <= letter <= "~" else f"\\u{ord(letter):04x}" for letter in text)


def error_reply(request: Request, status: int, text: str, extra: bytes = b"") -> bytes:
    return reply(request, status, ErrorBody(text), extra)


def _in_its_form(request: Request, answer: Answer) -> Answer:
    if names_msgpack(request.headers.accept):
        if isinstance(answer, bytes):
            packed = _repacked(answer)
            return answer if packed is None else packed
        answer.is_packed = True
    return answer


def _packed(status: int, body: object, extra: bytes = b"") -> bytes:
    packed = messagepack_form(body)
    if packed is None:
        return encode_response(status, json_form(body), JSON, extra)
    return encode_response(status, packed, MSGPACK, extra)


def _repacked(response: Response) -> bytes | None:
    """A finished response as MessagePack; None if it stays: it is not JSON, or long."""
    end = response.index(b"\r\n\r\n") + 4
    if len(response) - end > LONGEST_TRANSCODED or _JSON_LINE not in response[:end]:
        return None
    packed = messagepack_of(bytes(response[end:]))
    if packed is None:
        return None
    return encode_response(int(status_of(response)), packed, MSGPACK)
