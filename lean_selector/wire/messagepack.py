"""Additions to msgspec: read a list in pieces, and read a value followed by other bytes."""

import re
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
from msgspec.msgpack import Decoder

# Bytes per decoding step: at most 2 ms as Python objects, whatever the content.
WINDOW_BYTES = 64 * 1024

Bytes = bytes | memoryview
_T = TypeVar("_T")

_skip = Decoder(msgspec.Raw).decode
# Only this text tells that bytes follow the first value; a test pins msgspec's wording.
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")


def is_array(tag: int) -> bool:
    return tag & 0xF0 == 0x90 or tag in (0xDC, 0xDD)


def array_header(count: int) -> bytes:
    """Return the MessagePack header of an array of `count` values."""
    return b"\xdd" + count.to_bytes(4, "big")


def count_of(data: Bytes) -> tuple[int, int]:
    """Return the number of values of an array (or pairs of a map), and the offset of the first one.
    Raises ValueError for other types. Does not check the values."""
    tag = data[0] if len(data) else 0xC1
    if 0x80 <= tag < 0xA0:
        return tag & 15, 1
    if tag < 0xDC or tag > 0xDF:
        raise ValueError("neither a map nor an array")
    after = 5 if tag & 1 else 3
    return int.from_bytes(data[1:after], "big"), after


def first_value(decode: Callable[[Bytes], _T], data: Bytes) -> _T:
    """Decode a value, and ignore the bytes after it."""
    try:
        return decode(data)
    except msgspec.DecodeError as error:
        end = _first_end(error)
        if end is None:
            raise
    return decode(data[:end])


def size_of(data: Bytes) -> int:
    """Return the length in bytes of the first value in `data`."""
    try:
        return len(memoryview(_skip(data)))
    except msgspec.DecodeError as error:
        end = _first_end(error)
        if end is None:
            raise
        return end


def _first_end(error: msgspec.DecodeError) -> int | None:
    """Return the offset of the first value's end, if msgspec's error says that bytes follow."""
    found = _TRAILING.search(str(error))
    return int(found[1]) if found else None


class ListReader(Generic[_T]):
    """Reads a MessagePack array in pieces, from the first value to the last."""

    def __init__(self, data: Bytes, decode: Callable[[bytes], list[_T]]) -> None:
        """`decode` decodes a MessagePack array. Raises ValueError if `data` is not an array."""
        self._data = memoryview(data)
        self._decode = decode
        self.left, self._at = count_of(self._data)
        self._step = self.left  # number of values in the last piece
        if not is_array(self._data[0]):
            raise ValueError("not an array")

    def take(self, count: int) -> list[_T]:
        """Decode up to `count` values. ValueError if they are invalid or exceed WINDOW_BYTES."""
        count = min(count, self.left)
        head = array_header(count)
        end = self._end_of(count)
        if end is None:
            raise ValueError("too large, or no MessagePack")
        values = self._decode(head + self._data[self._at : end])
        self.left -= count
        self._at = end
        return values

    def rest(self) -> memoryview:
        """Return the bytes after the values that were read so far."""
        return self._data[self._at :]

    def piece(self, most: int) -> tuple[memoryview, int]:
        """Return the next values (at most `most`) as undecoded bytes, and their number. The bytes
        exceed WINDOW_BYTES only for a single value. Call this only while values are left."""
        count = min(2 * self._step, most, self.left)
        end = self._end_of(count)
        while end is None and count > 1:
            count = max(1, count // 4)
            end = self._end_of(count)
        rest = self._data[self._at :]
        size = size_of(rest) if end is None else end - self._at
        found = rest[:size]
        self._step = count
        self.left -= count
        self._at += len(found)
        return found, count

    def _end_of(self, count: int) -> int | None:
        """Return the end offset of `count` values; None if invalid or over WINDOW_BYTES long."""
        window = self._data[self._at : self._at + WINDOW_BYTES]
        head = array_header(count)
        try:
            _skip(head + window)
        except msgspec.DecodeError as error:
            end = _first_end(error)
            return None if end is None else self._at + end - len(head)
        return self._at + len(window)
