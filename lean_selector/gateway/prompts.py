"""Converts a raw OpenAI request to the block hashes of its prompt."""

import os
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from lean_selector.core.errors import BadRequest, UnknownModel
from lean_selector.core.hashing import any_local_hashes, hash_seed, sequence_hashes_bytes
from lean_selector.core.numbers import MAX_ISL_TOKENS
from lean_selector.core.selection.prompt import Prompt
from lean_selector.gateway.answers import MOST_TOKENS, Additions
from lean_selector.gateway.engine_answers import (
    EngineAnswers,
    EngineTokenizer,
    NotTokenized,
    Tokenizer,
)
from lean_selector.gateway.fleet import GatewayFleet
from lean_selector.gateway.learned_prompts import Chain, PromptMemory, model_key
from lean_selector.gateway.model_request import CHATS, COMPLETIONS, SEVERAL, Kind, ModelRequest
from lean_selector.gateway.prompt_shapes import Mode, PromptSettings, Served, Unknown, Why
from lean_selector.http.outbound import OutboundClient
from lean_selector.tasks import Steps
from lean_selector.wire.scalars import packed_u32


@dataclass
class Routed:
    """A raw OpenAI request, with the block hashes of its prompt.

    If `why_not` is None, all hashes were computed from the prompt's tokens. If it is UNMARKED, they
    were computed without the request's `cache_salt`. Otherwise only a prefix has computed hashes;
    the other blocks, up to the estimated length `prompt.isl_tokens`, have random hashes."""

    model_name: str  # as registered; for an adapter its base model
    tenant_id: str
    prompt: Prompt  # isl_tokens >= 1
    body: bytes  # to forward
    why_not: Unknown | None
    streams: bool
    output_tokens: int = 0  # expected answer tokens
    session_id: str | None = None
    fairness_id: str = ""
    strict_priority: int = 0  # 1 high, -1 low
    deadline: float | None = None  # of the first token, monotonic
    worker_ids: frozenset[int] | None = None  # the workers that have the adapter; None: any worker
    additions: Additions = field(default_factory=Additions)  # to `body`; they read its answer
    is_sent_once: bool = False  # it names other engines: not retried once it was sent
    # Called with the numbers of prompt and answer tokens, which are learned from.
    on_lengths: Callable[[int, int], None] | None = None
    bars_pair: str = ""  # why no pair of workers can serve it; empty if one can
    takes_reports: bool = True  # `vllm_xargs` are accepted on its path


OFF: Final = Unknown(Why.OFF, "prompts are off")
UNMARKED: Final = Unknown(
    Why.SALT, "its cache_salt has no prefix, so its blocks are treated as blocks without a salt"
)
NEW: Final = Unknown(Why.NEW, "it was not seen before")
BEGINNING: Final = Unknown(Why.BEGINNING, "only its beginning was seen before")
# Reasons for which a request gets no pair; `ModelRequest.bars_pair` has the others.
ENGINE_FIELDS_SET: Final = "engine_fields"
NO_PARAMS: Final = "no_params"  # the prefill worker's answer had none
_FOR_ENGINES: Final = "engines set it for each other; --pass-engine-fields lets clients set it"
_REPORT_MODE: Final = "kv_cache_report_mode"
_MOST_TOKENS_OF_SEVERAL: Final = 1 << 31  # prompts or texts in one request
# Engines that support `stream_options` but do not say so.
_KNOW_USAGE: Final = frozenset({"vllm", "sglang"})


