"""Scalars on the wire: integers and lists of them, hashes, and the names of a partition.

In JSON (except dumps), block hashes are signed 64-bit integers. In memory, a list of hashes is
`bytes`: 8 little-endian bytes per hash. Only this module converts such JSON to bytes and back."""

import functools
import re
import struct
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from lean_selector.core.errors import BadRequest
from lean_selector.core.numbers import MAX_RANKS, U64_MAX, NonNegative, check_u64

DEFAULT_GROUP = "default"


def group_of(tenant_id: str | UnsetType, routing_group: str | UnsetType) -> str:
    """Return the tenant from either of its two names; BadRequest if both are given and differ."""
    if tenant_id is UNSET:
        return DEFAULT_GROUP if routing_group is UNSET else routing_group
    if routing_group is not UNSET and routing_group != tenant_id:
        raise BadRequest(
            f"tenant_id `{tenant_id}` and routing_group `{routing_group}` are two names "
            "of one thing and must not differ"
        )
    return tenant_id


# JSON lists of integers, packed by simdjson, or by msgspec without it.
#
# The result is None for any other text. The caller then lets msgspec report the error, so that
# errors do not depend on the installed parser.

# A parser keeps some twelve times its longest text in memory, so longer texts get one of their own.
KEPT_BYTES: Final = 128 * 1024
_BLANKS: Final = b" \t\r\n"
_SHORT_BYTES: Final = 256  # reading a shorter list of ids with simdjson takes longer

_decode_integers = msgspec.json.Decoder(list[int]).decode


def _simdjson_parser() -> Callable[[], Any] | None:
    """Return simdjson's class of parsers; None if it is not installed or cannot be used."""
    try:
        parser: Callable[[], Any] = import_module("simdjson").Parser
    except ImportError:
        return None
    return parser if sys.byteorder == "little" else None  # it packs in machine byte order


_Parser = _simdjson_parser()
_parse: Callable[[bytes], Any] | None = None if _Parser is None else _Parser().parse


def packed_signed(text: bytes) -> bytes | None:
    """Pack a JSON list of signed 64-bit integers, 8 bytes little-endian each. Return None for any
    other text."""
    return packed_by_msgspec(text, "q") if _parse is None else _packed(text, "i")


def packed_u32(text: bytes) -> bytes | None:
    """Pack a JSON list of unsigned 32-bit integers, 4 bytes little-endian each. Return None for any
    other text."""
    if _parse is None or len(text) < _SHORT_BYTES:
        return packed_by_msgspec(text, "I")
    wide = _packed(text, "u")
    return None if wide is None else _halved(wide)


@functools.lru_cache(maxsize=8192)  # per list length; 8 192 blocks of 16 tokens are 131 072 tokens
def packer(count: int, kind: str = "q") -> Callable[..., bytes]:
    """Return a little-endian packer of `count` integers. `kind`: their format in `struct`."""
    return struct.Struct(f"<{count}{kind}").pack


def packed_by_msgspec(text: bytes, kind: Literal["q", "I"]) -> bytes | None:
    """Pack a JSON list of integers in `struct` format `kind`. Return None for any other text."""
    try:
        integers = _decode_integers(text)
        return packer(len(integers), kind)(*integers)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, struct.error):
        return None


def _packed(text: bytes, of_type: Literal["i", "u"]) -> bytes | None:
    """Pack a list with simdjson, to 8 bytes per integer. None if it is invalid."""
    assert _parse is not None
    assert _Parser is not None
    if text[:1] != b"[":  # simdjson accepts a leading byte order mark
        text = text.lstrip(_BLANKS)
    if text[:1] != b"[" or text.rfind(b"[") > 0:  # simdjson flattens nested lists
        return None
    try:
        parse = _parse if len(text) <= KEPT_BYTES else _Parser().parse
        return bytes(parse(text).as_buffer(of_type=of_type))
    except Exception:  # simdjson raises many undocumented kinds
        return None


def _halved(wide: bytes) -> bytes | None:
    """Pack unsigned 8-byte integers to 4 bytes each; None if an integer is too large."""
    zeros = bytes(len(wide) >> 3)
    narrow = bytearray(len(wide) >> 1)
    for byte in range(4):
        if wide[byte + 4 :: 8] != zeros:
            return None
        narrow[byte::4] = wide[byte::8]
    return bytes(narrow)


# -- integers and hashes ---------------------------------------------------------------------------


