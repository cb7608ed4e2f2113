"""A request to an engine, parsed as far as needed to read its prompt.

Most invalid requests are forwarded, so that the client gets the engine's own error. Only requests
without a usable model, and bodies that are too expensive to parse, are refused here."""

import contextlib
import re
from codecs import getincrementaldecoder
from collections.abc import Callable
from itertools import islice
from typing import Final, TypeVar
from urllib.parse import unquote

import msgspec
from msgspec import Raw
from xxhash import xxh3_128_hexdigest

from lean_selector.core.errors import BadRequest
from lean_selector.core.sessions.table import MAX_ID_BYTES
from lean_selector.gateway.prompt_shapes import (
    ContentPart,
    Item,
    Message,
    Metadata,
    Texts,
    Unknown,
    Why,
)
from lean_selector.wire.scalars import packed_u32

T = TypeVar("T")

BOM: Final = b"\xef\xbb\xbf"  # some clients write it before the body, and engines skip it
# Characters of an engine's list of ids: enough for 2 million tokens, the longest known prompt.
MOST_ID_BYTES: Final = 16 << 20
# Parsing takes a few MiB besides the body, and scanning 16 MiB takes some 50 ms: objects are
# created only for fields, which are counted first.
MOST_FIELDS: Final = 65_536
MOST_IDS: Final = 1 << 20
MOST_MESSAGES: Final = 8192
_TEXT_BYTES: Final = 64 * 1024  # checked in one step
# The end of a field's name. A quote after a single backslash belongs to a text.
_NAME_END: Final = re.compile(rb'"(?<![^\\]\\")[ \t\r\n]*+:')
_TYPE: Final = re.compile(rb'"type"')
_LIST_OF_TEXTS: Final = re.compile(rb'\[[ \t\r\n]*+["\[]')

MEDIA: Final = Unknown(Why.MEDIA, "an image, a recording or a file in a message")
SEVERAL: Final = Unknown(Why.SEVERAL, "several prompts in one request")
UNKNOWN_FORM: Final = Unknown(Why.FORM, "a prompt in an unknown form")
TOO_MANY_MESSAGES: Final = Unknown(Why.FORM, f"more than {MOST_MESSAGES} messages")
TOO_MANY_IDS: Final = Unknown(Why.FORM, f"more than {MOST_IDS} token ids")
NO_PROMPT: Final = Unknown(Why.PATH, "no known prompt form on this path")

# Requests for which a worker is chosen; the prompts of the last three are not indexed.
ROUTED_PATHS: Final = frozenset({
    *("/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses"),
    *("/v1/embeddings", "/v1/rerank", "/v1/score"),
})  # fmt: skip
_WITHOUT_OUTPUT: Final = ("/embeddings", "/rerank", "/score")

# Fields that make the engine's prompt differ from the messages or the text.
_CHANGING: Final = ("prompt_embeds", "suffix", "truncate_prompt_tokens")
# Fields by which engines tell each other where the KV blocks or the tokens of a prompt are. With
# one, a client can end the engine's process, or have other tokens computed than its messages say.
ENGINE_FIELDS: Final = frozenset({
    *("kv_transfer_params", "ec_transfer_params"),  # vLLM
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),  # SGLang
    *("disagg_prefill_dp_rank", "decode_tp_size"),
    *("disaggregated_params", "prompt_token_ids", "prompt_token_ids_b64"),  # TensorRT-LLM
})  # fmt: skip
# Fields of /v1/responses which say that the engine has stored a part of the prompt
_KEPT_BY_ENGINE: Final = ("previous_response_id", "conversation", "prompt")
# One of these may be why no pair of workers can serve a request.
_BARRING: Final = frozenset({"prompt_logprobs", "use_beam_search", "prompt_embeds"})
_TEXT_PARTS: Final = frozenset(
    {b'"text"', b'"input_text"', b'"output_text"', b'"refusal"', b'"thinking"'}
)
_TOOL_RESULT: Final = b'"tool_result"'  # a part whose content may have parts
# Clients move `cache_control` to another part in each turn, and engines ignore it.
_CACHE_CONTROL: Final = re.compile(rb',\s*+"cache_control"\s*+:\s*+\{[^{}]*+\}')
_MOST_CACHE_CONTROLS: Final = 64  # the API allows 4
_EMPTY: Final = re.compile(rb"\{[ \t\r\n]*+\}")
TOKENS_OF_MEDIA: Final = 1024  # estimate for an image or recording; engines use some 250 to 2 000
_NULL: Final = b"null"
_RAW_NULL: Final = Raw(_NULL)
read_fields: Final = msgspec.json.Decoder(dict[str, Raw]).decode  # of a JSON object
_read_text: Final = msgspec.json.Decoder(str | None).decode
_read_flag: Final = msgspec.json.Decoder(bool | None).decode
_read_messages: Final = msgspec.json.Decoder(list[Message]).decode
_read_items: Final = msgspec.json.Decoder(list[Item]).decode
_read_message: Final = msgspec.json.Decoder(Message).decode
_read_raw_messages: Final = msgspec.json.Decoder(list[Raw]).decode
_read_parts: Final = msgspec.json.Decoder(list[ContentPart]).decode
_read_arguments: Final = msgspec.json.Decoder(dict[str, Raw] | None).decode
_read_metadata: Final = msgspec.json.Decoder(Metadata).decode
_read_texts: Final = msgspec.json.Decoder(Texts).decode


