"""What a client is told whom no worker answers: an error as OpenAI's API has them."""

from lean_selector.http.response import encode_response
from lean_selector.wire.openai_errors import openai_error


def refusal(status: int, message: str, code: str | None = None, extra: bytes = b"") -> bytes:
    """A whole response; `extra` is header lines, each ended by CRLF."""
    return encode_response(status, openai_error(status, message, code), extra=extra)