def hashes_from_json(field: str, raw: msgspec.Raw) -> bytes:
    """Pack a JSON list of 64-bit integers, 8 bytes each; fast if all are signed, as documented, or
    all unsigned. Raises msgspec.ValidationError, which names `field`, for any other text."""
    text = bytes(raw)
    read = packed_signed(text)
    if read is None and _parse is not None:
        read = _packed(text, "u")
    if read is not None:
        return read
    try:
        hashes = _decode_integers(raw)
    except msgspec.DecodeError as error:
        fault, path, rest = str(error).partition(" - at `$")
        raise msgspec.ValidationError(f"{fault} - at `$.{field}{rest if path else '`'}") from None
    return hashes_from_integers(field, hashes)


def hashes_from_integers(field: str, hashes: Sequence[int]) -> bytes:
    """Pack 64-bit hashes, signed or unsigned. Raises msgspec.ValidationError above 64 bits."""
    try:
        return packer(len(hashes))(*hashes)
    except struct.error:
        if min(hashes) < -(2**63) or max(hashes) > U64_MAX:
            text = f"Expected `int` of 64 bits - at `$.{field}`"
            raise msgspec.ValidationError(text) from None
    if min(hashes) >= 0:
        return packer(len(hashes), "Q")(*hashes)
    # A loop in C, because a comprehension over 8 MiB of small hashes would take a second.
    return struct.pack(f"<{len(hashes)}Q", *map(U64_MAX.__and__, hashes))


# -- lists of hashes in a body ---------------------------------------------------------------------

ABSENT = Raw(b"")

# A hash list in a body: JSON text, a JSON list, a MessagePack array or bin. So it is a Raw,
# list[int], tuple[int, ...], bytes or None, but typed as `object`: in a union, msgspec's types
# treat Raw as bytes, which it is not.
HashList = object


def packed(name: str, hashes: HashList) -> bytes:
    """Return a hash list packed, 8 bytes per hash. Raises msgspec.ValidationError if invalid."""
    if isinstance(hashes, Raw):
        return hashes_from_json(name, hashes)
    if isinstance(hashes, bytes):
        if len(hashes) % 8:
            raise msgspec.ValidationError(
                f"Expected 8 bytes for each hash, got {len(hashes)} bytes - at `$.{name}`"
            )
        return hashes
    assert isinstance(hashes, list | tuple)
    return hashes_from_integers(name, hashes)


def is_absent(hashes: HashList) -> bool:
    if not isinstance(hashes, Raw):
        return hashes is None
    return hashes is ABSENT or (len(memoryview(hashes)) == 4 and bytes(hashes) == b"null")


# -- ids and sets of workers -----------------------------------------------------------------------

Id = Annotated[str, Meta(max_length=4096)]  # in a path of up to 64 KiB, up to 12 bytes each
WorkerIds = Annotated[list[NonNegative], Meta(max_length=65_536)]

# For sets up to _FEW_WORKERS, the check costs as much as a look-up. Sets larger than a worker can
# have ranks are not cached. The cached sets take 6 MB at most.
_FEW_WORKERS: Final = 8
_KEPT_SETS: Final = 16


def allowed_workers(ids: list[int]) -> frozenset[int]:
    """Return the worker ids as a set. Raises msgspec.ValidationError for an id above 2**64 - 1."""
    if _FEW_WORKERS < len(ids) <= MAX_RANKS:
        return _kept(tuple(ids))
    return _checked(ids)


@functools.lru_cache(maxsize=_KEPT_SETS)
def _kept(ids: tuple[int, ...]) -> frozenset[int]:
    """Return the worker ids as a set, which is cached because large sets take time to build."""
    return _checked(ids)


def _checked(ids: list[int] | tuple[int, ...]) -> frozenset[int]:
    if ids:
        check_u64("allowed_worker_ids[...]", max(ids))
    return frozenset(ids)


# -- answers ---------------------------------------------------------------------------------------


class JsonText:
    """JSON text that is sent unchanged, as an answer or a part of an answer. Meant for text that is
    sent often and rarely changes."""

    __slots__ = ("text",)

    def __init__(self, text: bytes) -> None:
        self.text = text


def _as_it_is(part: JsonText) -> Raw:
    """Encode JsonText, the only type in answers that msgspec cannot encode itself."""
    return Raw(part.text)


json_form: Final = msgspec.json.Encoder(enc_hook=_as_it_is).encode

# What a terminal or a line reader may interpret: control characters except the line feed, line and
# paragraph separators, bidirectional marks, and tags.
_CONTROLS = re.compile(
    "[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\U000e0000-\U000e007f]"
)


def json_escape(letter: str) -> str:
    r"""Return a character as in a JSON string: `\u00e9`, or a pair of surrogates."""
    units = letter.encode("utf-16-be", "surrogatepass").hex()
    return "".join([f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4)])


def without_controls(text: str) -> str:
    """Return `text` with JSON escapes in place of _CONTROLS."""
    return _CONTROLS.sub(lambda found: json_escape(found[0]), text)
