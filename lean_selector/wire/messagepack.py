"""What msgspec has no call for: lists read a window at a time, values that other bytes follow."""

import re
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
from msgspec.msgpack import Decoder

# What is read in one step: at most 2 ms as Python objects, whatever the content.
WINDOW_BYTES = 64 * 1024

Bytes = bytes | memoryview
_T = TypeVar("_T")

_skip = Decoder(msgspec.Raw).decode
# msgspec's only word about bytes after the first value; a test holds it to this text.
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")


def is_array(tag: int) -> bool:
    return tag & 0xF0 == 0x90 or tag in (0xDC, 0xDD)


def array_header(count: int) -> bytes:
    """What comes before so many values to make an array of them."""
    return b"\xdd" + count.to_bytes(4, "big")


def count_of(data: Bytes) -> tuple[int, int]:
    """How many values an array has, or pairs a map, and where they begin.

    Raises ValueError for what is neither; does not look at the values.
    """
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


def _first_end(error: msgspec.DecodeError) -> int | None:
    """Where the first value ended, if the error says that bytes follow it."""
    found = _TRAILING.search(str(error))
    return int(found[1]) if found else None


class ListReader(Generic[_T]):
    """Reads an array from its start, so many values at a time."""

    def __init__(self, data: Bytes, decode: Callable[[bytes], list[_T]]) -> None:
        """`decode` reads an array of values. Raises ValueError if `data` is no array."""
        self._data = memoryview(data)
        self._decode = decode
        self.left, self._at = count_of(self._data)
        if not is_array(self._data[0]):
            raise ValueError("not an array")

    def take(self, count: int) -> list[_T]:
        """The next values, fewer at the end; ValueError if a window does not hold them."""
        count = min(count, self.left)
        head = array_header(count)
        end = self._at + self._size_of(head)
        values = self._decode(head + self._data[self._at : end])
        self.left -= count
        self._at = end
        return values

    def _size_of(self, head: bytes) -> int:
        """Of as many values as the header says."""
        window = self._data[self._at : self._at + WINDOW_BYTES]
        try:
            _skip(head + window)
        except msgspec.DecodeError as error:
            end = _first_end(error)
            if end is None:
                raise
            return end - len(head)
        return len(window)
