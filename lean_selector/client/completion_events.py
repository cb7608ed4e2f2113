"""An event of the stream of /v1/completions, as far as it is read."""

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class Choice(msgspec.Struct, frozen=True):
    index: int = 0
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class CompletionEvent(msgspec.Struct, frozen=True):
    choices: list[Choice] = []
    usage: dict[str, Any] | None = None
    error: object | UnsetType = UNSET
