"""Requests to engines: the body of /v1/completions, and the parser for the streamed answer. No I/O.

The prompt is sent as token ids. By default, vLLM's field `return_token_ids` asks the engine to
stream token ids, too. Options have the names that Dynamo's router examples use."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from lean_selector.core.hashing import ENGINE_SALT_PREFIX


class Choice(msgspec.Struct, frozen=True):
    index: int = 0
    text: str | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    logprobs: dict[str, Any] | None = None


class CompletionEvent(msgspec.Struct, frozen=True):
    choices: list[Choice] = []
    usage: dict[str, Any] | None = None
    error: object | UnsetType = UNSET


MAX_EVENT_BYTES = 64 * 1024 * 1024  # far above any chunk an engine writes, logprobs included
DONE = b"[DONE]"
_encode = msgspec.json.Encoder().encode

Chunk = dict[str, Any]
Option = Mapping[str, object] | None

# Names in the router document that differ from the completions API.
_API_NAMES = {"stop_token_ids_hidden": "stop_token_ids"}


class MalformedStream(Exception):
    """The engine's response is not a stream of completions; the message says why."""


def completion_body(
    token_ids: Sequence[int],
    model: str,
    options: Sequence[Option] = (),
    *,
    return_token_ids: bool = True,
    cache_salt: str | None = None,
) -> bytes:
    """Return the body of a streaming request to /v1/completions. If several mappings in `options`
    have the same field, the last one counts. Fields with the value None are left out.

    `cache_salt` is sent with ENGINE_SALT_PREFIX. By this prefix, the selector recognises the salt
    among the extra keys of a block in vLLM's events."""
    body: dict[str, object] = {
        "model": model,
        "prompt": list(token_ids),
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if return_token_ids:
        body["return_token_ids"] = True
    if cache_salt:
        body["cache_salt"] = ENGINE_SALT_PREFIX + cache_salt
    for option in options:
        for name, value in (option or {}).items():
            if value is not None:
                body[_API_NAMES.get(name, name)] = value
    return _encode(body)


_decode_event = msgspec.json.Decoder(CompletionEvent).decode


class CompletionStream:
    """Converts the bytes of a text/event-stream into chunks.

    A chunk has `index`, and `text`, `token_ids`, `finish_reason`, `logprobs` and `usage` if the
    engine sent them. `output_tokens` counts token ids, and chunks with text but without ids. A
    higher count in the engine's usage takes precedence. Data after `[DONE]` is ignored."""

    def __init__(self) -> None:
        self.output_tokens = 0
        self.cached_tokens: int | None = None  # of the prompt, if the engine's usage has it
        self.state: Literal["open", "finished", "done"] = "open"
        self._buffer = b""

    def feed(self, data: bytes) -> Iterator[Chunk]:
        """Parses the next bytes of the stream, and yields the chunks that are complete. Raises
        MalformedStream for invalid data, and if the engine reports an error in the stream."""
        if self.state == "done":
            return
        lines = (self._buffer + data).split(b"\n") if self._buffer else data.split(b"\n")
        self._buffer = lines.pop()
        if len(self._buffer) > MAX_EVENT_BYTES:
            raise MalformedStream(f"an event has more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if not line.startswith(b"data:"):
                continue  # comments, event names, ids, and the blank line between events
            payload = line[5:].strip()
            if payload == DONE:
                self.state = "done"
                self._buffer = b""
                return
            if payload:
                yield from self._chunks(payload)

    def _chunks(self, payload: bytes) -> Iterator[Chunk]:
        try:
            event = _decode_event(payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedStream(f"an event that is not a completion: {error}") from None
        if event.error is not UNSET and event.error is not None:
            raise MalformedStream(f"the engine reports {_error_text(event.error)}")
        for choice in event.choices:
            chunk: Chunk = {"index": choice.index}
            for name in ("text", "token_ids", "finish_reason", "logprobs"):
                value = getattr(choice, name)
                if value is not None:
                    chunk[name] = value
            self.output_tokens += len(choice.token_ids or ()) or bool(choice.text)
            if choice.finish_reason is not None:
                self.state = "finished"
            if event.usage is not None:
                chunk["usage"] = event.usage
            yield chunk
        if event.usage is not None:
            self.output_tokens = max(self.output_tokens, _completion_tokens(event.usage))
            self.cached_tokens = _cached_tokens(event.usage)
            if not event.choices:
                yield {"usage": event.usage}


def error_text(body: bytes) -> str:
    """Return the message in a JSON error body (OpenAI's or the selector's), otherwise the body."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body[:500].decode("utf-8", "replace").strip() or "no reason given"
    return _error_text(value)


def _error_text(value: object) -> str:
    for key in ("error", "message", "detail"):
        if isinstance(value, dict) and value.get(key):
            return _error_text(value[key])
    return str(value)


def _completion_tokens(usage: Mapping[str, object]) -> int:
    tokens = usage.get("completion_tokens")
    return tokens if isinstance(tokens, int) else 0


def _cached_tokens(usage: Mapping[str, object]) -> int | None:
    """Return the number of cached prompt tokens in an engine's usage, or None. vLLM sends this
    number with --enable-prompt-tokens-details, SGLang with --enable-cache-report."""
    details = usage.get("prompt_tokens_details")
    tokens = details.get("cached_tokens") if isinstance(details, dict) else None
    return tokens if isinstance(tokens, int) and tokens >= 0 else None
