"""The head of a request: size limits, header section, credential; and the class Request."""

import os
import re
from collections.abc import Callable
from hashlib import blake2b
from typing import Final, NamedTuple

import httptools

# -- size limits of a request ----------------------------------------------------------------------
# Figures: spec selection.md 1.1.


class Limits(NamedTuple):
    """Size limits in bytes, inclusive. max_head_bytes limits the request line and, separately, the
    header section. A body above max_body_bytes is still read, up to max_discard_bytes, and dropped,
    so that the client can read the refusal."""

    max_body_bytes: int = 8 * 1024 * 1024  # the selector's; the slot tracker has 2 MiB
    max_head_bytes: int = 64 * 1024
    max_discard_bytes: int = 64 * 1024 * 1024


class HttpError(NamedTuple):
    """The status and text of an error answer, after which the connection is closed."""

    status: int
    text: str


# -- the header section ----------------------------------------------------------------------------
# httptools (llhttp) validates it, and the fields that we need are stored.

_VERSION: Final = re.compile(rb"[0-9]\.[0-9]\r\n")

# Characters of RFC 9110 section 7.2: a name, an IPv4 address or a bracketed address, and an
# optional port. Empty is allowed, because a client that has no name for us sends that.
_HOST: Final = re.compile(
    rb"(?:\[[0-9A-Za-z:.~_%!$&'()*+,;=-]++\]|[0-9A-Za-z._~%!$&'()*+,;=-]*+)(?::[0-9]*+)?+"
)

_MAX_HEADERS = 100  # as in hyper, which the reference uses

# The only name among the varying headers that has this length.
_RESERVATION_ID_LENGTH: Final = len(b"x-reservation-id")

CHUNKED = -1  # stands for a content length


def length_of(digits: bytes) -> int:
    """Parse a content length of 1 to 15 digits. Return -1 for anything else."""
    return int(digits) if digits.isdigit() and len(digits) <= 15 else -1


class HeaderBlock:
    """The parsed HTTP version and header section. Read only, because requests with equal sections
    share one object. If `frame` is set, requests that differ only in the content length also share
    this object; `frame.length_in` then returns each request's content length."""

    def __init__(
        self,
        is_http10: bool,
        keep_alive: bool,
        content_length: int,
        content_type: bytes | None,
        accept: bytes | None,
        traceparent: bytes | None,
        expects_continue: bool,
        reservation_id: bytes | None = None,
    ) -> None:
        self.is_http10 = is_http10
        self.keep_alive = keep_alive
        self.content_length = content_length
        self.content_type = content_type
        self.accept = accept
        self.traceparent = traceparent
        self.expects_continue = expects_continue
        self.reservation_id = reservation_id
        self.frame: LengthFrame | None = None

    def varied(self, values: list[tuple[bytes, bytes]]) -> "HeaderBlock | None":
        """Return a copy with these per-request headers; None if their content length is invalid."""
        content_length, traceparent = self.content_length, self.traceparent
        reservation_id = self.reservation_id
        for name, value in values:
            if name[0] in b"cC":
                content_length = length_of(value)
                if content_length < 0:
                    return None
            elif name[0] in b"tT":
                traceparent = value
            elif len(name) == _RESERVATION_ID_LENGTH:
                reservation_id = value
        return HeaderBlock(
            self.is_http10,
            self.keep_alive,
            content_length,
            self.content_type,
            self.accept,
            traceparent,
            self.expects_continue,
            reservation_id,
        )


class LengthFrame:
    """Text around a content length. Recognizes header sections that differ only in the length."""

    def __init__(self, prefix: bytes, suffix: bytes, block: HeaderBlock) -> None:
        """`prefix` ends just before the first digit of the length. `suffix` is not empty."""
        self._prefix, self._prefix_bytes = prefix, len(prefix)
        self._suffix, self._suffix_bytes = suffix, len(suffix)
        self.block = block
        self.lengths = 0  # number of cached sections that match this frame

    def length_in(self, section: bytes) -> int:
        """Return the length between prefix and suffix in `section`; -1 for any other section."""
        if section.startswith(self._prefix) and section.endswith(self._suffix):
            return length_of(section[self._prefix_bytes : -self._suffix_bytes])
        return -1