class Prompts:
    """Converts raw OpenAI requests to block hashes. Used only on the loop's thread."""

    def __init__(
        self,
        settings: PromptSettings,
        fleet: GatewayFleet,
        client: OutboundClient,
        local: Tokenizer | None = None,
    ) -> None:
        """`local` is a tokenizer in this process. With None, engines tokenize."""
        self.memory = PromptMemory(settings.memory_bytes)
        self.unknown: Counter[str] = Counter()  # prompts whose blocks are unknown, by reason
        self._settings = settings
        self._is_off, self._learns = settings.mode is Mode.OFF, settings.mode is Mode.LEARN
        self._fleet = fleet
        self._engines = EngineAnswers(fleet, client)
        self._tokenizer: Tokenizer = local or EngineTokenizer(client, settings.ask_timeout_s)

    def read(
        self, path: str, body: bytes, tenant_id: str = "default", forwards: bool = True
    ) -> Steps[Routed]:
        """Computes the block hashes of a request's prompt. With `forwards`, the caller must forward
        the result's body, which may have added fields. Raises BadRequest and UnknownModel."""
        request = ModelRequest(path, body)
        engine_field = request.engine_field
        if engine_field is not None:
            if not self._settings.passes_engine_fields:
                raise BadRequest(f"{engine_field}: {_FOR_ENGINES}")
            request.why_not = Unknown(Why.CHANGED, f"`{engine_field}` may change the prompt")
        bars_pair = ENGINE_FIELDS_SET if engine_field is not None else request.bars_pair
        served, lora_name, worker_ids = yield from self._served(request.model, tenant_id)
        additions = Additions(request.has_output, _most_tokens(request, served))
        if self._is_off:
            request.why_not = OFF
            forwards = False
        is_unmarked = not additions.mark_salt(request, forwards)
        chain = None
        if request.why_not is None and request.kind != Kind.IDS:
            chain = Chain(served, lora_name, request)
        prompt, why_not = yield from self._prompt(request, served, lora_name, worker_ids, chain)
        if is_unmarked and why_not is None:
            why_not = UNMARKED
        if why_not is not None:
            self.unknown[why_not.why] += 1
        if forwards and request.kind in COMPLETIONS:
            make = yield from self._engines.make(served)
            if chain is not None and self._learns and make == "vllm":
                additions.ask_for_ids(request, self._learning(chain))
            if make in _KNOW_USAGE:
                additions.ask_for_usage(request)
        averages = self.memory.averages(model_key(served, lora_name))
        output, most = round(averages.output_tokens), request.most_output_tokens
        answers = request.answers
        text_bytes = request.text_bytes if request.kind == Kind.TEXT or request.kind in CHATS else 0
        return Routed(
            served.model_name,
            served.tenant_id,
            prompt,
            additions.body(request),
            why_not=why_not,
            streams=request.streams,
            output_tokens=(output if most is None else min(output, most)) * answers,
            session_id=request.session_id,
            strict_priority=request.priority,
            worker_ids=worker_ids,
            additions=additions,
            on_lengths=None
            if engine_field is not None
            else lambda prompt, output: averages.had(text_bytes, prompt, output // answers),
            is_sent_once=engine_field is not None,
            bars_pair=bars_pair,
            takes_reports=request.kind in COMPLETIONS,
        )

    def with_report(self, body: bytes, base: str) -> bytes | None:
        """Return the body with a field that makes the engine at `base` announce the blocks that it
        reuses. Return None if the engine does not support the field or the client sets it."""
        if not self._engines.reports_in_full(base):
            return None
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
            given = fields.get("vllm_xargs", msgspec.Raw(b"null"))
            arguments = msgspec.json.decode(given, type=dict[str, msgspec.Raw] | None) or {}
        except msgspec.DecodeError:
            return None
        if _REPORT_MODE in arguments:
            return None
        arguments[_REPORT_MODE] = msgspec.Raw(b'"full"')
        return msgspec.json.encode({**fields, "vllm_xargs": arguments})

    def close(self) -> Coroutine[Any, Any, None]:
        """Closes the tokenizer. The caller must await the result, which cancels open queries."""
        self._tokenizer.close()
        return self._engines.close()

    # -- the model ---------------------------------------------------------------------------------

    def _served(
        self, model: str | None, tenant_id: str
    ) -> Steps[tuple[Served, str | None, frozenset[int] | None]]:
        """Return the model that a request names (directly or by an adapter), the adapter, and the
        workers that have loaded the adapter."""
        if model is None:
            models = self._fleet.models(tenant_id)
            if len(models) > 1:
                raise BadRequest("model: required, because there are several")
            model = models[0] if models else "default"
        served = self._fleet.model(model, tenant_id)
        if served is not None:
            return served, None, None
        adapted = yield self._engines.adapted(model, tenant_id)
        if adapted is None:
            raise UnknownModel(model)
        return adapted[0], model, adapted[1]

    # -- its prompt --------------------------------------------------------------------------------

    def _prompt(
        self,
        request: ModelRequest,
        served: Served,
        lora_name: str | None,
        worker_ids: frozenset[int] | None,
        chain: Chain | None,
    ) -> Steps[tuple[Prompt, Unknown | None]]:
        """Return the prompt, and why not all of its hashes are known; None if they are."""
        if request.why_not is not None:
            averages = self.memory.averages(model_key(served, lora_name))
            tokens = request.estimated_tokens(averages.tokens_per_byte)
            return _guessed(b"", tokens, served.block_size, lora_name), request.why_not
        if chain is None:
            seed = hash_seed(lora_name, request.salt)
            hashes = any_local_hashes(request.ids, served.block_size, seed, None, served.is_eagle)
            return _prompt_of(hashes, len(request.ids) // 4, lora_name), None
        known = self.memory.find(chain)
        if known.is_whole:
            return _prompt_of(known.hashes, known.tokens, lora_name), None
        why_not = BEGINNING if known.hashes else NEW
        ask_from = self._settings.ask_from_bytes
        if request.kind not in COMPLETIONS and self._learns:
            ask_from = self._settings.render_from_bytes
        if known.unknown_bytes >= ask_from:
            workers = served.workers
            if worker_ids is not None:
                workers = {each: workers[each] for each in worker_ids.intersection(workers)}
            try:
                tokens_packed = yield self._tokenizer.tokens(
                    request, lora_name or served.model_name, self._fleet.healthy(workers)
                )
            except NotTokenized as error:
                why_not = error.unknown
            else:
                hashes = self.memory.learn(chain, tokens_packed)
                return _prompt_of(hashes, len(tokens_packed) // 4, lora_name), None
        return _guessed(known.hashes, known.tokens, served.block_size, lora_name), why_not

    def _learning(self, chain: Chain) -> Callable[[bytes | None, bytes], None]:
        """Return a function that gets an answer's token ids and stores the prompt's hashes."""

        def learn(prompt_ids: bytes | None, output_ids: bytes) -> None:
            if prompt_ids is None:
                return
            prompt, output = packed_u32(b"[%b]" % prompt_ids), packed_u32(b"[%b]" % output_ids)
            if prompt and output is not None:
                self.memory.learn(chain, prompt, output)

        return learn


def _most_tokens(request: ModelRequest, served: Served) -> int:
    """Return the largest number of tokens that an engine can have counted for this request."""
    if request.why_not is SEVERAL or not request.has_output:
        return _MOST_TOKENS_OF_SEVERAL
    return min(served.most_tokens or MOST_TOKENS, MOST_TOKENS) * request.answers


def _guessed(known: bytes, tokens: int, block_size: int, lora_name: str | None) -> Prompt:
    """Return a prompt of `tokens` tokens that begins with the block hashes `known`. The other
    blocks get random hashes, which count as load, but match no other prompt. If `known` is empty,
    no hashes are looked up in the KV index, so that no block is predicted as cached."""
    tokens = max(min(tokens, MOST_TOKENS), len(known) // 8 * block_size)
    rest = os.urandom(8 * (tokens // block_size) - len(known))
    return _prompt_of(known, tokens, lora_name, rest)


def _prompt_of(known: bytes, tokens: int, lora_name: str | None, rest: bytes = b"") -> Prompt:
    return Prompt(
        min(max(1, tokens), MAX_ISL_TOKENS),
        known + rest if known else b"",
        (len(known) + len(rest)) // 8,
        (known or rest)[:8],
        lambda: sequence_hashes_bytes(known) + rest,
        lora_name,
        len(known) // 8,
    )
