"""The ranks of a partition, sorted by load, to find the least loaded rank quickly.

The cost of a prompt on a rank is a constant + scale * prefill tokens / block_size + standing load.
The standing load is the rank's active blocks plus a weight per active request. The constant depends
only on how many of the prompt's blocks are cached and active on the rank. Among ranks where these
are equal, the least loaded is the cheapest. The list `loads` has each load once, in ascending
order, with the set of its ranks (`RankBits`). The chooser (`selection/choice.py`) walks this list
until no later load can be cheaper."""

import bisect

from lean_selector.core.load.rank_load import LoadBucket, RankLoad
from lean_selector.core.rank_bits import bits_of


class LoadOrder:
    """Sets of ranks of equal load, sorted by load. Callers report each change of a load.

    Read only: `ranks` (by bit) and `loads` (sorted). `moved` collects the ranks whose load changed.
    Whoever reads `moved` also clears it. Ranks of `prefill_only` have no standing load: only their
    prefill tokens count. If `knows_prefilling`, `prefilling` has all ranks with prefill tokens."""

    def __init__(
        self, block_size: int, prefill_load_scale: float, request_weight: float = 0.0
    ) -> None:
        """In a rank's load, an active request counts as `request_weight` blocks."""
        self._block_size = block_size
        self._request_weight = request_weight
        self.scale = prefill_load_scale
        self.everyone = self.moved = self.prefill_only = self.prefilling = 0
        self.knows_prefilling = False
        self._is_plain = not request_weight
        self.ranks: dict[int, RankLoad] = {}
        self.loads: list[LoadBucket] = []
        # (key, tokens, standing) of each load in `loads`
        self._order: list[tuple[float, int, float]] = []
        self._by_load: dict[tuple[int, float], LoadBucket] = {}  # by (tokens, standing)
        # The keys of `_by_load`, sorted on first use.
        self._by_tokens: list[tuple[int, float]] | None = None

    def add(self, load: RankLoad) -> None:
        self.everyone |= load.mask
        self.moved |= load.mask
        self.ranks[load.bit] = load
        load.standing = self._standing(load)
        self._enter(load)

    def remove(self, load: RankLoad) -> None:
        self.everyone ^= load.mask
        self.moved &= self.everyone
        self.prefill_only &= self.everyone
        self.prefilling &= self.everyone
        del self.ranks[load.bit]
        bucket = load.bucket
        assert bucket is not None
        self._leave(load, bucket)
        load.bucket = None

    def changed(self, load: RankLoad) -> None:
        """Move a rank whose load changed to its new position. Ignores ranks that were not added."""
        bucket = load.bucket
        if bucket is None:
            return
        tokens = load.active_prefill_tokens
        standing = load.active_decode_blocks + 0.0  # mypyc accepts no int as a float
        if not self._is_plain:
            standing = self._standing(load)
        if tokens != bucket.tokens or standing != bucket.standing:
            self._leave(load, bucket)
            load.standing = standing
            self._enter(load)
            self.moved |= load.mask

    def set_roles(self, prefill_only: int, has_roles: bool) -> None:
        """Set for which ranks only prefill tokens count, and whether `prefilling` is known."""
        changed = self.prefill_only ^ prefill_only
        self.prefill_only = prefill_only
        if has_roles is not self.knows_prefilling:
            self.knows_prefilling, self.prefilling = has_roles, 0
            changed = self.everyone
        self._is_plain = not has_roles and not self._request_weight
        for bit in bits_of(changed & self.everyone):
            self.changed(self.ranks[bit])

    def _standing(self, load: RankLoad) -> float:
        if self.knows_prefilling:
            if load.active_prefill_tokens:
                self.prefilling |= load.mask
            elif self.prefilling & load.mask:
                self.prefilling ^= load.mask
            if load.mask & self.prefill_only:
                return 0.0
        return load.active_decode_blocks + self._request_weight * load.active_requests

    def _enter(self, load: RankLoad) -> None:
        standing = load.standing
        tokens = load.active_prefill_tokens
        bucket = self._by_load.get((tokens, standing))
        if bucket is None:
            bucket = self._open(tokens, standing)
        bucket.ranks |= load.mask
        load.bucket = bucket

    def _leave(self, load: RankLoad, bucket: LoadBucket) -> None:
        bucket.ranks ^= load.mask
        if not bucket.ranks:
            self._close(bucket)

    def _open(self, tokens: int, standing: float) -> LoadBucket:
        """Add and return a bucket (set of ranks of equal load) for a load that no rank has yet."""
        key = self.scale * tokens / self._block_size + standing
        entry = key, tokens, standing
        at = bisect.bisect_left(self._order, entry)
        self._order.insert(at, entry)
        bucket = LoadBucket(tokens, standing, key)
        self.loads.insert(at, bucket)
        self._by_load[tokens, standing] = bucket
        if self._by_tokens is not None:
            bisect.insort(self._by_tokens, (tokens, standing))
        return bucket

    def _close(self, bucket: LoadBucket) -> None:
        tokens, standing = bucket.tokens, bucket.standing
        at = bisect.bisect_left(self._order, (bucket.key, tokens, standing))
        del self._order[at]
        del self.loads[at]
        del self._by_load[tokens, standing]
        if self._by_tokens is not None:
            del self._by_tokens[bisect.bisect_left(self._by_tokens, (tokens, standing))]

    def position_of(self, key: float, first: int) -> int:
        """Return the first position in `loads`, from `first` on, with a load of `key` or more."""
        return bisect.bisect_left(self._order, (key, 0, 0.0), first)

    def least_tokens(self, ranks: int) -> int:
        """Return the least number of prefill tokens on any of these ranks; 0 for an empty set."""
        by_tokens = self._by_tokens
        if by_tokens is None:
            by_tokens = self._by_tokens = sorted(self._by_load)
        for entry in by_tokens:
            if self._by_load[entry].ranks & ranks:
                return entry[0]
        return 0
