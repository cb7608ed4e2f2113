"""Reads an engine's answer while it is relayed: what is known of it, and what the client gets.

`AnswerReader` gets the bytes of the answer's body, cut anywhere, without the framing of HTTP. It
does no I/O. It tells whether the first token has arrived, whether the answer is complete, whether
a stream begins with an error, what the engine counted (`usage`), and the token ids. `Additions`
has the fields that were added to the request; the reader removes their effects from the answer.

A stream consists of server-sent events. A text of the model may contain `data: [DONE]`, and a tool
may have a field `usage`, so nothing is found by searching all bytes: an event ends at a blank line,
its fields begin at the beginning of a line, and its JSON is decoded. To save time, an event is only
decoded if it has bytes that can matter. An answer that is not a stream is kept until its end, and
decoded then; of a long one, such as many embeddings, nothing is read.

A list of token ids is found by its field's name (`"token_ids"`). No JSON string can contain this
name, because quotes inside strings are escaped. If the client must not get the lists of an answer
that is not a stream, it gets the answer when that is complete."""

import contextlib
import re
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Raw

from lean_selector.core.hashing import ENGINE_SALT_PREFIX, unmarked_salt
from lean_selector.gateway.model_request import MOST_ID_BYTES, ModelRequest, read_fields
from lean_selector.gateway.prompt_shapes import AnswerError, AnswerEvent, HasUsage, Unknown, Why

MOST_TOKENS: Final = 1 << 21  # of a prompt or an output; longer than any engine accepts


# -- what the engine counted -----------------------------------------------------------------------

_NONE: Final = Raw(b"null")
_COUNTS: Final = {
    "prompt_tokens": "prompt",
    "input_tokens": "input",
    "completion_tokens": "output",
    "output_tokens": "output",
    "total_tokens": "total",
    "cached_tokens": "cached",
    "cache_read_input_tokens": "read",
    "cache_creation_input_tokens": "written",
}
_DETAILS: Final = ("prompt_tokens_details", "input_tokens_details")  # have `cached_tokens`
_MOST_DIGITS: Final = 15


def _is_object(value: Raw) -> bool:
    return bytes(memoryview(value)[:1]) == b"{"


class Usage:
    """The token counts of one answer. An answer may have several `usage` objects, of which each
    has some of the counts; of each count, the last valid value is used.

    Only whole numbers up to `most_tokens` are valid."""

    def __init__(self, most_tokens: int = MOST_TOKENS, has_output: bool = True) -> None:
        """`has_output`: the request has an output, unlike a request for embeddings."""
        self._most_tokens = most_tokens
        self._has_output = has_output
        self._counts: dict[str, int] = {}

    def add(self, text: bytes) -> None:
        """Adds a `usage` object, as JSON text. Ignores fields that are not counts."""
        try:
            fields = read_fields(text)
            for name in _DETAILS:
                if name in fields and _is_object(fields[name]):
                    details = read_fields(fields[name])
                    fields["cached_tokens"] = details.get("cached_tokens", _NONE)
        except (msgspec.DecodeError, RecursionError):
            return
        for name, count in _COUNTS.items():
            value = bytes(fields.get(name, _NONE))
            if value.isdigit() and len(value) <= _MOST_DIGITS and int(value) <= self._most_tokens:
                self._counts[count] = int(value)

    @property
    def prompt_tokens(self) -> int | None:
        """The number of prompt tokens, including those that were cached."""
        counts = self._counts
        found = counts.get("prompt")
        if found is None:
            found = counts.get("input")
            if found is None:
                return None if self._has_output else counts.get("total")
            # Anthropic's `input_tokens` lacks the tokens read from and written to the cache.
            found += counts.get("read", 0) + counts.get("written", 0)
        return found if found <= self._most_tokens else None

    @property
    def cached_tokens(self) -> int | None:
        """The number of prompt tokens that the engine had cached."""
        prompt, cached = self.prompt_tokens, self._counts.get("cached", self._counts.get("read"))
        return None if prompt is None or cached is None or cached > prompt else cached

    @property
    def lengths(self) -> tuple[int, int] | None:
        """The number of prompt tokens and the number of output tokens."""
        prompt, output = self.prompt_tokens, self._counts.get("output")
        if prompt is None:
            return None
        if output is None and not self._has_output:
            output = 0
        return None if output is None else (prompt, output)


# -- server-sent events ----------------------------------------------------------------------------

