"""The index of one partition (model_name, tenant_id): which rank holds which block on which tier.

Applies KV events, matches prompts, and dumps itself. Combines the device tier (one trie for all
ranks) with the lower tiers (separate for each rank), and limits their size. Independent of sockets,
tokens and registrations: any rank may hold blocks. Spec: indexer.md sections 3, 4.1 and 7; D16.

Rules where the spec leaves a choice:

- A block has every hash under which its rank stored it. If events are counted, it has as many
copies under a hash as were stored. The block is removed with its last hash or copy.

- If a hash is stored again with other tokens, it names the newer block. The older block stays held,
and gets the hash back when the newer one is removed. Evicting and clearing free it too.

- If a block is removed, the blocks behind it stay but are unreachable until the block returns."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from lean_selector.core.hashing import IS_COMPILED, u64s
from lean_selector.core.index import holes
from lean_selector.core.index.device_tier import DeviceRank, DeviceTier
from lean_selector.core.index.engine_hashes import NOWHERE, EngineHashes, HashesInDicts
from lean_selector.core.index.kv_dump import leading_names, slices_of
from lean_selector.core.index.lower_tiers import ROOT, Holdings, LowerMatches, LowerTier
from lean_selector.core.index.runs import Run
from lean_selector.core.index.shapes import Matched, StoredRun, StoreResult, Tier, UpperRun
from lean_selector.core.index.sweeping import Sweeps
from lean_selector.core.rank_bits import RankBits, RankKey

# Default limit for a rank of unknown size: 2^21 blocks of 16 tokens are 33 million tokens, ten
# times the cache of today's largest node. Each of the three lower tiers may hold four times as
# many.
DEFAULT_DEVICE_BLOCKS = 1 << 21
DEFAULT_LOWER_TIER_BLOCKS = 1 << 23


class Bounds:
    """Limits for each rank of a worker: (blocks on the device, blocks on each lower tier)."""

    __slots__ = ("_set", "default")

    def __init__(self, device_blocks: int, lower_tier_blocks: int) -> None:
        self.default = device_blocks, lower_tier_blocks
        self._set: dict[int, tuple[int, int]] = {}  # exceptions, by worker id

    def __len__(self) -> int:
        """Number of workers with limits of their own."""
        return len(self._set)

    def of(self, worker_id: int) -> tuple[int, int]:
        return self._set.get(worker_id, self.default)

    def set(self, worker_id: int, device_blocks: int | None, lower_tier_blocks: int | None) -> None:
        """Set a worker's limits; None means the default."""
        device, lower = self.default
        if device_blocks is not None:
            device = device_blocks
        if lower_tier_blocks is not None:
            lower = lower_tier_blocks
        if (device, lower) == self.default:
            self.forget(worker_id)
        else:
            self._set[worker_id] = device, lower

    def forget(self, worker_id: int) -> None:
        self._set.pop(worker_id, None)


# --------------------------------------------------------------------------------------------------
# The table of engine hashes that is fast in this form of the package.
#
# Compiled, the packed table is as fast as dicts and takes a fifth of their memory. Interpreted, it
# is thirty times slower. Both behave alike: the index tests run with each.


def engine_hashes() -> EngineHashes:
    """Return an empty table for a rank that holds nothing yet."""
    if not IS_COMPILED:
        return HashesInDicts()
    # Imported here: it needs a dependency that only the compiled form has.
    from lean_selector.core.index.hashes_packed import (  # pragma: no cover: compiled only
        HashesPacked,
    )

    return HashesPacked()  # pragma: no cover: in the compiled form, where coverage is not measured


# Freeing steps per stored event, plus one per 32 blocks: more than dropping an event's blocks adds.
_STEPS_PER_EVENT = 2
_EVICTED_PER_STEP = 32

_DEVICE = Tier.DEVICE  # an alias, because an enum look-up takes as long as three others
_STORED = StoreResult.STORED


