"""The two forms of an answer: JSON, and MessagePack for clients that accept it.

A part that is kept encoded, because it is shown often and changes rarely, is JSON text.
"""

import re
from typing import Final

import msgspec

LONGEST_TRANSCODED = 64 * 1024  # bytes of JSON text: a millisecond of work


# A float that is infinite or no number, which JSON writes as null; or else bytes that look like it.
_MAYBE_INFINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")


class JsonText:
    """JSON that stands in an answer, or is one, as it is."""

    __slots__ = ("text",)

    def __init__(self, text: bytes) -> None:
        self.text = text


class _StaysJson(Exception):
    pass


# The hooks are asked for what msgspec does not know, which is nothing else in an answer.


def _as_it_is(part: JsonText) -> msgspec.Raw:
    return msgspec.Raw(part.text)


def _taken_apart(part: JsonText) -> object:
    if len(part.text) > LONGEST_TRANSCODED:
        raise _StaysJson
    return msgspec.json.decode(part.text)


json_form: Final = msgspec.json.Encoder(enc_hook=_as_it_is).encode
_packed: Final = msgspec.msgpack.Encoder(enc_hook=_taken_apart).encode


def messagepack_form(body: object) -> bytes | None:
    """`body` as MessagePack, saying what its JSON says; None if it stays JSON.

    It does for a long text that is kept as JSON, and for an integer beyond 64 bits, which
    MessagePack does not have.
    """
    try:
        packed = _packed(body)
        if _MAYBE_INFINITE.search(packed):
            packed = _packed(msgspec.json.decode(json_form(body)))
        return packed
    except (_StaysJson, OverflowError):
        return None


def messagepack_of(text: bytes) -> bytes | None:
    """A JSON text as MessagePack; None if it stays JSON."""
    return messagepack_form(JsonText(text))
