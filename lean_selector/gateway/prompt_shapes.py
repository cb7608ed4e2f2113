"""Structs for prompts and models: settings, and the parts of bodies that are parsed."""

from enum import StrEnum

import msgspec


class Mode(StrEnum):
    """Where the tokens of a prompt come from."""

    LEARN = "learn"  # from the engines' own answers
    TOKENIZE = "tokenize"  # from the engines' /tokenize
    LOCAL = "local"  # from a tokenizer in this process
    OFF = "off"  # none: load alone decides


class PromptSettings(msgspec.Struct, frozen=True, kw_only=True):
    mode: Mode
    tokenizer: str | None = None  # folder for `local`
    memory_bytes: int = 128 << 20
    # Tokenize only if at least this many bytes of a prompt are unknown.
    ask_from_bytes: int = 0
    render_from_bytes: int = 0  # likewise, on paths whose answers contain no tokens to learn
    ask_timeout_s: float = 2.0
    passes_engine_fields: bool = False  # else a request with one is refused


class Served(msgspec.Struct, frozen=True):
    """A model that a tenant's workers serve. `workers`: worker id -> base URL."""

    model_name: str
    tenant_id: str
    block_size: int  # tokens, >= 1
    is_eagle: bool
    workers: dict[int, str]
    most_tokens: int = 0  # that the KV cache of a worker can hold; 0: unknown


class Why(StrEnum):
    """Why some block hashes of a prompt are unknown, in one word; see docs/guide/prompts.md."""

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
    """Why the gateway does not know some block hashes of a prompt: in one word, and in a text."""

    why: Why
    text: str


class Message(msgspec.Struct):
    """The parsed part of a chat message: its role and its content, as JSON text."""

    role: msgspec.Raw
    content: msgspec.Raw = msgspec.Raw(b"")


class Item(Message):
    """An item of /v1/responses: a message, or an object without a role, such as a tool call."""

    role: msgspec.Raw = msgspec.Raw(b"")
    output: msgspec.Raw = msgspec.Raw(b"")  # of a tool


class ContentPart(msgspec.Struct):
    """A part of a message's content. The result of a tool has a content of its own."""

    type: msgspec.Raw
    text: msgspec.Raw = msgspec.Raw(b"")
    content: msgspec.Raw = msgspec.Raw(b"")


class Texts(msgspec.Struct, array_like=True):
    """The first two prompts of a list. If `second` is not empty, the list has several prompts."""

    first: msgspec.Raw = msgspec.Raw(b"")
    second: msgspec.Raw = msgspec.Raw(b"")


class Metadata(msgspec.Struct):
    """`metadata` of a request, in which clients of Anthropic's API put the user or session id."""

    user_id: msgspec.Raw = msgspec.Raw(b"null")


class ModelCard(msgspec.Struct):
    """An entry of a model list. An adapter (LoRA) has its base model as parent."""

    id: str
    owned_by: str | None = None
    parent: str | None = None


class ModelCards(msgspec.Struct):
    data: list[ModelCard] = []


class TokenizeAnswer(msgspec.Struct):
    """An engine's answer with the tokens of a prompt, from POST /tokenize or a render path."""

    tokens: msgspec.Raw = msgspec.Raw(b"[]")
    token_ids: msgspec.Raw = msgspec.Raw(b"[]")


class NamesModel(msgspec.Struct):
    model: str | None = None


class HasUsage(msgspec.Struct):
    """A part of an engine's answer that has its token counts."""

    usage: msgspec.Raw = msgspec.Raw(b"")


class AnswerEvent(HasUsage):
    """The parts of a stream's event that are read, of all APIs."""

    type: msgspec.Raw = msgspec.Raw(b"")
    object: msgspec.Raw = msgspec.Raw(b"")
    choices: msgspec.Raw = msgspec.Raw(b"")
    message: msgspec.Raw = msgspec.Raw(b"")
    response: msgspec.Raw = msgspec.Raw(b"")
    error: msgspec.Raw = msgspec.Raw(b"")
    code: msgspec.Raw = msgspec.Raw(b"")


class AnswerError(msgspec.Struct):
    """An error in an event."""

    type: msgspec.Raw = msgspec.Raw(b"")
    code: msgspec.Raw = msgspec.Raw(b"")


# -- pairs -----------------------------------------------------------------------------------------


class HasTransferParams(msgspec.Struct):
    """A prefill worker's answer: where a decode worker finds the KV blocks of the prompt."""

    kv_transfer_params: msgspec.Raw = msgspec.Raw(b"null")


class TransferParams(msgspec.Struct):
    """What a decode worker cannot do without. Engines with several groups of layers have a list of
    block ids for each."""

    do_remote_prefill: bool = False
    remote_block_ids: list[list[int] | int] = []
    remote_engine_id: str = ""
    remote_request_id: str = ""
    remote_host: str = ""
