"""A body judged as a whole, whatever its values are meant to be (decisions D8 and D32).

One of the wrong shape may also be broken, and then that is its fault. 8 MiB of anything are judged
in a fraction of a second and without an object for each value: all loops are C's.
"""

import re
from itertools import islice
from math import isinf

import msgspec

# They check the grammar, and make nothing of it.
_skip_json = msgspec.json.Decoder(msgspec.Raw).decode
_skip_messagepack = msgspec.msgpack.Decoder(msgspec.Raw).decode

# A number beyond f64 has 309 digits before the point, or fewer and an exponent. One with neither
# 200 digits nor an exponent of three is not; of the others each is looked at. Both expressions
# begin with what is to be found: a search for that is quick, and one for a condition is not.
_LONG_RUN = b"0" * 200
_ANY_DIGIT_AS_0 = bytes.maketrans(b"123456789", b"000000000")
_LARGE_EXPONENT = re.compile(rb"[eE]\+?+0*+[1-9][0-9]{2}")
_LARGE_NUMBER = re.compile(
    rb"[0-9](?<![0-9.eE][0-9])(?<![eE][+-][0-9])"  # the first digit of a number
    rb"(?:[0-9]*+(?:\.[0-9]++)?+[eE]\+?+0*+[1-9][0-9]{2,}+"
    rb"|[0-9]{199,}+(?:\.[0-9]++)?+(?:[eE][+-]?+[0-9]++)?+)"
)
_STRINGS_BYTES = 256 * 1024  # cut out in one go: what it is cut into takes memory

MOST_COSTLY_NUMBERS = 1000
# The JSON parser needs 10 us for each of these, where other numbers take 0.05.
_COSTLY_NUMBER = re.compile(rb"[eE](?<=[0-9].)[+-]?+0*+[1-9][0-9]{2}")


def messagepack_fault(body: bytes | bytearray) -> str:
    """What makes `body` no MessagePack; "" when it is, of whatever shape."""
    try:
        _skip_messagepack(body)
    except (msgspec.DecodeError, RecursionError) as error:
        return str(error)
    return ""


def json_fault(text: bytes | bytearray) -> str:
    """What makes `text` no JSON by the law of D8; "" when it is JSON, of whatever shape."""
    try:
        _skip_json(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return str(error)
    return "number out of range" if _is_beyond_f64(bytes(text)) else ""


def _is_beyond_f64(text: bytes) -> bool:
    """Whether a number of a JSON text is too large for a double."""
    if not _may_be_beyond_f64(text):
        return False
    numbers = _without_strings(text)
    if not _may_be_beyond_f64(numbers):
        return False
    return any(map(isinf, map(float, set(_LARGE_NUMBER.findall(numbers)))))


def _may_be_beyond_f64(text: bytes) -> bool:
    return _LARGE_EXPONENT.search(text) is not None or _LONG_RUN in text.translate(_ANY_DIGIT_AS_0)


def _without_strings(text: bytes) -> bytes:
    """A JSON text but for its strings: what stands outside of quotes."""
    if b"\\" in text:
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside: list[bytes] = []
    first = 0  # of the pieces between quotes, where every other is outside of a string
    for at in range(0, len(text), _STRINGS_BYTES):
        pieces = text[at : at + _STRINGS_BYTES].split(b'"')
        outside.append(b"".join(pieces[first::2]))
        first = (first + len(pieces) - 1) % 2
    return b"".join(outside)


def has_costly_numbers(text: bytes | bytearray) -> bool:
    """Whether a JSON text has more than MOST_COSTLY_NUMBERS of those that take long to parse.

    For a body of token ids this is two looks for a character that is rare in it.
    """
    if not _has_many(text, b"e") and not _has_many(text, b"E"):
        return False
    return _has_many_costly(text) and _has_many_costly(_without_strings(bytes(text)))


def _has_many(text: bytes | bytearray, byte: bytes) -> bool:
    """More than half of MOST_COSTLY_NUMBERS; a search for a byte that is rare takes no time."""
    at = -1
    for _ in range(MOST_COSTLY_NUMBERS // 2):
        at = text.find(byte, at + 1)
        if at < 0:
            return False
    return True


def _has_many_costly(text: bytes | bytearray) -> bool:
    found = islice(_COSTLY_NUMBER.finditer(text), MOST_COSTLY_NUMBERS + 1)
    return sum(1 for _ in found) > MOST_COSTLY_NUMBERS
