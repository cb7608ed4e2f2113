"""Shapes of what is known of prompts and models: settings, and bodies as far as they are read."""

from enum import StrEnum
from typing import NamedTuple

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
    render_from_bytes: int = 0  # on paths whose answers have no tokens to learn
    ask_timeout_s: float = 2.0


class Served(msgspec.Struct, frozen=True):
    """A model of a tenant that has workers. `workers` holds the base URL of each by its id."""

    model_name: str
    tenant_id: str
    block_size: int  # tokens, >= 1
    is_eagle: bool
    workers: dict[int, str]


class Why(StrEnum):
    """In a word, for headers, the access log and the metric: docs/guide/prompts.md has them."""

    OFF = "off"
    PATH = "path"
    FORM = "form"
    SEVERAL = "several"
    MEDIA = "media"
    CHANGED = "changed"
    SALT = "salt"
    NEW = "new"
    BEGINNING = "beginning"
    TIMEOUT = "timeout"
    BUSY = "busy"
    REFUSED = "refused"
    FAILED = "failed"


class Unknown(NamedTuple):
    """The word, and what exactly it was in this request, for people."""

    why: Why
    text: str


class Message(msgspec.Struct):
    """A message of a chat, as far as it is read."""

    role: msgspec.Raw
    content: msgspec.Raw = msgspec.Raw(b"")


class Item(Message):
    """A message of /v1/responses, or something else that has no role, such as a call of a tool."""

    role: msgspec.Raw = msgspec.Raw(b"")


class ContentPart(msgspec.Struct):
    """A part of a message's content."""

    type: msgspec.Raw
    text: msgspec.Raw = msgspec.Raw(b"")


class Texts(msgspec.Struct, array_like=True):
    """The beginning of a list of prompts: whether there are several."""

    first: msgspec.Raw = msgspec.Raw(b"")
    second: msgspec.Raw = msgspec.Raw(b"")


class Metadata(msgspec.Struct):
    """Of a request; Anthropic's clients name the user there, and some the session."""

    user_id: msgspec.Raw = msgspec.Raw(b"null")


class ModelCard(msgspec.Struct):
    """An adapter (LoRA) has the model that it adapts as its parent."""

    id: str
    owned_by: str | None = None
    parent: str | None = None


class ModelCards(msgspec.Struct):
    data: list[ModelCard] = []


class TokenizeAnswer(msgspec.Struct):
    """What an engine answers to POST /tokenize, or to a request to render a prompt."""

    tokens: msgspec.Raw = msgspec.Raw(b"[]")
    token_ids: msgspec.Raw = msgspec.Raw(b"[]")


class NamesModel(msgspec.Struct):
    model: str | None = None