def block_of(fields: dict[bytes, bytes], is_http10: bool, is_upgrade: bool) -> HeaderBlock:
    """Build a HeaderBlock from fields with lower-case names. llhttp has validated the fields, so a
    content length has only digits."""
    options = fields.get(b"connection", b"").lower().translate(None, b" \t").split(b",")
    keep_alive = (
        b"close" not in options
        and (not is_http10 or b"keep-alive" in options)
        and not is_upgrade  # ignored: we answer normally, then close the connection
    )
    is_chunked = b"transfer-encoding" in fields
    expect = fields.get(b"expect")
    # RFC 9110 section 10.1.1: HTTP/1.0 has no `100 Continue`.
    expects_continue = expect is not None and not is_http10 and expect.lower() == b"100-continue"
    return HeaderBlock(
        is_http10,
        keep_alive,
        CHUNKED if is_chunked else int(fields.get(b"content-length", b"0")),
        fields.get(b"content-type"),
        fields.get(b"accept"),
        fields.get(b"traceparent"),
        expects_continue,
        fields.get(b"x-reservation-id"),
    )


# Parsed sections. The key is the whole section; or, if varying lines were cut out, the remaining
# pieces and the names of those lines, so that different sections have different keys.
HeaderBlocks = dict[bytes | tuple[bytes, ...], HeaderBlock]


class HeaderCollector:
    """The callback for header fields. httptools finds the method by its name, `on_header`."""

    def __init__(self, on_header: Callable[[bytes, bytes], object]) -> None:
        self.on_header = on_header


def parse_header_block(text: bytes) -> HeaderBlock | HttpError:
    """Parse and validate `1.1 CRLF name: value CRLF ... CRLF CRLF`: the part of a head after
    `HTTP/`."""
    if not text.startswith((b"1.1\r\n", b"1.0\r\n")):
        if _VERSION.match(text) is None:
            return HttpError(400, "malformed request line")
        return HttpError(505, "only HTTP/1.0 and HTTP/1.1 are supported")
    is_http10 = text.startswith(b"1.0")
    if text.count(b"\r\n") - 2 > _MAX_HEADERS:
        return HttpError(431, f"more than {_MAX_HEADERS} request headers")
    fields: dict[bytes, bytes] = {}
    hosts = 0

    def take(name: bytes, value: bytes) -> None:
        nonlocal hosts
        # llhttp keeps trailing blanks, which are not part of a value (RFC 9110 section 5.5). The
        # values of a repeated field are joined with commas (section 5.3).
        name, value = name.lower(), value.strip(b" \t")
        hosts += name == b"host"
        fields[name] = fields[name] + b", " + value if name in fields else value

    is_upgrade = False
    try:
        httptools.HttpRequestParser(HeaderCollector(take)).feed_data(b"POST / HTTP/" + text)
    except httptools.HttpParserUpgrade:
        is_upgrade = True
    except httptools.HttpParserError as error:
        return HttpError(400, f"malformed request header: {error}".replace('"', "'"))
    # RFC 9112 section 3.2. If there are two hosts, a proxy may route the request by the other one.
    if hosts > 1 or (hosts == 0 and not is_http10):
        return HttpError(400, "exactly one host header is required")
    if hosts and _HOST.fullmatch(fields[b"host"]) is None:
        return HttpError(400, "malformed host header")
    coding = fields.get(b"transfer-encoding")
    if coding is not None:
        if is_http10:  # RFC 9112 section 6.1: HTTP/1.0 has no chunked framing
            return HttpError(400, "transfer-encoding in an HTTP/1.0 request")
        if coding.lower() != b"chunked":
            return HttpError(501, "transfer-encoding is not supported, except chunked")
    return block_of(fields, is_http10, is_upgrade)


