"""Where values end, found window by window, against msgspec's reading of the whole."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.wire import messagepack_pieces
from lean_selector.wire.messagepack_pieces import (
    NotMessagePack,
    array_header,
    end_within,
    header,
    passed,
    pieces,
)
from lean_selector.wire.messagepack_values import Piece
from tests.kv_batches import small_windows

encode = msgspec.msgpack.encode

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


def end_of(data: bytes, at: int) -> int:
    walk = passed(data, at)
    while True:
        try:
            next(walk)
        except StopIteration as stop:
            return int(stop.value)


def cut(data: bytes, at: int, count: int, most: int) -> list[Piece]:
    return [piece for piece in pieces(data, at, count, most) if piece is not None]


@given(st.lists(VALUES, max_size=6), st.integers(1, 8), st.integers(40, 120))
def test_pieces_are_the_values_in_order(values: list[object], most: int, window: int) -> None:
    encoded = [encode(value) for value in values]
    data = b"before" + b"".join(encoded) + b"\xc1after"
    with small_windows(window):
        found = cut(data, 6, len(values), most)
        ends = [end_of(data, piece.start) for piece in found]
    at = 6
    for piece, end in zip(found, ends, strict=True):
        of_piece, encoded = encoded[: piece.count], encoded[piece.count :]
        assert (piece.start, piece.end) == (at, at + sum(map(len, of_piece)))
        assert 1 <= piece.count <= most
        assert piece.count == 1 or piece.end - piece.start <= window
        assert end == at + len(of_piece[0])
        at = piece.end
    assert not encoded


@given(st.binary(max_size=200), st.integers(0, 300), st.integers(40, 60))
def test_any_bytes_end_or_are_refused(data: bytes, count: int, window: int) -> None:
    with small_windows(window):
        try:
            found = cut(data, 0, count, 16)
        except NotMessagePack:
            return
    assert sum(piece.count for piece in found) == count
    whole = array_header(count) + data[: found[-1].end if found else 0]
    assert bytes(msgspec.msgpack.decode(whole, type=msgspec.Raw)) == whole


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\xdd\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff\x01",
        b"\xc6\x00\x00\x00\x09x",
        b"\xdb\x00\x00\x00\x09x",
        b"\xc9\x00\x00\x00\x00",
        b"\x92\x01",
        b"\x92\x01\xc1",
        b"\x91" * 100_000,
    ],
    ids=lambda data: data[:8].hex(),
)
@pytest.mark.parametrize("window", [40, 1 << 16])
def test_what_ends_too_early_is_refused(data: bytes, window: int) -> None:
    with small_windows(window), pytest.raises(NotMessagePack):
        end_of(data, 0)


@pytest.mark.parametrize(
    ("value", "inside"),
    [
        ([], 0),
        ([1] * 15, 15),
        ([1] * 16, 16),
        ([1] * 700, 700),
        ([1] * 70_000, 70_000),
        ({}, 0),
        ({1: 2}, 2),
        ({n: n for n in range(20)}, 40),
        ({n: n for n in range(700)}, 1400),
    ],
    ids=lambda value: str(value)[:10],
)
def test_a_header_tells_how_many_values_are_inside(value: object, inside: int) -> None:
    data = b"." + encode(value)
    count, start = header(data, 1)
    assert count == inside
    end = start
    for _ in range(count):
        end = end_of(data, end)
    assert end == len(data)


@pytest.mark.parametrize(
    "value", [7, -1, 2.5, None, "x" * 40, "x" * 300, "x" * 70_000, b"x" * 40, b"x" * 300]
)
def test_a_scalar_is_its_own_end(value: object) -> None:
    data = encode(value)
    assert header(data + b"more", 0) == (0, len(data))


def test_no_step_looks_at_more_than_a_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of a step is bounded by what it looks at; their number grows as the message."""
    window = 1000
    looks = 0
    skip = messagepack_pieces._skip

    def counting(data: bytes | memoryview) -> msgspec.Raw:
        nonlocal looks
        looks += 1
        assert len(data) <= window + 5
        return skip(data)

    def steps(data: bytes) -> int:
        nonlocal looks
        count = 0
        for _ in pieces(data, 0, 1, 1):
            assert looks <= 3, "a step is a look or two"
            looks = 0
            count += 1
        return count

    monkeypatch.setattr(messagepack_pieces, "_skip", counting)
    with small_windows(window):
        values: list[list[object]] = [
            [None],
            [[1, 2, 3]],
            [{"a": [1]}],
            ["x" * 300],
            [b"x" * 2000],
            [[[[]]]],
        ]
        for value in values:
            size = len(encode(value))
            few, many = (encode(value * (size_of // size)) for size_of in (100_000, 400_000))
            assert steps(many) <= 5 * steps(few)


def test_the_texts_of_msgspec_are_those_that_are_read() -> None:
    with pytest.raises(msgspec.DecodeError, match="trailing characters") as trailing:
        msgspec.msgpack.decode(b"\x01\x02")
    assert messagepack_pieces.trailing_at(trailing.value) == 1
    with pytest.raises(msgspec.DecodeError, match=messagepack_pieces._TRUNCATED):
        msgspec.msgpack.decode(b"\x92\x01")
    assert end_within(b"\x01\x02", 0, 2) == 2
