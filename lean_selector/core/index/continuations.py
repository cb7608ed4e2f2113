"""Which ranks a prompt's next block could be found on at all, on whatever lower tier.

What all ranks share, so that a match asks no others. Spec: indexer.md section 3.5.
"""

from typing import Final

# What all ranks share is in so many dicts, chosen by the first byte of the local hash: a single one
# of a million entries would take 50 ms to grow.
SHARDS: Final = 64
MASK: Final = SHARDS - 1


class Continuations:
    """Which ranks have a block with given tokens on a lower tier: local hash -> set of ranks.

    Exact but for hashes that agree in 7 of their 8 bytes, whose ranks are told for either.
    """

    __slots__ = ("_again", "_alone", "_ranks")

    def __init__(self) -> None:
        # A set of ranks, or ~bit where there is one. Most blocks are on one rank, and a set of one
        # of 4 000 ranks takes 560 bytes; so `_alone` keeps an int for each rank, to be shared.
        self._ranks: list[dict[int, int]] = []  # no dict before there is anything
        self._alone: list[int] = []
        # Per bit: of those in `_ranks`, how many more blocks with these tokens the rank has.
        self._again: dict[int, dict[int, int]] = {}

    def of(self, hashes: bytes, at: int) -> int:
        """The ranks that have the block at byte `at` of `hashes`, below whatever other block."""
        if not self._ranks:
            return 0
        block = int.from_bytes(hashes[at : at + 7], "little")
        ranks = self._ranks[block & MASK].get(block, 0)
        return 1 << ~ranks if ranks < 0 else ranks

    def add(self, bit: int, local: bytes) -> None:
        """A rank has another block with this local hash."""
        if not self._ranks:
            self._ranks = [{} for _ in range(SHARDS)]
        block = int.from_bytes(local[:7], "little")
        shard = self._ranks[block & MASK]
        ranks = shard.get(block)
        if ranks is None:
            shard[block] = self.only(bit)
            return
        if ranks < 0:
            ranks = 1 << ~ranks
        if ranks >> bit & 1:
            again = self._again.setdefault(bit, {})
            again[block] = again.get(block, 0) + 1
        else:
            shard[block] = ranks | 1 << bit

    def discard(self, bit: int, local: bytes) -> None:
        """The rank has one block with this local hash less."""
        block = int.from_bytes(local[:7], "little")
        again = self._again.get(bit)
        if again and block in again:
            again[block] -= 1
            if not again[block]:
                del again[block]
                if not again:
                    del self._again[bit]
            return
        shard = self._ranks[block & MASK]
        ranks = shard[block]
        if ranks < 0:
            del shard[block]
        else:
            ranks ^= 1 << bit
            is_one = not ranks & (ranks - 1)
            shard[block] = self.only(ranks.bit_length() - 1) if is_one else ranks

    def only(self, bit: int) -> int:
        """The set of this rank alone, as it is kept."""
        while len(self._alone) <= bit:
            self._alone.append(~len(self._alone))
        return self._alone[bit]
