"""JSON lists of integers, handed out packed: read by simdjson, or by msgspec where there is none.

Knows what is such a list, and no more. Of what is none it says nothing but that: whoever is told so
has msgspec say what is wrong, so that answers and errors do not depend on what is installed.
"""

import functools
import struct
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, Final, Literal

import msgspec

# A parser keeps some twelve times as many bytes as its longest text had: longer ones are cut at
# commas.
KEPT_BYTES: Final = 128 * 1024
_BLANKS: Final = b" \t\r\n"

_decode_integers = msgspec.json.Decoder(list[int]).decode


def _simdjson_parse() -> Callable[[bytes], Any] | None:
    """What reads a JSON text; None where there is no simdjson."""
    try:
        parse: Callable[[bytes], Any] = import_module("simdjson").Parser().parse
    except ImportError:
        return None
    return parse if sys.byteorder == "little" else None  # it packs in the machine's order


_parse = _simdjson_parse()
HAS_SIMDJSON: Final = _parse is not None


def packed_signed(text: bytes) -> bytes | None:
    """A JSON list of integers from -(2**63) to 2**63 - 1, 8 bytes little-endian each; None for any
    other text."""
    if _parse is not None:
        return packed_with(_parse, text, "i")
    return packed_by_msgspec(text, "q")


def packed_u32(text: bytes) -> bytes | None:
    """A JSON list of integers from 0 to 2**32 - 1, 4 bytes little-endian each; None likewise."""
    if _parse is None:
        return packed_by_msgspec(text, "I")
    wide = packed_with(_parse, text, "u")
    return None if wide is None else _halved(wide)


@functools.lru_cache(maxsize=8192)  # by length; 8 192 blocks of 16 are 131 072 tokens
def packer(count: int, kind: str = "q") -> Callable[..., bytes]:
    """Packs so many integers of a kind that `struct` knows, little-endian."""
    return struct.Struct(f"<{count}{kind}").pack


def packed_by_msgspec(text: bytes, kind: Literal["q", "Q", "I"]) -> bytes | None:
    """The same of any kind that `struct` knows."""
    try:
        integers = _decode_integers(text)
        return packer(len(integers), kind)(*integers)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, struct.error):
        return None


def packed_with(
    parse: Callable[[bytes], Any], text: bytes, of_type: Literal["i", "u"]
) -> bytes | None:
    """8 bytes each, signed or not, as a parser of simdjson's reads them."""
    if text[:1] != b"[":  # simdjson takes a byte order mark before it
        text = text.lstrip(_BLANKS)
    if text[:1] != b"[" or text.rfind(b"[") > 0:  # and flattens lists in a list
        return None
    try:
        if len(text) <= KEPT_BYTES:
            return bytes(parse(text).as_buffer(of_type=of_type))
        return _packed_pieces(parse, text, of_type)
    except Exception:  # of many kinds, none of them documented
        return None


def _packed_pieces(
    parse: Callable[[bytes], Any], text: bytes, of_type: Literal["i", "u"]
) -> bytes | None:
    """The same in pieces: what is no list of integers as a whole has a piece that is none."""
    end = text.rfind(b"]")
    if end < 0 or text[end + 1 :].strip(_BLANKS):
        return None
    packed: list[bytes] = []
    at = 1
    while at <= end:
        comma = text.find(b",", at + KEPT_BYTES, end)
        stop = end if comma < 0 else comma
        if stop - at > 2 * KEPT_BYTES:  # blanks between two commas, or what is no integer
            return packed_by_msgspec(text, "q" if of_type == "i" else "Q")
        piece = bytes(parse(b"[%b]" % text[at:stop]).as_buffer(of_type=of_type))
        if not piece:  # nothing before or after a comma
            return None
        packed.append(piece)
        at = stop + 1
    return b"".join(packed)


def _halved(wide: bytes) -> bytes | None:
    """Integers of 8 bytes in 4 bytes each; None when one needs more."""
    count = len(wide) >> 3
    narrow = bytearray(count << 2)
    for byte in range(4):
        if wide[byte + 4 :: 8].count(0) != count:
            return None
        narrow[byte::4] = wide[byte::8]
    return bytes(narrow)