class Kind:
    """The forms that a prompt can have. Not an Enum, because reading an Enum's members is slow."""

    CHAT: Final = "messages"
    TEXT: Final = "text"
    IDS: Final = "token ids"
    MESSAGES: Final = "messages of Anthropic's API"
    RESPONSES: Final = "items of /v1/responses"
    NONE: Final = "none"


COMPLETIONS: Final = frozenset({Kind.CHAT, Kind.TEXT, Kind.IDS})
CHATS: Final = frozenset({Kind.CHAT, Kind.MESSAGES, Kind.RESPONSES})
# The types of parts that are media. In chats, these are all parts that are not text.
_MEDIA_PARTS: Final = {
    Kind.MESSAGES: frozenset({b'"image"', b'"document"'}),
    Kind.RESPONSES: frozenset({
        *(b'"input_image"', b'"input_file"', b'"input_audio"', b'"computer_screenshot"'),
    }),
}  # fmt: skip


class ModelRequest:
    """A request to an engine; `fields` has its body's fields as JSON text. Raises BadRequest if the
    body is not an object or is too expensive to parse, and for an invalid model, salt or flag."""

    def __init__(self, path: str, body: bytes) -> None:
        self.fields = _fields(body.removeprefix(BOM))
        self.body: Final = body
        self.model = self._value("model", _read_text, "a string")
        self.streams = bool(self._value("stream", _read_flag, "true or false"))
        self.salt = self._value("cache_salt", _read_text, "a string") or None
        self.kind = Kind.NONE
        self.why_not: Unknown | None = None  # why its blocks are unknown
        self.messages: list[Raw] = []
        self.read_messages: list[Message] = []  # the parsed part of each message
        self.text = Raw(b"")  # the prompt as JSON
        self.ids: bytes = b""  # packed, 4 bytes each
        self._media = 0  # message parts that are not text
        self._part_text_bytes = 0  # bytes of the text parts
        path = unquote(path.partition("?")[0]).rstrip("/")  # as engines interpret it
        self.has_output = not path.endswith(_WITHOUT_OUTPUT)
        changing: tuple[str, ...] = _CHANGING
        if path.endswith("/chat/completions"):
            self._read_chat(Kind.CHAT, "messages")
        elif path.endswith("/completions"):
            self._read_prompt()
        elif path.endswith("/messages"):
            self._read_chat(Kind.MESSAGES, "messages", "system")
        elif path.endswith("/responses"):
            self._read_chat(Kind.RESPONSES, "input", "instructions")
            changing += _KEPT_BY_ENGINE
        else:
            self.why_not = NO_PROMPT
        for name in changing:
            if name in self.fields and self.has(name):
                self.why_not = Unknown(Why.CHANGED, f"`{name}` changes the prompt")

    def has(self, name: str) -> bool:
        """Whether a field of the body is present and not null."""
        raw = self.fields.get(name)
        return raw is not None and raw != _RAW_NULL

    @property
    def engine_field(self) -> str | None:
        """One of ENGINE_FIELDS that the body sets, or None. vLLM merges `vllm_xargs` with them."""
        names = [name for name in self.fields if name in ENGINE_FIELDS and self.has(name)]
        if not names and self.has("vllm_xargs"):
            with contextlib.suppress(msgspec.DecodeError):
                arguments = _read_arguments(self.fields["vllm_xargs"]) or {}
                names = [
                    f"vllm_xargs.{name}"
                    for name, value in arguments.items()
                    if name in ENGINE_FIELDS and value != _RAW_NULL
                ]
        return names[0] if names else None

    @property
    def bars_pair(self) -> str:
        """Why no pair of workers can serve the request, in a word; empty if one can."""
        if not self.has_output:
            return "no_output"
        if self.why_not is SEVERAL:  # the params are those of the first
            return "several_prompts"
        if self.kind == Kind.NONE:
            return "form"
        if self.kind != Kind.RESPONSES and _BARRING.isdisjoint(self.fields):
            return ""
        if self.has("prompt_logprobs"):  # the decode worker computes the prompt anew
            return "prompt_logprobs"
        if self.has("prompt_embeds"):  # a second prompt, to vLLM
            return "several_prompts"
        if self.flag("use_beam_search", False):
            return "beam_search"
        if self.kind == Kind.RESPONSES and (
            self.flag("background", False) or any(map(self.has, _KEPT_BY_ENGINE))
        ):
            return "kept_by_engine"
        return ""

    def flag(self, name: str, default: bool) -> bool:
        """Return a boolean field of the body, or `default` if the field is absent or invalid."""
        return {b"true": True, b"false": False}.get(bytes(self.fields.get(name, b"")), default)

    @property
    def asks_for_ids(self) -> bool:
        return self.flag("return_token_ids", False)

    @property
    def answers(self) -> int:
        """The number of answers that the client requests."""
        raw = self.fields.get("n")
        if raw is None:
            return 1
        given = bytes(raw).strip(b'"').partition(b".")[0]  # vLLM takes 2.0 and "2", too
        return max(1, int(given)) if given.isdigit() and len(given) < 6 else 1

    @property
    def session_id(self) -> str | None:
        """The conversation's id, from the first of `session_id`, `metadata` (Anthropic) and
        `prompt_cache_key` (OpenAI) that has an id."""
        for name in ("session_id", "metadata", "prompt_cache_key"):
            raw = self.fields.get(name)
            if raw is None:
                continue
            with contextlib.suppress(msgspec.DecodeError):
                if name == "metadata":
                    raw = _read_metadata(raw).user_id
                session_id = _read_text(raw)
                if session_id:
                    return session_id_of(session_id)
        return None

    @property
    def priority(self) -> int:
        """Return 1 if the request is urgent, -1 if it can wait. vLLM's `priority` is lower then."""
        raw = self.fields.get("priority")
        if raw is None:
            return 0
        given = bytes(raw)
        if not given.removeprefix(b"-").isdigit() or given in (b"0", b"-0"):
            return 0
        return 1 if given.startswith(b"-") else -1

    @property
    def echoes(self) -> bool:
        """Whether the answer repeats the prompt (`echo`)."""
        return bytes(self.fields.get("echo", b"false")) not in (b"false", _NULL)

    @property
    def tools_bytes(self) -> int:
        return size_of(self.fields.get("tools", b""))

    @property
    def text_bytes(self) -> int:
        """The prompt's size in bytes as sent; 0 for token ids, and for prompts with media."""
        if self._media or self.ids:
            return 0
        if self.kind in CHATS:
            return self.tools_bytes + sum(map(size_of, self.messages))
        return size_of(self.fields.get("prompt", self.body))

    def estimated_tokens(self, tokens_per_byte: float) -> int:
        """Estimates the prompt's number of tokens. Each image or recording adds a constant."""
        if self._media:
            text = round(self._part_text_bytes * tokens_per_byte)
            return text + self._media * TOKENS_OF_MEDIA
        return len(self.ids) // 4 or round(self.text_bytes * tokens_per_byte)

    @property
    def most_output_tokens(self) -> int | None:
        """The request's limit of output tokens, or None. For embeddings, reranks and scores: 0."""
        if not self.has_output:
            return 0
        for name in ("max_completion_tokens", "max_tokens", "max_output_tokens"):
            raw = self.fields.get(name)
            if raw is not None and (given := bytes(raw)).isdigit() and len(given) < 10:
                return int(given)
        return None

    def with_fields(self, **changed: object) -> bytes:
        """Return the request's body with these fields added or replaced."""
        fields: dict[str, object] = {**self.fields, **changed}
        return msgspec.json.encode(fields)

    def _read_chat(self, kind: str, name: str, system: str | None = None) -> None:
        """Reads the messages in the field `name`. A system message in the field `system` precedes
        these messages."""
        text = self.fields.get(name, Raw(b""))
        try:
            if kind != Kind.CHAT:
                text = _without_odd_forms(text, kind)
            messages: list[Message] = (
                [*_read_items(text)] if kind == Kind.RESPONSES else _read_messages(text)
            )
            if len(messages) > MOST_MESSAGES:
                self.why_not = TOO_MANY_MESSAGES
                return
            self.messages, self.read_messages = _read_raw_messages(text), messages
            if system is not None and self.has(system):
                content = _CACHE_CONTROL.sub(b"", self.fields[system], _MOST_CACHE_CONTROLS)
                first = Raw(b'{"role":"system","content":%b}' % content)
                self.messages.insert(0, first)
                self.read_messages.insert(0, _read_message(first))
            for message in messages:
                self._read_content(message.content, kind)
                if isinstance(message, Item):  # the result of a tool
                    self._read_content(message.output, kind)
        except msgspec.DecodeError:
            self.why_not = UNKNOWN_FORM
            return
        self.kind = kind
        if self._media:
            self.why_not = MEDIA

    def _read_content(self, content: Raw, kind: str, is_result: bool = False) -> None:
        """Counts the media and the text in a content: a text, a part or a list of parts. A tool's
        arguments are no content, whatever they have. `is_result`: it is that of a tool's result."""
        first = bytes(memoryview(content)[:1])
        if first == b'"':
            self._part_text_bytes += size_of(content)
        if first == b"{" and kind == Kind.RESPONSES:
            content = Raw(b"[%b]" % content)
        elif first != b"[":
            return
        if _TYPE.search(content) is None:
            return
        for part in _read_parts(content):
            form = bytes(part.type)
            if form in _TEXT_PARTS:
                self._part_text_bytes += size_of(part.text)
            elif kind == Kind.CHAT or form in _MEDIA_PARTS[kind]:
                self._media += 1
            elif form == _TOOL_RESULT and not is_result:
                self._read_content(part.content, kind, True)

    def _read_prompt(self) -> None:
        prompt = self.fields.get("prompt", Raw(b""))
        if _LIST_OF_TEXTS.match(prompt) is not None:
            texts = _read_texts(prompt)
            if size_of(texts.second):
                self.why_not = SEVERAL
                return
            prompt = texts.first
        first = bytes(memoryview(prompt)[:1])
        if first == b'"':
            self.kind, self.text = Kind.TEXT, prompt
            return
        ids: bytes | None = None
        if first == b"[":
            text = bytes(prompt)
            if len(text) > MOST_ID_BYTES or text.count(b",") >= MOST_IDS:
                self.why_not = TOO_MANY_IDS
                return
            ids = packed_u32(text)
        if not ids:
            self.why_not = UNKNOWN_FORM
            return
        self.kind, self.ids = Kind.IDS, ids

    def _value(self, name: str, read: Callable[[Raw], T | None], expected: str) -> T | None:
        raw = self.fields.get(name)
        if raw is None:
            return None
        try:
            return read(raw)
        except msgspec.DecodeError:
            raise BadRequest(f"{name}: expected {expected}") from None


