"""Turns the bytes of one connection into requests. Does no I/O, reads no clock, never raises.

Responsible for framing: the start and end of a request, and all limits on its size. Clients repeat
their headers, so httptools (llhttp) parses only header sections that are not cached. If a section
is not found in the cache, it is looked up again without the lines that vary per request
(content-length, traceparent, ids). After many sections that differ only in the content length, the
text around the length is compared before any look-up (`LengthFrame`). The `authorization` line is
not cached: each connection recognizes its own line (`CredentialLine`). Follows RFC 9112; limits and
statuses are in spec selection.md 1.1 and slot_tracker.md 1.2.

Request smuggling exploits two servers that disagree on where a request ends. Therefore the
following are refused with 400 or 501, and the connection is closed: content-length together with
transfer-encoding, a second content-length, a content-length that is not plain digits, transfer
codings other than a single "chunked", chunked in HTTP/1.0, folded header lines, space before a
colon, bare CR or LF or NUL in a head, control characters in chunk extensions, chunk data not ended
by CRLF, malformed trailers, a request line without exactly two spaces, no host or two hosts."""

import re
from collections.abc import Callable
from typing import Final

from lean_selector.http.body import RequestBody
from lean_selector.http.head import (
    UNUSABLE,
    CredentialLine,
    HeaderBlock,
    HeaderBlocks,
    LengthFrame,
    Request,
    has_credentials,
    parse_header_block,
)
from lean_selector.http.head import HttpError as HttpError
from lean_selector.http.head import Limits as Limits

# Method, path, query. A fragment is dropped; clients should not send one. The version follows.
_REQUEST_LINE: Final = re.compile(
    rb"([!#$%&'*+\-.^_`|~0-9A-Za-z]++) ([^\x00-\x20\x7f?#]++)"
    rb"(?:\?([^\x00-\x20\x7f#]*+))?+(?:#[^\x00-\x20\x7f]*+)?+ HTTP/"
)
_ABSOLUTE_FORM: Final = re.compile(rb"(?i:https?)://[^/]*+")
_BLANK_LINES: Final = re.compile(rb"(?:\r\n)++")
_METHOD_BYTE: Final = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z\r]")

# Header lines that vary between requests, as clients spell them, with a value that llhttp always
# accepts. The match does not include the line break.
_VARYING: Final = re.compile(
    rb"\r\n([cC]ontent-[lL]ength|traceparent|Traceparent|[xX]-[rR]equest-[iI][dD]"
    rb"|[xX]-[rR]eservation-[iI][dD]): "
    rb"([0-9A-Za-z._-]{1,128})(?=\r\n)"
)

_MAX_REMEMBERED_BLOCKS = 1024  # entries of at most the next size: 2 MiB in total
_MAX_REMEMBERED_BLOCK_BYTES = 2048
_MOST_LENGTHS = 64  # cached sections that differ only in the length

# per call; to parse a new header section takes some 20 us
MOST_REQUESTS: Final = 64


