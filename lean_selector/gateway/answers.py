"""Adds fields to a forwarded request, and removes their effects from the engine's answer.

Token ids in an answer are read while the answer is relayed. Streams and whole answers are both
handled piece by piece. A list of ids is found by its field's name (`"token_ids"`). No JSON string
can contain this name, because quotes inside strings are escaped. An unfinished list or name is
buffered. To remove the usage from a stream, an incomplete event is buffered too."""

import re
from collections.abc import Callable
from typing import Final

from msgspec import Raw

from lean_selector.core.hashing import ENGINE_SALT_PREFIX, unmarked_salt
from lean_selector.gateway.model_request import MOST_ID_BYTES, ModelRequest
from lean_selector.gateway.prompt_shapes import Unknown, Why

_USAGE_BYTES: Final = 4096  # at the end of an answer, which has its usage
_MOST_LAST_BYTES: Final = 4 * _USAGE_BYTES  # kept of the end: a stream has small pieces
_NAMES: Final = (b'"prompt_token_ids":', b'"token_ids":')  # followed by a list
_LONGEST_NAME: Final = 24  # including some blanks
_IDS: Final = re.compile(rb'"(prompt_)?token_ids"\s*:\s*\[')
_PROMPT_NAME: Final = b'"prompt_token_ids":'
# A whole list behind its name: the bracket comes first, since it is found faster.
_LIST: Final = re.compile(rb'\[(?:(?<="token_ids":\[)|(?<="prompt_token_ids":\[))([^\]]*+)\]')
_BEGINNINGS: Final = frozenset(
    name[:length] for name in _NAMES for length in range(1, len(name) + 1)
)
_MOST_EVENT_BYTES: Final = 1 << 20  # a longer event is not buffered
_USAGE_EVENT: Final = re.compile(
    rb'^data:[^\r\n]*"choices"\s*:\s*\[\s*\][^\r\n]*"usage"[^\r\n]*\r?\n\r?\n', re.MULTILINE
)
# In Anthropic's API, `input_tokens` does not include tokens read from or written to the cache.
_CACHED: Final = re.compile(rb'"(?:cached_tokens|cache_read_input_tokens)"\s*:\s*(\d{1,15})')
_PROMPT: Final = re.compile(rb'"(?:prompt|input)_tokens"\s*:\s*(\d{1,15})')
_BESIDE: Final = tuple(
    re.compile(rb'"cache_%b_input_tokens"\s*:\s*(\d{1,15})' % name)
    for name in (b"read", b"creation")
)
_OUTPUT: Final = re.compile(rb'"(?:completion|output)_tokens"\s*:\s*(\d{1,15})')


class Usage:
    """Reads the token counts (`usage`) at the end of an answer. Absent counts are None."""

    __slots__ = ("_begin", "_last")

    def __init__(self, last: bytes | bytearray) -> None:
        self._last = last
        self._begin = last.rfind(b'"usage"', max(0, len(last) - _MOST_LAST_BYTES))

    @property
    def cached_tokens(self) -> int | None:
        """The number of prompt tokens that the engine had cached."""
        return self._said(_CACHED)

    @property
    def lengths(self) -> tuple[int, int] | None:
        """The number of prompt tokens and the number of output tokens."""
        prompt, output = self._said(_PROMPT), self._said(_OUTPUT)
        if prompt is None or output is None:
            return None
        return prompt + sum(self._said(field) or 0 for field in _BESIDE), output

    def _said(self, field: re.Pattern[bytes]) -> int | None:
        found = field.findall(self._last, self._begin) if self._begin >= 0 else ()
        return int(found[-1]) if found else None


