"""Where a body ends, and how much of a request's is kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.http.body import RequestBody
from lean_selector.http.head import CHUNKED, Limits

LIMITS = Limits(max_body_bytes=10, max_head_bytes=40)
END = b"0\r\n\r\n"


def feed(body: RequestBody, *pieces: bytes) -> bytes:
    """Feeds pieces one after another; returns what was not taken of the last."""
    rest = b""
    for piece in pieces:
        rest = piece[body.feed(piece, 0) :]
    return rest


def chunked(*pieces: bytes) -> RequestBody:
    body = RequestBody(CHUNKED, LIMITS)
    feed(body, *pieces)
    return body


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


# A length told beforehand.


def test_a_sized_body_ends_after_its_length_and_leaves_the_rest() -> None:
    body = RequestBody(3, LIMITS)
    assert feed(body, b"abGET") == b"ET"
    assert (body.framing.is_done, body.content, body.wire_bytes) == (True, b"abG", 3)


def test_a_sized_body_begins_where_it_is_told() -> None:
    body = RequestBody(2, LIMITS)
    assert body.feed(b"head body", 5) == 7
    assert body.content == b"bo"


def test_a_body_in_one_piece_is_not_copied() -> None:
    piece = b"0123456789"
    body = RequestBody(10, LIMITS)
    feed(body, piece)
    assert body.content is piece


# Chunks.


def test_extensions_and_trailers_are_dropped() -> None:
    body = chunked(b'3 ;a="b"\r\nabc\r\n0;last\r\ndigest: x\r\n\r\n')
    assert (body.framing.is_done, body.content, body.framing.error) == (True, b"abc", None)


@pytest.mark.parametrize("tail", [b"2\r\nde", b"2\r\nde\r", b"2\r", b"2", b""])
def test_chunks_that_are_here_are_taken_and_the_one_that_is_not_waits(tail: bytes) -> None:
    wire = chunk(b"a") + chunk(b"bc") + tail
    body = chunked(wire)
    assert (bytes(body.content), body.wire_bytes) == (b"abc" + tail[3:5], len(wire))
    rest = (chunk(b"de") + END)[len(tail) :]
    assert feed(body, rest) == b""
    assert (body.framing.is_done, bytes(body.content), body.framing.error) == (True, b"abcde", None)


@pytest.mark.parametrize("malformed", [b"2\r\ndef", b"2\r\nde\n\r", b"2\nde\r\n", b"g\r\n"])
def test_a_malformed_chunk_behind_good_ones_is_an_error(malformed: bytes) -> None:
    body = chunked(chunk(b"a") * 3 + malformed + chunk(b"b") + END)
    assert body.framing.error is not None
    assert body.framing.error.status == 400
    assert not body.framing.is_done


@given(st.lists(st.binary(min_size=1, max_size=3), max_size=3), st.integers(1, 7))
def test_it_does_not_matter_how_chunks_arrive(parts: list[bytes], step: int) -> None:
    wire = b"".join(map(chunk, parts)) + END
    body = chunked(*(wire[i : i + step] for i in range(0, len(wire), step)))
    assert (body.framing.is_done, bytes(body.content), body.framing.error) == (
        True,
        b"".join(parts),
        None,
    )
    assert body.wire_bytes == len(wire)


@pytest.mark.parametrize(
    ("wire", "status", "words"),
    [
        pytest.param(b"x\r\n", 400, "malformed chunk size", id="no number"),
        pytest.param(b"\r\n", 400, "malformed chunk size", id="nothing"),
        pytest.param(b"-1\r\n", 400, "malformed chunk size", id="a sign"),
        pytest.param(b"0x1\r\n", 400, "malformed chunk size", id="a prefix"),
        pytest.param(b"1_0\r\n", 400, "malformed chunk size", id="an underscore"),
        pytest.param(b"1;\x00\r\n", 400, "malformed chunk size", id="a control character"),
        pytest.param(b"1" * 16 + b"\r\n", 400, "malformed chunk size", id="16 digits"),
        pytest.param(b"1\na", 400, "bare line feed", id="a line feed alone"),
        pytest.param(b"1\r\nab\r\n", 400, "stated size", id="data too long"),
        pytest.param(
            b"0\r\nno colon\r\n", 400, "malformed trailer", id="a trailer without a colon"
        ),
        pytest.param(b"0\r\na : b\r\n", 400, "malformed trailer", id="a space before the colon"),
        pytest.param(b"0\r\n: a\r\n", 400, "malformed trailer", id="a trailer without a name"),
        pytest.param(
            b"0\r\n" + b"a: b\r\n" * 11, 431, "trailers too large", id="more trailers than a head"
        ),
        pytest.param(b"1;" + b"a" * 4096, 400, "line too long", id="a line without an end"),
        pytest.param(
            (b"1;" + b"a" * 3000 + b"\r\nx\r\n") * 6, 400, "extensions too long", id="extensions"
        ),
    ],
)
def test_what_the_grammar_does_not_allow_is_an_error(wire: bytes, status: int, words: str) -> None:
    body = chunked(wire)
    assert body.framing.error is not None
    assert (body.framing.error.status, body.framing.is_done) == (status, False)
    assert words in body.framing.error.text


def test_nothing_is_taken_behind_an_error() -> None:
    body = RequestBody(CHUNKED, LIMITS)
    assert feed(body, b"x\r\nGET /") == b"GET /"
    assert body.feed(b"GET /", 0) == 0
