"""Tokens by a tokenizer in this process, in threads: it lets others run while it works.

Imported only where it is asked for: it needs what the extra `tokenizers` names.
"""

import asyncio
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import msgspec

from lean_selector.prompts.chat_template import ChatTemplate
from lean_selector.prompts.model_request import Kind, ModelRequest
from lean_selector.prompts.template_arguments import template_arguments
from lean_selector.prompts.tokenizing import NotTokenized
from lean_selector.prompts.unknown import Why
from lean_selector.wire.scalars import packer

THREADS: Final = 2
MOST_WAITING: Final = 64  # beyond, load decides


class LocalTokenizer:
    """Of one folder with `tokenizer.json` and the chat template, for all models that are served.

    Raises ValueError for a folder that cannot be used, and ModuleNotFoundError without the extra.
    """

    def __init__(self, folder: str, timeout_s: float) -> None:
        path = Path(folder)
        tokenizer_type: Any = import_module("tokenizers").Tokenizer
        try:
            self._tokenizer: Final = tokenizer_type.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # it raises no other kind
            raise ValueError(f"{path / 'tokenizer.json'}: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template: Final = ChatTemplate(path)
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(THREADS, "tokenizer")
        self._waiting = 0

    async def tokens(self, request: ModelRequest, model: str, workers: Mapping[int, str]) -> bytes:
        """The tokens of a prompt, 4 bytes each, whoever serves it. Raises NotTokenized."""
        if self._waiting >= MOST_WAITING:
            raise NotTokenized(Why.BUSY, f"{self._waiting} prompts wait for the tokenizer")
        self._waiting += 1
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._tokens, request)
        work.add_done_callback(self._done)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await asyncio.shield(work)
        except TimeoutError:
            raise NotTokenized(Why.TIMEOUT, f"not tokenized in {self._timeout_s:g} s") from None

    def close(self) -> None:
        """What has begun is waited for by nobody."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, work: "asyncio.Future[bytes]") -> None:
        self._waiting -= 1
        if not work.cancelled():
            work.exception()  # was told to who waited, if he still did

    def _tokens(self, request: ModelRequest) -> bytes:
        """In a thread."""
        try:
            text, adds_special = self._text(request)
            ids = self._tokenizer.encode(text, add_special_tokens=adds_special).ids
        except NotTokenized:
            raise
        # A template is a program that a client feeds, and the tokenizer's panics are no Exception.
        except BaseException as error:
            raise NotTokenized(Why.FAILED, str(error)) from None
        return packer(len(ids), "I")(*ids)

    def _text(self, request: ModelRequest) -> tuple[str, bool]:
        """The prompt, and whether the tokenizer begins it as it begins texts."""
        if request.kind is Kind.TEXT:
            return msgspec.json.decode(request.text, type=str), request.flag(
                "add_special_tokens", True
            )
        if request.has("chat_template"):
            raise NotTokenized(Why.REFUSED, "the request brings a chat template of its own")
        if request.flag("continue_final_message", False):
            raise NotTokenized(Why.REFUSED, "`continue_final_message` is left to engines")
        arguments: dict[str, Any] = msgspec.json.decode(
            msgspec.json.encode(template_arguments(request))
        )
        if request.has("tools"):
            arguments["tools"] = msgspec.json.decode(request.fields["tools"])
        arguments.setdefault("add_generation_prompt", request.flag("add_generation_prompt", True))
        messages = [msgspec.json.decode(each, type=dict[str, Any]) for each in request.messages]
        text = self._template.rendered(messages, arguments)
        return text, request.flag("add_special_tokens", False)