# -- the authorization line ------------------------------------------------------------------------
# It is cut out of header sections before they are cached, and recognized by a keyed digest. Neither
# this class nor the reader's caches store a credential: they store the position of the line, and
# digests with random keys of this process. RFC 9110 section 11.6.2, RFC 6750 section 2.1.

# A line whose value every parser accepts. The name may be in any case.
_LINE: Final = re.compile(rb"\r\n(?i:authorization):([\t -~\x80-\xff]*+)(?=\r\n)")
_NAME: Final = b"\r\nauthorization:"

_DIGEST_BYTES: Final = 32
_KEYED: Final = blake2b(digest_size=_DIGEST_BYTES, key=os.urandom(64))
_LINE_KEY: Final = os.urandom(16)

UNUSABLE: Final = b""  # stands for a credential of another scheme


def digest_of(text: bytes) -> bytes:
    """Return a keyed digest, stored in place of a secret. The key is random per process."""
    made = _KEYED.copy()  # takes a third less time than hashing the key each time
    made.update(text)
    return made.digest()


def has_credentials(section: bytes) -> bool:
    """Whether a header section (which begins with the version) has an `authorization` line."""
    return _NAME in section.lower()


def credential_of(value: bytes) -> bytes:
    """Return the digest of a header value's bearer token; UNUSABLE for another scheme."""
    scheme, _, token = value.strip(b" \t").partition(b" ")
    return digest_of(token.strip(b" \t")) if scheme.lower() == b"bearer" else UNUSABLE


class CredentialLine:
    """Recognizes the `authorization` line that the requests of a connection repeat.

    `rest_of` sets `credential`: to the digest of the bearer token, to UNUSABLE if the line has
    another scheme, or to None if the header section does not repeat the line.

    The line is recognized by Python's hash (SipHash) of a random key and the line, which is three
    times as fast as the digest of the token. Another line has the same hash with a probability of
    2**-64."""

    def __init__(self, section: bytes) -> None:
        """`section` is a header section with an `authorization` line."""
        self.credential: bytes | None = UNUSABLE
        self._begin = 0
        self._size = 0  # size of the line with both its line breaks
        self._start = b""  # CRLF and the name as spelled
        self._known = 0  # hash of the line
        self._value = UNUSABLE
        found = _LINE.search(section)
        if found is None or section.lower().count(_NAME) != 1:
            return
        begin, value_at, end = found.start(), found.start(1), found.end() + 2
        self._begin = begin
        self._size = end - begin
        self._start = section[begin:value_at]
        self._known = hash(_LINE_KEY + section[begin:end])
        self._value = credential_of(found[1])

    def rest_of(self, section: bytes) -> bytes:
        """Return the header section without its `authorization` line. If this line is missing, or
        differs from the line that the constructor was given, return the whole section."""
        begin, size = self._begin, self._size
        if not size or hash(_LINE_KEY + section[begin : begin + size]) != self._known:
            # Earlier lines may have another length now, such as the content length.
            begin = section.find(self._start) if size else -1
            if begin < 0 or hash(_LINE_KEY + section[begin : begin + size]) != self._known:
                self.credential = None
                return section
            self._begin = begin
        self.credential = self._value
        return section[:begin] + section[begin + size - 2 :]


class Request:
    """One request as the client sent it.

    `path` and `query` are raw. `body` is empty if the body was too large. `section` is the head
    after `HTTP/`: the version, and the header lines with their line ends. `credential` is the
    digest of the bearer token, UNUSABLE for another scheme, None if no credential was sent."""

    def __init__(
        self,
        method: bytes,
        path: bytes,
        query: bytes | None,
        body: bytes | bytearray,
        headers: HeaderBlock,
        section: bytes = b"",
        credential: bytes | None = None,
    ) -> None:
        self.method = method
        self.path = path
        self.query = query
        self.body = body
        self.headers = headers
        self.section = section
        self.credential = credential
        self.keep_alive = headers.keep_alive
        self.body_too_large = False
