"""What GET /v1/models says of a model, as far as it is read."""

import msgspec


class ModelCard(msgspec.Struct):
    """An adapter (LoRA) has the model that it adapts as its parent."""

    id: str
    owned_by: str | None = None
    parent: str | None = None


class ModelCards(msgspec.Struct):
    data: list[ModelCard] = []


class TokenizeAnswer(msgspec.Struct):
    """Of an engine's POST /tokenize."""

    tokens: msgspec.Raw
