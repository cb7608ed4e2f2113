"""The events that the publisher sends, as the engines themselves would."""

from collections.abc import Sequence

import msgspec


class BlockStored(msgspec.Struct, tag="BlockStored", frozen=True, gc=False, omit_defaults=True):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: Sequence[object] | None = None
    cache_salt: str | None = None


class BlockRemoved(msgspec.Struct, tag="BlockRemoved", frozen=True, gc=False, omit_defaults=True):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(msgspec.Struct, tag="AllBlocksCleared", frozen=True, gc=False):
    pass


PublishedEvent = BlockStored | BlockRemoved | AllBlocksCleared


class PublishedBatch(msgspec.Struct, array_like=True, frozen=True, gc=False):
    ts: float
    events: list[PublishedEvent]
    data_parallel_rank: int
