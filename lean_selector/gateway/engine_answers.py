"""Queries engines over HTTP for the name of the engine's software, for the loaded adapters (LoRA),
and for the tokens of a prompt.

A few workers of a model are asked for their software. All workers are asked for their adapters when
a request names an unregistered model. Answers are cached, and refreshed in the background."""

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

import msgspec

from lean_selector.gateway.fleet import GatewayFleet
from lean_selector.gateway.model_request import (
    MOST_ID_BYTES,
    Kind,
    ModelRequest,
    template_arguments,
)
from lean_selector.gateway.prompt_shapes import ModelCards, Served, TokenizeAnswer, Unknown, Why
from lean_selector.http.outbound import OutboundClient, OutboundFailed, OutboundTimedOut
from lean_selector.tasks import Steps, supervise
from lean_selector.wire.scalars import packed_u32

TIMEOUT_S: Final = 2.0  # for each query
FRESH_S: Final = 10.0  # age at which an answer is refreshed, or an unknown name looked up again
MOST_AT_ONCE: Final = 32
_MAKE_FRESH_S: Final = 60.0
_ASKED_FOR_MAKE: Final = 3  # queried workers of a model; one answer is enough
_FROM: Final = 4096  # cached answers
# From this vLLM version on, a request may ask for events about the blocks that it reuses.
_REPORTS_IN_FULL: Final = (0, 32)
_VERSION: Final = re.compile(rb'"version"\s*:\s*"v?(\d{1,4})\.(\d{1,4})')


class _Told(NamedTuple):
    """A worker's answers about its software and its LoRA adapters."""

    at: float
    make: str | None
    adapters: dict[str, str]  # adapter -> base model
    version: tuple[int, int]  # of vLLM