def _without_odd_forms(text: Raw, kind: str) -> Raw:
    """Return the messages as a JSON list without `cache_control` marks, which change each turn."""
    if kind == Kind.RESPONSES:
        if bytes(memoryview(text)[:1]) == b'"':
            return Raw(b"".join((b'[{"role":"user","content":', text, b"}]")))
        empty = islice(_EMPTY.finditer(text), MOST_MESSAGES + 1)
        # Each empty item would take twenty times the memory of its text
        if sum(1 for _ in empty) > MOST_MESSAGES:
            raise msgspec.DecodeError("too many empty items")
    elif _CACHE_CONTROL.search(text) is not None:
        return Raw(_CACHE_CONTROL.sub(b"", text, _MOST_CACHE_CONTROLS))
    return text


def session_id_of(name: str) -> str:
    """Return a session's id, or the id's hash if the id is too long."""
    return name if len(name.encode()) <= MAX_ID_BYTES else xxh3_128_hexdigest(name.encode())


def size_of(text: Raw | bytes) -> int:
    return memoryview(text).nbytes


def _fields(body: bytes) -> dict[str, Raw]:
    try:
        if not body.isascii():
            _check_text(body)
        if len(body) > 4 * MOST_FIELDS:  # a field has a name, a colon and a value
            _check_cost(body)
        return read_fields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadRequest(f"the body is not a JSON object: {error}") from None


