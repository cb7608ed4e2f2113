"""What a client is told whom no worker answers: an error as OpenAI's API has them."""

from lean_selector.http.response import encode_response
from lean_selector.wire.selection import OpenAiErrorBody


def refusal(status: int, message: str, code: str | None = None, extra: bytes = b"") -> bytes:
    """A whole response; `extra` is header lines, each ended by CRLF."""
    return encode_response(status, OpenAiErrorBody.encoded(status, message, code), extra=extra)