class EngineAnswers:
    """Asks engines for their software and LoRA adapters, and caches the answers."""

    def __init__(
        self,
        fleet: GatewayFleet,
        client: OutboundClient,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._clock = clock
        self._told: dict[str, _Told] = {}  # by base URL
        self._under_way: dict[object, asyncio.Task[None]] = {}

    def make(self, served: Served) -> Steps[str | None]:
        """Return the software of a model's engines, such as `vllm`; None if unknown."""
        told = self._any_answer(served)
        key = ("make", served.model_name, served.tenant_id)
        if told is None:
            yield asyncio.shield(self._start(key, partial(self._ask_some, served)))
            told = self._any_answer(served)
        elif self._clock() - told.at > (FRESH_S if told.make is None else _MAKE_FRESH_S):
            self._start(key, partial(self._ask_some, served))
        return None if told is None else told.make

    def reports_in_full(self, base: str) -> bool:
        """Whether the worker at this base URL is a vLLM that can announce reused blocks
        (`kv_cache_report_mode`). Return False until the worker has answered this question."""
        told = self._told.get(base)
        if told is None or self._clock() - told.at > _MAKE_FRESH_S:
            self._start(("report", base), partial(self._ask, base))
        return told is not None and told.version >= _REPORTS_IN_FULL

    async def adapted(self, name: str, tenant_id: str) -> tuple[Served, frozenset[int]] | None:
        """Return a LoRA adapter's base model and workers. None if no worker has the adapter."""
        found = self._adapted(name, tenant_id)
        bases = (
            self._bases(tenant_id)
            if found is None
            else self._fleet.healthy(found[0].workers).values()
        )
        if any(map(self._is_old, bases)):
            asked = self._start(("adapters", tenant_id), partial(self._ask_all, tenant_id))
            if found is None:
                await asyncio.shield(asked)
                return self._adapted(name, tenant_id)
        return found

    async def close(self) -> None:
        tasks = list(self._under_way.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- answers -----------------------------------------------------------------------------------

    def _any_answer(self, served: Served) -> _Told | None:
        bases = self._fleet.healthy(served.workers).values()
        for base in bases:
            told = self._told.get(base)
            if told is not None and told.make is not None:
                return told
        return next((told for base in bases if (told := self._told.get(base))), None)

    def _adapted(self, name: str, tenant_id: str) -> tuple[Served, frozenset[int]] | None:
        for model in self._fleet.models(tenant_id):
            served = self._fleet.model(model, tenant_id)
            if served is None:
                continue
            workers = frozenset(
                worker_id
                for worker_id, base in served.workers.items()
                if (told := self._told.get(base)) is not None and name in told.adapters
            )
            if workers:
                return served, workers
        return None

    def _is_old(self, base: str) -> bool:
        told = self._told.get(base)
        return told is None or self._clock() - told.at > FRESH_S

    # -- queries -----------------------------------------------------------------------------------

    def _bases(self, tenant_id: str) -> list[str]:
        models = (self._fleet.model(name, tenant_id) for name in self._fleet.models(tenant_id))
        return [
            base
            for served in models
            if served
            for base in self._fleet.healthy(served.workers).values()
        ]

    async def _ask_all(self, tenant_id: str) -> None:
        bases = [base for base in self._bases(tenant_id) if self._is_old(base)]
        for at in range(0, len(bases), MOST_AT_ONCE):
            await asyncio.gather(*map(self._ask, bases[at : at + MOST_AT_ONCE]))

    async def _ask_some(self, served: Served) -> None:
        bases = list(self._fleet.healthy(served.workers).values())
        await asyncio.gather(*map(self._ask, bases[:_ASKED_FOR_MAKE]))

    async def _ask(self, base: str) -> None:
        make, adapters, version = None, dict[str, str](), (0, 0)
        try:
            body = await self._client.text(base + "/v1/models", timeout_s=TIMEOUT_S)
            cards = msgspec.json.decode(body, type=ModelCards).data
            adapters = {card.id: card.parent for card in cards if card.parent is not None}
            make = next((card.owned_by for card in cards if card.owned_by), None)
            if make == "vllm":
                answer = await self._client.get(base + "/version", timeout_s=TIMEOUT_S)
                if (said := _VERSION.search(answer.body)) is not None:
                    version = int(said[1]), int(said[2])
        except (OutboundFailed, msgspec.DecodeError, ValueError):
            old = self._told.get(base)  # outdated answers are refreshed too
            if old is not None:
                _, make, adapters, version = old
        self._told.pop(base, None)
        self._told[base] = _Told(self._clock(), make, adapters, version)
        if len(self._told) > _FROM:
            del self._told[next(iter(self._told))]

    def _start(
        self, key: object, work: Callable[[], Coroutine[Any, Any, None]]
    ) -> "asyncio.Task[None]":
        """Return the running query with this key. If there is none, starts the query `work`."""
        task = self._under_way.get(key)
        if task is None:
            task = self._under_way[key] = supervise("model lists", work, again=False)
            task.add_done_callback(lambda _: self._under_way.pop(key, None))
        return task


class NotTokenized(Exception):
    """The tokens of a prompt cannot be obtained."""

    def __init__(self, why: Why, text: str) -> None:
        super().__init__(text)
        self.unknown = Unknown(why, text)


class Tokenizer(Protocol):
    async def tokens(self, request: ModelRequest, model: str, workers: Mapping[int, str]) -> bytes:
        """Return the tokens of a prompt, 4 bytes each. `model` is the engine's name of the model
        or adapter; `workers` has the base URLs of workers with this model. Raises NotTokenized."""
        ...

    def close(self) -> None: ...


# Fields that /tokenize accepts; other fields may be sent as template arguments.
_CHAT: Final = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message"),
    *("add_special_tokens", "chat_template"),
)
_TEXT: Final = ("prompt", "add_special_tokens")
# The paths that return the tokens of a prompt, best first. /render accepts the request itself: vLLM
# has it with --enable-scale-out, for messages from 0.29 on, for responses from 0.30 on.
_TOKENIZE: Final = "/tokenize"
_TOKEN_PATHS: Final = {
    Kind.TEXT: (_TOKENIZE,),
    Kind.CHAT: ("/v1/chat/completions/render", _TOKENIZE),
    Kind.MESSAGES: ("/v1/messages/render",),
    Kind.RESPONSES: ("/v1/responses/render",),
}
_LACKS_FOR_S: Final = 60.0  # how long a path that a worker lacks is not tried again
_OFF: Final = frozenset({403, 405, 501})  # 403: vLLM 0.33 without --enable-scale-out
# The body of a 404 for an unknown route; a 404 may also mean an unknown model.
_NO_ROUTE: Final = re.compile(rb'^\s*+\{\s*+"detail"')


class EngineTokenizer:
    """Gets the tokens of prompts from engines, over HTTP. If an engine fails, another is asked."""

    def __init__(self, client: OutboundClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._turn = 0
        # (base URL, path) -> time until which it is not tried
        self._lacking: dict[tuple[str, str], float] = {}

    async def tokens(self, request: ModelRequest, model: str, workers: Mapping[int, str]) -> bytes:
        """Return the tokens of a prompt, 4 bytes each. Raises NotTokenized."""
        failed = NotTokenized(Why.FAILED, "no worker has a URL to request tokens from")
        now = time.monotonic()
        self._turn += 1
        for path in _TOKEN_PATHS[request.kind] if workers else ():
            able = [
                each for each in workers.values() if self._lacking.get((each, path), 0.0) <= now
            ]
            body = tokens_body(request, model, path)
            failed = NotTokenized(Why.REFUSED, f"the workers lack POST {path}")
            for attempt in range(min(2, len(able))):
                base = able[(self._turn + attempt) % len(able)]
                url = base + path
                try:
                    answer = await self._client.request(
                        "POST", url, body, timeout_s=self._timeout_s, most_bytes=MOST_ID_BYTES
                    )
                except OutboundFailed as error:
                    why = Why.TIMEOUT if isinstance(error, OutboundTimedOut) else Why.FAILED
                    failed = NotTokenized(why, error.message)
                    continue
                if answer.status == 200:
                    if tokens := _tokens(answer.body):
                        return tokens
                    failed = NotTokenized(Why.FAILED, f"POST {url}: an answer without tokens")
                    is_lacking = path is not _TOKENIZE  # early forms of /render
                else:
                    failed = NotTokenized(Why.REFUSED, f"POST {url}: status {answer.status}")
                    is_lacking = answer.status in _OFF or bool(_NO_ROUTE.match(answer.body))
                if not is_lacking:
                    raise failed  # another worker would refuse it too
                if len(self._lacking) >= _FROM:
                    self._lacking.clear()
                self._lacking[base, path] = now + _LACKS_FOR_S
            if failed.unknown.why is Why.TIMEOUT:
                break
        raise failed

    def close(self) -> None:
        """Does nothing, because there is nothing to close."""


def _tokens(body: bytes) -> bytes | None:
    try:
        answer = msgspec.json.decode(body, type=TokenizeAnswer)
    except msgspec.DecodeError:
        return None
    return packed_u32(bytes(answer.token_ids)) or packed_u32(bytes(answer.tokens))


def tokens_body(request: ModelRequest, model: str, path: str) -> bytes:
    """Return the JSON body of POST `path`, which asks an engine to tokenize `request`'s prompt."""
    if path != _TOKENIZE:
        fields: dict[str, object] = {**request.fields, "model": model}
        fields.pop("stream", None)
        fields.pop("stream_options", None)
        return msgspec.json.encode(fields)
    names = _CHAT if request.kind == Kind.CHAT else _TEXT
    fields = {name: request.fields[name] for name in names if request.has(name)}
    if request.kind == Kind.TEXT:
        fields["prompt"] = request.text
    elif arguments := template_arguments(request):
        fields["chat_template_kwargs"] = arguments
    return msgspec.json.encode({"model": model, **fields})
