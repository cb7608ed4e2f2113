"""Which rank holds which block on which tier, for one partition (model_name, tenant_id).

Applies KV events, matches prompts, dumps itself. Composes the device tier, where all ranks share a
trie, and the lower tiers, which each rank has for itself; bounds both. Knows no sockets, no tokens
and no registrations: any rank may hold blocks. Spec: indexer.md sections 3, 4.1 and 7; D16.

Rules where the spec leaves a choice:
- A block has the first hash that its rank stored it under, and the newest other one as a second
  name. Removing it by either removes the block.
- A hash stored again with other tokens names the newer block. The older one stays held; the hash
  names it again when the newer is removed. Bounds, clear and drop free it like any other.
- A removed block leaves those behind it known but out of reach: they count again when it comes
  back.
"""

from collections import deque
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from enum import IntEnum
from itertools import chain

from lean_selector.core.hashing import u64s
from lean_selector.core.index import holes
from lean_selector.core.index.device_tier import DeviceRank, DeviceTier
from lean_selector.core.index.engine_hashes import NOWHERE
from lean_selector.core.index.holdings import Holdings
from lean_selector.core.index.holdings import Tier as Tier
from lean_selector.core.index.kv_dump import stored_runs
from lean_selector.core.index.lower_matches import LowerMatches
from lean_selector.core.index.lower_tiers import ROOT, LowerTier
from lean_selector.core.index.matched import Matched as Matched
from lean_selector.core.index.stored_run import StoredRun as StoredRun
from lean_selector.core.index.sweeping import emptied
from lean_selector.core.rank_bits import RankBits
from lean_selector.core.rank_bits import RankKey as RankKey

# Holdings of a rank whose size nobody told us: 2^21 blocks of 16 tokens are a cache of 33 million
# tokens, ten times that of the largest node today. On a lower tier four times as much, for each of
# the three.
DEFAULT_DEVICE_BLOCKS = 1 << 21
DEFAULT_LOWER_TIER_BLOCKS = 1 << 23
_STEPS_AT_ONCE = 8  # of giving back: some 0.3 ms, so that what is little is gone at once
_STEPS_PER_EVENT = 2  # and one for 32 blocks: more than the event leaves behind when it is dropped
_EVICTED_PER_STEP = 32
_ENDED = object()
_SLICE_BLOCKS = 512  # of a dump: some 0.1 ms, as blocks of a lower tier 0.5


_DEVICE = Tier.DEVICE  # a look-up in an enum takes as long as three others


class StoreResult(IntEnum):
    """What became of a stored event. Only STORED may have changed anything."""

    STORED = 0
    EMPTY = 1
    SELF_REFERENCE = 2
    UNKNOWN_PARENT = 3
    FULL = 4  # as many runs as can be numbered, some 4 million


_STORED = StoreResult.STORED


