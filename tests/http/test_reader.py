"""Bytes in, requests out: framing, limits, and what is refused. No socket, no loop."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lean_selector.http.head import HeaderBlocks, Limits, Request
from lean_selector.http.reader import RequestReader

LIMITS = Limits(max_body_bytes=100, max_head_bytes=1000, max_discard_bytes=400)

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
POST = (
    b"POST /select HTTP/1.1\r\nhost: x\r\nContent-Type: application/json\r\n"
    b"Content-Length: 2\r\n\r\n{}"
)
CHUNKED = b"POST /c HTTP/1.1\r\nhost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


def head(*lines: bytes) -> bytes:
    return b"\r\n".join((b"POST /a HTTP/1.1", b"host: x", *lines, b"", b""))


def read(*pieces: bytes, limits: Limits = LIMITS) -> tuple[list[Request], RequestReader]:
    reader = RequestReader(limits)
    return [request for piece in pieces for request in reader.feed(piece)], reader


def refusal(*pieces: bytes) -> int | None:
    """The status of the error that the pieces lead to; no request may have come through."""
    requests, reader = read(*pieces, limits=Limits(max_body_bytes=100, max_head_bytes=1000))
    assert not requests
    return None if reader.error is None else reader.error.status


def fault(reader: RequestReader) -> tuple[int, str] | None:
    return None if reader.error is None else (reader.error.status, reader.error.text)


def seen(request: Request) -> tuple[object, ...]:
    return (
        *(request.method, request.path, request.query, bytes(request.body), request.body_too_large),
        *(request.headers.content_type, request.headers.accept, request.headers.traceparent),
        *(request.headers.reservation_id, request.keep_alive, request.headers.is_http10),
    )


def test_a_request_carries_what_the_app_needs() -> None:
    (request,), reader = read(
        b"POST /a%2Fb?model_name=m&x HTTP/1.1\r\nHost: x\r\nCONTENT-TYPE: application/json\r\n"
        b"accept: text/plain\r\ntraceparent: 00-1-2-01\r\ncontent-length: 3\r\n\r\nabc"
    )
    assert seen(request) == (
        *(b"POST", b"/a%2Fb", b"model_name=m&x", b"abc", False, b"application/json", b"text/plain"),
        *(b"00-1-2-01", None, True, False),
    )
    assert reader.error is None
    assert not reader.is_unfinished


def test_repeated_headers_are_one_list() -> None:
    (request,), _ = read(
        head(
            b"accept: a/b", b"Accept: c/d", b"connection: upgrade", b"connection: x", b"upgrade: y"
        )
    )
    assert request.headers.accept == b"a/b, c/d"
    assert not request.keep_alive


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        pytest.param(b"/a?", b"/a", b"", id="empty query"),
        pytest.param(b"/a?b?c", b"/a", b"b?c", id="question mark in the query"),
        pytest.param(b"/a#f", b"/a", None, id="fragment"),
        pytest.param(b"/a?b#f?g", b"/a", b"b", id="fragment after a query"),
        pytest.param(b"http://h:1/a?b", b"/a", b"b", id="absolute form"),
        pytest.param(b"HTTP://h", b"/", None, id="absolute form without a path"),
        pytest.param(b"*", b"*", None, id="asterisk form"),
        pytest.param(b"h:443", b"h:443", None, id="authority form"),
        pytest.param("/caf\u00e9".encode(), "/caf\u00e9".encode(), None, id="bytes beyond ASCII"),
        pytest.param(b"//health", b"//health", None, id="kept as it is"),
    ],
)
def test_targets(target: bytes, path: bytes, query: bytes | None) -> None:
    (request,), _ = read(b"GET " + target + b" HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (request.path, request.query) == (path, query)


@pytest.mark.parametrize("method", [b"PATCH", b"FOO", b"get", b"M-SEARCH", b"CONNECT", b"PURGE"])
def test_any_method_reaches_the_app_which_knows_the_allowed_ones(method: bytes) -> None:
    requests, _ = read(method + b" /health HTTP/1.1\r\nhost: x\r\n\r\n" + GET)
    assert [request.method for request in requests] == [method, b"GET"]


@pytest.mark.parametrize(
    ("version", "connection", "keep_alive"),
    [
        *((b"1.1", None, True), (b"1.1", b"close", False), (b"1.1", b"Keep-Alive", True)),
        *((b"1.1", b"x, CLOSE", False), (b"1.0", None, False), (b"1.0", b"keep-alive", True)),
        (b"1.0", b"Keep-Alive, close", False),
    ],
)
def test_keep_alive(version: bytes, connection: bytes | None, keep_alive: bool) -> None:
    lines = b"" if connection is None else b"connection: " + connection + b"\r\n"
    (request,), reader = read(b"GET / HTTP/" + version + b"\r\nhost: x\r\n" + lines + b"\r\n")
    assert request.keep_alive is keep_alive
    assert request.headers.is_http10 is (version == b"1.0")
    assert reader.is_finished is not keep_alive


def test_bytes_after_the_last_request_are_ignored() -> None:
    requests, reader = read(head(b"connection: close") + GET, GET)
    assert len(requests) == 1
    assert reader.error is None
    assert reader.has_unread_input
    _, reader = read(head(b"connection: close"))
    reader.hold(GET)
    assert (reader.has_unread_input, bytes(reader.waiting)) == (True, b"")


@pytest.mark.parametrize("framing", [b"content-length: 3", b"transfer-encoding: chunked"])
def test_a_request_for_an_upgrade_keeps_its_body_and_is_the_last(framing: bytes) -> None:
    body = b"abc" if b"length" in framing else b"3\r\nabc\r\n0\r\n\r\n"
    requests, _ = read(head(b"connection: upgrade", b"upgrade: h2c", framing) + body + GET)
    assert [(bytes(r.body), r.keep_alive) for r in requests] == [(b"abc", False)]


@pytest.mark.parametrize(
    ("status", "data"),
    [
        pytest.param(400, b"GET\r\n\r\n", id="no target"),
        pytest.param(400, b"GET /a\r\n\r\n", id="no version"),
        pytest.param(400, b"GET  /a HTTP/1.1\r\nhost: x\r\n\r\n", id="two spaces"),
        pytest.param(400, b"GET /a b HTTP/1.1\r\nhost: x\r\n\r\n", id="space in the target"),
        pytest.param(400, b"GET /a\rb HTTP/1.1\r\nhost: x\r\n\r\n", id="bare CR in the target"),
        pytest.param(400, b"GET /a HTTP/1.1 \r\n\r\n", id="space after the version"),
        pytest.param(400, b"GET /a HTTP/1.1\n\n\r\n\r\n", id="bare LF"),
        pytest.param(400, b"GET /a FTP/1.1\r\n\r\n", id="another protocol"),
        pytest.param(400, b"G(T /a HTTP/1.1\r\nhost: x\r\n\r\n", id="not a token"),
        pytest.param(400, b"\x16\x03\x01\x02\x00", id="TLS hello"),
        pytest.param(400, b"nonsense\r\n" + b"x" * 3000, id="not a request line, and long"),
        pytest.param(505, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="HTTP/2 preface"),
        pytest.param(505, b"GET /a HTTP/1.2\r\n\r\n", id="HTTP/1.2"),
        pytest.param(505, b"GET /a HTTP/0.9\r\n\r\n", id="HTTP/0.9"),
        pytest.param(505, b"GET /a HTTP/3.0\r\n\r\n", id="HTTP/3.0"),
        pytest.param(400, head(b": x"), id="no header name"),
        pytest.param(400, head(b"x: a\0b"), id="NUL in a value"),
        pytest.param(400, head(b"x: a\rb"), id="bare CR in a value"),
        pytest.param(400, head(b"x: a\nb: c"), id="bare LF between headers"),
        # What a proxy in front may frame in another way is in test_hostile_streams.py.
        pytest.param(501, head(b"transfer-encoding: gzip, chunked"), id="two codings"),
        pytest.param(
            400,
            b"POST /a HTTP/1.0\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            id="chunked in 1.0",
        ),
        # The grammar of chunks is in test_body.py.
        pytest.param(431, CHUNKED + b"0\r\n" + b"a: b\r\n" * 300, id="endless trailers"),
        pytest.param(
            414, b"GET /" + b"a" * 1000 + b" HTTP/1.1\r\nhost: x\r\n\r\n", id="target too long"
        ),
        pytest.param(414, b"GET /" + b"a" * 1000, id="unfinished target too long"),
        pytest.param(431, head(b"a: " + b"b" * 1000), id="header section too large"),
        pytest.param(431, head(b"a: " + b"b" * 1000)[:-2], id="unfinished section too large"),
        pytest.param(431, head(*[b"a: b"] * 101), id="too many headers"),
    ],
)
def test_refused_in_one_piece_and_byte_by_byte(status: int, data: bytes) -> None:
    assert refusal(data) == status
    assert refusal(*(data[i : i + 1] for i in range(len(data)))) == status


def test_a_hundred_headers_are_enough() -> None:
    (request,), _ = read(head(*[b"a: b"] * 99))  # and the host
    assert request.path == b"/a"


def test_requests_before_an_error_are_delivered_and_none_after_it() -> None:
    requests, reader = read(GET + POST + b"nonsense\r\n" + GET, GET)
    assert [request.path for request in requests] == [b"/health", b"/select"]
    assert reader.error is not None
    assert reader.error.status == 400
    assert reader.notice
    assert reader.has_unread_input


def test_the_text_of_an_error_fits_into_json() -> None:
    _, reader = read(head(b"content-length: 1", b"transfer-encoding: chunked"))
    assert reader.error is not None
    assert '"' not in reader.error.text
    assert reader.error.text.isprintable()


def test_a_body_at_the_limit_is_kept_and_one_byte_more_is_not() -> None:
    for size, too_large in ((100, False), (101, True)):
        sized = head(b"content-length: %d" % size) + b"x" * size
        chunked = CHUNKED + b"%x\r\n" % (size - 1) + b"x" * (size - 1) + b"\r\n1\r\nx\r\n0\r\n\r\n"
        for data in (sized, chunked):
            requests, reader = read(data[:60], data[60:], GET)
            assert [r.body_too_large for r in requests] == [too_large, False]
            assert len(requests[0].body) == (0 if too_large else size)
            assert requests[0].keep_alive
            assert not reader.is_finished


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(head(b"content-length: 401"), id="told beforehand"),
        pytest.param(CHUNKED + b"fff\r\n" + b"x" * 500, id="found out"),
    ],
)
def test_a_body_beyond_the_discard_limit_is_answered_without_reading_it(data: bytes) -> None:
    requests, reader = read(data, b"x" * 100)
    assert [(r.body_too_large, r.keep_alive, r.body) for r in requests] == [(True, False, b"")]
    assert reader.has_unread_input
    assert reader.error is None


def test_received_bytes_tells_how_far_an_unfinished_request_is() -> None:
    reader = RequestReader(LIMITS)
    reader.feed(b"POST /a HT")
    assert (reader.received_bytes, reader.is_unfinished) == (10, True)
    reader.feed(b"TP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nabc")
    assert (reader.received_bytes, reader.is_unfinished) == (3, True)
    reader.feed(b"de")
    assert (reader.received_bytes, reader.is_unfinished) == (0, False)


EXPECT = b"expect: 100-Continue"


def test_a_client_that_holds_its_body_back_is_noticed() -> None:
    requests, reader = read(head(EXPECT, b"content-length: 3"))
    assert requests == []
    assert (reader.wants_continue, reader.notice) == (True, True)
    assert len(reader.feed(b"abc")) == 1
    assert (reader.wants_continue, reader.notice) == (False, False)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(head(EXPECT, b"content-length: 3") + b"a", id="it does not hold back"),
        pytest.param(head(EXPECT), id="there is no body"),
        pytest.param(head(b"expect: 200-ok", b"content-length: 3"), id="another expectation"),
        pytest.param(
            b"POST /a HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\n", id="HTTP/1.0"
        ),
    ],
)
def test_no_100_where_none_is_due(data: bytes) -> None:
    _, reader = read(data)
    assert not reader.wants_continue


def test_a_body_held_back_and_too_large_is_not_asked_for() -> None:
    requests, reader = read(head(EXPECT, b"content-length: 101"))
    assert [(r.body_too_large, r.keep_alive) for r in requests] == [(True, False)]
    assert not reader.wants_continue


def test_header_sections_are_shared_and_remembered_in_bounds() -> None:
    blocks: HeaderBlocks = {}
    first, second = RequestReader(LIMITS, blocks), RequestReader(LIMITS, blocks)
    (a,), (b,) = first.feed(GET), second.feed(GET)
    assert a.headers is b.headers
    for i in range(3000):
        first.feed(head(b"x: %d" % i))
        assert len(blocks) <= 1024
    first.feed(head(b"x: " + b"y" * 2500))
    assert not any(b"yyy" in part for key in blocks for part in key if isinstance(part, bytes))


def test_sections_that_differ_in_their_varying_lines_share_one_judgement() -> None:
    blocks: HeaderBlocks = {}
    reader = RequestReader(LIMITS, blocks)
    for i in range(1, 50):
        lines = (
            b"traceparent: 00-%d-2-01" % i,
            b"X-Request-Id: r-%d" % i,
            b"X-Reservation-Id: b-%d" % i,
        )
        (request,) = reader.feed(head(*lines, b"content-length: %d" % i) + b"b" * i)
        assert (request.headers.traceparent, len(request.body)) == (b"00-%d-2-01" % i, i)
        assert request.headers.reservation_id == b"b-%d" % i
    assert len(blocks) == 1  # what names one request is not kept


def test_of_lengths_that_vary_some_are_remembered_and_then_what_stands_around_them() -> None:
    blocks: HeaderBlocks = {}
    reader = RequestReader(Limits(), blocks)
    several = []
    for length in range(2000):
        data = head(b"content-length: %d" % length, b"accept: a/b") + bytes(length)
        several += reader.feed(data)
    assert [len(request.body) for request in several] == list(range(2000))
    assert len(blocks) < 100
    assert several[-1].headers is several[-2].headers
    (other,) = RequestReader(Limits(), blocks).feed(data)
    assert len(other.body) == 1999


@pytest.mark.parametrize("known", [1, 100], ids=["one is known", "where lengths vary"])
@pytest.mark.parametrize("lines", [(), (b"authorization: Bearer abc",)], ids=["", "credential"])
def test_behind_known_sections_one_byte_or_line_more_less_or_other_is_read_as_alone(
    lines: tuple[bytes, ...], known: int
) -> None:
    blocks: HeaderBlocks = {}

    def warm() -> RequestReader:
        """On a connection of its own."""
        reader = RequestReader(Limits(), blocks)
        for length in (*range(known if not blocks else 0), 501, 502)[:known]:
            assert len(reader.feed(asked(length))) == 1
        return reader

    def asked(length: int) -> bytes:
        return head(b"a: b", b"content-length: %d" % length, *lines, b"c: d") + bytes(length)

    data = asked(12)
    edits = [
        (at, behind, put)
        for at in range(data.index(b"HTTP/"), data.index(b"\r\n\r\n") + 4)
        for put in (b"", b"\r", b"\n", b"\0", b" ", b":", b"+", b"1", b"x", b"0" * 16, b"\xb9")
        for behind in (at, at + 1)
    ]
    framing = data.index(b"content-length")
    edits += [
        (framing, behind, put)
        for behind in (framing, data.index(b"\r\n", framing) + 2)
        for put in (b"", b"Content-Length: 12\r\n", b"transfer-encoding: chunked\r\n", b"e: f\r\n")
    ]
    for at, behind, put in edits:
        edited = data[:at] + put + data[behind:]
        reader, alone = warm(), RequestReader(Limits())
        read, expected = reader.feed(edited), alone.feed(edited)
        assert list(map(seen, read)) == list(map(seen, expected)), edited
        assert [one.credential for one in read] == [one.credential for one in expected]
        assert fault(reader) == fault(alone), edited
        assert reader.received_bytes == alone.received_bytes


@given(
    st.lists(
        st.sampled_from(
            [
                *(b"traceparent: 00-aa-bb-01", b"Traceparent: has blanks"),
                *(b"Traceparent: 00-cc-dd-01", b"traceParent: 00-ee-ff-01", b"Content-Length: 0"),
                *(b"content-length: 0 ", b"X-Request-Id: 1", b"X-Request-ID: 2"),
                *(b"x-reservation-id: a", b"X-Reservation-ID: b c", b"accept: a/b"),
            ]
        ),
        max_size=4,
    )
)
@example([b"traceparent: 00-aa-bb-01", b"Traceparent: has blanks"])
@example([b"traceparent: 00-aa-bb-01", b"Traceparent: 00-cc-dd-01"])
def test_the_same_bytes_say_the_same_however_often_they_come(lines: list[bytes]) -> None:
    blocks: HeaderBlocks = {}
    said = []
    for _ in range(3):
        reader = RequestReader(LIMITS, blocks)
        requests = reader.feed(head(*lines))
        said.append(([seen(request) for request in requests], reader.error is None))
    assert said[0] == said[1] == said[2]


# One host, as RFC 9112 section 3.2 asks.


@pytest.mark.parametrize(
    "host",
    [
        *(b"x", b"", b"selector:8092", b"127.0.0.1:8092", b"[::1]:8092", b"[fe80::1%25eth0]"),
        *(b"lean_selector.svc.cluster.local", b"%2Frun%2Fselector.sock", b"x:", b"x  "),
    ],
)
def test_a_host_in_any_form_that_a_url_may_have_is_taken(host: bytes) -> None:
    (request,), _ = read(b"GET /a HTTP/1.1\r\nhost: " + host + b"\r\n\r\n")
    assert request.path == b"/a"


def test_http10_needs_no_host_but_two_are_refused() -> None:
    (request,), _ = read(b"GET /a HTTP/1.0\r\n\r\n")
    assert request.headers.is_http10
    assert refusal(b"GET /a HTTP/1.0\r\nhost: x\r\nHost: x\r\n\r\n") == 400


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(b"", id="none"),
        pytest.param(b"a: b\r\nA: c\r\n", id="none, and a name twice"),
        pytest.param(b"host: x\r\nhost: x\r\n", id="one twice"),
        pytest.param(b"Host: x\r\nhost: y\r\n", id="two"),
        pytest.param(b"host: a b\r\n", id="a blank within"),
        pytest.param(b"host: a/b\r\n", id="a path"),
        pytest.param(b"host: a:b\r\n", id="a port that is no number"),
        pytest.param(b"host: ::1\r\n", id="IPv6 without brackets"),
        pytest.param(b"host: [::1\r\n", id="a bracket left open"),
        pytest.param(b"host: u@x\r\n", id="a user"),
    ],
)
def test_no_host_or_two_or_a_malformed_one_is_refused(lines: bytes) -> None:
    assert refusal(b"GET /a HTTP/1.1\r\n" + lines + b"\r\n") == 400


# Blanks after a value are no part of it.


def test_blanks_after_a_value_do_not_count() -> None:
    (request,), _ = read(
        b"POST /a HTTP/1.1\r\nhost: x \r\ntransfer-encoding: chunked  \r\n"
        b"content-type: application/json \r\ntraceparent: 00-1\t\r\n\r\n"
        b"1\r\na\r\n0\r\n\r\n"
    )
    assert (bytes(request.body), request.headers.content_type, request.headers.traceparent) == (
        b"a",
        b"application/json",
        b"00-1",
    )
