"""A request as its client sent it, cut out of a connection's bytes."""

from lean_selector.http.header_block import HeaderBlock


class Request:
    """One request as the client sent it. `path` and `query` are raw; the body is not kept if too
    large. `section` is the head behind `HTTP/`: the version, and the header lines with their ends.
    `credential` is the digest of its bearer token, `credentials.UNUSABLE`, or None.
    """

    __slots__ = (
        "body",
        "body_too_large",
        "credential",
        "headers",
        "keep_alive",
        "method",
        "path",
        "query",
        "section",
    )

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

    @property
    def content_type(self) -> bytes | None:
        return self.headers.content_type

    @property
    def accept(self) -> bytes | None:
        return self.headers.accept

    @property
    def traceparent(self) -> bytes | None:
        return self.headers.traceparent

    @property
    def reservation_id(self) -> bytes | None:
        return self.headers.reservation_id

    @property
    def is_http10(self) -> bool:
        return self.headers.is_http10
