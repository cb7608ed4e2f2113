"""A bounded, paged KV cache: which blocks of which sequences an engine holds.

Owns residency, sharing of prefixes, and eviction: the least recently used leaf that nothing uses.
Pure and deterministic; does not know tokens, time, nor who is told about its changes.
"""

from collections import OrderedDict
from collections.abc import Sequence

from lean_selector.demo.records import Held


class BlockCache:
    """Blocks by their chained hash, `len(cache) <= capacity` at all times.

    A block is in `_users` while at least one sequence holds it and in `_idle` otherwise, oldest
    first. A chain is released from its end to its start, so a parent never stands before its
    child in `_idle`, nor outside `_users` while its child is inside: evicting the oldest idle
    block therefore always takes a leaf.
    """

    def __init__(self, capacity: int) -> None:
        assert capacity > 0, "an engine has at least one block"
        self.capacity = capacity
        self._users: dict[int, int] = {}  # block hash -> number of holders, >= 1
        self._idle: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._users) + len(self._idle)

    def __contains__(self, block: int) -> bool:
        return block in self._users or block in self._idle

    def hold(self, chain: Sequence[int]) -> Held:
        """Pin the resident prefix of a chain and store the rest, as far as there is room.

        chain: distinct chained hashes that start at a sequence's first block, or continue one
        of which the caller holds every block before.
        """
        users, idle = self._users, self._idle
        hit = 0
        for block in chain:
            if block in users:
                users[block] += 1
            elif block in idle:
                del idle[block]
                users[block] = 1
            else:
                break
            hit += 1
        stored = min(len(chain) - hit, self.capacity - len(users))
        excess = len(self) + stored - self.capacity
        evicted = [idle.popitem(last=False)[0] for _ in range(excess)]
        for block in chain[hit : hit + stored]:
            users[block] = 1
        return Held(hit, stored, evicted)

    def release(self, chain: Sequence[int]) -> None:
        """Let go of a held chain; its blocks stay until they are evicted."""
        users, idle = self._users, self._idle
        for block in reversed(chain):
            left = users[block] - 1
            if left:
                users[block] = left
            else:
                del users[block]
                idle[block] = None
