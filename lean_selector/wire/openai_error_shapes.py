"""What an error of OpenAI's API is made of."""

import msgspec


class OpenAiError(msgspec.Struct, frozen=True):
    """`param` is always null: no field is named apart from the message."""

    message: str
    type: str
    param: None
    code: str | None


class OpenAiErrorBody(msgspec.Struct, frozen=True):
    """An error that a gateway may hand to its client."""

    error: OpenAiError
