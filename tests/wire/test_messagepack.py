"""Lists read some values at a time, and single values, against msgspec's reading of the whole."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.wire import messagepack
from lean_selector.wire.messagepack import ListReader, count_of, first_value
from tests.support.kv_batches import small_windows

encode = msgspec.msgpack.encode
decode = msgspec.msgpack.decode
untyped = msgspec.msgpack.Decoder(list[object]).decode

SIZES = st.sampled_from((0, 1, 31, 32, 50, 300, 70_000))
VALUES = st.recursive(
    st.none()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.builds("x".__mul__, SIZES)
    | st.builds(b"x".__mul__, SIZES)
    | st.builds(lambda size: msgspec.msgpack.Ext(5, b"x" * size), SIZES),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.builds(lambda value, size: [value] * size, inner, st.sampled_from((16, 40)))
        | st.dictionaries(st.integers(0, 300), inner, max_size=3)
    ),
    max_leaves=6,
)


def read_all(data: bytes, most: int, into: list[object]) -> None:
    reader = ListReader(data, untyped)
    while reader.left:
        more = reader.take(most)
        assert 1 <= len(more) <= most
        into += more
    assert not reader.take(most)


@given(st.lists(VALUES, max_size=6), st.integers(1, 8), st.integers(40, 120))
def test_a_list_is_read_in_order_until_values_do_not_fit(
    values: list[object], most: int, window: int
) -> None:
    fitting = len(values)
    for at in range(0, len(values), most):
        if sum(len(encode(value)) for value in values[at : at + most]) > window:
            fitting = at
            break
    read: list[object] = []
    with small_windows(window):
        try:
            read_all(encode(values) + b"\xc1after", most, read)
        except ValueError:
            assert fitting < len(values)
    assert read == values[:fitting]


@given(st.lists(VALUES, max_size=6), st.integers(1, 8), st.integers(40, 120))
def test_pieces_are_the_values_in_order(values: list[object], most: int, window: int) -> None:
    encoded = [encode(value) for value in values]
    with small_windows(window):
        reader = ListReader(encode(values) + b"\xc1after", untyped)
        while reader.left:
            found, count = reader.piece(most)
            assert bytes(found) == b"".join(encoded[:count])
            assert 1 <= count <= most
            assert count == 1 or len(found) <= window
            encoded = encoded[count:]
    assert not encoded


@pytest.mark.parametrize(
    "data",
    [
        *(b"\xdd\xff\xff\xff\xff", b"\xdd\xff", b"\x91", b"\x92\x01", b"\x92\x01\xc1"),
        *(b"\x91\xc6\x00\x00\x00\x09x", b"\x91\xdb\x00\x00\x00\x09x", b"\x91" * 100_000),
    ],
    ids=lambda data: data[:8].hex(),
)
@pytest.mark.parametrize("window", [40, 1 << 16])
def test_what_ends_too_early_is_refused(data: bytes, window: int) -> None:
    with small_windows(window), pytest.raises((ValueError, RecursionError)):
        read_all(data, 100, [])


@pytest.mark.parametrize("count", [0, 15, 16, 700, 70_000])
def test_a_header_tells_how_many_values_are_inside(count: int) -> None:
    for value in ([1] * count, dict.fromkeys(range(count))):
        data = encode(value)
        told, start = count_of(data)
        assert told == count
        if isinstance(value, list):
            assert data[start:] == b"\x01" * count


@pytest.mark.parametrize("data", [b"", *map(encode, (7, -1, 2.5, None, "x", "x" * 40, b"x"))])
def test_a_scalar_holds_nothing(data: bytes) -> None:
    with pytest.raises(ValueError, match="neither a map nor an array"):
        count_of(data)


def test_the_text_of_msgspec_is_the_one_that_is_read() -> None:
    with pytest.raises(msgspec.DecodeError, match="trailing characters") as trailing:
        decode(b"\x01\x02")
    assert messagepack._first_end(trailing.value) == 1
    assert first_value(decode, b"\x01\x02") == 1