class RequestReader:
    """Splits the bytes of one connection into requests.

    After each `feed`, the caller must answer the returned requests, in order, and then check two
    attributes: `error` (an answer to send before closing) and `wants_continue` (the client waits
    for `100 Continue` before it sends the body; the caller resets the flag). `notice` is true if
    `error` or `wants_continue` is set.

    One `feed` does bounded work. The unread bytes stay in `waiting` until the next `feed`.

    After a request with keep_alive false, or once `error` is set, further bytes are ignored.
    `has_unread_input` then tells whether the client may still be sending."""

    def __init__(
        self,
        limits: Limits,
        blocks: HeaderBlocks | None = None,
        refuses: Callable[[Request], bool] | None = None,
    ) -> None:
        """`blocks` is a cache of parsed header sections; connections should share the cache. If
        `refuses` returns True for a request, the body of this request is not read."""
        # Constant for the connection's lifetime.
        self._limits = limits
        self._refuses = refuses
        self._max_head_bytes = limits.max_head_bytes
        self._max_body_bytes = limits.max_body_bytes
        self._blocks: HeaderBlocks = {} if blocks is None else blocks
        self._credentials: CredentialLine | None = None  # set by the first request with credentials
        self._frame: LengthFrame | None = None  # set if lengths vary too much for the cache
        self.error: HttpError | None = None
        self.is_finished = False  # all further bytes are ignored
        self.has_unread_input = False
        self.waiting = bytearray()  # received, but not read yet
        # The incomplete request: a part of its head; or the request, with a part of its body.
        self.is_unfinished = False
        self._head = bytearray()
        self._request: Request | None = None
        self._body: RequestBody | None = None
        # For the caller
        self.notice = False
        self.wants_continue = False

    @property
    def received_bytes(self) -> int:
        """Bytes received of an incomplete head, or of the body after it; 0 between requests."""
        return len(self._head) if self._body is None else self._body.wire_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes stored of the incomplete request, plus bytes that are not read yet. A body above
        the size limit is not stored."""
        kept = len(self._head) if self._body is None else len(self._body.content)
        return kept + len(self.waiting)

    def drop(self) -> None:
        """Drop an incomplete request and ignore further bytes."""
        self._finish()

    def hold(self, data: bytes) -> None:
        """Store bytes that will be read later."""
        if self.is_finished:
            self.has_unread_input = True
        else:
            self.waiting += data

    def feed(self, data: bytes) -> list[Request]:
        """Return the requests that `data` completes, in order. Never raises."""
        requests: list[Request] = []
        if self.waiting:
            data = bytes(self.waiting) + data
            self.waiting.clear()
        if self.is_unfinished:
            if self._body is not None:
                at = self._continue_body(data, 0, requests)
                if at < len(data):
                    self.read_heads(data, at, requests)
            else:
                self._continue_head(data, requests)
        else:
            self.read_heads(data, 0, requests)
        return requests

    def read_heads(self, data: bytes, at: int, requests: list[Request]) -> None:
        """Append the requests in data[at:] to `requests`. No unread bytes may be in `waiting`."""
        size = len(data)
        method: bytes
        path: bytes
        query: bytes | None
        while at < size:
            if self.is_finished:
                self.has_unread_input = True
                return
            line = _REQUEST_LINE.match(data, at)
            if line is None:
                # RFC 9112 section 2.2: blank lines are skipped
                blank = _BLANK_LINES.match(data, at)
                if blank is None:
                    self._hold_head(data, at)
                    return
                at = blank.end()
                continue
            version_at = line.end()
            end = data.find(b"\r\n\r\n", version_at) + 4
            if end == 3:
                self._hold_head(data, at)
                return
            if version_at - at > self._max_head_bytes:
                self._fail(HttpError(414, "request target too long"))
                return
            section = data[version_at:end]
            credentials, rest = self._credentials, section
            if credentials is not None:
                rest = credentials.rest_of(section)
            frame = self._frame
            if frame is not None and (length := frame.length_in(rest)) >= 0:
                block = frame.block
            else:
                known = self._blocks.get(rest)
                if known is None:
                    known = self._judge(rest)
                    if known is None:
                        return
                    credentials = self._credentials
                block, length = known, known.content_length
            credential = None if credentials is None else credentials.credential
            method, path, query = line.group(1, 2, 3)
            if path[0] != 0x2F:
                path = _origin_form(path)
            at = end + length
            if end <= at <= size and length <= self._max_body_bytes:
                request = Request(method, path, query, data[end:at], block, section, credential)
                requests.append(request)
                if not block.keep_alive:
                    self.is_finished = True
                elif at == size:
                    return
                elif len(requests) == MOST_REQUESTS:
                    self.waiting += memoryview(data)[at:]
                    return
            else:
                request = Request(method, path, query, b"", block, section, credential)
                at = self._begin_body(request, length, data, end, requests)

    def _judge(self, text: bytes) -> HeaderBlock | None:
        """Parse a header section that is not cached. On failure, set `error` and return None."""
        self._frame = None
        if len(text) > self._limits.max_head_bytes:
            self._fail(HttpError(431, "request header section too large"))
            return None
        parts = _VARYING.split(text)
        names, values = parts[1::3], parts[2::3]
        shape = (*parts[::3], *names)
        known = self._blocks.get(shape)
        if known is not None:
            varied = known.varied(list(zip(names, values, strict=True)))
            if varied is not None:
                frame = known.frame
                if frame is not None and frame.lengths < _MOST_LENGTHS:
                    frame.lengths += 1  # a length may repeat; an id, which is cut out too, does not
                    self._remember(text, varied)
                else:  # parsing costs less than a look-up for a section that never repeats
                    self._frame = frame
                return varied
        if has_credentials(text):
            return self._judge_rest(text)
        block = self._parse(text)
        if block is not None and len(text) <= _MAX_REMEMBERED_BLOCK_BYTES:
            if not names:
                self._remember(text, block)
            elif _each_occurs_once(names, text):
                if len(names) == 1 and names[0][0] in b"cC":
                    block.frame = LengthFrame(b"%b\r\n%b: " % (parts[0], names[0]), parts[3], block)
                self._remember(shape, block)
        return block

    def _judge_rest(self, text: bytes) -> HeaderBlock | None:
        """Drop `text`'s `authorization` line. Find the rest in the cache, or parse the rest."""
        credentials = self._credentials
        # The known line is already cut out, so any remaining one is a second one.
        is_second = credentials is not None and credentials.credential is not None
        self._credentials = credentials = CredentialLine(text)
        rest = text if is_second else credentials.rest_of(text)
        if rest is text:
            credentials.credential = UNUSABLE
            return self._parse(text)
        return self._blocks.get(rest) or self._judge(rest)

    def _parse(self, text: bytes) -> HeaderBlock | None:
        block = parse_header_block(text)
        if isinstance(block, HttpError):
            self._fail(block)
            return None
        return block

    def _remember(self, key: bytes | tuple[bytes, ...], block: HeaderBlock) -> None:
        if len(self._blocks) >= _MAX_REMEMBERED_BLOCKS:
            self._blocks.clear()
        self._blocks[key] = block

    def _hold_head(self, data: bytes, at: int) -> None:
        """Store an incomplete head; or set `error` if the head is too large or malformed."""
        max_head_bytes = self._limits.max_head_bytes
        line_end = data.find(b"\r\n", at)
        line_bytes = (len(data) if line_end < 0 else line_end) - at
        if line_bytes > max_head_bytes:
            self._fail(HttpError(414, "request target too long"))
        elif (_METHOD_BYTE if line_end < 0 else _REQUEST_LINE).match(data, at) is None:
            self._fail(HttpError(400, "malformed request line"))
        elif len(data) - at - line_bytes > max_head_bytes:
            self._fail(HttpError(431, "request header section too large"))
        else:
            self.is_unfinished = True
            self._head += memoryview(data)[at:]

    def _continue_head(self, data: bytes, requests: list[Request]) -> None:
        head = self._head
        head += data
        # No line ended, so the head did not end either: only check the size.
        if b"\n" not in data and len(head) <= self._limits.max_head_bytes:
            return
        whole = bytes(head)
        head.clear()
        self.is_unfinished = False
        self.read_heads(whole, 0, requests)

    def _begin_body(
        self, request: Request, length: int, data: bytes, at: int, requests: list[Request]
    ) -> int:
        """Begin a chunked, too large, or incomplete body. Return the next offset in `data`."""
        limits = self._limits
        is_held_back = request.headers.expects_continue and at == len(data)
        if length > limits.max_body_bytes and (is_held_back or length > limits.max_discard_bytes):
            # The answer does not depend on the body, so do not wait for it.
            return self._cut_short(request, data, requests)
        if self._refuses is not None and self._refuses(request):
            return self._cut_short(request, data, requests)
        self._request = request
        self._body = RequestBody(length, limits)
        self.is_unfinished = True
        self.wants_continue = self.notice = is_held_back
        return self._continue_body(data, at, requests)

    def _continue_body(self, data: bytes, at: int, requests: list[Request]) -> int:
        request, body = self._request, self._body
        assert request is not None
        assert body is not None
        at = body.feed(data, at)
        framing = body.framing
        if framing.error is not None:
            self._fail(framing.error)
        elif framing.is_done:
            request.body = body.content
            request.body_too_large = body.is_too_large
            requests.append(request)
            self._forget_unfinished()
            self.is_finished = not request.keep_alive
        elif body.wire_bytes > self._limits.max_discard_bytes:
            return self._cut_short(request, data, requests)
        elif at < len(data):  # this call has parsed as many chunks as a call may
            self.waiting += memoryview(data)[at:]
            return len(data)
        return at

    def _cut_short(self, request: Request, data: bytes, requests: list[Request]) -> int:
        """Complete a request before its body ends. Ignore all later input. Return len(data)."""
        request.body_too_large = True
        request.keep_alive = False
        requests.append(request)
        self._finish()
        self.has_unread_input = True
        return len(data)

    def _fail(self, error: HttpError) -> None:
        self._finish()
        self.error = error
        self.notice = self.has_unread_input = True

    def _finish(self) -> None:
        self._forget_unfinished()
        self.waiting.clear()
        self.is_finished = True

    def _forget_unfinished(self) -> None:
        self._request = self._body = None
        self._head.clear()
        self.is_unfinished = self.wants_continue = self.notice = False


def _each_occurs_once(names: list[bytes], text: bytes) -> bool:
    lines = text.lower()
    return all(lines.count(b"\r\n%b:" % name.lower()) == 1 for name in names)


def _origin_form(target: bytes) -> bytes:
    """Return the path of a request target, which may be a full URL (RFC 9112 section 3.2.2)."""
    authority = _ABSOLUTE_FORM.match(target)
    return target if authority is None else target[authority.end() :] or b"/"