# A line ends with CRLF, LF or CR. Each alternative begins with one byte, which is found faster.
_BLANK_LINE: Final = re.compile(rb"\n(?:\n|\r\n?)|\r(?:\n(?:\n|\r\n?)|\r\n?)")
_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_BOM: Final = b"\xef\xbb\xbf"
_MOST_READ_BYTES: Final = MOST_ID_BYTES  # of a longer event or whole answer, nothing is read
_DONE: Final = b"[DONE]"
_USAGE_OBJECT: Final = re.compile(rb'"usage"[ \t]*+:[ \t]*+\{')
# What can matter in an event after the first token, if events have types.
_TYPED: Final = re.compile(
    rb"\"usage\"|\[DONE\]|message_stop|response\.(?:completed|incomplete|failed)"
)
_TYPES: Final = re.compile(rb"(?:message_|content_block_|response\.|(?:error|ping)\Z)")
_LAST_TYPES: Final = frozenset({
    *(b"message_stop", b"response.completed", b"response.incomplete", b"response.failed"),
})  # fmt: skip
_ROLE_ALONE: Final = re.compile(
    rb'"delta" *: *\{ *"role" *: *"assistant" *, *"content" *: *(?:""|null)'
)
_FAILED_CODE: Final = re.compile(rb'"?50[02]"?|"server_error"')
_read_event: Final = msgspec.json.Decoder(AnswerEvent).decode
_read_error: Final = msgspec.json.Decoder(AnswerError).decode
_read_holder: Final = msgspec.json.Decoder(HasUsage).decode


class _Events:
    """Reads the events of a stream, and returns the bytes for the client, which gets each event
    when it is complete. If the first is an error, another worker can be tried."""

    def __init__(self, usage: Usage, ids: "_Ids | None", drops_usage: bool) -> None:
        """`drops_usage`: the client does not get the event with the usage."""
        self.has_token = False
        self.is_done = False
        self.error: bytes | None = None  # the first event, if that is an error
        # What vLLM says before it has the blocks of a prompt that another worker prefilled is no
        # token: an error may follow.
        self.is_strict = False
        self._usage = usage
        self._ids = ids
        self._drops_usage = drops_usage
        self._has_begun = False  # an event has arrived
        self._is_typed = False  # these are events of /v1/messages or /v1/responses
        self.pending = b""  # the beginning of an event
        self._is_long = False  # this event is too long to be read
        self._after_cr = False  # the last event ended with CR, so that its LF may follow
        self._dropped = False  # the last event was not passed on

    def feed(self, text: bytes) -> bytes:
        pending, ids = self.pending, self._ids
        is_one = False
        if not pending and text.endswith(b"\n\n") and not self._after_cr:
            if ids is not None:
                text, ids = ids.read(text), None
            if self.has_token and not self._matters(text):
                return text
            # One event with one line, as most are
            is_one = text.startswith(b"data: ") and text.find(b"\n") == len(text) - 2
        kept = []
        if self._after_cr and text:
            self._after_cr = False
            if text.startswith(b"\n"):
                text = text[1:]
                if not self._dropped:
                    kept.append(b"\n")
        data, at = pending + text, 0
        start = max(0, len(pending) - 3)
        ends = [len(text)] if is_one else [e.end() for e in _BLANK_LINE.finditer(data, start)]
        for end in ends:
            event = data[at:end]
            if ids is not None and not self._is_long:
                event = ids.read(event)
            self._dropped = not self._is_long and self._read(event, is_one)
            self._is_long = False
            if not self._dropped:
                kept.append(event)
            at = end
        if at:
            self._after_cr = at == len(data) and data.endswith(b"\r")
        rest = data[at:]
        if len(rest) > _MOST_READ_BYTES or self._is_long:
            self._is_long = self._has_begun = self.has_token = True
            kept.append(rest[:-3])
            rest = rest[-3:]  # a blank line may begin here
        elif rest and not self._has_begun:
            rest = b"".join((*kept, rest))
            kept.clear()
        self.pending = rest
        return b"".join(kept)

    def rest(self) -> bytes:
        """Reads an event whose blank line is missing, and returns the bytes not yet returned."""
        pending, self.pending = self.pending, b""
        if pending and not self._is_long:
            if self._ids is not None:
                pending = self._ids.read(pending)
            if self._read(pending):
                return b""
        return pending

    def _matters(self, text: bytes) -> bool:
        """Whether events after the first token may have to be decoded."""
        if self._is_typed:
            return _TYPED.search(text) is not None
        # `find`, because `in` first tries to use the bytes as a number, and catches an exception.
        if text.find(_DONE) >= 0 or text.find(b'"type"') >= 0:
            return True
        at = text.find(b'"usage"')
        return at >= 0 and _USAGE_OBJECT.search(text, at) is not None

    def _read(self, event: bytes, is_one: bool = False) -> bool:
        """Reads an event. Return whether it must not be passed on. `is_one`: it is `data: ` and a
        text of one line, and it may matter."""
        if self.has_token and not is_one and not self._matters(event):
            return False
        name, data = (b"", event[6:-2]) if is_one else _name_and_data(event)
        if data is None:
            return False
        is_first, self._has_begun = not self._has_begun, True
        if data.strip() == _DONE:
            self.is_done = True
            return False
        try:
            told = _read_event(data)
        except (msgspec.DecodeError, RecursionError):
            self.has_token = True
            return False
        kind = bytes(told.type).strip(b'"') or name
        holders: tuple[Raw, ...] = ()
        is_empty = False
        if kind and _TYPES.match(kind) is not None:
            self._is_typed = True
            self.has_token |= kind.startswith(b"content_block_") or kind.endswith(b".delta")
            self.is_done |= kind in _LAST_TYPES
            holders = (told.message, told.response)
        else:
            choices = bytes(told.choices)
            is_empty = choices.startswith(b"[") and not choices.strip(b"[] \t\r\n")
            is_token = not is_empty and bytes(told.error) in (b"", b"null")
            if is_token and self.is_strict:
                is_token = _ROLE_ALONE.search(choices) is None
            self.has_token |= is_token
        may_fail = is_first or (self.is_strict and not self.has_token)
        if may_fail and data.find(b"error") >= 0 and _is_failure(told, kind):
            self.error = event
        if data.find(b'"usage"') < 0:
            return False
        usages = [told.usage, *[_read_holder(each).usage for each in holders if _is_object(each)]]
        usages = [each for each in usages if _is_object(each)]
        for usage in usages:
            self._usage.add(bytes(usage))
        return self._drops_usage and is_empty and bool(usages)


