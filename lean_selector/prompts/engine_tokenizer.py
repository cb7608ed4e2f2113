"""Tokens by an engine's own /tokenize (vLLM's, and who serves the same)."""

from collections.abc import Mapping
from typing import Final

import msgspec
from msgspec import Raw

from lean_selector.http.outbound import OutboundClient, OutboundFailed, OutboundTimedOut
from lean_selector.prompts.answers import MOST_ID_BYTES
from lean_selector.prompts.model_card import TokenizeAnswer
from lean_selector.prompts.model_request import Kind, ModelRequest
from lean_selector.prompts.template_arguments import template_arguments
from lean_selector.prompts.tokenizing import NotTokenized
from lean_selector.prompts.unknown import Why
from lean_selector.wire.scalars import packed_u32

# Taken by /tokenize as they are; of the rest it takes what goes into the template's arguments.
_CHAT: Final = (
    *("messages", "tools", "add_generation_prompt", "continue_final_message"),
    *("add_special_tokens", "chat_template"),
)
_TEXT: Final = ("prompt", "add_special_tokens")


class EngineTokenizer:
    """Asks over HTTP; two workers at most."""

    def __init__(self, client: OutboundClient, timeout_s: float) -> None:
        self._client = client
        self._timeout_s = timeout_s
        self._turn = 0

    async def tokens(self, request: ModelRequest, model: str, workers: Mapping[int, str]) -> bytes:
        """The tokens of a prompt, 4 bytes each. Raises NotTokenized."""
        bases = list(workers.values())
        if not bases:
            raise NotTokenized(Why.FAILED, "no worker has a URL to ask for tokens")
        self._turn += 1
        body = tokenize_body(request, model)
        failures: list[OutboundFailed] = []
        for attempt in range(min(2, len(bases))):
            base = bases[(self._turn + attempt) % len(bases)]
            try:
                answer = await self._client.post(
                    base + "/tokenize", body, timeout_s=self._timeout_s, most_bytes=MOST_ID_BYTES
                )
            except OutboundFailed as error:
                failures.append(error)
                continue
            if answer.status != 200:
                # What one worker refuses, another does too.
                raise NotTokenized(Why.REFUSED, f"POST {base}/tokenize: status {answer.status}")
            return _read(base, answer.body)
        last = failures[-1]
        why = Why.TIMEOUT if isinstance(last, OutboundTimedOut) else Why.FAILED
        raise NotTokenized(why, last.message)

    def close(self) -> None:
        """Nothing is kept between two questions."""


def _read(base: str, body: bytes) -> bytes:
    try:
        tokens = packed_u32(bytes(msgspec.json.decode(body, type=TokenizeAnswer).tokens))
    except msgspec.DecodeError:
        tokens = None
    if not tokens:
        raise NotTokenized(Why.FAILED, f"POST {base}/tokenize: an answer without tokens")
    return tokens


def tokenize_body(request: ModelRequest, model: str) -> bytes:
    """What vLLM's /tokenize is asked, so that it does with it what it does with the request."""
    names = _CHAT if request.kind is Kind.CHAT else _TEXT
    fields: dict[str, object] = {name: request.fields[name] for name in names if request.has(name)}
    if request.kind is Kind.TEXT:
        fields["prompt"] = Raw(request.text)
    else:
        arguments = template_arguments(request)
        if arguments:
            fields["chat_template_kwargs"] = arguments
    return msgspec.json.encode({"model": model, **fields})
