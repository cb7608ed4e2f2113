"""Fields that the gateway adds to a forwarded request, and removes from the engine's answer.

Token ids in an answer are read while it is relayed. Works on bytes as they arrive, for streams and
whole answers alike: in JSON a quote inside a text is escaped, so a field's name followed by a list
of numbers is unambiguous. Only the end of such a list is buffered, and that of an event if a
stream's usage is to be removed.
"""

import re
from collections.abc import Callable
from typing import Final

from msgspec import Raw

from lean_selector.core.hashing import ENGINE_SALT_PREFIX
from lean_selector.gateway.model_request import MOST_ID_BYTES, ModelRequest
from lean_selector.gateway.prompt_shapes import Unknown, Why

_USAGE_BYTES: Final = 4096  # at the end of an answer, where its usage is
_NAMES: Final = (b'"prompt_token_ids":', b'"token_ids":')  # and the bracket
_LONGEST_NAME: Final = 24  # with some blanks
_IDS: Final = re.compile(rb'"(prompt_)?token_ids"\s*:\s*\[')
_BEGINNINGS: Final = frozenset(
    name[:length] for name in _NAMES for length in range(1, len(name) + 1)
)
_MOST_EVENT_BYTES: Final = 1 << 20  # a longer one is not buffered
_USAGE_EVENT: Final = re.compile(
    rb'^data:[^\r\n]*"choices"\s*:\s*\[\s*\][^\r\n]*"usage"[^\r\n]*\r?\n\r?\n', re.MULTILINE
)
# Anthropic's API counts tokens read from or written to the cache in addition to `input_tokens`.
_CACHED: Final = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d{1,15})')
_PROMPT: Final = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,15})')
_BESIDE: Final = tuple(
    re.compile(rb'"cache_%b_input_tokens"\s*:\s*(\d{1,15})' % name)
    for name in (b"read", b"creation")
)
_OUTPUT: Final = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,15})')


class UsageReader:
    """The usage in an answer, None if absent. Looks at the last bytes only."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last = bytearray()

    def feed(self, data: bytes) -> None:
        self._last += data
        # from time to time: a stream arrives in small pieces
        if len(self._last) > 4 * _USAGE_BYTES:
            del self._last[:-_USAGE_BYTES]

    @property
    def cached_tokens(self) -> int | None:
        """Cached tokens of the prompt."""
        return self._said(_CACHED)

    @property
    def lengths(self) -> tuple[int, int] | None:
        """Tokens of the prompt and of the answer."""
        prompt, output = self._said(_PROMPT), self._said(_OUTPUT)
        if prompt is None or output is None:
            return None
        return prompt + sum(self._said(field) or 0 for field in _BESIDE), output

    def _said(self, field: re.Pattern[bytes]) -> int | None:
        found = field.findall(self._last, max(0, self._last.rfind(b'"usage"')))
        return int(found[-1]) if found else None


class AnswerReader:
    """Reads an answer with status 200. At its end `on_ids` is called with the ids: the contents of
    JSON lists."""

    def __init__(
        self,
        on_ids: Callable[[bytes | None, bytes], None] | None,
        *,
        strips: bool,
        drops_usage: bool = False,
    ) -> None:
        """`strips`: the client did not request the ids, and gets `null` for each list.
        `drops_usage`: it did not request a stream's last event, which has only the usage."""
        self._on_ids = on_ids
        self._strips = strips
        self._drops_usage = drops_usage
        self._event = b""  # the start of an event, if events may have to be dropped
        self.usage: Final = UsageReader()
        self._held = b""  # possibly the start of a list's name
        self._array: bytearray | None = None  # the current list
        self._is_of_prompt = False
        self._prompt: bytes | None = None
        self._output: list[bytes] = []
        self._is_too_long = False

    def feed(self, data: bytes) -> bytes:
        """The bytes to send to the client for this piece of the answer, possibly none."""
        text: bytes | None = None
        if self._array is None and not self._held and data.endswith(b"\n"):
            text = self._without_one_list(data)
        if text is None:
            text = self._without_ids(self._held + data)
        self.usage.feed(text)
        if not self._strips:
            text = data
        return self._without_usage(text) if self._drops_usage else text

    def rest(self) -> bytes:
        """The bytes left at the end; none for a well-formed answer."""
        rest = self._event + (self._held if self._strips else b"")
        self._event = self._held = b""
        return rest

    def end(self) -> bytes:
        """The answer is complete. Returns `rest`."""
        rest = self.rest()
        if self._on_ids is not None and self._array is None and not self._is_too_long:
            self._on_ids(self._prompt, b",".join(self._output))
        return rest

    def _without_one_list(self, data: bytes) -> bytes | None:
        """As `_without_ids`, of events that are whole and have one list of an answer at most, as
        nearly all; None: look closer."""
        lists = data.count(b"token_ids")
        if not lists:
            return data
        before, name, rest = data.partition(b'"token_ids":[')
        ids, end, after = rest.partition(b"]")
        if lists > 1 or not name or not end:
            return None
        if ids:
            self._output.append(ids)
        return b'%b"token_ids":null%b' % (before, after)

    def _without_ids(self, data: bytes) -> bytes:
        """`data` with `null` for each list; its end may be buffered until the next piece."""
        kept: list[bytes] = []
        at = 0
        self._held = b""
        while True:
            if self._array is not None:
                end = data.find(b"]", at)
                self._keep(data[at:] if end < 0 else data[at:end])
                if end < 0:
                    break
                at = end + 1
                self._close()
            found = _IDS.search(data, at)
            if found is None:
                held = 0 if data.endswith(b"\n") else _beginning(data, at)
                kept.append(data[at : len(data) - held])
                self._held = data[len(data) - held :]
                break
            kept += (data[at : found.end() - 1], b"null")
            self._is_of_prompt = found[1] is not None
            self._array = bytearray()
            at = found.end()
        return b"".join(kept)

    def _without_usage(self, data: bytes) -> bytes:
        """`data` up to the end of its last event, without the usage event."""
        if not self._event and data.endswith(b"\n\n") and b'"usage"' not in data:
            return data
        data = self._event + data
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            end = data.rfind(b"\r\n\r\n") + 4
            if end < 4:
                end = 0 if len(data) < _MOST_EVENT_BYTES else len(data)
        whole, self._event = data[:end], data[end:]
        return _USAGE_EVENT.sub(b"", whole) if b'"usage"' in whole else whole

    def _keep(self, ids: bytes) -> None:
        assert self._array is not None
        if len(self._array) + len(ids) > MOST_ID_BYTES:
            self._is_too_long = True
            self._array.clear()
        if not self._is_too_long:
            self._array += ids

    def _close(self) -> None:
        assert self._array is not None
        ids, self._array = bytes(self._array), None
        if self._is_of_prompt:
            if self._prompt is None:
                self._prompt = ids
        elif ids:
            self._output.append(ids)


