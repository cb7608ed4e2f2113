"""Which ranks have a full cache, so that new blocks evict others.

Used by the policy `latency`. A rank is full if less than an eighth of its worker's stated capacity
is left, after the blocks in the index and the blocks of waiting prefill. A worker without a stated
capacity counts as full. A rank is checked again after its load has changed, which happens before
and after the rank stores a prompt, not at each event.

Requests that share a prefix go to the rank that caches it, even if other ranks stay idle. So
prefill that full ranks get while others have room is *owed*, until the others get as much prefill.
Owed tokens count as evicted too, up to the number of tokens cached on the rank. So once about as
many tokens are owed as the prefix has, another rank computes the prefix."""

from collections.abc import Mapping
from typing import Protocol

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Tier
from lean_selector.core.load.load_order import LoadOrder
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.rank_bits import bits_of

_DEVICE = Tier.DEVICE


class HasBlocks(Protocol):
    """The part of a worker's record that is used here."""

    total_kv_blocks: int | None


class Fullness:
    """The ranks of a partition whose cache is full."""

    __slots__ = ("_full", "_index", "_order", "_owed_tokens", "_workers")

    def __init__(self, index: KvIndex, order: LoadOrder, workers: Mapping[int, HasBlocks]) -> None:
        self._index = index
        self._order = order
        self._workers = workers
        self._full = 0
        self._owed_tokens = 0

    def full(self) -> int:
        """Return the set of full ranks. It may contain bits that no rank has."""
        order = self._order
        if moved := order.moved:
            order.moved = 0
            self._full &= ~moved
            for bit in bits_of(moved):
                if self._is_full(order.ranks[bit]):
                    self._full |= 1 << bit
        return self._full

    def _is_full(self, load: RankLoad) -> bool:
        total = self._workers[load.worker_id].total_kv_blocks
        if not total:
            return True
        index = self._index
        used = index.blocks(load.worker_id, load.dp_rank, _DEVICE)
        used += load.active_prefill_tokens // index.block_size
        return 8 * used >= 7 * total

    def owed_tokens(self, ranks: int) -> int:
        """Return the limit up to which cached tokens of the full ranks among `ranks` count as
        evicted: 0 unless another rank of `ranks` has room."""
        return self._owed_tokens if ranks & ~self.full() else 0

    def booked(self, load: RankLoad, ranks: int, uncached_tokens: int) -> None:
        """Record a booking: `load` was chosen among `ranks`, and computes `uncached_tokens`."""
        full = self._full
        if not load.mask & full:
            self._owed_tokens = max(0, self._owed_tokens - uncached_tokens)
        elif ranks & ~full:
            self._owed_tokens += uncached_tokens
