"""Scalar types of the wire, and the hash lists that fill most of it.

JSON carries hashes as signed 64-bit integers; inside, a list of hashes is `bytes`, 8 per block,
little-endian (the same bit pattern signed or unsigned). Conversion happens here and nowhere else.
"""

import functools
import struct
from collections.abc import Callable, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from lean_selector.core.limits import U64_MAX

_LOOKED_AT_TOGETHER = 4096  # hashes, when one of a long list is at fault
# msgspec bounds an integer by at most 2**63 - 1: what may be larger is checked by `check_u64`.
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
NonNegative = Annotated[int, Meta(ge=0)]


def check_u64(name: str, value: int) -> None:
    """Raises msgspec.ValidationError beyond 2**64 - 1."""
    if value > U64_MAX:
        raise msgspec.ValidationError(f"Expected `int` <= {U64_MAX} - at `$.{name}`")


@functools.lru_cache(
    maxsize=8192
)  # one Struct per list length; 8 192 blocks of 16 are 131 072 tokens
def _packer(count: int) -> Callable[..., bytes]:
    return struct.Struct(f"<{count}q").pack


def unpack_signed(hashes: bytes) -> tuple[int, ...]:
    """Hashes of 8 bytes each as the signed integers that JSON carries."""
    return struct.unpack(f"<{len(hashes) // 8}q", hashes)


_decode_hashes = msgspec.json.Decoder(list[int]).decode


def hashes_from_json(field: str, raw: msgspec.Raw) -> bytes:
    """A JSON list of signed 64-bit integers, packed.

    Raises msgspec.ValidationError naming `field` for anything else: then whoever knows the whole
    body tells text that is no JSON from a wrong shape.
    """
    try:
        hashes = _decode_hashes(raw)
    except msgspec.DecodeError as error:
        text, path, rest = str(error).partition(" - at `$")
        raise msgspec.ValidationError(f"{text} - at `$.{field}{rest if path else '`'}") from None
    return hashes_from_signed(field, hashes)


def hashes_from_signed(field: str, hashes: list[int]) -> bytes:
    """Signed 64-bit hashes, packed; raises msgspec.ValidationError for one out of range."""
    try:
        return _packer(len(hashes))(*hashes)
    except struct.error:
        raise _out_of_range(field, hashes, 2**63) from None


def hashes_from_integers(field: str, hashes: Sequence[int]) -> bytes:
    """64-bit hashes of either sign, packed; raises msgspec.ValidationError for one out of range."""
    try:
        return _packer(len(hashes))(*hashes)
    except struct.error:
        if _first_beyond(hashes, 2**64) >= 0:
            raise _out_of_range(field, hashes, 2**64) from None
    # In C for each of them: a comprehension over 8 MiB of small ones would take a second.
    return struct.pack(f"<{len(hashes)}Q", *map(U64_MAX.__and__, hashes))


def _out_of_range(field: str, hashes: Sequence[int], top: int) -> msgspec.ValidationError:
    at = _first_beyond(hashes, top)
    kind = "i64" if top == 2**63 else "i64 or u64"
    return msgspec.ValidationError(
        f"Expected `int` in the range of {kind}, got {hashes[at]} - at `$.{field}[{at}]`"
    )


def _first_beyond(hashes: Sequence[int], top: int) -> int:
    """Where the first stands that is not in -(2**63) <= hash < top; -1 if there is none."""
    for start in range(0, len(hashes), _LOOKED_AT_TOGETHER):
        some = hashes[start : start + _LOOKED_AT_TOGETHER]
        if min(some) < -(2**63) or max(some) >= top:
            return start + next(i for i, h in enumerate(some) if not -(2**63) <= h < top)
    return -1


def f32(value: float) -> float:
    """`value` rounded to single precision; beyond it, an infinity of the same sign."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def f32_shortest(value: float) -> float:
    """The float of the fewest digits that is `value` in single precision: 0.1, not 0.100000001."""
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if f32(short) == value:
            return short
    return value


_NOT_COMMAS = b"0123456789- \t\r\n[]"


class HashListHead:
    """A list of signed hashes known by its length and its first item; the rest comes on demand.

    Syntax, characters and count are checked at once, the range of the items after the first only
    when `packed` is called: decoding is most of what a long prompt costs, and a selection needs
    these hashes only if some active prompt starts with the first of them.
    """

    __slots__ = ("_field", "_raw", "count", "first")

    def __init__(self, field: str, raw: msgspec.Raw) -> None:
        text = bytes(raw)  # well-formed JSON, so only the kinds of values are in question
        commas = text.translate(None, _NOT_COMMAS)
        if (
            text[:1] != b"["
            or commas.translate(None, b",")
            or text.rfind(b"[") > 0
            or text.find(b"]") < len(text) - 1
        ):
            hashes_from_json(field, raw)  # raises, naming the item at fault
        self._field = field
        self._raw = raw
        head = (text[1 : text.index(b",")] if commas else text[1:-1]).strip()
        self.count = len(commas) + 1 if head else 0
        self.first = b""
        if head:
            if len(head) > 20 or not -(2**63) <= int(head) < 2**63:
                hashes_from_json(field, raw)
            self.first = int(head).to_bytes(8, "little", signed=True)

    def packed(self) -> bytes:
        """All of them, 8 bytes each; raises msgspec.ValidationError for one out of range."""
        return hashes_from_json(self._field, self._raw)
