"""Long bodies with a prompt, read quickly: their lists of numbers are cut out and come packed.

So the decoder walks over a few hundred bytes, not over lists only to find where they end, and no
integer becomes an object. What stands in a list's place is known to this process alone, so that
nothing else can be taken for it. A body that is odd in any way is nobody's here: the plain decoders
read it, and say what is wrong.
"""

import secrets
import struct
import sys
from array import array
from collections.abc import Callable
from typing import Final, TypeVar

import msgspec
from msgspec import Raw

from lean_selector.wire.body_text import has_costly_numbers
from lean_selector.wire.hash_lists import HashList
from lean_selector.wire.integer_text import packed_signed, packed_u32
from lean_selector.wire.prompt_fields import PromptFields

T = TypeVar("T")
Body = bytes | bytearray

# Below, cutting costs more than it saves: some 50 hashes in two lists.
LONG_PROMPT_BYTES: Final = 2048
# What is left of a body is looked at for numbers that are slow to read (D32) when it may hold so
# many; of more than this nothing is won by cutting.
_SHORT_REST_BYTES: Final = 4096
_MOST_REST_BYTES: Final = 128 * 1024

# Where a body names its tokens, or its next list of hashes; further on they are not looked for.
_HEAD_BYTES: Final = 512

_BLOCK_HASHES: Final = b'"block_hashes":'
_SEQUENCE_HASHES: Final = b'"sequence_hashes":'
_TOKEN_IDS: Final = b'"token_ids":'
_CUT_HASHES: Final = b'"%b"' % secrets.token_hex(16).encode()
_CUT_TOKENS: Final = list(struct.unpack("<4I", secrets.token_bytes(16)))
_CUT_TOKENS_TEXT: Final = msgspec.json.encode(_CUT_TOKENS)

_BINARY_BLOCK_HASHES: Final = b"\xacblock_hashes"
_BINARY_SEQUENCE_HASHES: Final = b"\xafsequence_hashes"
_CUT_BYTES: Final = secrets.token_bytes(16)
_CUT_BINARY: Final = b"\xc4\x10" + _CUT_BYTES
_SIZES: Final = {0xDC: 2, 0xDD: 4}  # bytes that tell the length of an array, by its tag
_WIDE: Final = b"\xcf\xd3"  # the tags of integers of 8 bytes, which hashes are but for a few


def long_json_reader(body_type: type[T]) -> Callable[[Body], T | None]:
    """What decodes a long JSON body of PromptFields, its lists packed; None: nothing is known of
    it."""
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
        block = packed_signed(bytes(body[block_at:block_end])) if block_end else b""
        sequence = packed_signed(bytes(body[at:end])) if end else b""
        if block is None or sequence is None:
            return None
        spans = sorted(((block_at, block_end), (at, end)))
        fields = _decoded_text(decode, _without(body, spans, _CUT_HASHES))
        return _with_hashes(fields, block if block_end else None, sequence if end else None)

    return read


def _list_after(body: Body, key: bytes, start: int, end: int) -> tuple[int, int]:
    """Where a flat list after a key lies, between `start` and `end`; (0, 0) when none does."""
    at = body.find(key, start, end) + len(key)
    if at < len(key):
        return 0, 0
    if body.startswith(b" ", at):  # unlike an index, right at the end of a cut body too
        at += 1
    stop = body.find(b"]", at, end) + 1
    return (at, stop) if stop and body.startswith(b"[", at) else (0, 0)


def _without(body: Body, spans: list[tuple[int, int]], cut: bytes) -> bytes:
    """A body with something else in place of its hash lists; an empty span is none."""
    pieces: list[Body] = []
    done = 0
    for at, end in spans:
        if end:
            pieces += (body[done:at], cut)
            done = end
    pieces.append(body[done:])
    return b"".join(pieces)


def _decoded_text(decode: Callable[[bytes], T], rest: bytes) -> T | None:
    """The same of JSON; None, too, when it has more than ASCII, or much that is slow to read."""
    if not rest.isascii():
        return None
    if _SHORT_REST_BYTES < len(rest) <= _MOST_REST_BYTES and has_costly_numbers(rest):
        return None
    return _decoded(decode, rest)


def _decoded(decode: Callable[[bytes], T], rest: bytes) -> T | None:
    """What is left of a body; None when it is long, or wrong."""
    if len(rest) > _MOST_REST_BYTES:
        return None
    try:
        return decode(rest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _with_hashes(fields: T | None, block: bytes | None, sequence: bytes | None) -> T | None:
    """The fields with the lists that were cut out; None when something else stands there.

    Then a list was part of another field, or its key stands there again.
    """
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
    if isinstance(hashes, Raw):
        return bytes(hashes) == _CUT_HASHES
    return hashes == _CUT_BYTES


def _with_tokens(decode: Callable[[bytes], T], body: Body) -> T | None:
    """The same for a body that states its prompt by tokens, of 4 bytes each."""
    at, end = _list_after(body, _TOKEN_IDS, 0, len(body))
    tokens = packed_u32(bytes(body[at:end])) if end else None
    if tokens is None:
        return None
    fields = _decoded_text(decode, b"".join((body[:at], _CUT_TOKENS_TEXT, body[end:])))
    if not isinstance(fields, PromptFields) or fields.token_ids != _CUT_TOKENS:
        return None
    fields.token_ids = tokens
    return fields


# -- MessagePack ----------------------------------------------------------------------------------


def long_binary_reader(body_type: type[T]) -> Callable[[Body], T | None]:
    """The same for MessagePack with lists that are arrays of integers of 8 bytes."""
    decode = msgspec.msgpack.Decoder(body_type).decode

    def read(body: Body) -> T | None:
        block_at, block_end = _array_after(body, _BINARY_BLOCK_HASHES, 0)
        at, end = _array_after(body, _BINARY_SEQUENCE_HASHES, block_end)
        if not end:  # not both, or in another order
            return None
        block = array_packed(body, block_at, block_end) if block_end else b""
        sequence = array_packed(body, at, end)
        if block is None or sequence is None:
            return None
        spans = [(block_at, block_end), (at, end)]
        fields = _decoded(decode, _without(body, spans, _CUT_BINARY))
        return _with_hashes(fields, block if block_end else None, sequence)

    return read


def _array_after(body: Body, key: bytes, start: int) -> tuple[int, int]:
    """Where an array after a key would lie, were all its integers of 8 bytes; (0, 0): nowhere."""
    at = body.find(key, start, start + _HEAD_BYTES) + len(key)
    if at < len(key) or at >= len(body):
        return 0, 0
    size = _SIZES.get(body[at], 0)
    first = at + 1 + size
    end = first + 9 * int.from_bytes(body[at + 1 : first], "big")
    return (at, end) if size and end <= len(body) else (0, 0)


def array_packed(body: Body, at: int, end: int) -> bytes | None:
    """An array of integers of 8 bytes each, packed; None if it has others."""
    elements = bytearray(body[at + 1 + _SIZES[body[at]] : end])
    if elements[::9].translate(None, _WIDE):
        return None
    del elements[::9]
    packed = array("Q", bytes(elements))
    if sys.byteorder == "little":  # pragma: no branch: as the machines are that tests run on
        packed.byteswap()
    return packed.tobytes()
