"""The ranks of a partition by load, so that the least loaded is known without visiting them all.

A rank that holds nothing of a prompt, cached or active, costs scale * (tokens + isl) / block_size +
blocks + new blocks: the same constant for all plus what `_key` says of its load. So the cheapest of
them is one with the least key, and only ranks that do hold something are worth a look of their own
(measured: 512 ranks one by one take 190 us, this 2 us). Ranks of equal load share a bucket, in
which any of them is as good as any other.
"""

import bisect

from lean_selector.core.slots import RankLoad

Bucket = tuple[int, int]  # (active_prefill_tokens, active_decode_blocks)


class LoadOrder:
    """Buckets of equally loaded ranks, least loaded first. Told of every change of load."""

    __slots__ = ("_block_size", "_keys", "_scale", "buckets")

    def __init__(self, block_size: int, prefill_load_scale: float) -> None:
        self._block_size = block_size
        self._scale = prefill_load_scale
        self.buckets: dict[Bucket, list[RankLoad]] = {}
        # One per bucket, sorted. Each rank is in the bucket that it names, at the index it names.
        self._keys: list[tuple[float, Bucket]] = []

    def _key(self, bucket: Bucket) -> tuple[float, Bucket]:
        tokens, blocks = bucket
        return self._scale * tokens / self._block_size + blocks, bucket

    def add(self, load: RankLoad) -> None:
        bucket = load.active_prefill_tokens, load.active_decode_blocks
        ranks = self.buckets.get(bucket)
        if ranks is None:
            ranks = self.buckets[bucket] = []
            bisect.insort(self._keys, self._key(bucket))
        load.bucket, load.bucket_index = bucket, len(ranks)
        ranks.append(load)

    def remove(self, load: RankLoad) -> None:
        bucket = load.bucket
        assert bucket is not None
        ranks = self.buckets[bucket]
        last = ranks.pop()
        if last is not load:
            ranks[load.bucket_index] = last
            last.bucket_index = load.bucket_index
        elif not ranks:
            del self.buckets[bucket]
            del self._keys[bisect.bisect_left(self._keys, self._key(bucket))]
        load.bucket = None

    def changed(self, load: RankLoad) -> None:
        """A rank's load is not what it was; ranks that were never added are not our concern."""
        bucket = load.bucket
        if bucket is not None and bucket != (load.active_prefill_tokens, load.active_decode_blocks):
            self.remove(load)
            self.add(load)

    def least(self, isl_tokens: int, new_blocks: int, apart: list[RankLoad]) -> "Least":
        """The cheapest ranks but for those in `apart`, at the cost that the formula gives them.

        Keys that differ by rounding alone may cost the same, or compare the other way round: all
        within the rounding error of the least are computed in full.
        """
        cost, tied, count, limit = 0.0, [], 0, None
        for key, bucket in self._keys:
            if limit is not None and key > limit:
                break
            free = len(self.buckets[bucket])
            for load in apart:
                free -= load.bucket == bucket
            if not free:
                continue
            tokens, blocks = bucket
            prefill = self._scale * max(0.0, (tokens + isl_tokens) / self._block_size)
            this = prefill + (blocks + new_blocks)
            if limit is None or this < cost:
                cost, tied, count = this, [bucket], free
                if limit is None:
                    limit = key + 1e-9 * (1.0 + cost)
            elif this == cost:
                tied.append(bucket)
                count += free
        return Least(cost, tied, count)

    def pick(self, least: "Least", index: int, apart: list[RankLoad]) -> RankLoad:
        """The rank at `index` of the `count` in `least`, in an order that means nothing."""
        for bucket in least.buckets:
            ranks = self.buckets[bucket]
            if any(load.bucket == bucket for load in apart):
                ranks = [load for load in ranks if load not in apart]
            if index < len(ranks):
                return ranks[index]
            index -= len(ranks)
        raise AssertionError("index is below count")


class Least:
    """What `LoadOrder.least` found: `count` ranks at `cost` in `buckets`; count 0 when none."""

    __slots__ = ("buckets", "cost", "count")

    def __init__(self, cost: float, buckets: list[Bucket], count: int) -> None:
        self.cost = cost
        self.buckets = buckets
        self.count = count
