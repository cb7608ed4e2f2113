"""The two forms of an answer: JSON, and MessagePack for clients that accept it.

A cached part, which is sent often and changes rarely, is JSON text.
"""

import re
from typing import Final

import msgspec

LONGEST_TRANSCODED = 64 * 1024  # bytes of JSON text: a millisecond of work


# An infinite float or NaN, which JSON writes as null; or bytes that look like one.
_MAYBE_INFINITE = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]")


class JsonText:
    """JSON text that is part of an answer, or all of it, sent as it is."""

    __slots__ = ("text",)

    def __init__(self, text: bytes) -> None:
        self.text = text


class _StaysJson(Exception):
    pass


# The hooks are called for types that msgspec does not know: in an answer, only JsonText.


def _as_it_is(part: JsonText) -> msgspec.Raw:
    return msgspec.Raw(part.text)


def _taken_apart(part: JsonText) -> object:
    if len(part.text) > LONGEST_TRANSCODED:
        raise _StaysJson
    return msgspec.json.decode(part.text)


json_form: Final = msgspec.json.Encoder(enc_hook=_as_it_is).encode
_packed: Final = msgspec.msgpack.Encoder(enc_hook=_taken_apart).encode


def messagepack_form(body: object) -> bytes | None:
    """`body` as MessagePack, equivalent to its JSON; None if it stays JSON, because it has a long
    cached JSON text, or an integer beyond 64 bits, which MessagePack does not have."""
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