class AnswerReader:
    """Reads an engine's answer while it is relayed. At the answer's end, calls `on_ids` with the
    token ids of the prompt and of the output, as comma-separated text."""

    def __init__(
        self,
        on_ids: Callable[[bytes | None, bytes], None] | None,
        *,
        strips: bool,
        drops_usage: bool = False,
    ) -> None:
        """`strips`: the client did not request token ids, and gets `null` in place of each list.
        `drops_usage`: the client did not request the last event of a stream, which has only the
        usage."""
        self._on_ids = on_ids
        self._strips = strips
        self._drops_usage = drops_usage
        self._event = b""  # an incomplete event, if events may be dropped
        self.last: Final = bytearray()  # the end of the answer so far, without ids
        self._held = b""  # possibly the beginning of a list's name
        self._array: bytearray | None = None  # the current list
        self._is_of_prompt = False
        self._prompt: bytes | None = None
        self._output: list[bytes] = []
        self._is_too_long = False

    def feed(self, data: bytes) -> bytes:
        """Takes a piece of the answer, and returns the bytes that can be sent to the client now."""
        pieces = _LIST.split(data)  # every second one is a list
        is_whole = data.endswith(b"\n") and len(pieces) // 2 == data.count(b"token_ids")
        if is_whole and self._array is None and not self._held:  # as nearly all
            for at in range(1, len(pieces), 2):
                self._is_of_prompt = pieces[at - 1].endswith(_PROMPT_NAME)
                self._took(pieces[at])
            text = b"null".join(pieces[::2])
        else:
            text = self._without_ids(self._held + data)
        last = self.last
        last += text
        if len(last) > _MOST_LAST_BYTES:
            del last[:-_USAGE_BYTES]
        if not self._strips:
            text = data
        # `find`, because `in` first tries to use the bytes as a number, and catches an exception.
        if self._drops_usage and (
            self._event or text.find(b'"usage"') >= 0 or not text.endswith(b"\n\n")
        ):
            return self._without_usage(text)
        return text

    def rest(self) -> bytes:
        """Returns the bytes still buffered when the answer ends. Well-formed answers leave none."""
        rest = self._event + (self._held if self._strips else b"")
        self._event = self._held = b""
        return rest

    def end(self) -> bytes:
        """Passes the token ids to `on_ids`, and returns the bytes that are still buffered."""
        rest = self.rest()
        if self._on_ids is not None and self._array is None and not self._is_too_long:
            self._on_ids(self._prompt, b",".join(self._output))
        return rest

    def _without_ids(self, data: bytes) -> bytes:
        """Returns `data` with `null` in place of each list of ids. The end of `data` may be
        buffered until the next piece."""
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
        """Returns `data` up to its last complete event, without the event that has the usage."""
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
        self._took(ids)

    def _took(self, ids: bytes) -> None:
        if self._is_of_prompt:
            if self._prompt is None:
                self._prompt = ids
        elif ids:
            self._output.append(ids)


def _beginning(data: bytes, at: int) -> int:
    """Returns how many bytes at the end of `data[at:]` may begin the field name of an id list."""
    quote = data.find(b'"', max(at, len(data) - _LONGEST_NAME))
    while quote >= 0:
        if data[quote:].translate(None, b" ") in _BEGINNINGS:
            return len(data) - quote
        quote = data.find(b'"', quote + 1)
    return 0


# vLLM's limits: it refuses longer salts, and some characters.
MOST_SALT_CHARACTERS: Final = 128
_NOT_IN_SALTS: Final = frozenset("@/\\\0")
UNMARKABLE: Final = Unknown(
    Why.SALT, "its cache_salt cannot be prefixed: it is too long, or has @, /, \\ or NUL"
)
_TRUE: Final = Raw(b"true")
_USAGE: Final = Raw(b'{"include_usage":true}')


class Additions:
    """The fields added to one forwarded request; their effects are removed from its answer."""

    __slots__ = ("_drops_usage", "_fields", "_on_ids", "_strips")

    def __init__(self) -> None:
        self._fields: dict[str, object] = {}
        self._on_ids: Callable[[bytes | None, bytes], None] | None = None
        self._strips = False
        self._drops_usage = False

    def mark_salt(self, request: ModelRequest, forwards: bool) -> bool:
        """Adds a prefix to `cache_salt` in the forwarded body, because vLLM's KV events have only
        salts with this prefix. Sets `request.salt` to the salt without the prefix. If the request
        is not forwarded and its salt has no prefix, drops the salt and returns False."""
        salt = request.salt
        if salt is None:
            return True
        if salt.startswith(ENGINE_SALT_PREFIX):
            request.salt = unmarked_salt(salt)
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
        """Makes the engine return token ids. `on_ids` gets the prompt's ids and, if only one answer
        is requested, the output's ids. Does nothing for `echo`, because the answer would change."""
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
        """Makes the engine end a stream with its token counts, unless `stream_options` is set."""
        if request.streams and not request.has("stream_options"):
            self._fields["stream_options"] = _USAGE
            self._drops_usage = True

    def body(self, request: ModelRequest) -> bytes:
        """Returns the body to forward: the client's own body if nothing is added."""
        return request.with_fields(**self._fields) if self._fields else request.body

    def reader(self) -> AnswerReader | None:
        """Returns the reader to pass the answer through, or None to relay the answer unchanged."""
        if self._on_ids is None and not self._drops_usage:
            return None
        return AnswerReader(self._on_ids, strips=self._strips, drops_usage=self._drops_usage)
