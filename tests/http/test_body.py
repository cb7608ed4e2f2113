"""Where a body ends, whatever pieces it comes in, and how much of a request's is kept."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_selector.http.body import ChunkedBody, RequestBody, SizedBody, UnboundedBody
from lean_selector.http.head import CHUNKED, Limits

LIMITS = Limits(max_body_bytes=10, max_head_bytes=40)
END = b"0\r\n\r\n"


# What both halves of HTTP read.

SIZES = st.lists(st.integers(1, 40), max_size=12)


def passed(body: UnboundedBody, data: bytes, cuts: list[int]) -> tuple[int, bytes]:
    """How much of `data` belonged to the body, fed in pieces, and its payload."""
    payload: list[bytes] = []
    at = taken = 0
    for cut in [*cuts, len(data)]:
        piece = data[at : at + cut]
        at += len(piece)
        if not piece or body.is_done or body.error is not None:
            continue
        taken += body.read(piece, 0, payload)
    return taken, b"".join(payload)


def wire_of(pieces: list[bytes], extension: bytes = b"", trailer: bytes = b"") -> bytes:
    chunks = [b"%x%b\r\n%b\r\n" % (len(each), extension, each) for each in pieces]
    return b"".join(chunks) + b"0\r\n" + trailer + b"\r\n"


@given(
    st.lists(st.binary(min_size=1, max_size=30), max_size=8),
    st.binary(max_size=5),
    SIZES,
    st.sampled_from([b"", b";a=b", b' ;a="b"', b";last"]),
    st.sampled_from([b"", b"x: y\r\n"]),
)
def test_chunks_end_where_they_say(
    pieces: list[bytes], rest: bytes, cuts: list[int], extension: bytes, trailer: bytes
) -> None:
    body = wire_of(pieces, extension, trailer)
    framing = ChunkedBody()
    taken, payload = passed(framing, body + rest, cuts)
    assert framing.is_done
    assert framing.error is None
    assert (taken, payload) == (len(body), b"".join(pieces))


@pytest.mark.parametrize("cut", [1, 4])
def test_many_chunks_after_a_cut_one_are_all_passed(cut: int) -> None:
    body = wire_of([b"x"] * 2_000)
    assert passed(ChunkedBody(), body, [cut]) == (len(body), b"x" * 2_000)


@given(st.lists(st.binary(min_size=1, max_size=30), min_size=1), SIZES)
def test_chunks_that_are_cut_short_have_no_end(pieces: list[bytes], cuts: list[int]) -> None:
    framing = ChunkedBody()
    passed(framing, wire_of(pieces)[:-1], cuts)
    assert not framing.is_done


@given(st.binary(max_size=60), st.binary(max_size=9), SIZES)
def test_a_length_is_where_it_ends(body: bytes, rest: bytes, cuts: list[int]) -> None:
    framing = SizedBody(len(body))
    assert passed(framing, body + rest, cuts) == (len(body), body)
    assert framing.is_done


@given(st.binary(max_size=60), SIZES)
def test_without_either_all_belongs_to_it(body: bytes, cuts: list[int]) -> None:
    framing = UnboundedBody()
    assert passed(framing, body, cuts) == (len(body), body)
    assert not framing.is_done


def test_a_whole_piece_is_passed_on_as_it_is() -> None:
    data = b"x" * 100
    payload: list[bytes] = []
    SizedBody(200).read(data, 0, payload)
    assert payload[0] is data


@pytest.mark.parametrize(
    ("framing", "body", "rest"),
    [
        (SizedBody(5), b"hello", b"rest"),
        (SizedBody(0), b"", b"rest"),
        (ChunkedBody(), wire_of([b"he", b"llo"]), b"rest"),
        (UnboundedBody(), b"hello", b""),
    ],
    ids=["sized", "empty", "chunked", "unbounded"],
)
def test_a_body_whose_payload_nobody_wants_ends_where_it_says(
    framing: UnboundedBody, body: bytes, rest: bytes
) -> None:
    begin, others = body[:4], body[4:]
    assert framing.read(begin, 0, None) == len(begin)
    assert framing.read(others + rest, 0, None) == len(others)
    assert framing.is_done == bool(rest)


# What of a request is kept.


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
    return wire_of([data]).removesuffix(END)


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


def test_one_call_reads_a_bounded_number_of_chunks() -> None:
    wire = wire_of([b"x"] * 2_000)
    body = RequestBody(CHUNKED, Limits())
    at = body.feed(wire, 0)
    assert at < len(wire) / 2
    while at < len(wire):
        at = body.feed(wire, at)
    assert (body.framing.is_done, body.content) == (True, b"x" * 2_000)


@pytest.mark.parametrize(
    ("wire", "status", "words"),
    [
        pytest.param(b"x\r\n", 400, "malformed chunk size", id="no number"),
        pytest.param(b"\r\n", 400, "malformed chunk size", id="nothing"),
        pytest.param(b"-1\r\n", 400, "malformed chunk size", id="a sign"),
        pytest.param(b"0x1\r\n", 400, "malformed chunk size", id="a prefix"),
        pytest.param(b"1_0\r\n", 400, "malformed chunk size", id="an underscore"),
        pytest.param(b"1;\x00\r\n", 400, "malformed chunk size", id="a control character"),
        pytest.param(b"3;a\rb\r\nabc", 400, "malformed chunk size", id="a bare CR"),
        pytest.param(b"1" * 16 + b"\r\n", 400, "malformed chunk size", id="16 digits"),
        pytest.param(b"1\na", 400, "bare line feed", id="a line feed alone"),
        pytest.param(b"1\r\nab\r\n", 400, "stated size", id="data too long"),
        pytest.param(
            b"0\r\nno colon\r\n", 400, "malformed trailer", id="a trailer without a colon"
        ),
        pytest.param(b"0\r\na : b\r\n", 400, "malformed trailer", id="a space before the colon"),
        pytest.param(b"0\r\n: a\r\n", 400, "malformed trailer", id="a trailer without a name"),
        pytest.param(b"0\r\na\0b\r\n", 400, "malformed trailer", id="NUL in a trailer"),
        pytest.param(b"0\r\na: b\r\n c: d\r\n", 400, "malformed trailer", id="a folded trailer"),
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
