"""Which ranks have a full cache, where new blocks evict others.

Used by the policy `latency`. A rank is full if at most an eighth of its worker's stated capacity
is left. Blocks in the index and blocks of waiting prefill count as used. A worker without a stated
capacity counts as full. A rank is checked again after its load has changed, not at each KV event.

Requests that share a prefix go to the rank that caches it, even if other ranks stay idle. To limit
this, prefill tokens that go to a full rank while another rank has room are *owed*. Prefill that
goes to a rank with room reduces the owed tokens. On a full rank, as many cached tokens of the
prompt as are owed are treated as evicted, which raises the cost. So when the owed tokens reach the
length of a prefix, another rank computes the prefix."""

from collections.abc import Mapping

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Tier
from lean_selector.core.load.load_order import LoadOrder
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.rank_bits import bits_of
from lean_selector.core.selection.schedulable_worker import SchedulableWorker

_DEVICE = Tier.DEVICE


class Fullness:
    """Tells which ranks of a partition have a full KV cache."""

    __slots__ = ("_full", "_index", "_order", "_owed_tokens", "_workers")

    def __init__(
        self, index: KvIndex, order: LoadOrder, workers: Mapping[int, SchedulableWorker]
    ) -> None:
        self._index = index
        self._order = order
        self._workers = workers
        self._full = 0
        self._owed_tokens: dict[str, int] = {}  # by role

    def full(self) -> int:
        """Return the set of ranks with a full cache. The set may contain bits of removed ranks."""
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

    def owed_tokens(self, ranks: int, role: str) -> int:
        """Return how many of a prompt's cached tokens a full rank treats as evicted. Prefill on
        full ranks raises this number, and other prefill lowers it. 0 if all `ranks` are full."""
        return self._owed_tokens.get(role, 0) if ranks & ~self.full() else 0

    def booked(self, load: RankLoad, ranks: int, uncached_tokens: int, role: str) -> None:
        """Record that the rank of `load`, one of `ranks`, has to prefill `uncached_tokens`."""
        full, owed = self._full, self._owed_tokens.get(role, 0)
        if not load.mask & full:
            self._owed_tokens[role] = max(0, owed - uncached_tokens)
        elif ranks & ~full:
            self._owed_tokens[role] = owed + uncached_tokens
