"""Which ranks have a full cache, where a prompt's new blocks are stored in place of others.

For the policy `latency`. A rank is full when less than an eighth of the blocks that its worker
stated is left beside what the index knows there and what waits to be computed; one that stated
none counts as full. It is looked at again after its load has changed, as it does before and after
it stores a prompt, not with each event.

Requests that share a prefix go where it is cached, for ever if the other ranks are idle. So the
prefill that full ranks got while others had room, minus the prefill that the others got since, is
owed. It counts as evicted too, up to what is cached there: the prefix is computed on another rank
once about as much has been evicted for it.
"""

from collections.abc import Mapping
from typing import Protocol

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Tier
from lean_selector.core.load.load_order import LoadOrder
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.rank_bits import bits_of

_DEVICE = Tier.DEVICE


class HasBlocks(Protocol):
    """A worker, as far as it matters here."""

    total_kv_blocks: int | None


class Fullness:
    """The full ranks of a partition, as a set."""

    __slots__ = ("_full", "_index", "_order", "_owed_tokens", "_workers")

    def __init__(self, index: KvIndex, order: LoadOrder, workers: Mapping[int, HasBlocks]) -> None:
        self._index = index
        self._order = order
        self._workers = workers
        self._full = 0
        self._owed_tokens = 0

    def full(self) -> int:
        """The full ranks; perhaps also bits of no rank."""
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
        """The tokens owed by the full ones of `ranks`: they count as evicted, up to what is cached
        there. 0 unless another of `ranks` has room."""
        return self._owed_tokens if ranks & ~self.full() else 0

    def booked(self, load: RankLoad, ranks: int, uncached_tokens: int) -> None:
        """A prompt was booked: `load` was chosen among `ranks`, and computes this many tokens."""
        full = self._full
        if not load.mask & full:
            self._owed_tokens = max(0, self._owed_tokens - uncached_tokens)
        elif ranks & ~full:
            self._owed_tokens += uncached_tokens
