"""Lists of integers: of a JSON text every reader makes the same; sets of worker ids are kept."""

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lean_selector.core.numbers import MAX_RANKS
from lean_selector.wire.scalars import (
    KEPT_BYTES,
    allowed_workers,
    hashes_from_json,
    packed_by_msgspec,
    packed_signed,
    packed_u32,
)

I64_MIN, I64_MAX, U64_MAX = -(2**63), 2**63 - 1, 2**64 - 1
U32_MAX = 2**32 - 1


def plainly(text: bytes, least: int, most: int, width: int) -> bytes | None:
    """What such a list is when every integer of it is looked at."""
    try:
        integers = msgspec.json.decode(text, type=list[int])
    except msgspec.DecodeError:
        return None
    if not all(least <= value <= most for value in integers):
        return None
    return b"".join(value.to_bytes(width, "little", signed=least < 0) for value in integers)


def check(text: bytes) -> None:
    signed, tokens = plainly(text, I64_MIN, I64_MAX, 8), plainly(text, 0, U32_MAX, 4)
    assert packed_signed(text) == packed_by_msgspec(text, "q") == signed
    assert packed_u32(text) == packed_by_msgspec(text, "I") == tokens
    hashes = signed or plainly(text, 0, U64_MAX, 8)
    if hashes is not None:
        assert hashes_from_json("f", msgspec.Raw(text)) == hashes


edges = st.sampled_from(
    [
        *(I64_MIN - 1, I64_MIN, -1, 0, 1, U32_MAX, U32_MAX + 1, I64_MAX, I64_MAX + 1, U64_MAX),
        U64_MAX + 1,
    ]
)
integers = st.one_of(edges, st.integers(0, U32_MAX), st.integers(I64_MIN, I64_MAX)).map(str)
ODD_ITEMS = [
    *(
        *("-0", "0.0", "-0.0", "1.0", "1.5", "1e2", "1E0", "1e400", "1e-400"),
        "18446744073709551616000",
    ),
    *("00", "01", "-01", "-", "+", "+1", ".5", "5.", "0x1", "1_0", "1a", "NaN", "Infinity", "//"),
    *("true", "null", "[]", "[1]", "{}", '{"a":1}', '{"a":[1]}', "1/**/", "é"),
    *('""', '"1"', '"a,b"', '"a]"', '"]"', '"["', '"\\""'),
]
odd_items = st.sampled_from(["", *ODD_ITEMS])
blanks = st.sampled_from(["", "", "", " ", "\n\t\r ", "\f", "\v", "\0", "\u00a0", "\ufeff"])
items = st.builds("{}{}{}".format, blanks, st.one_of(integers, integers, odd_items), blanks)
texts = st.builds(
    "{}{}{}{}".format,
    st.sampled_from(["[", "[", "[", "[[", "", "{", '"[', " [", "\ufeff["]),
    st.lists(items, max_size=8).map(",".join),
    st.sampled_from(["]", "]", "]", "", ",]", "]]", "}", "] ", "]\n", "]\f", "]x", "],1]", '"]']),
    blanks,
).map(str.encode)
# Cut anywhere, or with bytes that are no UTF-8 in it.
broken = st.builds(
    lambda text, at, put: text[:at] + put + text[at:],
    texts,
    st.integers(0, 40),
    st.sampled_from([b"", b"", b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x00", b"[", b"]", b",", b"-"]),
)


@given(broken)
@example(b"")
@example(b"[]")
@example(b"[ \t\r\n]")
@example(b"[[1],[2]]")  # simdjson flattens it
@example(b"\xef\xbb\xbf[1]")  # and skips a byte order mark
@example(b"[9223372036854775808]")
@example(b"[-9223372036854775809]")
@example(b"[4294967296]")
@example(b"[" * 100_000)
def test_every_reader_makes_the_same_of_a_text(text: bytes) -> None:
    check(text)


# A text for which no parser is kept.
LONG = ",".join(map(str, range(10**9, 10**9 + KEPT_BYTES // 8))).encode()


@pytest.mark.parametrize("form", [b" [%b] ", b"[%b,-1]", b"[%b,9223372036854775808]", b"[%b,[1]]"])
def test_a_long_text_is_read_alike(form: bytes) -> None:
    check(form % LONG)


# -- sets of workers, and what is remembered of them -----------------------------------------------


def test_a_list_that_is_sent_again_is_the_same_set_and_not_only_an_equal_one() -> None:
    first = allowed_workers(list(range(1_000, 1_064)))
    assert first == frozenset(range(1_000, 1_064))
    assert allowed_workers(list(range(1_000, 1_064))) is first
    assert allowed_workers(list(range(1_063, 999, -1))) == first
    assert allowed_workers([*range(1_000, 1_063), 5]) == {*range(1_000, 1_063), 5}


@pytest.mark.parametrize("count", [0, 1, 8, 9, MAX_RANKS, MAX_RANKS + 1])
def test_sets_of_every_size_are_what_was_named(count: int) -> None:
    for _ in range(2):
        assert allowed_workers([*range(count), *range(count // 2)]) == frozenset(range(count))


def test_what_is_kept_is_bounded() -> None:
    many = list(range(MAX_RANKS + 1))
    assert allowed_workers(many) is not allowed_workers(many)
    first = allowed_workers(list(range(64)))
    for other in range(100):
        allowed_workers(list(range(other + 1, other + 65)))
    assert allowed_workers(list(range(64))) is not first


@pytest.mark.parametrize("count", [0, 100])
def test_an_id_beyond_64_bits_is_refused_each_time(count: int) -> None:
    for _ in range(2):
        with pytest.raises(msgspec.ValidationError, match=r"`\$\.allowed_worker_ids\[\.\.\.\]`"):
            allowed_workers([*range(count), U64_MAX + 1])
    assert U64_MAX in allowed_workers([*range(count), U64_MAX])
