"""Messages that were right once: cut, damaged byte by byte, or with values that nobody expects."""

from typing import Any

import msgspec
from hypothesis import strategies as st

FRAGMENTS = [
    *(b'"', b"\\", b"{", b"}", b"[", b"]", b",", b":", b"null", b"true", b"-", b"0", b".", b" "),
    *(b"1e400", b"1e-400", b"-1e999", b"1" * 400, b"1" * 5000, b"18446744073709551616", b"-0"),
    *(b"1e0000000000000005", b"9223372036854775808", b"\\ud800", b"\\udc00\\ud800", b"\\u0000"),
    *(b"\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"\xef\xbb\xbf", b"[" * 3000, b'{"a":' * 3000),
    *(b'"block_hashes":', b'"sequence_hashes":', b'"block_hashes":[', b'"token_ids":null,'),
    *(b"\xc1", b"\xc7\x01\x01\x00", b"\xd6\xff\x00\x00\x00\x00", b"\xdd\xff\xff\xff\xff"),
    *(b"\xc6\xff\xff\xff\xff", b"\xca\x7f\x80\x00\x00", b"\xcb\x7f\xf8" + b"\x00" * 6, b"\x90" * 9),
    *(
        *(b"\xcf" + b"\xff" * 8, b"\xd3\x80" + b"\x00" * 7, b"\xc4\x03abc", b"\xa2\xff\xfe"),
        b"\x81\x90\xc0",
    ),
]


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """The body with bytes changed, dropped, repeated or put in, in up to four places."""
    body = whole
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(body)))
        end = draw(st.integers(at, min(len(body), at + 40)))
        piece = draw(
            st.one_of(
                st.sampled_from(FRAGMENTS),
                st.binary(max_size=4),
                st.just(body[at:end] * 2),
                st.just(b""),
            )
        )
        body = body[:at] + piece + body[end:]
        if draw(st.booleans()):
            body = body[: draw(st.integers(0, len(body)))]
    return body


ODD: list[Any] = [
    *(None, True, -1, 0, 1, 2**31, 2**32, 2**63 - 1, -(2**63), 2**64 - 1, float("nan"), 1e308),
    *("", "GPU", "x" * 300, "\x00", b"", b"\xff" * 9, [], {}, [[]], {"": None}, [1] * 70),
]


def odd(value: Any) -> st.SearchStrategy[Any]:
    """The value of a message with some of what is in it, or all of it, replaced, left out or
    repeated."""
    return st.one_of(st.just(value), _changed(value), _changed(value).flatmap(_changed))


def _changed(value: Any) -> st.SearchStrategy[Any]:
    other: st.SearchStrategy[Any] = st.sampled_from(ODD)
    if isinstance(value, dict) and value:
        return other | st.sampled_from(list(value)).flatmap(lambda key: _in_map(value, key))
    if isinstance(value, list) and value:
        places = st.integers(0, len(value) - 1)
        return other | places.flatmap(lambda at: _in_list(value, at))
    return other


def _in_map(value: dict[Any, Any], key: Any) -> st.SearchStrategy[Any]:
    without = {each: value[each] for each in value if each != key}
    return st.just(without) | _changed(value[key]).map(lambda new: {**value, key: new})


def _in_list(value: list[Any], at: int) -> st.SearchStrategy[Any]:
    before, after = value[:at], value[at + 1 :]
    return st.one_of(
        st.just(before + after),
        st.just([*before, value[at], value[at], *after]),
        _changed(value[at]).map(lambda new: [*before, new, *after]),
    )


def messages(golden: list[bytes]) -> st.SearchStrategy[bytes]:
    """MessagePack messages that begin as one of these."""

    def of(whole: bytes) -> st.SearchStrategy[bytes]:
        try:
            value = msgspec.msgpack.decode(whole)
        except (ValueError, UnicodeDecodeError):
            return damaged(whole)
        return st.just(whole) | damaged(whole) | odd(value).map(msgspec.msgpack.encode)

    return st.sampled_from(golden).flatmap(of)
