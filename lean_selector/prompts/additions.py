"""What a door adds to a request that it forwards, and takes out of the answer again."""

from collections.abc import Callable
from typing import Final

from msgspec import Raw

from lean_selector.core.hashing import ENGINE_SALT_PREFIX
from lean_selector.prompts.answers import AnswerReader
from lean_selector.prompts.model_request import ModelRequest
from lean_selector.prompts.unknown import Unknown, Why

# As vLLM takes them: it refuses longer ones, and some characters.
MOST_SALT_CHARACTERS: Final = 128
_NOT_IN_SALTS: Final = frozenset("@/\\\0")
UNMARKABLE: Final = Unknown(
    Why.SALT, "its cache_salt cannot be marked: it is too long, or has @, /, \\ or NUL"
)
_TRUE: Final = Raw(b"true")
_USAGE: Final = Raw(b'{"include_usage":true}')


class Additions:
    """Those of one request."""

    __slots__ = ("_drops_usage", "_fields", "_on_ids", "_strips")

    def __init__(self) -> None:
        self._fields: dict[str, object] = {}
        self._on_ids: Callable[[bytes | None, bytes], None] | None = None
        self._strips = False
        self._drops_usage = False

    def mark_salt(self, request: ModelRequest, forwards: bool) -> bool:
        """Has the engine tell the salt in its events as one: `request.salt` becomes the salt that
        the blocks will have there. False where they will have none although the request has.
        """
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
        """`on_ids` is told the ids of the prompt, and of the answer if there is only one. Nothing
        is asked for where that changes the answer."""
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
        """At the end of a stream, where it is not asked for."""
        if request.streams and not request.has("stream_options"):
            self._fields["stream_options"] = _USAGE
            self._drops_usage = True

    def body(self, request: ModelRequest) -> bytes:
        """To be forwarded; the caller's own where nothing is added."""
        return request.with_fields(**self._fields) if self._fields else request.body

    def reader(self) -> AnswerReader | None:
        """Of the answer; None where it is to pass untouched."""
        if self._on_ids is None and not self._drops_usage:
            return None
        return AnswerReader(self._on_ids, strips=self._strips, drops_usage=self._drops_usage)