def _beginning(data: bytes, at: int) -> int:
    """How many bytes at the end of `data[at:]` may start a list's name."""
    quote = data.find(b'"', max(at, len(data) - _LONGEST_NAME))
    while quote >= 0:
        if data[quote:].translate(None, b" ") in _BEGINNINGS:
            return len(data) - quote
        quote = data.find(b'"', quote + 1)
    return 0


# vLLM's limits: it refuses longer ones, and some characters.
MOST_SALT_CHARACTERS: Final = 128
_NOT_IN_SALTS: Final = frozenset("@/\\\0")
UNMARKABLE: Final = Unknown(
    Why.SALT, "its cache_salt cannot be marked: it is too long, or has @, /, \\ or NUL"
)
_TRUE: Final = Raw(b"true")
_USAGE: Final = Raw(b'{"include_usage":true}')


class Additions:
    """The additions to one forwarded request, and their removal from its answer."""

    __slots__ = ("_drops_usage", "_fields", "_on_ids", "_strips")

    def __init__(self) -> None:
        self._fields: dict[str, object] = {}
        self._on_ids: Callable[[bytes | None, bytes], None] | None = None
        self._strips = False
        self._drops_usage = False

    def mark_salt(self, request: ModelRequest, forwards: bool) -> bool:
        """Add the prefix that makes the engine report the salt in its events; sets
        `request.salt` to the salt of the blocks there. False if they will have none although
        the request has one."""
        salt = request.salt
        if salt is None:
            return True
        if salt.startswith(ENGINE_SALT_PREFIX):
            request.salt = salt.removeprefix(ENGINE_SALT_PREFIX) or None
            return True
        if not forwards:
            request.salt = None
            return False
        marked = ENGINE_SALT_PREFIX + salt
        if len(marked) > MOST_SALT_CHARACTERS or not _NOT_IN_SALTS.isdisjoint(salt):
            request.why_not = request.why_not or UNMARKABLE
        else:
            self._fields["cache_salt"] = marked
        return True

    def ask_for_ids(
        self, request: ModelRequest, on_ids: Callable[[bytes | None, bytes], None]
    ) -> None:
        """`on_ids` is called with the ids of the prompt, and of the answer if there is only one.
        Does nothing if that would change the answer."""
        if request.echoes:
            return
        if not request.asks_for_ids:
            self._fields["return_token_ids"] = _TRUE
            self._strips = True
        if request.has_one_answer:
            self._on_ids = on_ids
        else:
            self._on_ids = lambda prompt_ids, _: on_ids(prompt_ids, b"")

    def ask_for_usage(self, request: ModelRequest) -> None:
        """Request the usage at the end of a stream, if the client does not."""
        if request.streams and not request.has("stream_options"):
            self._fields["stream_options"] = _USAGE
            self._drops_usage = True

    def body(self, request: ModelRequest) -> bytes:
        """The body to forward; the caller's own if nothing is added."""
        return request.with_fields(**self._fields) if self._fields else request.body

    def reader(self) -> AnswerReader | None:
        """The reader of the answer; None if it is relayed unchanged."""
        if self._on_ids is None and not self._drops_usage:
            return None
        return AnswerReader(self._on_ids, strips=self._strips, drops_usage=self._drops_usage)
