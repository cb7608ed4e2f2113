"""What a router is asked: what is to be placed, how, and what the worker is to do then."""

from collections.abc import Mapping, Sequence

import msgspec

from lean_selector.client.completions import Option


class Prompt(msgspec.Struct, frozen=True):
    """What is to be placed."""

    token_ids: Sequence[int]
    lora_name: str | None = None
    cache_salt: str | None = None


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """How it is to be placed; None leaves everything to the service."""

    router_config_override: Mapping[str, object] | None = None
    worker_id: int | None = None
    dp_rank: int | None = None
    expected_output_tokens: int | None = None
    priority_jump: float | None = None
    strict_priority: int | None = None
    routing_constraints: Mapping[str, object] | None = None

    def __post_init__(self) -> None:
        if self.dp_rank is not None and self.worker_id is None:
            raise ValueError("dp_rank needs worker_id")


class Generation(msgspec.Struct, frozen=True):
    """What a worker is to be asked, once there is one."""

    model: str
    options: Sequence[Option]
    return_token_ids: bool
