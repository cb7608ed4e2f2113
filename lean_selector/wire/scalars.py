"""Scalar types of the wire, and the hash lists that fill most of it.

JSON carries hashes as signed 64-bit integers; inside, a list of hashes is `bytes`, 8 per block,
little-endian (the same bit pattern signed or unsigned). Conversion happens here and nowhere else.
"""

import math
import struct
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from lean_selector.core.errors import BadRequest
from lean_selector.core.numbers import U64_MAX
from lean_selector.wire.integer_text import packed_signed, packer

_LOOKED_AT_TOGETHER = 4096  # hashes, when one of a long list is at fault
# msgspec bounds an integer by at most 2**63 - 1: what may be larger is checked by `check_u64`.
U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
NonNegative = Annotated[int, Meta(ge=0)]


def check_u64(name: str, value: int) -> None:
    """Raises msgspec.ValidationError beyond 2**64 - 1."""
    if value > U64_MAX:
        raise msgspec.ValidationError(f"Expected `int` <= {U64_MAX} - at `$.{name}`")


def check_finite(name: str, value: float) -> None:
    """Raises BadRequest for an infinity and for what is no number: JSON cannot say either, but
    MessagePack and Python can."""
    if not math.isfinite(value):
        raise BadRequest(f"{name}: expected a number, got {value}")


def unpack_signed(hashes: bytes) -> tuple[int, ...]:
    """Hashes of 8 bytes each as the signed integers that JSON carries."""
    return struct.unpack(f"<{len(hashes) // 8}q", hashes)


_decode_hashes = msgspec.json.Decoder(list[int]).decode


def hashes_from_json(field: str, raw: msgspec.Raw) -> bytes:
    """A JSON list of signed 64-bit integers, packed.

    Raises msgspec.ValidationError naming `field` for anything else: then whoever knows the whole
    body tells text that is no JSON from a wrong shape.
    """
    read = packed_signed(bytes(raw))
    if read is not None:
        return read
    try:
        hashes = _decode_hashes(raw)
    except msgspec.DecodeError as error:
        text, path, rest = str(error).partition(" - at `$")
        raise msgspec.ValidationError(f"{text} - at `$.{field}{rest if path else '`'}") from None
    return hashes_from_signed(field, hashes)


def hashes_from_signed(field: str, hashes: list[int]) -> bytes:
    """Signed 64-bit hashes, packed; raises msgspec.ValidationError for one out of range."""
    try:
        return packer(len(hashes))(*hashes)
    except struct.error:
        raise _out_of_range(field, hashes, 2**63) from None


def hashes_from_integers(field: str, hashes: Sequence[int]) -> bytes:
    """64-bit hashes of either sign, packed; raises msgspec.ValidationError for one out of range."""
    try:
        return packer(len(hashes))(*hashes)
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
    for digits in range(1, 9):
        short = float(f"{value:.{digits}g}")
        if f32(short) == value:
            return short
    return float(f"{value:.9g}")  # so many tell any two of single precision apart
