"""A tokenizer in this process, on threads.

Renders chat templates in the same way as the engines, which use Hugging Face's tokenizers. Imported
only with `--prompts local`; requires the extra `tokenizers`."""

import asyncio
import datetime
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, Final, NoReturn

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension as JinjaExtension
from jinja2.ext import loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from lean_selector.gateway.engine_answers import NotTokenized
from lean_selector.gateway.model_request import (
    COMPLETIONS,
    Kind,
    ModelRequest,
    template_arguments,
)
from lean_selector.gateway.prompt_shapes import Why
from lean_selector.wire.body_text import has_costly_numbers
from lean_selector.wire.scalars import packer

_CONTENT: Final = "content"


class ChatTemplate:
    """The chat template in a model's folder. Raises ValueError if the template is invalid."""

    def __init__(self, folder: Path) -> None:
        config = _config(folder)
        self._special = {
            name: token
            for name, told in config.items()
            if name.endswith("_token") and (token := _token(told)) is not None
        }
        text = _template(folder, config)
        if text is None:
            text = "{{ raise_exception('this model has none') }}"
        environment = _environment()
        try:
            self._template = environment.from_string(text)
            self._takes_parts = _looks_into_contents(environment.parse(text))
        except jinja2.TemplateError as error:
            raise ValueError(f"{folder}: invalid chat template: {error}") from None

    def rendered(self, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str:
        """Return the text of a conversation. Raises ValueError if the template raises an error."""
        try:
            return self._template.render(
                messages=[self._prepared(message) for message in messages],
                **{**self._special, **arguments},
            )
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
            raise ValueError(f"the chat template says: {error}") from None

    def _prepared(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message as engines pass it to the template: content becomes one text or a list,
        as the template expects, and arguments of tool calls become objects."""
        prepared = dict(message)
        content = prepared.get(_CONTENT)
        if isinstance(content, list) and not self._takes_parts:
            parts = (part if isinstance(part, str) else part["text"] for part in content)
            prepared[_CONTENT] = "\n".join(parts)
        elif isinstance(content, str) and self._takes_parts:
            prepared[_CONTENT] = [{"type": "text", "text": content}]
        calls = prepared.get("tool_calls")
        if isinstance(calls, list):
            if calls:
                prepared["tool_calls"] = [_call(call) for call in calls]
            else:
                del prepared["tool_calls"]
        return prepared


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except ValueError:
            arguments = {}
    return {**call, "function": {**function, "arguments": arguments or {}}}


# -- the folder ------------------------------------------------------------------------------------


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    if not isinstance(config, dict):
        raise ValueError(f"{folder}/tokenizer_config.json is not an object")
    return config


def _template(folder: Path, config: dict[str, Any]) -> str | None:
    """Return the chat template from its own file, or else from the configuration (if there are
    several templates, the one named `default`). None if the folder has no chat template."""
    try:
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    except FileNotFoundError:
        template = config.get("chat_template")
    if isinstance(template, list):
        by_name = {each["name"]: each["template"] for each in template}
        template = by_name.get("default")
    return template if isinstance(template, str) else None


def _token(told: object) -> str | None:
    if isinstance(told, dict):
        told = told.get("content")
    return told if isinstance(told, str) else None


# -- Jinja -----------------------------------------------------------------------------------------


class _Generation(JinjaExtension):
    """The tag `{% generation %}`, with which templates mark answers for training; only the tag's
    content is rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda layout: datetime.datetime.now().strftime(layout)
    return environment


def _to_json(value: object, ensure_ascii: bool = False, **options: Any) -> str:
    """Encodes a value as JSON, without the HTML escapes that Jinja's filter adds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _looks_into_contents(template: nodes.Template) -> bool:
    """Whether the template iterates over the parts of a message's content."""
    named = {
        node.target.name
        for node in template.find_all(nodes.Assign)
        if isinstance(node.target, nodes.Name) and _is_content(node.node)
    }
    return any(
        _is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in named)
        for loop in template.find_all(nodes.For)
    )


def _is_content(node: nodes.Node) -> bool:
    name = node.attr if isinstance(node, nodes.Getattr) else None
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const):
        name = node.arg.value
    return name == _CONTENT


THREADS: Final = 2
MOST_WAITING: Final = 64  # prompts; above this, only known prefixes match


class LocalTokenizer:
    """A tokenizer for all served models, from a folder with `tokenizer.json` and a chat template.
    Raises ValueError if the folder is unusable; ModuleNotFoundError without `tokenizers`."""

    def __init__(self, folder: str, timeout_s: float) -> None:
        path = Path(folder)
        tokenizer_type: Any = import_module("tokenizers").Tokenizer
        try:
            self._tokenizer: Final = tokenizer_type.from_file(str(path / "tokenizer.json"))
        except Exception as error:  # the only class that it raises
            raise ValueError(f"{path / 'tokenizer.json'}: {error}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._template: Final = ChatTemplate(path)
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(THREADS, "tokenizer")
        self._waiting = 0

    async def tokens(self, request: ModelRequest, model: str, workers: Mapping[int, str]) -> bytes:
        """Return a prompt's tokens, 4 bytes each; ignores `workers`. Raises NotTokenized."""
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
        """Stops the threads without waiting for prompts that are being tokenized."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, work: "asyncio.Future[bytes]") -> None:
        self._waiting -= 1
        if not work.cancelled():
            work.exception()  # the request has its error, if it is still waiting

    def _tokens(self, request: ModelRequest) -> bytes:
        """Tokenizes a prompt. Runs in a thread."""
        try:
            text, adds_special = self._text(request)
            ids = self._tokenizer.encode(text, add_special_tokens=adds_special).ids
        except NotTokenized:
            raise
        # A template is a program that gets client input, and the tokenizer's panics are
        # BaseExceptions.
        except BaseException as error:
            raise NotTokenized(Why.FAILED, str(error)) from None
        return packer(len(ids), "I")(*ids)

    def _text(self, request: ModelRequest) -> tuple[str, bool]:
        """Return the prompt's text, and whether the tokenizer must add special tokens. By default,
        special tokens are added only to plain text, not to rendered chats."""
        if has_costly_numbers(request.body):
            raise NotTokenized(Why.REFUSED, "it has numbers that are slow to parse")
        if request.kind not in COMPLETIONS:
            raise NotTokenized(Why.REFUSED, "only engines render messages of this path")
        if request.kind == Kind.TEXT:
            return msgspec.json.decode(request.text, type=str), request.flag(
                "add_special_tokens", True
            )
        if request.has("chat_template"):
            raise NotTokenized(Why.REFUSED, "the request has its own chat template")
        if request.flag("continue_final_message", False):
            raise NotTokenized(Why.REFUSED, "only engines support `continue_final_message`")
        arguments: dict[str, Any] = msgspec.json.decode(
            msgspec.json.encode(template_arguments(request))
        )
        if request.has("tools"):
            arguments["tools"] = msgspec.json.decode(request.fields["tools"])
        arguments.setdefault("add_generation_prompt", request.flag("add_generation_prompt", True))
        messages = [msgspec.json.decode(each, type=dict[str, Any]) for each in request.messages]
        text = self._template.rendered(messages, arguments)
        return text, request.flag("add_special_tokens", False)
