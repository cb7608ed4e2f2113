"""How prompts become blocks, as a door was told. Nothing of it is imported that does it."""

from enum import StrEnum

import msgspec


class Mode(StrEnum):
    """Where the tokens of a prompt come from."""

    LEARN = "learn"  # from the engines' own answers
    TOKENIZE = "tokenize"  # from the engines' /tokenize
    LOCAL = "local"  # from a tokenizer in this process
    OFF = "off"  # from nowhere: load decides alone


class PromptSettings(msgspec.Struct, frozen=True, kw_only=True):
    mode: Mode
    tokenizer: str | None = None  # the folder of `local`
    memory_bytes: int = 128 << 20
    # Tokens are asked for when so many bytes of a prompt, or more, were not seen before.
    ask_from_bytes: int = 0
    ask_timeout_s: float = 2.0
