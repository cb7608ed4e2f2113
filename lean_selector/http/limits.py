"""The sizes that one request may have, and the error that ends a connection.

Owns two records of plain values that the parts of the reader share. Figures: spec selection.md 1.1.
"""


class Limits:
    """Sizes in bytes, inclusive.

    The request line and the header section may each have max_head_bytes. A body over
    max_body_bytes is read and dropped, up to max_discard_bytes of it, so that the client gets to
    read why it was refused.
    """

    __slots__ = ("max_body_bytes", "max_discard_bytes", "max_head_bytes")

    def __init__(
        self,
        max_body_bytes: int = 8 * 1024 * 1024,  # the selector's; the slot tracker has 2 MiB
        max_head_bytes: int = 64 * 1024,
        max_discard_bytes: int = 64 * 1024 * 1024,
    ) -> None:
        self.max_body_bytes = max_body_bytes
        self.max_head_bytes = max_head_bytes
        self.max_discard_bytes = max_discard_bytes


class HttpError:
    """Why no more requests can come from a connection, and the status that says so."""

    __slots__ = ("status", "text")

    def __init__(self, status: int, text: str) -> None:
        self.status = status
        self.text = text
