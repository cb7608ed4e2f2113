"""MessagePack taken apart value by value, for messages that a typed decoder is too strict for.

Keeps what such a decoder gives up: repeated keys, the order of pairs, text apart from bytes, and
extension values. Long arrays of 64-bit integers, which are block hashes, stay packed.

It is done in steps of bounded work, and there are bounds to what it looks at, so that bytes of any
content cost little: values one by one cost a thousand times what their bytes do.
"""

import struct
from collections.abc import Generator
from typing import Annotated

import msgspec

from lean_selector.wire.messagepack_pieces import WINDOW_BYTES, array_header, pieces
from lean_selector.wire.messagepack_values import Extension, Hashes, Map, Value

_MAX_DEPTH = 32  # of nested values; what replicas send needs 6, unknown keys may hold more
# Values of a message, but for long arrays of integers: replicas send some forty.
MAX_VALUES = 10_000
MAX_INTEGERS = 1 << 20  # of one long array
MAX_TEXT_BYTES = 1 << 20  # of one string; longer ones stay bytes
_STEP_VALUES = 1_000
_STEP_INTEGERS = 16_384
_TYPED_INTEGERS = 4_096


class TooMany(ValueError):
    """More than anybody has reason to send; the message says of what."""


Step = Generator[None, None, Value]  # what comes when it was taken in steps

_decode_integers = msgspec.msgpack.Decoder(list[Annotated[int, msgspec.Meta(ge=0)]]).decode


class Reader:
    """Takes one MessagePack value apart, keeping repeated keys and telling str from bin."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self._values = 0

    def value(self, depth: int = 0) -> Step:
        """The next value, in steps of a millisecond; raises IndexError, struct.error or ValueError
        when there is none, TooMany when there is too much of it.
        """
        if depth > _MAX_DEPTH:
            raise ValueError("nested too deep")
        self._values += 1
        if self._values > MAX_VALUES:
            raise TooMany(f"more than {MAX_VALUES} values")
        if self._values % _STEP_VALUES == 0:
            yield
        tag = self.data[self.at]
        self.at += 1
        if tag & 0xF0 == 0x80:
            return (yield from self._map(tag & 15, depth))
        if tag & 0xF0 == 0x90:
            return (yield from self._array(tag & 15, depth))
        if tag in (0xDC, 0xDD):
            return (yield from self._array(self._size(tag - 0xDB), depth))
        if tag in (0xDE, 0xDF):
            return (yield from self._map(self._size(tag - 0xDD), depth))
        return self._scalar(tag)

    def _scalar(self, tag: int) -> Value:
        if tag < 0x80:
            return tag
        if tag >= 0xE0:
            return tag - 256
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
        if count > MAX_TEXT_BYTES:
            return taken
        try:
            return taken.decode()
        except UnicodeDecodeError:
            return taken  # harmless in a key or value that nobody reads

    def _array(self, count: int, depth: int) -> Generator[None, None, list[Value] | Hashes]:
        if count > 15:
            packed = yield from self._integers(count)
            if packed is not None:
                return Hashes(packed)
        items: list[Value] = []
        for _ in range(count):
            items.append((yield from self.value(depth + 1)))  # noqa: PERF401 - not in one step
        return items

    def _integers(self, count: int) -> Generator[None, None, bytes | None]:
        """A long array of u64, 8 bytes LE each; None, and nothing read, if it is something else."""
        if count > MAX_INTEGERS:
            raise TooMany(f"an array of more than {MAX_INTEGERS}")
        at, parts = self.at, []
        first = self.data[at]
        if first >= 0x80 and first not in _INTEGER_TAGS:
            return None
        for done in range(0, count, _STEP_INTEGERS):
            now = min(_STEP_INTEGERS, count - done)
            end = at + 9 * now
            if self.data[at:end:9] == b"\xcf" * now and end <= len(self.data):
                parts.append(turned_round(self.data, at, now))
                at = end
                yield
                continue
            for piece in pieces(self.data, at, now, _TYPED_INTEGERS):
                yield
                if piece is None:
                    continue
                if piece.end - piece.start > WINDOW_BYTES:
                    return None  # one large value
                inside = array_header(piece.count) + self.data[piece.start : piece.end]
                try:
                    integers = _decode_integers(inside)
                except (msgspec.DecodeError, UnicodeDecodeError):
                    return None
                parts.append(struct.pack(f"<{len(integers)}Q", *integers))
                at = piece.end
        self.at = at
        return b"".join(parts)

    def _map(self, count: int, depth: int) -> Generator[None, None, Map]:
        pairs = []
        for _ in range(count):
            key = yield from self.value(depth + 1)
            pairs.append((key, (yield from self.value(depth + 1))))
        return Map(pairs)


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
_INTEGER_TAGS = range(0xCC, 0xD4)
_CONSTANTS = {0xC0: None, 0xC2: False, 0xC3: True}
