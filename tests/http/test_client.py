"""The client half of HTTP: answers whose heads have no bounds, and which connections are kept."""

import pytest

from lean_selector.http.body import ChunkedBody, SizedBody, UnboundedBody
from lean_selector.http.client import (
    MOST_HEAD_BYTES,
    AnswerHead,
    ClientConnection,
    MalformedAnswer,
    Upstream,
    head_of,
)
from tests.http.test_protocol import FakeTransport

NO_BODY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"


class Heard:
    """What a receiver is told."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.is_over = False
        self.lost: list[str] = []

    def on_head(self, head: AnswerHead) -> bool:
        self.statuses.append(head.status)
        return True

    def on_body(self, data: bytes, is_last: bool) -> None:
        pass

    def on_end(self) -> None:
        self.is_over = True

    def on_lost(self, reason: str, is_stale: bool) -> None:
        self.lost.append(reason)


def asked(upstream: Upstream, body: bytes = b"x") -> tuple[ClientConnection, FakeTransport, Heard]:
    connection, transport, heard = ClientConnection(upstream), FakeTransport(), Heard()
    connection.connection_made(transport)
    connection.send(b"POST / HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body), body, heard)
    return connection, transport, heard


@pytest.mark.parametrize("unwritten", [0, 1])
def test_a_connection_is_kept_only_where_the_whole_request_was_taken(unwritten: int) -> None:
    """The next request on it would stand behind what was not read of this one."""
    upstream = Upstream("http://w:1")
    connection, transport, heard = asked(upstream)
    transport.unsent = unwritten
    connection.data_received(NO_BODY)
    assert (heard.statuses, heard.is_over, heard.lost) == ([200], True, [])
    assert upstream.kept() is (None if unwritten else connection)
    assert connection.is_open != bool(unwritten)


@pytest.mark.parametrize(
    ("status", "size", "is_kept"),
    [(413, 1 << 20, False), (500, 1 << 16, False), (413, 100, True), (200, 1 << 20, True)],
)
def test_a_connection_that_refused_a_long_body_is_not_kept(
    status: int, size: int, is_kept: bool
) -> None:
    """The kernel may have taken what the other side never reads."""
    upstream = Upstream("http://w:1")
    connection, _, heard = asked(upstream, b"x" * size)
    connection.data_received(NO_BODY.replace(b"200", b"%d" % status))
    assert (heard.statuses, heard.is_over) == ([status], True)
    assert upstream.kept() is (connection if is_kept else None)


def test_a_head_has_a_bound_also_when_it_comes_at_once() -> None:
    connection, _, heard = asked(Upstream("http://w:1"))
    line = b"x: %b\r\n" % (b"a" * MOST_HEAD_BYTES)
    connection.data_received(NO_BODY[:-2] + line + b"\r\n")
    assert (heard.statuses, len(heard.lost)) == ([], 1)
    assert str(MOST_HEAD_BYTES) in heard.lost[0]


@pytest.mark.parametrize("size", [1, 1 << 20])
def test_interim_answers_have_an_end(size: int) -> None:
    connection, _, heard = asked(Upstream("http://w:1"))
    interim = b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    connection.data_received(interim * 16 + NO_BODY)
    assert (heard.statuses, heard.lost) == ([200], [])
    connection.send(b"GET / HTTP/1.1\r\n\r\n", b"", heard)
    flood = interim * 10_000
    for at in range(0, 20 * len(interim), size):
        connection.data_received(flood[at : at + size])
        if heard.lost:
            break
    assert len(heard.lost) == 1
    assert not connection.is_open


def test_of_an_answer_s_lines_only_those_that_frame_it_are_kept() -> None:
    text = NO_BODY[:-2] + b"a: b\r\n" * 5_000 + b"\r\n"
    head = head_of(text, False)
    assert head is not None
    assert head.keeps
    assert head.lines.count(b"\r\na: b") == 5_000


KEEP = "connection: keep-alive"


def answer(status: str, *lines: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"HTTP/{version} {status}", *lines, "", ""]).encode()


@pytest.mark.parametrize(
    ("text", "answers_head", "kind", "keeps"),
    [
        (answer("200 OK", "content-length: 3"), False, SizedBody, True),
        (answer("200 OK", "Content-Length: 3", "Connection: Close"), False, SizedBody, False),
        (answer("200 OK", "Transfer-Encoding: Chunked"), False, ChunkedBody, True),
        (answer("200 OK"), False, UnboundedBody, False),
        (answer("204 No"), False, SizedBody, True),
        (answer("304 No", "content-length: 9"), False, SizedBody, True),
        (answer("200 OK", "content-length: 9"), True, SizedBody, True),
        (answer("200 OK", "content-length: 3", version="1.0"), False, SizedBody, False),
        (answer("200 OK", "content-length: 3", KEEP, version="1.0"), False, SizedBody, True),
        (
            answer("200 OK", "transfer-encoding: chunked", KEEP, version="1.0"),
            False,
            ChunkedBody,
            False,
        ),
    ],
)
def test_where_an_answer_s_body_ends(
    text: bytes, answers_head: bool, kind: type[object], keeps: bool
) -> None:
    head = head_of(text, answers_head)
    assert head is not None
    assert isinstance(head.body, kind)
    assert head.keeps == keeps
    # a proxy sends its own version
    assert head.start + head.lines + b"\r\n\r\n" == text.replace(b"HTTP/1.0", b"HTTP/1.1")


@pytest.mark.parametrize(
    "text",
    [
        *(b"SSH-2.0-x\r\n\r\n", b"\r\n" + NO_BODY, NO_BODY.replace(b"1.1", b"0.9")),
        *(NO_BODY.replace(b"1.1", b"2.0"), NO_BODY.replace(b"200", b"099")),
        NO_BODY.replace(b"OK", b"O\x01\x00K"),
        answer("101 Other", "connection: upgrade", "upgrade: h2c", "content-length: 0"),
        answer("200 OK", "a b: c"),
        answer("200 OK", "content-length: 3", "content-length: 4"),
        answer("200 OK", "transfer-encoding: gzip"),
    ],
)
def test_what_is_no_answer_of_http_1_is_not_passed_on(text: bytes) -> None:
    with pytest.raises(MalformedAnswer):
        head_of(text, False)


def test_a_status_line_without_a_reason_is_mended() -> None:
    head = head_of(b"HTTP/1.1 200\r\ncontent-length: 3\r\n\r\n", False)
    assert head is not None
    assert head.start == b"HTTP/1.1 200 "


def test_a_head_may_answer_head_that_frames_no_body() -> None:
    text = answer("200 OK", "transfer-encoding: gzip")
    assert head_of(text, True) is not None
    with pytest.raises(MalformedAnswer):
        head_of(text, False)