def _name_and_data(event: bytes) -> tuple[bytes, bytes | None]:
    """Return the name of an event, and its data, or None for comments and other events without
    data."""
    name, data = b"", None
    for line in _LINE_END.split(event.removeprefix(_BOM)):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            data = value if data is None else data + b"\n" + value
        elif field == b"event":
            name = value
        elif not line and data is None:
            name = b""
    return name, data


def _is_failure(event: AnswerEvent, kind: bytes) -> bool:
    """Whether an event says that the engine has failed, so that another worker may do better."""
    code = event.code
    if _is_object(event.error):
        try:
            error = _read_error(event.error)
        except msgspec.DecodeError:
            return False
        if kind == b"error" and bytes(error.type) == b'"api_error"':
            return True
        code = error.code
    elif kind != b"error" and bytes(event.object) != b'"error"':
        return False
    return _FAILED_CODE.fullmatch(code) is not None


# -- token ids -------------------------------------------------------------------------------------

_IDS: Final = re.compile(rb'"(prompt_)?token_ids"\s*+:\s*+\[([^\]]*+)\]')
_PROMPT_NAME: Final = b'"prompt_token_ids":'
_NAMES: Final = (b'"token_ids"', b'"prompt_token_ids"')
# A whole list behind its name: the bracket comes first, since it is found faster.
_LIST: Final = re.compile(rb'\[(?:(?<="token_ids":\[)|(?<="prompt_token_ids":\[))([^\]]*+)\]')


class _Ids:
    """The token ids in an answer. `strips`: the client gets `null` in place of each list."""

    def __init__(self, strips: bool) -> None:
        self.strips = strips
        self.prompt: bytes | None = None
        self.output: list[bytes] = []
        self.size = 0  # bytes of the prompt and the output

    def read(self, text: bytes) -> bytes:
        """Reads the lists in a text, which are whole, and returns what the client gets of it."""
        pieces = _LIST.split(text)  # every second one is a list
        if len(pieces) // 2 == text.count(b"token_ids"):  # as nearly all
            for at in range(1, len(pieces), 2):
                self._take(pieces[at], pieces[at - 1].endswith(_PROMPT_NAME))
            kept = pieces[::2]
        else:
            kept, at = [], 0
            for found in _IDS.finditer(text):
                kept.append(text[at : found.start(2) - 1])
                self._take(found[2], found[1] is not None)
                at = found.end()
            kept.append(text[at:])
        return b"null".join(kept) if self.strips else text

    def _take(self, ids: bytes, is_of_prompt: bool) -> None:
        if not is_of_prompt:
            self.output += [ids] if ids else []
        elif self.prompt is None:
            self.prompt = ids
        else:
            return
        self.size += len(ids)


def _before_ids(text: bytearray, start: int) -> int:
    """Return where the first name of a list of ids begins, or may begin, at or after `start`."""
    at = text.find(_NAMES[0][1:], start)
    end = len(text) if at < 0 else at
    begin = text.rfind(b'"', start, end)
    if begin < 0:
        return end
    tail = bytes(text[begin : begin + len(_NAMES[1])])
    return begin if at >= 0 or any(name.startswith(tail) for name in _NAMES) else end


