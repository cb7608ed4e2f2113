"""A model as far as prompts need it."""

import msgspec


class Served(msgspec.Struct, frozen=True):
    """A model of a tenant that has workers. `workers` holds the base URL of each by its id."""

    model_name: str
    tenant_id: str
    block_size: int  # tokens, >= 1
    is_eagle: bool
    workers: dict[int, str]
