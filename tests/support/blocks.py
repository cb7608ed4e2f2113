"""What an index is told of blocks, with engine hashes as ints, and what it tells of prompts."""

from collections.abc import Sequence

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Matched, StoreResult, Tier
from lean_selector.core.rank_bits import RankKey, bits_of
from tests.support.driven_selector import pack


def store_blocks(
    index: KvIndex,
    key: RankKey,
    tier: Tier,
    parent: int | None,
    hashes: Sequence[int],
    local: bytes,
    counted: bool = False,
) -> StoreResult:
    return index.store(key, tier, parent, pack(hashes), local, counted)


def remove_blocks(index: KvIndex, key: RankKey, tier: Tier, hashes: Sequence[int]) -> int:
    return index.remove(key, tier, pack(hashes))


def matches(index: KvIndex, local_hashes: bytes) -> dict[RankKey, Matched]:
    """How many leading blocks of a prompt each rank holds on each tier."""
    sets, found = index.match_sets(local_hashes)
    found += [(Matched(blocks), ranks) for blocks, ranks in sets]
    keys = index.bits.keys
    return {key: match for match, ranks in found for bit in bits_of(ranks) if (key := keys[bit])}
