"""A stretch of what a rank holds, as a dump tells it."""

from enum import IntEnum

import msgspec

from lean_selector.core.index.holdings import Tier


class StoredRun(msgspec.Struct, frozen=True, gc=False):
    """One `stored` event of a dump. Hashes are u64; `parent_hash` is the rank's own."""

    worker_id: int
    dp_rank: int
    tier: Tier
    parent_hash: int | None
    block_hashes: tuple[int, ...]
    tokens_hashes: tuple[int, ...]


class StoreResult(IntEnum):
    """What became of a stored event. Only STORED may have changed anything."""

    STORED = 0
    EMPTY = 1
    SELF_REFERENCE = 2
    UNKNOWN_PARENT = 3
    FULL = 4  # as many runs as can be numbered, some 4 million
