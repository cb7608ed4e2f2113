"""What MessagePack is taken apart into: values, and stretches of whole ones."""

import msgspec


class Map(msgspec.Struct):
    pairs: list[tuple["Value", "Value"]]


class Hashes(msgspec.Struct):
    """A long array of unsigned integers, kept as 8 bytes LE each."""

    packed: bytes


class Extension(msgspec.Struct):
    """An ext value: only good for being ignored."""


Value = None | bool | int | float | str | bytes | list["Value"] | Map | Hashes | Extension


class Piece(msgspec.Struct, frozen=True, gc=False):
    """`count` whole values in a row at [start, end); more than WINDOW_BYTES only if it is one."""

    start: int
    end: int
    count: int
