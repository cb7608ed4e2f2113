"""Streams that want to be read in two ways: nothing is ever framed but as the RFC frames it, and
where a stream is cut never matters.

Run `pytest tests/http/test_hostile_streams.py --explore` to look for others.
"""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lean_selector.http.head import Limits, Request
from lean_selector.http.reader import RequestReader
from tests.http.strict_framing import Framed, framed
from tests.http.test_protocol import Client

SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
LENGTHS = {
    "no length": b"",
    **{
        f"length {value!r}": b"content-length: %b\r\n" % value
        for value in (
            *(b"5", b"05", b"5 ", b"\t5", b"+5", b"-5", b"5,5", b"5, 6", b"0x5", b"5;", b"5 5"),
            *(b"", b"5.0", b"1_0", b"\xef\xbc\x95", b"18446744073709551621", b"5\x00", b"\x0b5"),
        )
    },
    "length before a colon with a blank": b"content-length : 5\r\n",
    "length before a colon with a tab": b"content-length\t: 5\r\n",
    "length in a folded line": b"x: y\r\n content-length: 5\r\n",
    "length behind a bare LF": b"x: y\ncontent-length: 5\r\n",
    "length behind a bare CR": b"x: y\rcontent-length: 5\r\n",
    "length under another name": b"content_length: 5\r\n",
    "one length twice": b"content-length: 5\r\ncontent-length: 5\r\n",
    "two lengths": b"content-length: 5\r\nContent-Length: 6\r\n",
}
CODINGS = {
    "no coding": b"",
    **{
        f"coding {value!r}": b"transfer-encoding: %b\r\n" % value
        for value in (
            *(b"chunked", b"CHUNKED", b"chunked ", b"\tchunked", b"\x0bchunked", b"chunked\x00"),
            *(b"chunked, identity", b"identity, chunked", b"identity", b"xchunked", b"chunkedx"),
            *(b"gzip, chunked", b'"chunked"', b"chunked;q=1", b",chunked", b""),
        )
    },
    "coding before a colon with a blank": b"transfer-encoding : chunked\r\n",
    "coding in a folded line": b"transfer-encoding:\r\n chunked\r\n",
    "coding behind a bare LF": b"x: y\ntransfer-encoding: chunked\r\n",
    "coding under another name": b"transfer_encoding: chunked\r\n",
    "one coding twice": b"transfer-encoding: chunked\r\ntransfer-encoding: chunked\r\n",
    "two codings": b"transfer-encoding: identity\r\ntransfer-encoding: chunked\r\n",
}
# Read as chunks it ends before the other request, read by length it may end within it.
BODY = b"0\r\n\r\n" + SMUGGLED
PLAIN = {  # what nobody may refuse: the bodies
    ("no length", "no coding"): b"",
    ("length b'5'", "no coding"): b"0\r\n\r\n",
    ("length b'05'", "no coding"): b"0\r\n\r\n",
    ("no length", "coding b'chunked'"): b"",
    ("no length", "coding b'CHUNKED'"): b"",
}


def read(*pieces: bytes) -> tuple[list[Framed], int | None, list[object]]:
    """What was taken, the status of what was refused, and what the heads of the taken say."""
    reader = RequestReader(Limits())
    requests: list[Request] = [request for piece in pieces for request in reader.feed(piece)]
    heads: list[object] = []
    for each in requests:
        block = each.headers
        heads.append((block.content_type, block.accept, block.traceparent, block.is_http10))
        heads.append((each.keep_alive, each.credential, each.body_too_large))
    taken = [
        Framed(
            bytes(each.method),
            bytes(each.path) + (b"" if each.query is None else b"?" + each.query),
            bytes(each.body),
        )
        for each in requests
    ]
    return taken, None if reader.error is None else reader.error.status, heads