class KvIndex:
    """The index of one partition. Lists of local hashes are bytes, 8 per block, little-endian.

    `evicted` counts holdings dropped because a rank went beyond its bound, or because the holes
    before them took too much memory.
    """

    def __init__(
        self,
        block_size: int,
        device_bound: int = DEFAULT_DEVICE_BLOCKS,
        lower_tier_bound: int = DEFAULT_LOWER_TIER_BLOCKS,
        *,
        on_sweep: Callable[["KvIndex"], None] | None = None,
    ) -> None:
        """`on_sweep` hears when there is something to give back."""
        self.block_size = block_size
        self.evicted = 0
        self._default_bound = (device_bound, lower_tier_bound)
        self._bounds: dict[int, tuple[int, int]] = {}  # by worker id, where set
        self._dp_ranks: dict[int, set[int]] = {}  # by worker id, those of its ranks in `_ranks`
        self._ranks: dict[RankKey, Holdings] = {}  # those with a holding, no others
        # What is to be given back, step by step.
        self._sweeps: deque[Iterator[None]] = deque()
        self._until_review = holes.REVIEW_AFTER  # device blocks to be dropped
        self._is_reviewed = False  # just now, in one of the sweeps
        self.on_sweep = on_sweep
        self.bits = RankBits()  # those with a holding, and whatever else a user of it numbers
        self._device = DeviceTier(self.bits)
        self._lower_matches = LowerMatches(self._device)
        self._lower = self._lower_matches.ranks  # by bit, those with a holding on a lower tier

    # Reading

    @property
    def total_blocks(self) -> int:
        return sum(rank.blocks() for rank in self._ranks.values())

    @property
    def is_empty(self) -> bool:
        return not self._ranks

    def ranks(self) -> list[RankKey]:
        """The ranks that hold anything, sorted."""
        return sorted(self._ranks)

    def workers(self) -> set[int]:
        """The workers with a rank that holds anything."""
        return set(self._dp_ranks)

    def blocks(self, worker_id: int, dp_rank: int, tier: Tier) -> int:
        """Blocks that a rank holds on a tier, in reach or not."""
        rank = self._ranks.get((worker_id, dp_rank))
        if rank is None:
            return 0
        if tier == Tier.DEVICE:
            return rank.device.blocks
        return len(rank.lower[tier - 1]) if rank.lower else 0

    def match(self, local_hashes: bytes) -> dict[RankKey, Matched]:
        """What each rank holds of the start of a prompt. Ranks without a hit are left out."""
        sets, path = self._device.match_sets(local_hashes)
        result = self._device.by_rank(sets)
        if self._lower:
            result.update(self._lower_matches.extended(sets, path, local_hashes))
        return result

    def match_sets(
        self, local_hashes: bytes
    ) -> tuple[list[tuple[int, int]], dict[RankKey, Matched]]:
        """The same as sets of ranks (`bits`) that hold equally many leading blocks on the device.

        The sets are apart, none is empty, and they leave out the ranks in the dict: those for which
        a lower tier goes on.
        """
        sets, path = self._device.match_sets(local_hashes)
        if not self._lower:
            return sets, {}
        extended = self._lower_matches.extended(sets, path, local_hashes)
        if extended:
            apart = 0
            for key in extended:
                apart |= 1 << self._ranks[key].device.bit
            sets = [(blocks, rest) for blocks, mask in sets if (rest := mask & ~apart)]
        return sets, extended

    # Events

    def store(
        self,
        worker_id: int,
        dp_rank: int,
        tier: Tier,
        parent_hash: int | None,
        block_hashes: Sequence[int],
        local_hashes: bytes,
    ) -> StoreResult:
        """Apply a `stored` event: a chain of blocks below `parent_hash` (None: a prompt's start).

        Hashes are u64. Blocks beyond the shorter of the two lists are left out. Evicts the oldest
        holdings of the rank beyond its bound.
        """
        blocks = len(local_hashes) >> 3
        if not blocks or not block_hashes:
            return StoreResult.EMPTY
        if len(block_hashes) == 1:  # a decoding engine sends most of its blocks one by one
            if block_hashes[0] == parent_hash:
                return StoreResult.SELF_REFERENCE
            packed = block_hashes[0].to_bytes(8, "little")
        else:
            distinct = set(block_hashes)
            if parent_hash in distinct or len(distinct) != len(block_hashes):
                return StoreResult.SELF_REFERENCE
            packed = u64s(len(block_hashes)).pack(*block_hashes)
        if len(packed) != len(local_hashes):
            blocks = min(len(block_hashes), blocks)
            block_hashes = block_hashes[:blocks]
            packed, local_hashes = packed[: blocks << 3], local_hashes[: blocks << 3]
        key = (worker_id, dp_rank)
        if tier is not _DEVICE:
            parent = ROOT if parent_hash is None else parent_hash.to_bytes(8, "little")
            self._store_lower(key, tier, parent, packed, local_hashes)
            return StoreResult.STORED
        if self._sweeps:
            self.sweep(_STEPS_PER_EVENT + (blocks >> 5))
        rank = self._ranks.get(key)
        place = NOWHERE
        if parent_hash is not None:
            place = rank.device.names.find(parent_hash) if rank else NOWHERE
            if place == NOWHERE:
                return StoreResult.UNKNOWN_PARENT
        if not self._device.has_room(blocks):
            return StoreResult.FULL
        rank = rank or self._admit(key)
        self._device.store(rank.device, place, block_hashes, packed, local_hashes)
        bound = self._bounds.get(worker_id, self._default_bound)[0]
        if rank.device.blocks > bound:
            self._evict_device(rank, bound, blocks + _EVICTED_PER_STEP)
            self._release_if_empty(key, rank)
            if self._until_review < 0:
                self._start_review()
        return _STORED

    def remove(self, worker_id: int, dp_rank: int, tier: Tier, block_hashes: Sequence[int]) -> int:
        """Apply a `removed` event; unknown blocks are skipped. Returns the blocks removed."""
        key = (worker_id, dp_rank)
        rank = self._ranks.get(key)
        if rank is None:
            return 0
        if tier is _DEVICE:
            removed = self._device.remove(rank.device, block_hashes)
            self._until_review -= removed
        elif rank.lower:
            held = rank.lower[tier - 1]
            removed = sum(held.remove(name.to_bytes(8, "little")) for name in block_hashes)
        else:
            removed = 0
        self._release_if_empty(key, rank)
        if self._until_review < 0:
            self._start_review()
        return removed

    def clear(self, worker_id: int, *dp_ranks: int) -> int:
        """Drop all that these ranks hold, on all tiers; returns the blocks dropped.

        Nothing of it is seen any more; where it is much, `sweep` gives the memory back.
        """
        dropped = 0
        sweeps: list[Iterator[None]] = []
        for dp_rank in dp_ranks:
            key = (worker_id, dp_rank)
            rank = self._ranks.get(key)
            if rank is not None:
                dropped += rank.blocks()
                self._until_review -= rank.device.blocks
                sweeps += [held.dismantled() for held in rank.lower]
                rank.lower = []
                self._forget(key, rank)
                sweeps.append(self._device.retire(rank.device))
        if sweeps:
            self._start(chain.from_iterable(sweeps))
            if self._until_review < 0:
                self._start_review()
        return dropped

    def drop_worker(self, worker_id: int) -> int:
        """Drop all that a worker holds, on all ranks that ever appeared, and its bounds."""
        self._bounds.pop(worker_id, None)
        return self.clear(worker_id, *self._dp_ranks.get(worker_id, ()))

    def set_bound(
        self, worker_id: int, device_blocks: int | None, lower_tier_blocks: int | None
    ) -> None:
        """Bound what each rank of a worker holds, on the device and on each lower tier.

        None means the default. Beyond it the oldest go: the run that was stored first, from its
        end.
        """
        device, lower = self._default_bound
        if device_blocks is not None:
            device = device_blocks
        if lower_tier_blocks is not None:
            lower = lower_tier_blocks
        self._bounds[worker_id] = (device, lower)
        if self._bounds[worker_id] == self._default_bound:
            del self._bounds[worker_id]
        self._start(self._keep_bound(worker_id))

    def _keep_bound(self, worker_id: int) -> Iterator[None]:
        for dp_rank in list(self._dp_ranks.get(worker_id, ())):
            key = worker_id, dp_rank
            while (rank := self._ranks.get(key)) is not None:
                device, lower = self._bounds.get(worker_id, self._default_bound)
                is_over = self._evict_device(rank, device, _EVICTED_PER_STEP)
                for held in rank.lower:
                    is_over |= self._evict_lower(held, lower, _EVICTED_PER_STEP)
                self._release_if_empty(key, rank)
                if not is_over:
                    break
                yield
        if self._until_review < 0:
            self._start_review()

    def abandon(self) -> None:
        """Drop everything; `sweep` gives the memory back. Of no use afterwards."""
        self._start(self._clear_all())

    def _clear_all(self) -> Iterator[None]:
        for key in list(self._ranks):
            self.clear(*key)
            yield

    # Giving back

    def sweep(self, steps: int) -> bool:
        """Give back memory of what was dropped, or drop what is beyond a bound, in so many steps.

        True when there is more to do. A step takes some 50 us, 500 at most. Nothing waits for it:
        each stored event does as much as the events before it may have left.
        """
        while self._sweeps and steps > 0:
            steps -= 1
            try:
                next(self._sweeps[0])
            except StopIteration:
                self._sweeps.popleft()
        return bool(self._sweeps)

    def let_go(self, entries: MutableMapping[int, str]) -> None:
        """Give back the memory of a dict that its owner has dropped, as that of blocks."""
        self._start(emptied(entries))

    def _start_review(self) -> None:
        if not self._is_reviewed:
            self._is_reviewed, self._until_review = True, 0
            self._start(self._review())

    def _review(self) -> Iterator[None]:
        held = yield from holes.review(self._device, self._lose)
        self._is_reviewed = False
        self._until_review += holes.REVIEW_AFTER + (held >> 1)

    def _lose(self, device: DeviceRank, blocks: int) -> None:
        self.evicted += blocks
        self._release_if_empty(device.key, self._ranks[device.key])

    def _start(self, sweep: Iterator[None]) -> None:
        for _ in range(_STEPS_AT_ONCE):
            if next(sweep, _ENDED) is _ENDED:
                return
        self._sweeps.append(sweep)
        if len(self._sweeps) == 1 and self.on_sweep is not None:
            self.on_sweep(self)

    # Dump

    def dump(self, worker_id: int | None = None) -> Iterator[list[StoredRun]]:
        """Stored events that rebuild the index, in slices of bounded work: one or more per rank.

        Ranks are sorted; in a rank the oldest blocks come first, on the device parents before
        children. Device: a run each, only blocks that can be reached. Lower tiers: a block each. A
        caller may let events in between two slices. Then a slice tells of what was held at some
        moment since the dump began; told the events from that moment on once more, a copy ends up
        with what the rank holds.
        """
        for key in self.ranks():
            rank = self._ranks.get(key)
            if rank is None or worker_id not in (None, key[0]):
                continue
            runs: list[StoredRun] = []
            blocks = 0
            for run in stored_runs(self._device.trie, rank):
                runs.append(run)
                blocks += len(run.block_hashes)
                if blocks >= _SLICE_BLOCKS:
                    yield runs
                    runs, blocks = [], 0
            yield runs

    # Changing

    def _store_lower(
        self, key: RankKey, tier: Tier, parent: bytes, names: bytes, local: bytes
    ) -> None:
        if self._sweeps:
            self.sweep(_STEPS_PER_EVENT + (len(names) >> 8))
        rank = self._ranks.get(key) or self._admit(key)
        if not rank.lower:
            self._lower_matches.admit(rank)
        held = rank.lower[tier - 1]
        held.store(parent, names, local)
        bound = self._bounds.get(key[0], self._default_bound)[1]
        self._evict_lower(held, bound, (len(names) >> 3) + _EVICTED_PER_STEP)
        self._release_if_empty(key, rank)

    def _evict_device(self, rank: Holdings, bound: int, most: int) -> bool:
        """Evict what is beyond the bound, at most so many blocks; True when more is."""
        surplus = rank.device.blocks - bound
        if surplus <= 0:
            return False
        self.evicted += min(surplus, most)
        self._until_review -= min(surplus, most)
        self._device.drop_oldest(rank.device, min(surplus, most))
        return surplus > most

    def _evict_lower(self, held: LowerTier, bound: int, most: int) -> bool:
        surplus = len(held) - bound
        if surplus <= 0:
            return False
        self.evicted += min(surplus, most)
        held.drop_oldest(min(surplus, most))
        return surplus > most

    def _admit(self, key: RankKey) -> Holdings:
        rank = self._ranks[key] = Holdings(self._device.admit(key))
        self._dp_ranks.setdefault(key[0], set()).add(key[1])
        return rank

    def _release_if_empty(self, key: RankKey, rank: Holdings) -> None:
        if rank.device.blocks and not rank.lower:
            return
        if any(rank.lower):
            return
        rank.lower = []
        if rank.device.blocks:
            self._lower_matches.release(rank)
        else:
            self._forget(key, rank)
            self._device.release(rank.device)

    def _forget(self, key: RankKey, rank: Holdings) -> None:
        """The rank holds nothing any more, as far as anybody sees."""
        self._lower_matches.release(rank)
        del self._ranks[key]
        self._dp_ranks[key[0]].remove(key[1])
        if not self._dp_ranks[key[0]]:
            del self._dp_ranks[key[0]]
