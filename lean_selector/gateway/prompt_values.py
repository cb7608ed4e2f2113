"""Canonical bytes of the parts of a request that form its prompt.

The same JSON value can have different spaces, escapes and orders of fields. Messages and
`tools` recur in later requests, so canonical forms are cached, by the hash of the text as sent."""

import contextlib
import re
from collections.abc import Iterator
from typing import Final, NamedTuple, TypeVar

import msgspec
from msgspec import Raw
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from lean_selector.gateway.model_request import CHATS, Kind, ModelRequest, read_fields, size_of
from lean_selector.gateway.prompt_shapes import ContentPart, Message

# Other fields that affect how the engine renders the messages or the text.
CHAT_FIELDS: Final = (
    *("tools", "tool_choice", "documents", "reasoning_effort", "chat_template"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message"),
    *("add_special_tokens", "response_format"),
)
TEXT_FIELDS: Final = ("add_special_tokens",)
_FIELDS: Final = {
    Kind.CHAT: CHAT_FIELDS,
    Kind.TEXT: TEXT_FIELDS,
    Kind.MESSAGES: ("tools", "tool_choice", "thinking", "output_config", "chat_template_kwargs"),
    Kind.RESPONSES: ("tools", "tool_choice", "reasoning", "text", "chat_template_kwargs"),
}

# Rewriting a value requires decoding it, which takes up to 5 times the memory of a text, and 25
# times that of other values. A longer value is compared as sent.
MOST_TEXT_BYTES: Final = 4 << 20
MOST_VALUE_BYTES: Final = 256 << 10
# Bytes of a link of a long message, some 250 to 500 tokens. Prompts that differ within one link are
# compared by their blocks once both are known.
LINK_BYTES: Final = 2048
# Some 4 MB of cache; 12 MB if all entries have the maximum length.
_MOST_KEPT: Final = 16_384
_MOST_KEPT_LINKS: Final = 64

_ROLE: Final = b'{"role":'
_BARE: Final = len(b'{"role":,"content":}')
# Unnecessary escapes in a text. A match after an escaped backslash only costs time.
_NEEDLESS: Final = re.compile(rb"\\[/u]")
_NULL: Final = b"null"
_TEXT_TYPES: Final = frozenset({b'"text"', b'"input_text"', b'"output_text"'})
_read_parts: Final = msgspec.json.Decoder(list[ContentPart]).decode


class _Links(NamedTuple):
    """Hashes of a message's compact JSON (8 bytes per piece of LINK_BYTES bytes), and its size."""

    hashes: bytes
    size: int


# By the hash of the text as sent.
_kept_keys: Final[dict[int, int]] = {}
_kept_links: Final[dict[int, _Links]] = {}
K = TypeVar("K")


def _keep(kept: dict[int, K], written: int, value: K) -> None:
    if len(kept) >= _MOST_KEPT:
        kept.clear()
    kept[written] = value


def rendering_key(request: ModelRequest, shape: tuple[object, ...], seed: int) -> int:
    """Return a hash of `shape` (model, kind, block size, EAGLE) and all fields that affect the
    rendered prompt, except messages and text. A null field counts as absent. The order of members
    in a field matters, because templates render tools and arguments in that order."""
    names = _FIELDS[request.kind]
    fields = request.fields
    given = [(name, _key(fields[name])) for name in names if name in fields and request.has(name)]
    return xxh3_64_intdigest(msgspec.json.encode((shape, given)), seed)


def _key(value: Raw) -> int:
    written = xxh3_64_intdigest(value)
    key = _kept_keys.get(written)
    if key is None:
        key = xxh3_64_intdigest(_compact(value))
        _keep(_kept_keys, written, key)
    return key


def links_of(request: ModelRequest) -> Iterator[_Links]:
    """Yields the hashes (`Links`) of each message, or of the prompt's text."""
    if request.kind not in CHATS:
        yield _cut(_compact(request.text))
        return
    for raw, message in zip(request.messages, request.read_messages, strict=True):
        written = xxh3_64_intdigest(raw)
        links = _kept_links.get(written)
        if links is None:
            links = _cut(_message(raw, message))
            if len(links.hashes) <= 8 * _MOST_KEPT_LINKS:
                _keep(_kept_links, written, links)
        yield links


def _cut(text: Raw | bytes) -> _Links:
    view = memoryview(text)
    pieces = [view[at : at + LINK_BYTES] for at in range(0, len(view), LINK_BYTES)]
    return _Links(b"".join([xxh3_64_digest(each) for each in pieces]), len(view))


def _message(raw: Raw, message: Message) -> Raw | bytes:
    """Return the message as `{"role":...,"content":...}`, with other fields ordered by name."""
    role, content = size_of(message.role), size_of(message.content)
    is_bare = bool(role and content) and size_of(raw) == _BARE + role + content
    if is_bare:
        view = memoryview(raw)
        is_plain = bytes(view[: len(_ROLE)]) == _ROLE and bytes(view[-2:]) == b'"}'
        if is_plain and _NEEDLESS.search(raw) is None:
            return raw
    pieces = [_ROLE, message.role, b',"content":', _content(message.content)]
    if not is_bare:
        rest = read_fields(raw)
        for name in sorted(rest.keys() - {"role", "content"}):
            if bytes(rest[name]) != _NULL:
                pieces += (b',"%b":' % name.encode(), _compact(rest[name]))
    return b"".join([*pieces, b"}"])


def _content(content: Raw) -> Raw | bytes:
    """Return the content. A single text part becomes its text: templates render both alike."""
    if bytes(memoryview(content)[:1]) == b"[":
        with contextlib.suppress(msgspec.DecodeError):
            parts = _read_parts(content)
            if len(parts) == 1 and bytes(parts[0].type) in _TEXT_TYPES:
                return _compact(parts[0].text)
    return b"" if bytes(content) == _NULL else _compact(content)


def _compact(value: Raw) -> Raw | bytes:
    """Return a JSON value without spaces and unnecessary escapes."""
    is_text = bytes(memoryview(value)[:1]) == b'"'
    if size_of(value) > (MOST_TEXT_BYTES if is_text else MOST_VALUE_BYTES):
        return value
    text = bytes(value)
    if is_text and _NEEDLESS.search(text) is None:
        return text
    try:
        return msgspec.json.encode(msgspec.json.decode(text))
    except (ValueError, RecursionError):  # half of a surrogate pair, for example
        return text
