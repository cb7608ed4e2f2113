"""Limits of numbers on the wire (D6), and checks of arguments that Python callers pass."""

import math
from collections.abc import Callable
from typing import Annotated, SupportsFloat, SupportsIndex, TypeVar

from msgspec import Meta, ValidationError

U64_MAX = 2**64 - 1  # ids, hashes and token counts are unsigned 64 bits
MAX_ISL_TOKENS = 2**53 - 1  # the largest integers that a float holds exactly
MAX_RANKS = 4096  # per worker; every rank costs a row
RANK_LIMIT = 2**32 - 1  # ranks are u32, and so is the end of a worker's range

U32 = Annotated[int, Meta(ge=0, le=2**32 - 1)]
U64 = Annotated[int, Meta(ge=0)]  # MessagePack itself has no integer above 2^64-1
# msgspec cannot bound integers above 2^63-1, so `check_u64` does it. `extra_json_schema` is what
# /openapi.json says of a type besides; it checks nothing.
NonNegative = Annotated[int, Meta(ge=0, extra_json_schema={"maximum": U64_MAX})]
# JSON has neither infinities nor NaN; MessagePack and Python do.
LARGEST = math.nextafter(math.inf, 0.0)
Finite = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Weight = Annotated[float, Meta(ge=0.0, le=LARGEST)]


def check_u64(name: str, value: int) -> None:
    """Raise ValidationError if `value` is above 2^64-1."""
    if value > U64_MAX:
        raise ValidationError(f"Expected `int` <= {U64_MAX} - at `$.{name}`")


# -- arguments of Python callers -------------------------------------------------------------------
# Arguments that Python callers pass must have the expected type; otherwise the error names them.
# Values that can be used as an int or a float (NumPy's) are accepted; a bool is not.

T = TypeVar("T")


def not_a(name: str, expected: str, given: object) -> TypeError:
    """Return a TypeError about argument `name`. `expected` is the right type, such as `an int`."""
    return TypeError(f"{name}: expected {expected}, got {type(given).__name__}")


def whole(name: str, given: object) -> int:
    """Return `given`, the value of the argument `name`, as an int. Raises TypeError."""
    if isinstance(given, bool) or not isinstance(given, SupportsIndex):
        raise not_a(name, "an int", given)
    try:
        return given.__index__()
    except TypeError:  # such as an array of several elements
        raise not_a(name, "an int", given) from None


def number(name: str, given: object) -> float:
    """Return `given` as a float. Raises TypeError, or ValueError if `given` is too large."""
    if isinstance(given, bool) or not isinstance(given, SupportsFloat):
        raise not_a(name, "a number", given)
    try:
        return float(given)
    except TypeError:  # such as an array of several elements
        raise not_a(name, "a number", given) from None
    except (OverflowError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from None


def switch(name: str, given: object) -> bool:
    """Return `given`, which must be a bool. Raises TypeError, which names the argument `name`."""
    if not isinstance(given, bool):
        raise not_a(name, "a bool", given)
    return given


def optional(taken: Callable[[str, object], T], name: str, given: object) -> T | None:
    """Return None if `given` is None; otherwise check and convert `given` with `taken`."""
    return None if given is None else taken(name, given)