class AnswerReader:
    """Reads the body of an engine's answer, which has status 200, while it is relayed. `feed` takes
    pieces of it, cut anywhere; after the last, call `end`, or `rest` if it may be incomplete."""

    def __init__(self, streams: bool, added: "Additions") -> None:
        """`streams`: the answer consists of server-sent events."""
        self.usage: Final = Usage(added.most_tokens, added.has_output)
        self._on_ids = added.on_ids
        self._strips = added.strips
        self._ids = _Ids(added.strips) if added.strips or added.on_ids is not None else None
        self._events = _Events(self.usage, self._ids, added.drops_usage) if streams else None
        # An answer that is not a stream, so far, and how much of it the client has, if lists are
        # stripped; None if it is too long, or over.
        self._whole: bytearray | None = None if streams else bytearray()
        self._sent = 0

    @property
    def has_token(self) -> bool:
        """Whether a part of the output has arrived."""
        return self._events is None or self._events.has_token

    @property
    def held_bytes(self) -> int:
        """How many bytes of the answer are kept, in part or whole."""
        kept = self._whole if self._events is None else self._events.pending
        return len(kept or b"") + (0 if self._ids is None else self._ids.size)

    def be_strict(self) -> None:
        """Makes `has_token` and `error` judge a stream of a decode worker: its first event may tell
        the role alone, and an error follow."""
        if self._events is not None:
            self._events.is_strict = True

    @property
    def is_done(self) -> bool:
        """Whether a stream had its last event. False if the answer is not a stream."""
        return self._events is not None and self._events.is_done

    @property
    def error(self) -> bytes | None:
        """The first event of a stream, if it says that the engine has failed; for `be_strict`, any
        event before the first token."""
        return None if self._events is None else self._events.error

    def feed(self, data: bytes) -> bytes:
        """Takes a piece of the answer, and returns the bytes that can be sent to the client now."""
        if self._events is not None:
            return self._events.feed(data)
        if self._whole is None:
            return data
        self._whole += data
        if len(self._whole) > _MOST_READ_BYTES:
            whole, self._whole = self._whole, None
            return bytes(whole[self._sent :]) if self._strips else data
        if not self._strips:
            return data
        begun, self._sent = self._sent, _before_ids(self._whole, self._sent)
        return bytes(self._whole[begun : self._sent])

    def rest(self) -> bytes:
        """Reads what is left when the answer ends, and returns the bytes not yet returned."""
        if self._events is not None:
            return self._events.rest()
        if self._whole is None:
            return b""
        text, self._whole = bytes(self._whole), None
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            self.usage.add(bytes(_read_holder(text).usage))
        left = text[self._sent :]
        if self._ids is not None:
            left = self._ids.read(left)
        return left if self._strips else b""

    def end(self) -> bytes:
        """Passes the token ids to `on_ids`, once. Return the bytes that are still buffered."""
        rest = self.rest()
        on_ids, self._on_ids = self._on_ids, None
        if on_ids is not None and self._ids is not None:
            on_ids(self._ids.prompt, b",".join(self._ids.output))
        return rest

    def was_whole(self) -> bool:
        """Return whether a stream was complete when its client disconnected, as OpenAI's client
        always does at its end; if so, ends it."""
        self.rest()
        if self.is_done:
            self.end()
        return self.is_done


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

    def __init__(self, has_output: bool = True, most_tokens: int = MOST_TOKENS) -> None:
        """For the reader of the answer: see `Usage`."""
        self.has_output = has_output
        self.most_tokens = most_tokens
        self._fields: dict[str, object] = {}
        # Gets the ids of the prompt and of the output at the answer's end, as text with commas.
        self.on_ids: Callable[[bytes | None, bytes], None] | None = None
        self.strips = False  # the client gets `null` in place of each list of ids
        self.drops_usage = False  # it does not get a stream's last event, which has only the usage

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
            self.strips = True
        if request.answers == 1:
            self.on_ids = on_ids
        else:
            self.on_ids = lambda prompt_ids, _: on_ids(prompt_ids, b"")

    def ask_for_usage(self, request: ModelRequest) -> None:
        """Makes the engine end a stream with its token counts, unless `stream_options` is set."""
        if request.streams and not request.has("stream_options"):
            self._fields["stream_options"] = _USAGE
            self.drops_usage = True

    def body(self, request: ModelRequest) -> bytes:
        """Return the body to forward: the client's own body if nothing is added."""
        return request.with_fields(**self._fields) if self._fields else request.body

    @property
    def change_answer(self) -> bool:
        """Whether the answer has something that the client must not get."""
        return self.strips or self.drops_usage

    def reader(self, streams: bool) -> AnswerReader:
        """Return a new reader, to pass one answer through. `streams`: see `AnswerReader`."""
        return AnswerReader(streams, self)
