"""A stretch of what a rank holds, as a dump tells it."""

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
