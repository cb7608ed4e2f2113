"""The headers of MessagePack arrays."""


def is_array(tag: int) -> bool:
    return tag & 0xF0 == 0x90 or tag in (0xDC, 0xDD)


def array_header(count: int) -> bytes:
    """Return the MessagePack header of an array of `count` values."""
    return b"\xdd" + count.to_bytes(4, "big")


def count_of(data: bytes | bytearray | memoryview) -> tuple[int, int]:
    """Return the number of values of an array, and the offset of the first. Raises ValueError."""
    if not is_array(data[0]):
        raise ValueError("not an array")
    if data[0] < 0xDC:
        return data[0] & 15, 1
    after = 5 if data[0] == 0xDD else 3
    return int.from_bytes(data[1:after], "big"), after
