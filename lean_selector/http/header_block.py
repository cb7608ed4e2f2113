"""A header section: judged by httptools (llhttp), and what the service needs of it.

Knows nothing of connections, nor of where a body ends; `reader` does.
"""

import re
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import httptools

from lean_selector.http.limits import HttpError

_VERSION: Final = re.compile(rb"[0-9]\.[0-9]\r\n")

# RFC 9110 section 7.2, as far as characters go: a name, an IPv4 address or a bracketed one, and
# perhaps a port. Empty is allowed: a client that has no name for us says so.
_HOST: Final = re.compile(
    rb"(?:\[[0-9A-Za-z:.~_%!$&'()*+,;=-]++\]|[0-9A-Za-z._~%!$&'()*+,;=-]*+)(?::[0-9]*+)?+"
)

_MAX_HEADERS = 100  # as hyper, under the reference, has it

_RESERVATION_ID_LENGTH: Final = len(b"x-reservation-id")  # of the varying names the only one

CHUNKED = -1  # in place of a content length


def length_of(digits: bytes) -> int:
    """A content length; -1 if that is for the parser to judge."""
    return int(digits) if digits.isdigit() and len(digits) <= 15 else -1


class HeaderBlock:
    """What a version and a header section say. Read only: requests that repeat it share it.

    `content_length` is that of the section which was judged; by a `frame`, where only the length is
    cut out of a section, others are read.
    """

    __slots__ = (
        "accept",
        "content_length",
        "content_type",
        "expects_continue",
        "frame",
        "is_http10",
        "keep_alive",
        "reservation_id",
        "traceparent",
    )

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
        """The same section with other values in its varying lines; None if they need judging."""
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
    """What stands around the length in header sections that differ in nothing else."""

    __slots__ = (
        "_prefix",
        "_prefix_bytes",
        "_suffix",
        "_suffix_bytes",
        "block",
        "lengths",
    )

    def __init__(self, prefix: bytes, suffix: bytes, block: HeaderBlock) -> None:
        """`prefix` goes to the first digit, `suffix` is not empty."""
        self._prefix, self._prefix_bytes = prefix, len(prefix)
        self._suffix, self._suffix_bytes = suffix, len(suffix)
        self.block = block
        self.lengths = 0  # whose sections are remembered whole

    def length_in(self, section: bytes) -> int:
        """The length that a section says; -1 if it is not one of these."""
        if section.startswith(self._prefix) and section.endswith(self._suffix):
            return length_of(section[self._prefix_bytes : -self._suffix_bytes])
        return -1


def block_of(fields: dict[bytes, bytes], is_http10: bool, is_upgrade: bool) -> HeaderBlock:
    """What `fields` say, by lower-case name, as llhttp let them through: lengths are digits."""
    options = fields.get(b"connection", b"").lower().translate(None, b" \t").split(b",")
    keep_alive = (
        b"close" not in options
        and (not is_http10 or b"keep-alive" in options)
        and not is_upgrade  # not granted: answered as if it had not been asked for, then closed
    )
    is_chunked = b"transfer-encoding" in fields
    expect = fields.get(b"expect")
    # RFC 9110 section 10.1.1: never of an HTTP/1.0 client.
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


# Judged sections: whole ones by their bytes, and what is left of one without its varying lines by
# the pieces around those and their names, so that no two sections share a key.
HeaderBlocks = dict[bytes | tuple[bytes, ...], HeaderBlock]


class _Collector:
    """What httptools calls: it looks the callback up by name, as an attribute."""

    __slots__ = ("on_header",)

    def __init__(self, on_header: Callable[[bytes, bytes], object]) -> None:
        self.on_header = on_header


def parse_header_block(text: bytes) -> HeaderBlock | HttpError:
    """Judge `1.1 CRLF name: value CRLF ... CRLF CRLF`, the rest of a head after `HTTP/`."""
    if not text.startswith((b"1.1\r\n", b"1.0\r\n")):
        if _VERSION.match(text) is None:
            return HttpError(400, "malformed request line")
        return HttpError(505, "only HTTP/1.0 and HTTP/1.1 are supported")
    is_http10 = text.startswith(b"1.0")
    header_count = text.count(b"\r\n") - 2
    if header_count > _MAX_HEADERS:
        return HttpError(431, f"more than {_MAX_HEADERS} request headers")
    first_values: dict[bytes, bytes] = {}
    is_upgrade = False
    head = b"POST / HTTP/" + text
    try:
        httptools.HttpRequestParser(_Collector(first_values.setdefault)).feed_data(head)
    except httptools.HttpParserUpgrade:
        is_upgrade = True
    except httptools.HttpParserError as error:
        return HttpError(400, f"malformed request header: {error}".replace('"', "'"))
    # llhttp leaves the blanks after a value, which are no part of it (RFC 9110 section 5.5).
    fields = {name.lower(): value.strip(b" \t") for name, value in first_values.items()}
    hosts = 1 if b"host" in fields else 0
    if len(fields) != header_count:
        fields, hosts = _merged_fields(head)
    # RFC 9112 section 3.2. Two hosts are one request to two servers, for whoever reads the other.
    if hosts > 1 or (hosts == 0 and not is_http10):
        return HttpError(400, "exactly one host header is required")
    if hosts and _HOST.fullmatch(fields[b"host"]) is None:
        return HttpError(400, "malformed host header")
    coding = fields.get(b"transfer-encoding")
    if coding is not None:
        if is_http10:  # RFC 9112 section 6.1: such framing is faulty
            return HttpError(400, "transfer-encoding in an HTTP/1.0 request")
        if coding.lower() != b"chunked":
            return HttpError(501, "transfer-encoding is not supported, except chunked")
    return block_of(fields, is_http10, is_upgrade)


def _merged_fields(head: bytes) -> tuple[dict[bytes, bytes], int]:
    """Fields of a head that repeats a name: the values are one list (RFC 9110 section 5.3).

    And how often `host` stands there, whose values are none.
    """
    fields: dict[bytes, bytes] = {}
    hosts = 0

    def merge(name: bytes, value: bytes) -> None:
        nonlocal hosts
        name, value = name.lower(), value.strip(b" \t")
        hosts += name == b"host"
        fields[name] = fields[name] + b", " + value if name in fields else value

    with suppress(httptools.HttpParserUpgrade):
        httptools.HttpRequestParser(_Collector(merge)).feed_data(head)
    return fields, hosts
