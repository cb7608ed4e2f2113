"""GET /v1/models at the gateway: the models that the workers list, each once."""

import asyncio
from time import monotonic
from typing import Final

import msgspec

from lean_selector.core.errors import UnknownModel
from lean_selector.gateway.headers import refusal
from lean_selector.gateway.prompt_shapes import ModelCard
from lean_selector.gateway.upstreams import Rotation
from lean_selector.http.outbound import OutboundClient, OutboundFailed
from lean_selector.http.response import PendingReply, encode_response
from lean_selector.tasks import watched

HOLDS_S: Final = 2.0  # how long a list is cached
TIMEOUT_S: Final = 2.0  # for a worker's answer


class ModelList:
    """Answers GET /v1/models and GET /v1/models/MODEL. Workers are queried concurrently, and the
    result is cached briefly. If a worker is ejected or gives no list, its last list is used."""

    def __init__(self, rotation: Rotation, client: OutboundClient) -> None:
        self._rotation = rotation
        self._client = client
        self._told: dict[str, dict[str, msgspec.Raw]] = {}  # by base URL, then model
        self._known: dict[str, msgspec.Raw] | None = None  # by model
        self._until = 0.0
        self._asking: asyncio.Task[dict[str, msgspec.Raw]] | None = None

    def answer(self, line: bytes, model: str | None = None) -> bytes | PendingReply:
        """Return an answer with all models, or only with `model`. `line` is a header to add."""
        if self._known is not None and monotonic() < self._until:
            return _told_models(self._known, line, model)
        if self._asking is None:
            self._asking = watched("list of models", self._ask())
        reply = PendingReply()

        def told(asked: "asyncio.Task[dict[str, msgspec.Raw]]") -> None:
            if reply.response is not None or asked.cancelled():
                return
            models = {} if asked.exception() is not None else asked.result()
            reply.resolve(_told_models(models, line, model))

        self._asking.add_done_callback(told)
        return reply

    async def _ask(self) -> dict[str, msgspec.Raw]:
        try:
            workers = self._rotation.in_turn
            asked = [each.text for each in workers if self._rotation.is_well(each)]
            lists = await asyncio.gather(*map(self._models_of, asked))
            told = self._told | dict(zip(asked, lists, strict=True))
            self._told = {each.text: told.get(each.text, {}) for each in workers}
            models: dict[str, msgspec.Raw] = {}
            for rows in self._told.values():
                for name, row in rows.items():
                    models.setdefault(name, row)
            if models:
                self._known, self._until = models, monotonic() + HOLDS_S
            return models
        finally:
            self._asking = None

    async def _models_of(self, base: str) -> dict[str, msgspec.Raw]:
        try:
            text = await self._client.text(base + "/v1/models", timeout_s=TIMEOUT_S)
            listed = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
            rows = msgspec.json.decode(listed["data"], type=list[msgspec.Raw])
            return {_named(row).id: row for row in rows}
        except (OutboundFailed, msgspec.DecodeError, LookupError, ValueError, RecursionError):
            return self._told.get(base, {})

    def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()


_named = msgspec.json.Decoder(ModelCard).decode


def _told_models(models: dict[str, msgspec.Raw], line: bytes, model: str | None) -> bytes:
    if not models:
        return refusal(503, "no worker lists its models", "no_worker", line)
    if model is None:
        listed = b",".join(bytes(row) for row in models.values())
        return encode_response(200, b'{"object":"list","data":[%b]}' % listed, extra=line)
    row = models.get(model)
    if row is None:
        return refusal(404, UnknownModel(model).message, "model_not_found", line)
    return encode_response(200, bytes(row), extra=line)
