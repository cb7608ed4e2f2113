"""The head of a worker's answer: judged by httptools (llhttp), and what passing it on needs.

Knows where the body ends (RFC 9112 section 6.3), and nothing of what it means.
"""

from typing import Final

import httptools

from lean_selector.http.passage import ChunkedPassage, Passage, SizedPassage, UnboundedPassage

MOST_BYTES: Final = 64 * 1024
_WITHOUT_BODY: Final = (204, 304)


class MalformedAnswer(Exception):
    """What came is no answer that can be passed on; the message says why."""


class AnswerHead:
    """`lines` are the header lines as they came, each behind its CRLF."""

    __slots__ = ("is_chunked", "keeps", "lines", "passage", "start", "status")

    def __init__(
        self,
        status: int,
        start: bytes,
        lines: bytes,
        passage: Passage,
        is_chunked: bool,
        keeps: bool,
    ) -> None:
        self.status = status
        self.start = start  # the status line without its CRLF
        self.lines = lines
        self.passage = passage
        self.is_chunked = is_chunked
        self.keeps = keeps  # the connection can be used again when the body is over


class _Collector:
    """What httptools calls."""

    __slots__ = ("fields",)

    def __init__(self) -> None:
        self.fields: dict[bytes, bytes] = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        known = self.fields.get(name)
        self.fields[name] = value if known is None else known + b"," + value


def head_of(text: bytes, answers_head: bool) -> AnswerHead | None:
    """`HTTP/1.1 200 OK CRLF ... CRLF CRLF`; None for an interim answer, after which another comes.

    `answers_head`: of a HEAD request, so that no body follows. Raises MalformedAnswer.
    """
    collector = _Collector()
    parser = httptools.HttpResponseParser(collector)
    try:
        parser.feed_data(text)
    except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
        raise MalformedAnswer(f"its answer is not HTTP: {error}") from None
    status = parser.get_status_code()
    if status < 200:
        if status == 101:
            raise MalformedAnswer("it changed the protocol, which nobody asked for")
        return None
    fields = collector.fields
    options = fields.get(b"connection", b"").lower()
    is_http11 = parser.get_http_version() == "1.1"
    keeps = b"close" not in options and (is_http11 or b"keep-alive" in options)
    start, _, rest = text.partition(b"\r\n")
    lines = b"\r\n" + rest[:-4] if len(rest) > 2 else b""
    passage: Passage
    coding = fields.get(b"transfer-encoding")
    is_chunked = False
    if answers_head or status in _WITHOUT_BODY:
        passage = SizedPassage(0)
    elif coding is not None:
        if coding.strip().lower() != b"chunked":
            raise MalformedAnswer("its answer has a transfer coding that is not chunked")
        passage, is_chunked = ChunkedPassage(), True
    elif (length := fields.get(b"content-length")) is not None:
        if not length.strip().isdigit():
            raise MalformedAnswer("its answer has more than one length")
        passage = SizedPassage(int(length))
    else:
        passage, keeps = UnboundedPassage(), False
    return AnswerHead(status, start, lines, passage, is_chunked, keeps)
