"""MessagePack cut into pieces in steps of bounded work, whatever the bytes.

msgspec finds the end of a value as fast as memory is read, but 32 MB of small values take it 90 ms
at a stretch, and 300 as Python objects. So a large message is walked window by window: msgspec
passes over as many whole values as fit, and says where it stopped; a value larger than a window is
entered by its header. Knows nothing of what the values mean.
"""

import re
from collections.abc import Generator, Iterator

import msgspec
from msgspec.msgpack import Decoder

from lean_selector.wire.messagepack_values import Piece

# What is looked at in one step: 0.2 ms as values passed over, 2 ms as Python objects.
WINDOW_BYTES = 64 * 1024

Bytes = bytes | memoryview
Passing = Generator[None, None, int]  # steps on the way to where a value ends

_skip = Decoder(msgspec.Raw).decode
# msgspec's only word about bytes after the first value, and about values that end too early; tests
# hold it to these texts.
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")
_TRUNCATED = "Input data was truncated"


class NotMessagePack(ValueError):
    """The bytes are no MessagePack, or nested too deep."""


def array_header(count: int) -> bytes:
    """What comes before so many values to make an array of them."""
    return b"\xdd" + count.to_bytes(4, "big")


def trailing_at(error: msgspec.DecodeError) -> int | None:
    """Where the first value ended, if the error says that bytes follow it."""
    found = _TRAILING.search(str(error))
    return int(found[1]) if found else None


def is_array(tag: int) -> bool:
    return tag & 0xF0 == 0x90 or tag in (0xDC, 0xDD)


def is_map(tag: int) -> bool:
    return tag & 0xF0 == 0x80 or tag in (0xDE, 0xDF)


def header(data: Bytes, at: int) -> tuple[int, int]:
    """(values inside, where they begin) of the value at `at`; 0 and its end if it is a scalar.

    The values inside a map are its keys too. Raises NotMessagePack.
    """
    if at >= len(data):
        raise NotMessagePack("truncated")
    tag = data[at]
    inside, size = 0, 0  # of what follows the header
    if tag & 0xF0 == 0x90:
        inside, after = tag & 15, at + 1
    elif tag & 0xF0 == 0x80:
        inside, after = 2 * (tag & 15), at + 1
    elif tag in (0xDC, 0xDD):
        inside, after = _sized(data, at, tag - 0xDB)
    elif tag in (0xDE, 0xDF):
        inside, after = _sized(data, at, tag - 0xDD)
        inside *= 2
    elif tag in (0xC4, 0xC5, 0xC6):
        size, after = _sized(data, at, tag - 0xC4)
    elif tag in (0xD9, 0xDA, 0xDB):
        size, after = _sized(data, at, tag - 0xD9)
    elif tag in (0xC7, 0xC8, 0xC9):
        size, after = _sized(data, at, tag - 0xC7)
        size += 1
    else:
        end = end_within(data, at, 1)
        assert end is not None, "every other value is small"
        after = end
    if after + size > len(data):
        raise NotMessagePack("truncated")
    return inside, after + size


def _sized(data: Bytes, at: int, power: int) -> tuple[int, int]:
    after = at + 1 + (1 << power)
    if after > len(data):
        raise NotMessagePack("truncated")
    return int.from_bytes(data[at + 1 : after], "big"), after


def end_within(data: Bytes, at: int, count: int) -> int | None:
    """Where so many values end; None if that is beyond the window. Raises NotMessagePack."""
    window = data[at : at + WINDOW_BYTES]
    before = b"" if count == 1 else array_header(count)
    try:
        _skip(before + bytes(window) if before else window)
    except msgspec.DecodeError as error:
        end = trailing_at(error)
        if end is not None:
            return at + end - len(before)
        if _TRUNCATED in str(error) and at + WINDOW_BYTES < len(data):
            return None
        raise NotMessagePack(str(error)) from None
    except RecursionError as depth:
        raise NotMessagePack(str(depth)) from None
    return at + len(window)


def pieces(data: Bytes, at: int, count: int, most: int) -> Iterator[Piece | None]:
    """Cut `count` values from `at` on into pieces of at most `most` values; None between steps.

    Raises NotMessagePack where they stop being values.
    """
    step = most
    while count:
        wanted = min(step, count)
        end = end_within(data, at, wanted)
        if end is not None:
            yield Piece(at, end, wanted)
            at, count = end, count - wanted
            step = min(most, 2 * step)
        elif wanted > 1:
            step = max(1, wanted // 4)
            yield None
        else:
            end = yield from _through_large(data, at)
            yield Piece(at, end, 1)
            at, count = end, count - 1


def passed(data: Bytes, at: int) -> Passing:
    """Walk to the end of the value at `at`. Raises NotMessagePack."""
    end = end_within(data, at, 1)
    yield None
    return end if end is not None else (yield from _through_large(data, at))


def _through_large(data: Bytes, at: int) -> Passing:
    inside, at = header(data, at)
    left = [inside]  # values still to be passed, outermost first
    step = WINDOW_BYTES
    while left:
        if not left[-1]:
            left.pop()
            continue
        wanted = min(step, left[-1])
        end = end_within(data, at, wanted)
        if end is not None:
            left[-1] -= wanted
            at = end
            step = min(WINDOW_BYTES, 2 * step)
        elif wanted > 1:
            step = max(1, wanted // 4)
        else:
            left[-1] -= 1
            inside, at = header(data, at)
            left.append(inside)
        yield None
    return at
