"""Errors as OpenAI's API has them, for the doors whose answers its clients read."""

import msgspec

from lean_selector.wire.openai_error_shapes import OpenAiError, OpenAiErrorBody


def openai_error(status: int, message: str, code: str | None = None) -> bytes:
    """The body of an error: `{"error": {"message", "type", "param", "code"}}`.

    `code` is a word for programs, such as `model_not_found`.
    """
    if status == 429:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if status < 500 else "server_error"
    return msgspec.json.encode(OpenAiErrorBody(OpenAiError(message, kind, None, code)))
