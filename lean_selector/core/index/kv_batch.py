"""What an engine tells about its KV cache, free of any encoding.

The wire decodes every producer's layout into these records; the index learns from them. Hashes
here are unsigned 64-bit, tokens flat. Spec: indexer.md 1.4.
"""

import msgspec

from lean_selector.core.index.kv_index import Tier


class BlockStored(msgspec.Struct, gc=False):
    """Consecutive blocks that the engine now holds on one tier."""

    block_hashes: list[int]  # the engine's own identifiers, one per block, in chain order
    parent_hash: int | None  # None: the first block is the first of a prompt; 0 is a hash
    token_ids: list[int]  # not checked for u32: hashing them does that
    block_size: int  # the engine's, in tokens
    tier: Tier | None  # None: a medium of unknown name
    lora_name: str | None = None
    cache_salt: str | None = None  # None also for "", which means none
    mm_hashes: list[list[int] | None] | None = None  # per block; blocks beyond the list have none
    is_eagle: bool = False  # tokens came as pairs; a block's hash covers block_size + 1 of them
    group_idx: int | None = None
    kind: str | None = None  # kv_cache_spec_kind
    is_remote: bool = False  # locality other than LOCAL: not in this worker's reach


class BlockRemoved(msgspec.Struct, gc=False):
    """Blocks that the engine no longer holds on one tier.

    `events` in a row that differ in their blocks alone are one record: engines tell evictions
    block by block.
    """

    block_hashes: list[int]
    tier: Tier | None
    group_idx: int | None = None
    kind: str | None = None
    is_remote: bool = False
    events: int = 1


class AllBlocksCleared(msgspec.Struct, gc=False):
    """The rank holds nothing any more, on no tier."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class SkippedEvent(msgspec.Struct, gc=False):
    """An event that could not be read; the others of its batch stand."""

    event_type: str  # "stored", "removed", "cleared", or "unknown"
    reason: str  # "malformed" or "unknown_type": a metric label
    detail: str  # for people


class EventBatch(msgspec.Struct, gc=False):
    """One message. dp_rank None means the rank that the source was registered for."""

    dp_rank: int | None
    events: list[Event]
    skipped: list[SkippedEvent]
