"""Structs of prompts and models: settings, and the parsed parts of bodies."""

from enum import StrEnum

import msgspec


class Mode(StrEnum):
    """The source of a prompt's tokens."""

    LEARN = "learn"  # from the engines' own answers
    TOKENIZE = "tokenize"  # from the engines' /tokenize
    LOCAL = "local"  # from a tokenizer in this process
    OFF = "off"  # none: load decides alone


class PromptSettings(msgspec.Struct, frozen=True, kw_only=True):
    mode: Mode
    tokenizer: str | None = None  # the folder of `local`
    memory_bytes: int = 128 << 20
    # Tokenize only if at least this many bytes of a prompt are unknown.
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
    """One word, for headers, the access log and the metric: docs/guide/prompts.md lists them."""

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


class Unknown(msgspec.Struct, frozen=True):
    """The word, and a description for people."""

    why: Why
    text: str


class Message(msgspec.Struct):
    """A message of a chat, its parsed part."""

    role: msgspec.Raw
    content: msgspec.Raw = msgspec.Raw(b"")


class Item(Message):
    """Item of /v1/responses: a message, or something without a role, such as a tool call."""

    role: msgspec.Raw = msgspec.Raw(b"")


class ContentPart(msgspec.Struct):
    """A part of a message's content."""

    type: msgspec.Raw
    text: msgspec.Raw = msgspec.Raw(b"")


class Texts(msgspec.Struct, array_like=True):
    """The start of a list of prompts: whether there are several."""

    first: msgspec.Raw = msgspec.Raw(b"")
    second: msgspec.Raw = msgspec.Raw(b"")


class Metadata(msgspec.Struct):
    """Metadata of a request; Anthropic's clients name the user there, and some the session."""

    user_id: msgspec.Raw = msgspec.Raw(b"null")


class ModelCard(msgspec.Struct):
    """An adapter (LoRA) has its base model as parent."""

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
