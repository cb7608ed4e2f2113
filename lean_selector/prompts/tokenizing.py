"""What tells the tokens of a prompt, whatever it is."""

from collections.abc import Mapping
from typing import Protocol

from lean_selector.prompts.model_request import ModelRequest
from lean_selector.prompts.unknown import Unknown, Why


class NotTokenized(Exception):
    """Nobody said what the tokens are."""

    def __init__(self, why: Why, text: str) -> None:
        super().__init__(text)
        self.unknown = Unknown(why, text)


class Tokenizer(Protocol):
    async def tokens(self, request: ModelRequest, model: str, workers: Mapping[int, str]) -> bytes:
        """The tokens of a prompt, 4 bytes each; `model` as the engine knows it, adapters too, and
        `workers` the base URLs of who has it. Raises NotTokenized."""
        ...

    def close(self) -> None: ...
