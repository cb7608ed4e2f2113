"""Checks the limits of request bodies (D32), and reads long prompts fast.

Checking 8 MiB takes a fraction of a second: all loops run in C, and create no object per value."""

import re
import secrets
import struct
from collections.abc import Callable
from itertools import islice
from typing import Final, TypeVar

import msgspec
from msgspec import Raw

from lean_selector.core.errors import BadRequest
from lean_selector.wire.scalars import HashList, packed_signed, packed_u32
from lean_selector.wire.selection_bodies import PromptFields

_STRINGS_BYTES = 256 * 1024  # searched for strings at a time: pieces take memory

MOST_COSTLY_NUMBERS = 1000
# The JSON parser needs 10 us for each slow number, and 0.05 us for any other number.
_COSTLY_NUMBER = re.compile(rb"[eE](?<=[0-9].)[+-]?+0*+[1-9][0-9]{2}")


def _without_strings(text: bytes) -> bytes:
    """Return a JSON text with all string literals cut out."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside: list[bytes] = []
    first = 0  # text.split(b'"'): every other piece is outside of strings
    for at in range(0, len(text), _STRINGS_BYTES):
        pieces = text[at : at + _STRINGS_BYTES].split(b'"')
        outside.append(b"".join(pieces[first::2]))
        first = (first + len(pieces) - 1) % 2
    return b"".join(outside)


def has_costly_numbers(text: bytes | bytearray) -> bool:
    """Whether a JSON text has more than MOST_COSTLY_NUMBERS (1000) numbers with an exponent of
    three digits, which are slow to parse. The check is fast for a text without exponents."""
    if not _has_many(text, b"e") and not _has_many(text, b"E"):
        return False
    return _has_many_costly(text) and _has_many_costly(_without_strings(bytes(text)))


def _has_many(text: bytes | bytearray, byte: bytes) -> bool:
    """Whether `byte` occurs at least MOST_COSTLY_NUMBERS / 2 (500) times. Fast for a rare byte."""
    at = -1
    for _ in range(MOST_COSTLY_NUMBERS // 2):
        at = text.find(byte, at + 1)
        if at < 0:
            return False
    return True


def _has_many_costly(text: bytes | bytearray) -> bool:
    found = islice(_COSTLY_NUMBER.finditer(text), MOST_COSTLY_NUMBERS + 1)
    return sum(1 for _ in found) > MOST_COSTLY_NUMBERS


# -- bodies that would block the loop --------------------------------------------------------------
#
# 8 MiB of `[1,2],` take a second to decode. At each of these limits a body takes some 50 ms. A body
# below COSTLY_BODY_BYTES cannot take longer, and is not checked.

COSTLY_BODY_BYTES: Final = 256 * 1024
MOST_STRINGS_AND_LISTS: Final = 1 << 15  # up to 1.5 us each; field names are strings
MOST_VALUES: Final = 3 << 18  # elements of lists of numbers: 0.05 us each
MOST_ESCAPES: Final = 1 << 18  # 0.1 us each
MOST_PACKED: Final = 1 << 21  # elements of a packed list: 0.02 us each
_MOST_FIELDS = 256  # in a MessagePack body; no struct has 30
_LISTS: Final = frozenset({"token_ids", "routing_token_ids", "block_hashes", "sequence_hashes"})
_MM_NAMES: Final = frozenset({"block_mm_infos"})
_read_fields = msgspec.msgpack.Decoder(dict[str, Raw]).decode


def json_excess(body: bytes | bytearray) -> str:
    """Return which limit (escapes, strings, lists, values) a JSON body exceeds; "" if none."""
    if len(body) < COSTLY_BODY_BYTES:
        return ""
    values, lists, strings = body.count(b","), body.count(b"["), body.count(b'"') // 2
    if body.count(b"\\") > MOST_ESCAPES:
        return f"more than {MOST_ESCAPES} escapes"
    if values <= MOST_VALUES and strings + lists <= MOST_STRINGS_AND_LISTS:
        return ""
    text = bytes(body)
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
        strings = text.count(b'"') // 2
    if strings <= MOST_STRINGS_AND_LISTS:  # strings may contain commas and brackets
        text = _without_strings(text)
        values, lists = text.count(b","), text.count(b"[")
    if strings + lists > MOST_STRINGS_AND_LISTS:
        return f"more than {MOST_STRINGS_AND_LISTS} strings and lists"
    return f"more than {MOST_VALUES} values" if values > MOST_VALUES else ""


def messagepack_excess(body: bytes | bytearray, names: frozenset[str]) -> str:
    """Return which limit a MessagePack body exceeds, or "". `names`: fields limited to 256 KiB."""
    if len(body) < COSTLY_BODY_BYTES:
        return ""
    size = {0xDE: 2, 0xDF: 4}.get(body[0], 0)  # bytes that encode the number of fields
    if int.from_bytes(body[1 : 1 + size], "big") > _MOST_FIELDS:
        return f"more than {_MOST_FIELDS} fields"
    try:
        fields = _read_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""  # the decoder will report the error
    for name, value in fields.items():
        raw = memoryview(value)
        if name == "mm_routing_info":
            if excess := messagepack_excess(bytes(raw), _MM_NAMES):
                return excess
        elif name in _LISTS:
            if raw[0] == 0xDD and int.from_bytes(raw[1:5], "big") > MOST_VALUES:
                return f"more than {MOST_VALUES} values in {name}"
        elif name in names and len(raw) > COSTLY_BODY_BYTES:
            return f"more than {COSTLY_BODY_BYTES} bytes of {name}"
    return ""


# -- long bodies with a prompt ---------------------------------------------------------------------
#
# The lists of numbers are cut out of such a body and packed. A placeholder that only this process
# knows replaces each list. So the decoder sees a few hundred bytes instead of long lists, and no
# integer becomes an object. If a body is unusual in any way, the plain decoders handle it, and
# report errors.

T = TypeVar("T")
Body = bytes | bytearray

# Below this size, cutting lists out costs more than it saves: some 50 hashes in two lists.
LONG_PROMPT_BYTES: Final = 2048
# A rest above _SHORT_REST_BYTES may contain too many slow numbers (D32), and is checked. Above
# _MOST_REST_BYTES cutting lists out gains nothing.
_SHORT_REST_BYTES: Final = 4096
_MOST_REST_BYTES: Final = 128 * 1024

# Tokens, or the next list of hashes, are searched in this many bytes of the body.
_HEAD_BYTES: Final = 512

_BLOCK_HASHES: Final = b'"block_hashes":'
_SEQUENCE_HASHES: Final = b'"sequence_hashes":'
_TOKEN_IDS: Final = b'"token_ids":'
_CUT_HASHES: Final = b'"%b"' % secrets.token_hex(16).encode()
_CUT_TOKENS: Final = list(struct.unpack("<4I", secrets.token_bytes(16)))
_CUT_TOKENS_TEXT: Final = msgspec.json.encode(_CUT_TOKENS)


def long_json_reader(body_type: type[T]) -> Callable[[Body], T | None]:
    """Return a fast decoder for JSON bodies of `body_type` with a long prompt. The decoder
    packs the prompt to bytes. It returns None for a body that an ordinary decoder must read."""
    decode = msgspec.json.Decoder(body_type).decode

    def read(body: Body) -> T | None:
        if body.find(_TOKEN_IDS, 0, _HEAD_BYTES) >= 0:
            return _with_tokens(decode, body)
        block_at, block_end = _list_after(body, _BLOCK_HASHES, 0, len(body))
        at, end = _list_after(body, _SEQUENCE_HASHES, block_end, len(body))
        if block_end and not end:
            at, end = _list_after(body, _SEQUENCE_HASHES, 0, block_at)
        if not (block_end or end):
            return _with_tokens(decode, body)
        block: bytes | None = b""
        sequence: bytes | None = b""
        if block_end:
            block = packed_signed(_list_text("block_hashes", body, block_at, block_end))
        if end:
            sequence = packed_signed(_list_text("sequence_hashes", body, at, end))
        if block is None or sequence is None:
            return None
        spans = sorted(((block_at, block_end), (at, end)))
        fields = _decoded(decode, _without(body, spans))
        return _with_hashes(fields, block if block_end else None, sequence if end else None)

    return read


def _list_after(body: Body, key: bytes, start: int, end: int) -> tuple[int, int]:
    """Return the span of the list that follows `key` in body[start:end], or (0, 0) if none does."""
    at = body.find(key, start, end) + len(key)
    if at < len(key):
        return 0, 0
    if body.startswith(b" ", at):  # unlike an index, this works at the end of a truncated body
        at += 1
    stop = body.find(b"]", at, end) + 1
    return (at, stop) if stop and body.startswith(b"[", at) else (0, 0)


def _list_text(name: str, body: Body, at: int, end: int) -> bytes:
    """Return body[at:end], the text of list `name`. Raises BadRequest above MOST_PACKED values."""
    if end - at > 2 * MOST_PACKED and body.count(b",", at, end) >= MOST_PACKED:
        raise BadRequest(f"{name} has more than {MOST_PACKED} values")
    return bytes(body[at:end])


def _without(body: Body, spans: list[tuple[int, int]]) -> bytes:
    """Return the body with a placeholder for each list in `spans`. Empty spans are skipped."""
    pieces: list[Body] = []
    done = 0
    for at, end in spans:
        if end:
            pieces += (body[done:at], _CUT_HASHES)
            done = end
    pieces.append(body[done:])
    return b"".join(pieces)


def _decoded(decode: Callable[[bytes], T], rest: bytes) -> T | None:
    """Decode a body from which long lists were cut out. Return None if it is invalid, too long, not
    ASCII, or slow to parse (D32)."""
    if len(rest) > _MOST_REST_BYTES or not rest.isascii():
        return None
    if len(rest) > _SHORT_REST_BYTES and has_costly_numbers(rest):
        return None
    try:
        return decode(rest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _with_hashes(fields: T | None, block: bytes | None, sequence: bytes | None) -> T | None:
    """Put the packed lists `block` and `sequence` where the decoded body `fields` has placeholders.
    Return None if a placeholder is missing, for example because the body repeats a key."""
    if not isinstance(fields, PromptFields):
        return None
    if block is not None:
        if not _is_cut(fields.block_hashes):
            return None
        fields.block_hashes = block
    if sequence is not None:
        if not _is_cut(fields.sequence_hashes):
            return None
        fields.sequence_hashes = sequence
    return fields


def _is_cut(hashes: HashList) -> bool:
    return isinstance(hashes, Raw) and bytes(hashes) == _CUT_HASHES


def _with_tokens(decode: Callable[[bytes], T], body: Body) -> T | None:
    """Decode a JSON body whose prompt is a list of tokens; pack the tokens to 4 bytes each."""
    at, end = _list_after(body, _TOKEN_IDS, 0, len(body))
    tokens = packed_u32(_list_text("token_ids", body, at, end)) if end else None
    if tokens is None:
        return None
    fields = _decoded(decode, b"".join((body[:at], _CUT_TOKENS_TEXT, body[end:])))
    if not isinstance(fields, PromptFields) or fields.token_ids != _CUT_TOKENS:
        return None
    fields.token_ids = tokens
    return fields
