"""Answers as complete responses, in the form that their request accepts.

JSON, or MessagePack where `accept` names it: chosen before anything is encoded. Only what is made
as JSON text before it is known who asks for it is transcoded, and only while it is short: dumps and
snapshots, which are made in slices, once for all who wait for them.
"""

from collections.abc import Callable
from typing import Final

from lean_selector.http1.protocol import PendingReply
from lean_selector.http1.reader import Request
from lean_selector.http1.response import JSON, encode_response, status_of
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


class Reply:
    """What a handler returns whose status depends on what it found."""

    __slots__ = ("body", "status")

    def __init__(self, status: int, body: object) -> None:
        self.status = status
        self.body = body


class LaterReply(PendingReply):
    """What a handler returns that answers later, once, in the form that its request accepts."""

    __slots__ = ("is_packed",)

    def __init__(
        self, on_disconnect: Callable[[], None] | None = None, *, is_being_made: bool = False
    ) -> None:
        super().__init__(on_disconnect, is_being_made=is_being_made)
        self.is_packed = False  # the request accepts MessagePack

    def answer(self, status: int, body: object) -> None:
        if self.is_packed:
            self.resolve(_packed(status, body))
        else:
            self.resolve(encode_response(status, json_form(body), JSON))

    def finish(self, response: bytes) -> None:
        """A response that is made already, and perhaps shared with others."""
        self.resolve(_repacked(response) if self.is_packed else response)


Answer = bytes | LaterReply
_NO_BODIES: Final = (bytes, LaterReply, Reply)


def sent(request: Request, status: int, result: object) -> Answer:
    """What a handler returned, as the answer to its request: a body, or one of the above.

    Bytes are a finished response.
    """
    if isinstance(result, _NO_BODIES):
        if not isinstance(result, Reply):
            return _in_its_form(request, result)
        status, result = result.status, result.body
    # `reply`, spelled out: it is the way of every select, and a call is 1 % of one
    accept = request.headers.accept
    if accept is not None and names_msgpack(accept):
        return _packed(status, result)
    return encode_response(status, json_form(result), JSON)


def reply(request: Request, status: int, body: object, extra: bytes = b"") -> bytes:
    """A finished answer; `extra` as in `encode_response`."""
    accept = request.headers.accept
    if accept is not None and names_msgpack(accept):
        return _packed(status, body, extra)
    return encode_response(status, json_form(body), JSON, extra)


def error_reply(request: Request, status: int, text: str, extra: bytes = b"") -> bytes:
    return reply(request, status, ErrorBody(text), extra)


def _in_its_form(request: Request, answer: Answer) -> Answer:
    if names_msgpack(request.headers.accept):
        if isinstance(answer, bytes):
            return _repacked(answer)
        answer.is_packed = True
    return answer


def _packed(status: int, body: object, extra: bytes = b"") -> bytes:
    packed = messagepack_form(body)
    if packed is None:
        return encode_response(status, json_form(body), JSON, extra)
    return encode_response(status, packed, MSGPACK, extra)


def _repacked(response: bytes) -> bytes:
    """A finished response as MessagePack, unless it is not JSON, or long: its content-type says."""
    end = response.index(b"\r\n\r\n") + 4
    if len(response) - end > LONGEST_TRANSCODED or _JSON_LINE not in response[:end]:
        return response
    packed = messagepack_of(response[end:])
    if packed is None:
        return response
    return encode_response(int(status_of(response)), packed, MSGPACK)
