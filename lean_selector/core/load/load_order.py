"""The ranks of a partition by load, so that the least loaded is known without visiting them all.

Ranks that hold equally much of a prompt, cached and active, cost scale * tokens / block_size +
blocks and the same constant on top. So the cheapest of such a set is one with the least of that,
and ranks of equal load are alike. Loads are kept in that order, each with the set of its ranks; a
set is an int (`RankBits`), and the first load in order that shares a rank with the set has the
cheapest (measured: 512 ranks one by one take 190 us, this 2 us).
"""

import bisect

from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.rank_bits import bits_of

Bucket = tuple[int, int]  # (active_prefill_tokens, active_decode_blocks)

# A set this small is computed rank by rank: cheaper than looking for it along the order.
_FEW_RANKS = 6


class LoadOrder:
    """Sets of equally loaded ranks, least loaded first. Told of every change of load."""

    __slots__ = ("_block_size", "_buckets", "_by_bit", "_keys", "_scale", "everyone")

    def __init__(self, block_size: int, prefill_load_scale: float) -> None:
        self._block_size = block_size
        self._scale = prefill_load_scale
        self.everyone = 0  # the ranks that were added
        self._by_bit: dict[int, RankLoad] = {}
        self._buckets: dict[Bucket, int] = {}
        self._keys: list[tuple[float, Bucket]] = []  # one per bucket, sorted

    def _key(self, bucket: Bucket) -> tuple[float, Bucket]:
        tokens, blocks = bucket
        return self._scale * tokens / self._block_size + blocks, bucket

    def add(self, load: RankLoad) -> None:
        self.everyone |= load.mask
        self._by_bit[load.bit] = load
        self._enter(load, (load.active_prefill_tokens, load.active_decode_blocks))

    def remove(self, load: RankLoad) -> None:
        self.everyone ^= load.mask
        del self._by_bit[load.bit]
        self._leave(load)
        load.bucket = None

    def changed(self, load: RankLoad) -> None:
        """A rank's load is not what it was; ranks that were not added are not our concern."""
        if load.bucket is None:
            return
        bucket = load.active_prefill_tokens, load.active_decode_blocks
        if bucket != load.bucket:
            self._leave(load)
            self._enter(load, bucket)

    def _enter(self, load: RankLoad, bucket: Bucket) -> None:
        ranks = self._buckets.get(bucket)
        if ranks is None:
            ranks = 0
            bisect.insort(self._keys, self._key(bucket))
        self._buckets[bucket] = ranks | load.mask
        load.bucket = bucket

    def _leave(self, load: RankLoad) -> None:
        bucket = load.bucket
        assert bucket is not None
        ranks = self._buckets[bucket] ^ load.mask
        if ranks:
            self._buckets[bucket] = ranks
        else:
            del self._buckets[bucket]
            del self._keys[bisect.bisect_left(self._keys, self._key(bucket))]

    def rank(self, bit: int) -> RankLoad:
        return self._by_bit[bit]

    def least_key(self) -> float:
        """scale * tokens / block_size + blocks of the least loaded rank; there is one."""
        return self._keys[0][0]

    def least(
        self, ranks: int, prompt_tokens: int, credit: float, new_blocks: int
    ) -> tuple[float, list[int]]:
        """The least cost among `ranks`, which is not empty, and the sets of ranks that have it.

        `credit` is in blocks and no more than prompt_tokens / block_size, so that no rank's prefill
        is cut off at zero. Loads whose order is decided by rounding alone may cost the same, or
        compare the other way round: all within the rounding error of the least are computed.
        """
        scale, block_size = self._scale, self._block_size
        least, tied = 0.0, list[int]()
        if ranks.bit_count() <= _FEW_RANKS:
            for bit in bits_of(ranks):
                load = self._by_bit[bit]
                tokens = load.active_prefill_tokens + prompt_tokens
                prefill = scale * max(0.0, tokens / block_size - credit)
                cost = prefill + (load.active_decode_blocks + new_blocks)
                if not tied or cost < least:
                    least, tied = cost, [load.mask]
                elif cost == least:
                    tied.append(load.mask)
            return least, tied
        limit = 0.0
        for key, bucket in self._keys:
            if tied and key > limit:
                break
            found = self._buckets[bucket] & ranks
            if not found:
                continue
            tokens, blocks = bucket
            prefill = scale * max(0.0, (tokens + prompt_tokens) / block_size - credit)
            cost = prefill + (blocks + new_blocks)
            if not tied:
                least, tied, limit = cost, [found], key + 1e-9 * (1.0 + key + abs(cost))
            elif cost < least:
                least, tied = cost, [found]
            elif cost == least:
                tied.append(found)
        return least, tied
