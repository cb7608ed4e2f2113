"""Records of KV events from plain lists, and plain lists from records."""

from collections.abc import Sequence
from struct import pack, unpack
from typing import Any

from msgspec.structs import replace

from lean_selector.core.index.shapes import BlockRemoved, BlockStored, Tier
from lean_selector.wire.kv_event_records import stored_record
from lean_selector.wire.kv_event_shapes import MapStored


def stored_blocks(
    block_hashes: Sequence[int],
    parent_hash: int | None,
    token_ids: Sequence[int],
    block_size: int,
    tier: Tier | None,
    **more: Any,
) -> BlockStored:
    event = MapStored([*block_hashes], [*token_ids], block_size, parent_hash)
    return replace(stored_record(event), tier=tier, **more)


def removed_blocks(
    block_hashes: Sequence[int], tier: Tier | None, *more: Any, **by_name: Any
) -> BlockRemoved:
    names = pack(f"<{len(block_hashes)}Q", *block_hashes)
    return BlockRemoved(names, tier, *more, **by_name)


def hashes_of(record: BlockStored | BlockRemoved) -> list[int]:
    return list(unpack(f"<{len(record.engine_hashes) >> 3}Q", record.engine_hashes))


def tokens_of(record: BlockStored) -> list[int]:
    return list(unpack(f"<{len(record.tokens) >> 2}I", record.tokens))