def _check_text(body: bytes) -> None:
    """Raises UnicodeDecodeError for invalid UTF-8."""
    decode = getincrementaldecoder("utf-8")().decode
    for at in range(0, len(body), _TEXT_BYTES):
        decode(body[at : at + _TEXT_BYTES])
    decode(b"", True)


def _check_cost(body: bytes) -> None:
    """Raises BadRequest for a body whose objects would take much more memory than its text."""
    if body.count(b":") > MOST_FIELDS:
        names = islice(_NAME_END.finditer(body), MOST_FIELDS + 1)
        if sum(1 for _ in names) > MOST_FIELDS:
            raise BadRequest(f"the body has more than {MOST_FIELDS} fields")


_ARGUMENTS: Final = ("documents", "reasoning_effort")


def template_arguments(request: ModelRequest) -> dict[str, object]:
    """Return the request's arguments for the chat template: name -> JSON value."""
    given: dict[str, object] = {}
    if request.has("chat_template_kwargs"):
        try:
            given.update(read_fields(request.fields["chat_template_kwargs"]))
        except msgspec.DecodeError:
            return {}
    more = {name: request.fields[name] for name in _ARGUMENTS if request.has(name)}
    if "reasoning_effort" in more:
        given.setdefault("enable_thinking", bytes(more["reasoning_effort"]) != b'"none"')
    return {**given, **more}
