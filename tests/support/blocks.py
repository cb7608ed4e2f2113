"""What an index is told of blocks, with engine hashes as ints."""

from collections.abc import Sequence

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import StoreResult, Tier
from lean_selector.core.rank_bits import RankKey
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