def pieces_of(stream: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    return [stream[start:end] for start, end in itertools.pairwise(places)]


def check(stream: bytes, cuts: list[int]) -> list[Framed]:
    """What was taken of it, which is how the stream begins, in whatever pieces it comes."""
    taken, status, heads = read(stream)
    known = framed(stream)
    assert taken == known[: len(taken)]
    assert len(taken) == len(known) or status is not None or not _may_go_on(stream)
    assert read(*pieces_of(stream, cuts)) == (taken, status, heads)
    byte_by_byte = read(*(stream[at : at + 1] for at in range(len(stream))))
    assert byte_by_byte == (taken, status, heads)
    return taken


def _may_go_on(stream: bytes) -> bool:
    """Whether nothing in it asks for the end of the connection."""
    words = stream.lower()
    return not any(word in words for word in (b"close", b"upgrade", b"http/1.0", b"connect"))


@pytest.mark.parametrize("coding", CODINGS)
def test_a_request_within_a_body_stays_there(coding: str) -> None:
    for length in LENGTHS:
        for version in (b"1.1", b"1.0"):
            head = b"POST /a HTTP/%b\r\nhost: x\r\n" % version
            for fields in (LENGTHS[length] + CODINGS[coding], CODINGS[coding] + LENGTHS[length]):
                stream = head + fields + b"\r\n" + BODY
                taken = check(stream, [len(head), len(stream) - len(SMUGGLED)])
                if not framed(stream):
                    assert read(stream)[1] in (400, 501), fields
                if (length, coding) in PLAIN and version == b"1.1":
                    body = PLAIN[length, coding]
                    assert taken[:1] == [Framed(b"POST", b"/a", body)]


HEADS = (
    b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n",
    b"GET /b?c=d HTTP/1.1\r\nhost: x\r\nconnection: keep-alive\r\n\r\n",
    b"POST /c HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n\r\nabc",
    b"POST /d HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1;x=y\r\na\r\n0\r\n\r\n",
    b"POST /e HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n0\r\nt: u\r\n\r\n",
    b"GET /f HTTP/1.0\r\nconnection: keep-alive\r\n\r\n",
    b"GET /g HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
    b"FOO /h HTTP/1.1\r\nhost: x\r\ncontent-type: a/b\r\nACCEPT: */*\r\ntraceparent: 00-1\r\n\r\n",
    b"GET /h HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\ncontent-length: 1\r\n\r\nz",
    b"\r\nGET /i HTTP/1.1\r\nhost: x\r\nauthorization: Bearer t\r\n\r\n",
    SMUGGLED,
)
JUNK = (
    *(b"\r", b"\n", b"\r\n", b" ", b"\t", b"\0", b"\x0b", b":", b";", b",", b"0", b"5", b"f"),
    *(b"0\r\n\r\n", b"content-length: 5\r\n", b"transfer-encoding: chunked\r\n", b"\r\n\r\n"),
    *(b"Transfer-Encoding : chunked\r\n", b" chunked\r\n", b"content-length: 0\r\n", b"\x80"),
    *(b"connection: close\r\n", b"HTTP/1.0", b"HTTP/1.1", b"FFFFFFFFFFFFFFFFF", SMUGGLED),
)


@st.composite
def hostile(draw: st.DrawFn) -> bytes:
    """Requests behind each other, with junk put in, taken out or repeated in some places."""
    stream = b"".join(draw(st.lists(st.sampled_from(HEADS), min_size=1, max_size=4)))
    for _ in range(draw(st.integers(0, 3))):
        at = draw(st.integers(0, len(stream)))
        end = draw(st.integers(at, min(len(stream), at + 12)))
        piece = draw(st.sampled_from((*JUNK, b"", stream[at:end] * 2)) | st.binary(max_size=3))
        stream = stream[:at] + piece + stream[end:]
    return stream


@settings(max_examples=400)
@given(hostile(), st.lists(st.integers(0, 300), max_size=6))
def test_nothing_is_framed_but_as_the_rfc_does(stream: bytes, cuts: list[int]) -> None:
    check(stream, cuts)


def answers(pieces: list[bytes]) -> tuple[bytes, bool]:
    """All that a connection writes, and whether more may follow. 100 is left out, which is said
    only to a client that is still to send."""
    client = Client()
    written = b""
    for piece in pieces:
        written += client.send(piece)
        while client.soon:
            written += client.run_soon()
    return written.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b""), client.state == "open"


@settings(max_examples=300)
@given(hostile(), st.lists(st.integers(0, 300), max_size=6))
@example(HEADS[0] * 3, [1, 40])
def test_a_stream_is_answered_alike_in_any_pieces(stream: bytes, cuts: list[int]) -> None:
    pieces = pieces_of(stream, cuts)
    single = [stream[at : at + 1] for at in range(len(stream))]
    expected = answers([stream])
    assert answers(pieces) == expected
    assert answers(single) == expected
