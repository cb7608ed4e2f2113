"""What came back for a request of ours."""

import msgspec


class OutboundAnswer(msgspec.Struct, frozen=True):
    """A whole answer, whatever its status."""

    status: int
    headers: dict[str, str]  # names in lower case; of a repeated one the last
    body: bytes
