"""Bit numbers for the ranks of a partition. So a set of ranks is a bit mask, held in one int.

The index, the slots and the order of loads use the same numbers. So one `&` combines their sets,
for example to find the least loaded ranks that have a prompt cached. A number can be reused when
the index and the slots have both released the rank that had it."""

import heapq

RankKey = tuple[int, int]  # (worker_id, dp_rank), as u64 and u32

_FEW_BITS = 24  # for so few bits, counting one by one is as fast as halving


class RankBits:
    """Assigns a bit number to each rank. Every `acquire` needs a `release`."""

    def __init__(self) -> None:
        self.keys: list[RankKey | None] = []  # by bit; None: free
        self._bits: dict[RankKey, int] = {}
        self._users: dict[RankKey, int] = {}  # number of users, >= 1 for every key in _bits
        # A heap of free bits, then of bits beyond `keys`.
        self._free: list[int] = []

    def acquire(self, key: RankKey) -> int:
        """Return the bit number of a rank. A new rank gets the lowest free number."""
        bit = self._bits.get(key)
        if bit is not None:
            self._users[key] += 1
            return bit
        keys = self.keys
        if len(self._bits) == len(keys):
            bit = len(keys)
            keys.append(None)
            self._free.clear()
        else:
            bit = heapq.heappop(self._free)
        keys[bit] = key
        self._bits[key] = bit
        self._users[key] = 1
        return bit

    def release(self, key: RankKey) -> None:
        self._users[key] -= 1
        if self._users[key]:
            return
        del self._users[key]
        bit = self._bits.pop(key)
        self.keys[bit] = None
        heapq.heappush(self._free, bit)
        while self.keys and self.keys[-1] is None:
            self.keys.pop()


def bits_of(mask: int) -> list[int]:
    """Return the numbers of the bits that are set, lowest first."""
    bits = []
    while mask:
        low = mask & -mask
        bits.append(low.bit_length() - 1)
        mask ^= low
    return bits


def nth_bit(mask: int, n: int) -> int:
    """Return the number of the n-th set bit of `mask`. The lowest set bit is the 0th."""
    assert 0 <= n < mask.bit_count()
    if not mask & (mask + 1):
        return n  # no bit is missing below the highest
    base, width = 0, mask.bit_length()
    while width > _FEW_BITS:
        half = width // 2
        low = mask & ((1 << half) - 1)
        count = low.bit_count()
        if n < count:
            mask, width = low, half
        else:
            n -= count
            mask >>= half
            base += half
            width -= half
    while n:
        mask &= mask - 1
        n -= 1
    return base + (mask & -mask).bit_length() - 1