class KvIndex:
    """The index of one partition. Lists of local hashes are bytes, 8 per block, little-endian.
    `evicted` counts blocks that were dropped because a rank exceeded its limit, or because holes
    before them took too much memory."""

    def __init__(
        self,
        block_size: int,
        device_bound: int = DEFAULT_DEVICE_BLOCKS,
        lower_tier_bound: int = DEFAULT_LOWER_TIER_BLOCKS,
        *,
        on_sweep: Callable[["KvIndex"], None] | None = None,
        new_names: Callable[[], EngineHashes] = engine_hashes,
        bits: RankBits | None = None,
    ) -> None:
        """`on_sweep` is called when there is memory to free; `new_names` is for tests; `bits`
        assigns bit numbers to ranks, and may be shared."""
        self.block_size = block_size
        self.evicted = 0
        self.bounds = Bounds(device_bound, lower_tier_bound)
        # bits of a worker's ranks in `_ranks`, by worker id
        self._dp_ranks: dict[int, set[int]] = {}
        self._ranks: dict[RankKey, Holdings] = {}  # only ranks with a block
        self._sweeps = Sweeps()
        # How many device blocks may be dropped until the next review of holes.
        self._until_review = holes.REVIEW_AFTER
        self._is_reviewed = False  # whether a review is running, as one of the sweeps
        self.on_sweep = on_sweep
        # Bit numbers of ranks with a block, and of other keys if a user of the index acquires them.
        self.bits = RankBits() if bits is None else bits
        self._device = DeviceTier(self.bits, new_names)
        self._lower_matches = LowerMatches(self._device)
        self._lower = self._lower_matches.ranks  # ranks with a block on a lower tier, by bit

    def beside(self) -> "KvIndex":
        """Return an empty index with the same limits, which shares the bit numbers of ranks."""
        bounds, on_sweep = self.bounds.default, self.on_sweep
        return KvIndex(self.block_size, *bounds, on_sweep=on_sweep, bits=self.bits)

    # Reading

    @property
    def total_blocks(self) -> int:
        return sum(rank.blocks() for rank in self._ranks.values())

    @property
    def is_empty(self) -> bool:
        return not self._ranks

    def ranks(self) -> list[RankKey]:
        """The ranks that hold a block on any tier, sorted."""
        return sorted(self._ranks)

    def workers(self) -> set[int]:
        """The workers of which a rank holds a block on any tier."""
        return set(self._dp_ranks)

    def blocks(self, worker_id: int, dp_rank: int, tier: Tier) -> int:
        """Return how many blocks a rank holds on a tier, reachable or not."""
        rank = self._ranks.get((worker_id, dp_rank))
        if rank is None:
            return 0
        if tier == Tier.DEVICE:
            return rank.device.blocks
        return len(rank.lower[tier - 1]) if rank.lower else 0

    def match(self, local_hashes: bytes) -> dict[RankKey, Matched]:
        """Return, for each rank with a hit, how many leading blocks of a prompt the rank holds."""
        sets, found = self.match_sets(local_hashes)
        found += [(Matched(blocks), ranks) for blocks, ranks in sets]
        keys_of = self._device.ranks.keys_of
        return {key: match for match, ranks in found for key in keys_of(ranks)}

    def match_sets(
        self, local_hashes: bytes
    ) -> tuple[list[tuple[int, int]], list[tuple[Matched, int]]]:
        """Like `match`, but with sets of ranks (numbered by `bits`). The first list has sets that
        hold equally many leading blocks on the device, the second has sets whose matches continue
        in the same way on a lower tier. All sets are disjoint and not empty."""
        sets, path = self._device.match_sets(local_hashes)
        if not self._lower:
            return sets, []
        extended = self._lower_matches.extended(sets, path, local_hashes)
        if extended:
            apart = 0
            for _, ranks in extended:
                apart |= ranks
            sets = [(blocks, rest) for blocks, mask in sets if (rest := mask & ~apart)]
        return sets, extended

    def path(self, local_hashes: bytes) -> list[Run]:
        """Return the runs along a prompt, up to the last run that some rank holds completely."""
        return self._device.match_sets(local_hashes)[1]

    def upper_runs(self, most: int, hits: dict[Run, int] | None) -> Iterator[UpperRun | None]:
        """Yield the largest runs, from the root down, step by step like `core.index.upper_runs`."""
        from lean_selector.core.index.upper_runs import upper_runs

        return upper_runs(self._device.trie.root, self._device.ranks.in_use, most, hits)

    def leading_names(self, key: RankKey, local_hashes: bytes, blocks: int) -> tuple[int, ...]:
        """Return a rank's engine hashes of the first blocks of a prompt, all of which the rank
        holds on its device."""
        return leading_names(self._device.trie, self._ranks[key].device, local_hashes, blocks)

    # Events

    def store(
        self,
        worker_id: int,
        dp_rank: int,
        tier: Tier,
        parent_hash: int | None,
        block_hashes: Sequence[int],
        local_hashes: bytes,
        counted: bool = False,
    ) -> StoreResult:
        """Apply a `stored` event: a chain of blocks below `parent_hash` (None: it starts a prompt).

        Hashes are u64. If one list is shorter, the other list's further blocks are ignored. Evicts
        the rank's oldest blocks beyond its limit. With `counted`, a block that is stored again is
        one more copy, which needs a remove event of its own."""
        if not local_hashes or not block_hashes:
            return StoreResult.EMPTY
        if len(block_hashes) == 1:  # usual for an engine that decodes
            if block_hashes[0] == parent_hash:
                return StoreResult.SELF_REFERENCE
            names = block_hashes[0].to_bytes(8, "little")
        else:
            distinct = set(block_hashes)
            if parent_hash in distinct or len(distinct) != len(block_hashes):
                return StoreResult.SELF_REFERENCE
            names = u64s(len(block_hashes)).pack(*block_hashes)
        if len(names) != len(local_hashes):
            end = min(len(names), len(local_hashes) & ~7)
            names, local_hashes = names[:end], local_hashes[:end]
        key = (worker_id, dp_rank)
        return self.store_chain(key, tier, parent_hash, names, local_hashes, counted)

    def store_chain(
        self,
        key: RankKey,
        tier: Tier,
        parent_hash: int | None,
        names: bytes,
        local_hashes: bytes,
        counted: bool = False,
    ) -> StoreResult:
        """Like `store`, for packed hashes. There must be at least one engine hash, and as many
        local hashes. The engine hashes differ from each other and from the parent."""
        blocks = len(names) >> 3
        if tier is not _DEVICE:
            parent = ROOT if parent_hash is None else parent_hash.to_bytes(8, "little")
            self._store_lower(key, tier, parent, names, local_hashes, counted)
            return StoreResult.STORED
        if len(self._sweeps):
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
        self._device.store(rank.device, place, names, local_hashes, counted)
        bound = self.bounds.of(key[0])[0]
        extra = rank.device.names.extra
        if extra and rank.device.blocks + extra > bound:  # more blocks than the engine can hold
            rank.device.names.forget_extra(rank.device.blocks + extra - bound)
        if rank.device.blocks > bound:
            self._evict_device(rank, bound, blocks + _EVICTED_PER_STEP)
            self._release_if_empty(key, rank)
            if self._until_review < 0:
                self._start_review()
        return _STORED

    def store_known(self, key: RankKey, tier: Tier, names: bytes, counted: bool) -> int:
        """Apply a `stored` event with hashes only, for blocks whose tokens are known, because the
        rank holds them on some tier. Returns how many are known. `counted`: as in `store`."""
        known = 0
        for at in range(0, len(names), 8):
            rank = self._ranks.get(key)
            if rank is None:
                break
            name = names[at : at + 8]
            place = rank.device.names.find(int.from_bytes(name, "little"))
            if tier is _DEVICE:
                if place == NOWHERE:
                    continue
                self._device.announce(rank.device, place, int.from_bytes(name, "little"), counted)
            else:
                edge = None if place == NOWHERE else self._device.edge_to(rank.device, place)
                for held in rank.lower if edge is None else ():
                    edge = edge or held.edge_to(name)
                if edge is None:
                    continue
                self._store_lower(key, tier, edge[:-8], name, edge[-8:], counted)
            known += 1
        return known

    def knows(self, key: RankKey, tier: Tier, name: int) -> bool:
        """Whether a rank holds a block with this engine hash on a tier."""
        rank = self._ranks.get(key)
        if rank is None:
            return False
        if tier is _DEVICE:
            return rank.device.names.find(name) != NOWHERE
        packed = name.to_bytes(8, "little")
        return bool(rank.lower) and rank.lower[tier - 1].edge_to(packed) is not None

    def forget_copies(self, key: RankKey, names: Sequence[int]) -> None:
        """Remove one copy of each of these device blocks, unless it is the only copy."""
        rank = self._ranks.get(key)
        for name in names if rank is not None else ():
            assert rank is not None
            rank.device.names.take_copy(name)

    def remove(self, worker_id: int, dp_rank: int, tier: Tier, block_hashes: Sequence[int]) -> int:
        """Apply a `removed` event. Ignores unknown blocks. Returns how many blocks were removed."""
        names = u64s(len(block_hashes)).pack(*block_hashes)
        return self.remove_blocks((worker_id, dp_rank), tier, names)

    def remove_blocks(self, key: RankKey, tier: Tier, names: bytes) -> int:
        """Like `remove`, for packed engine hashes."""
        rank = self._ranks.get(key)
        if rank is None:
            return 0
        removed = 0
        if tier is _DEVICE:
            removed = self._device.remove(rank.device, names)
            self._until_review -= removed
        elif rank.lower:
            held = rank.lower[tier - 1]
            for at in range(0, len(names), 8):
                removed += held.remove(names[at : at + 8])
        self._release_if_empty(key, rank)
        if self._until_review < 0:
            self._start_review()
        return removed

    def clear(self, worker_id: int, *dp_ranks: int) -> int:
        """Drop all blocks of these ranks, on all tiers; returns how many. The blocks are hidden at
        once. If there are many, `sweep` frees the memory."""
        dropped = 0
        sweeps: list[Iterator[None]] = []
        for dp_rank in dp_ranks:
            key = (worker_id, dp_rank)
            rank = self._ranks.get(key)
            if rank is not None:
                dropped += rank.blocks()
                self._until_review -= rank.device.blocks
                if rank.lower:
                    sweeps.append(self._lower_matches.retire(rank))
                self._forget(key, rank)
                sweeps.append(self._device.retire(rank.device))
        if sweeps:
            self.do_in_steps(chain.from_iterable(sweeps))
            if self._until_review < 0:
                self._start_review()
        return dropped

    def drop_worker(self, worker_id: int) -> int:
        """Drop the worker's limits, and all its blocks on every rank that it ever had."""
        self.bounds.forget(worker_id)
        return self.clear(worker_id, *self._dp_ranks.get(worker_id, ()))

    def set_bound(
        self, worker_id: int, device_blocks: int | None, lower_tier_blocks: int | None
    ) -> None:
        """Limit the blocks of each rank of a worker, on the device and on each lower tier; None
        means the default. Above the limit, blocks are evicted from the run that was stored first,
        beginning at its end."""
        self.bounds.set(worker_id, device_blocks, lower_tier_blocks)
        self.do_in_steps(self._keep_bound(worker_id))

    def _keep_bound(self, worker_id: int) -> Iterator[None]:
        for dp_rank in list(self._dp_ranks.get(worker_id, ())):
            key = worker_id, dp_rank
            while (rank := self._ranks.get(key)) is not None:
                device, lower = self.bounds.of(worker_id)
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
        """Drop everything; `sweep` then frees the memory. The index is unusable afterwards."""
        self.do_in_steps(self._clear_all())

    def _clear_all(self) -> Iterator[None]:
        for key in list(self._ranks):
            self.clear(*key)
            yield

    # Giving back

    def sweep(self, steps: int) -> bool:
        """Free the memory of dropped blocks, or evict blocks above a limit, in `steps` steps.
        Returns True if more is left. A step takes some 50 us, at most 500. Memory stays bounded
        even without calls: each stored event frees memory too."""
        return self._sweeps.go_on(steps)

    def do_in_steps(self, sweep: Iterator[None]) -> None:
        """Run these steps as part of later calls of `sweep`."""
        if self._sweeps.start(sweep) and self.on_sweep is not None:
            self.on_sweep(self)

    def _start_review(self) -> None:
        if not self._is_reviewed:
            self._is_reviewed, self._until_review = True, 0
            self.do_in_steps(self._review())

    def _review(self) -> Iterator[None]:
        held = yield from holes.review(self._device, self._lose)
        self._is_reviewed = False
        self._until_review += holes.REVIEW_AFTER + (held >> 1)

    def _lose(self, device: DeviceRank, blocks: int) -> None:
        self.evicted += blocks
        self._release_if_empty(device.key, self._ranks[device.key])

    # Dump

    def dump(self, worker_id: int | None = None) -> Iterator[list[StoredRun]]:
        """Yield stored events from which the index can be rebuilt, in slices of bounded work.

        Ranks are sorted, and have at least one slice each. Within a rank the oldest blocks come
        first; in the device tier, each block comes after its parent. Device: one event per run,
        reachable blocks only. Lower tiers: one event per block.

        Events may be applied between two slices, so each slice shows the index at some moment since
        the dump started. A copy of the index that applies each slice of a rank, and then all
        events since the moment of that slice, ends up with the rank's blocks."""
        for key in self.ranks():
            rank = self._ranks.get(key)
            if rank is None or worker_id not in (None, key[0]):
                continue
            yield from slices_of(self._device.trie, rank)

    # Changing

    def _store_lower(
        self, key: RankKey, tier: Tier, parent: bytes, names: bytes, local: bytes, counted: bool
    ) -> None:
        if len(self._sweeps):
            self.sweep(_STEPS_PER_EVENT + (len(names) >> 8))
        rank = self._ranks.get(key) or self._admit(key)
        if not rank.lower:
            self._lower_matches.admit(rank)
        held = rank.lower[tier - 1]
        held.store(parent, names, local, counted)
        bound = self.bounds.of(key[0])[1]
        self._evict_lower(held, bound, (len(names) >> 3) + _EVICTED_PER_STEP)
        self._release_if_empty(key, rank)

    def _evict_device(self, rank: Holdings, bound: int, most: int) -> bool:
        """Evict at most `most` device blocks above the limit. Returns True if more are left."""
        surplus = rank.device.blocks - bound
        if surplus <= 0:
            return False
        now = min(surplus, most)
        self.evicted += now
        self._until_review -= now
        self._device.drop_oldest(rank.device, now)
        return surplus > most

    def _evict_lower(self, held: LowerTier, bound: int, most: int) -> bool:
        surplus = len(held) - bound
        if surplus <= 0:
            return False
        self.evicted += min(surplus, most)
        held.drop_oldest(min(surplus, most))
        return surplus > most

    def _admit(self, key: RankKey) -> Holdings:
        rank = self._ranks[key] = Holdings(self._device.ranks.admit(key))
        self._dp_ranks.setdefault(key[0], set()).add(key[1])
        return rank

    def _release_if_empty(self, key: RankKey, rank: Holdings) -> None:
        if rank.device.blocks and not rank.lower:
            return
        if any(rank.lower):
            return
        if rank.device.blocks:
            self._lower_matches.release(rank)
        else:
            self._forget(key, rank)
            self._device.ranks.release(rank.device)

    def _forget(self, key: RankKey, rank: Holdings) -> None:
        """Hide all blocks of a rank."""
        self._lower_matches.release(rank)
        del self._ranks[key]
        self._dp_ranks[key[0]].remove(key[1])
        if not self._dp_ranks[key[0]]:
            del self._dp_ranks[key[0]]
