"""MessagePack taken apart value by value, for messages that a typed decoder is too strict for.

Keeps what such a decoder gives up: repeated keys, the order of pairs, text apart from bytes, and
extension values. Long arrays of 64-bit integers, which are block hashes, stay packed.
"""

import struct

import msgspec

_MAX_DEPTH = 32  # of nested values; what replicas send needs 6, unknown keys may hold more


class Map(msgspec.Struct):
    pairs: list[tuple["Value", "Value"]]


class Hashes(msgspec.Struct):
    """A long array of 9-byte integers, kept as 8 bytes LE each."""

    packed: bytes


class Extension(msgspec.Struct):
    """An ext value: only good for being ignored."""


Value = None | bool | int | float | str | bytes | list["Value"] | Map | Hashes | Extension


class Reader:
    """Takes one MessagePack value apart, keeping repeated keys and telling str from bin."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def value(self, depth: int = 0) -> "Value":
        """The next value; raises IndexError, struct.error or ValueError when there is none."""
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        tag = self.data[self.at]
        self.at += 1
        if tag < 0x80:
            return tag
        if tag >= 0xE0:
            return tag - 256
        if tag < 0x90:
            return self._map(tag & 15, depth)
        if tag < 0xA0:
            return self._array(tag & 15, depth)
        if tag < 0xC0:
            return self._text(tag & 31)
        if tag in _FIXED:
            form = _FIXED[tag]
            number: int | float = form.unpack_from(self.data, self.at)[0]
            self.at += form.size
            return number
        if tag in _CONSTANTS:
            return _CONSTANTS[tag]
        if tag in (0xC4, 0xC5, 0xC6):
            return self._take(self._size(tag - 0xC4))
        if tag in (0xC7, 0xC8, 0xC9):
            self._take(self._size(tag - 0xC7) + 1)
            return Extension()
        if 0xD4 <= tag <= 0xD8:
            self._take((1 << (tag - 0xD4)) + 1)
            return Extension()
        if tag in (0xD9, 0xDA, 0xDB):
            return self._text(self._size(tag - 0xD9))
        if tag in (0xDC, 0xDD):
            return self._array(self._size(tag - 0xDB), depth)
        if tag in (0xDE, 0xDF):
            return self._map(self._size(tag - 0xDD), depth)
        raise ValueError("reserved tag c1")

    def _size(self, power: int) -> int:
        return int.from_bytes(self._take(1 << power), "big")

    def _take(self, count: int) -> bytes:
        taken = self.data[self.at : self.at + count]
        if len(taken) != count:
            raise ValueError("truncated")
        self.at += count
        return taken

    def _text(self, count: int) -> str | bytes:
        taken = self._take(count)
        try:
            return taken.decode()
        except UnicodeDecodeError:
            return taken  # harmless in a key or value that nobody reads

    def _array(self, count: int, depth: int) -> "list[Value] | Hashes":
        end = self.at + 9 * count
        fits = count > 15 and end <= len(self.data)
        if fits and self.data[self.at : end : 9] == b"\xcf" * count:
            start, self.at = self.at, end
            return Hashes(turned_round(self.data, start, count))
        return [self.value(depth + 1) for _ in range(count)]

    def _map(self, count: int, depth: int) -> Map:
        return Map([(self.value(depth + 1), self.value(depth + 1)) for _ in range(count)])


def turned_round(data: bytes, start: int, count: int) -> bytes:
    """`count` elements of `cf` and 8 bytes BE at `start`, as 8 bytes LE each."""
    out = bytearray(8 * count)
    end = start + 9 * count
    for i in range(8):
        out[i::8] = data[start + 8 - i : end : 9]
    return bytes(out)


_FIXED = {
    tag: struct.Struct(form)
    for tag, form in {
        0xCA: ">f",
        0xCB: ">d",
        0xCC: ">B",
        0xCD: ">H",
        0xCE: ">I",
        0xCF: ">Q",
        0xD0: ">b",
        0xD1: ">h",
        0xD2: ">i",
        0xD3: ">q",
    }.items()
}
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
