"""A request to an engine, read as far as its prompt goes. Nothing of it is judged for the engine.

What an engine would refuse is passed on, so that it says so in its own words; only what names no
model that could be chosen is refused here.
"""

from enum import Enum
from typing import Final, TypeVar

import msgspec
from msgspec import Raw

from lean_selector.core.errors import BadRequest
from lean_selector.gateway.prompt_shapes import Unknown, Why
from lean_selector.wire.scalars import packed_u32

T = TypeVar("T")

# What holds 2 million ids, the longest prompt that we know of.
MOST_ID_BYTES: Final = 16 << 20

MEDIA: Final = Unknown(Why.MEDIA, "an image, a recording or a file in a message")
SEVERAL: Final = Unknown(Why.SEVERAL, "several prompts in one request")
UNKNOWN_FORM: Final = Unknown(Why.FORM, "a prompt in a form that is not known")
NO_PROMPT: Final = Unknown(Why.PATH, "no prompt that is known on this path")

# Whatever else has a hand in what the engine makes of the messages or of the text.
CHAT_FIELDS: Final = (
    *("tools", "tool_choice", "documents", "reasoning_effort", "chat_template"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("add_special_tokens", "response_format"),
)
TEXT_FIELDS: Final = ("add_special_tokens",)
# With these the engine's prompt is not what the messages or the text make.
_CHANGING: Final = ("prompt_embeds", "suffix", "truncate_prompt_tokens")
_TEXT_PARTS: Final = frozenset({"text", "input_text", "output_text", "refusal", "thinking"})
BYTES_PER_TOKEN: Final = 4  # of a text of which nothing is known
TOKENS_OF_MEDIA: Final = 1024  # of one image or recording; engines have some 250 to 2 000
_NULL: Final = b"null"


class Kind(Enum):
    CHAT = "messages"
    TEXT = "text"
    IDS = "token ids"
    NONE = "none"


class ModelRequest:
    """`fields` are those of the body, as JSON text. Raises BadRequest for a body that is no object,
    and for a model, a salt or a flag that is none."""

    def __init__(self, path: str, body: bytes) -> None:
        self.fields = _fields(body)
        self.body: Final = body
        self.model = self._value("model", str, "a string")
        self.streams = bool(self._value("stream", bool, "true or false"))
        self.salt = self._value("cache_salt", str, "a string") or None
        self.kind = Kind.NONE
        self.why_not: Unknown | None = None  # why its blocks cannot be known
        self.messages: list[Raw] = []
        self.text: bytes = b""  # of the prompt, as JSON
        self.ids: bytes = b""  # packed, 4 bytes each
        self._media = 0
        path = path.partition("?")[0].rstrip("/")
        if path.endswith("/chat/completions"):
            self._read_chat()
        elif path.endswith("/completions"):
            self._read_prompt()
        else:
            self.why_not = NO_PROMPT
        for name in _CHANGING:
            if self.has(name):
                self.why_not = Unknown(Why.CHANGED, f"`{name}` changes the prompt")

    def has(self, name: str) -> bool:
        """Whether a field is there, and not null."""
        raw = self.fields.get(name)
        return raw is not None and bytes(raw) != _NULL

    def flag(self, name: str, default: bool) -> bool:
        """The default where a field is no flag, too."""
        return {b"true": True, b"false": False}.get(bytes(self.fields.get(name, b"")), default)

    @property
    def asks_for_ids(self) -> bool:
        return self.flag("return_token_ids", False)

    @property
    def has_one_answer(self) -> bool:
        return bytes(self.fields.get("n", b"1")) in (b"1", _NULL)

    @property
    def echoes(self) -> bool:
        """The prompt is part of the answer; vLLM leaves its text out where ids are asked for."""
        return bytes(self.fields.get("echo", b"false")) not in (b"false", _NULL)

    def estimated_tokens(self) -> int:
        """The tokens of a prompt of which nothing is known: a file says little by its length."""
        if self._media:
            size = sum(map(_text_bytes_of, self.messages))
            return size // BYTES_PER_TOKEN + self._media * TOKENS_OF_MEDIA
        prompt = self.fields.get("prompt", self.body)
        return len(self.ids) // 4 or len(prompt) // BYTES_PER_TOKEN

    def with_fields(self, **changed: object) -> bytes:
        """The body with these fields added, or in the place of those that it has."""
        fields: dict[str, object] = {**self.fields, **changed}
        return msgspec.json.encode(fields)

    def _read_chat(self) -> None:
        try:
            self.messages = msgspec.json.decode(self.fields.get("messages", b""), type=list[Raw])
        except msgspec.DecodeError:
            self.why_not = UNKNOWN_FORM
            return
        self.kind = Kind.CHAT
        for message in self.messages:
            if b'"type"' in bytes(message):
                self._media += _media_of(message)
        if self._media:
            self.why_not = MEDIA

    def _read_prompt(self) -> None:
        prompt = bytes(self.fields.get("prompt", b""))
        if prompt.startswith(b"["):
            several = msgspec.json.decode(prompt, type=list[Raw])
            if several and bytes(several[0])[:1] in (b'"', b"["):
                if len(several) > 1:
                    self.why_not = SEVERAL
                    return
                prompt = bytes(several[0])
        if prompt.startswith(b'"'):
            self.kind, self.text = Kind.TEXT, prompt
            return
        ids = packed_u32(prompt) if prompt.startswith(b"[") else None
        if not ids:
            self.why_not = UNKNOWN_FORM
            return
        self.kind, self.ids = Kind.IDS, ids

    def _value(self, name: str, kind: type[T], expected: str) -> T | None:
        raw = self.fields.get(name)
        if raw is None or bytes(raw) == _NULL:
            return None
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.DecodeError:
            raise BadRequest(f"{name}: expected {expected}") from None


def _fields(body: bytes) -> dict[str, Raw]:
    try:
        if not body.isascii():
            body.decode()
        return msgspec.json.decode(body, type=dict[str, Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not a JSON object: {error}") from None


def _media_of(message: Raw) -> int:
    """How many parts of a message are not text."""
    return sum(part.get("type") not in _TEXT_PARTS for part in _parts_of(message))


def _parts_of(message: Raw) -> list[dict[str, object]]:
    try:
        content = msgspec.json.decode(message).get("content")
    except (msgspec.DecodeError, AttributeError):
        return []
    return [part for part in content if isinstance(part, dict)] if isinstance(content, list) else []


def _text_bytes_of(message: Raw) -> int:
    """Bytes of a message's parts that are text."""
    texts = (part.get("text") for part in _parts_of(message))
    return sum(len(text) for text in texts if isinstance(text, str))


_ARGUMENTS: Final = ("documents", "reasoning_effort")


def template_arguments(request: ModelRequest) -> dict[str, object]:
    """`chat_template_kwargs`, and the fields that are arguments too, as JSON; by name."""
    given: dict[str, object] = {}
    if request.has("chat_template_kwargs"):
        try:
            given.update(
                msgspec.json.decode(request.fields["chat_template_kwargs"], type=dict[str, Raw])
            )
        except msgspec.DecodeError:
            return {}
    more = {name: request.fields[name] for name in _ARGUMENTS if request.has(name)}
    if "reasoning_effort" in more:
        given.setdefault("enable_thinking", bytes(more["reasoning_effort"]) != b'"none"')
    return {**given, **more}
