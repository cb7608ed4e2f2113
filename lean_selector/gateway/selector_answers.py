"""Answers of a selector, as far as the gateway reads them."""

import msgspec


class Found(msgspec.Struct):
    dp: dict[str, int] = {}


class ChosenWorker(msgspec.Struct):
    """POST /select_and_reserve."""

    worker_id: int
    dp_rank: int
    endpoint: str
    overlap: Found
    effective_prefill_tokens: int


class Told(msgspec.Struct):
    """An error; a `code` only where the request was shed."""

    error: str
    code: int | None = None


class ListedWorker(msgspec.Struct):
    """A row of GET /workers."""

    worker_id: int
    model_name: str
    lifecycle: str
    tenant_id: str = "default"
    routing_group: str | None = None  # the same, as 1.6 calls it
    endpoint: str | None = None
    block_size: int | None = None
    is_eagle: bool | None = None

    def __post_init__(self) -> None:
        if self.routing_group is not None:
            self.tenant_id = self.routing_group
