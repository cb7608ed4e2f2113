"""The index of one partition (model_name, tenant_id): which rank holds which block on which tier.

The index applies KV events, matches prompts, and dumps itself. It combines the device tier (one
trie for all ranks) with the lower tiers (separate for each rank), and limits the blocks of a rank
on each tier. Ranks need not be registered. Spec: indexer.md sections 3, 4.1 and 7; D16.

Rules where the spec leaves a choice:

- A rank may store a block under several engine hashes (aliases), and several times under one hash
(copies). The rank holds the block until all its hashes and copies are removed.

- If a hash is stored again with other tokens, both blocks are held. The hash stands for the newer
block. After the newer block is removed, the hash stands for the older block again.

- If a block is removed, the blocks after it stay, but cannot match until the block returns."""

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from lean_selector.core.hashing import IS_COMPILED, u64s
from lean_selector.core.index import holes
from lean_selector.core.index.device_tier import DeviceRank, DeviceTier
from lean_selector.core.index.engine_hashes import NOWHERE, EngineHashes, HashesInDict
from lean_selector.core.index.lower_tiers import ROOT, Holdings, LowerMatches, LowerTier
from lean_selector.core.index.runs import Run
from lean_selector.core.index.shapes import (
    LearnedFacts,
    Matched,
    StoredRun,
    StoreResult,
    Tier,
    UpperRun,
    Watermark,
)
from lean_selector.core.index.sweeping import Sweeps, emptied
from lean_selector.core.rank_bits import RankBits, RankKey

# Default limit for a rank of unknown size: 2^21 blocks of 16 tokens are 33 million tokens, ten
# times the cache of today's largest node. Each of the three lower tiers may hold four times as
# many.
DEFAULT_DEVICE_BLOCKS = 1 << 21
DEFAULT_LOWER_TIER_BLOCKS = 1 << 23


class Bounds:
    """How many blocks each rank of a worker may hold on the device, and on each lower tier."""

    def __init__(self, device_blocks: int, lower_tier_blocks: int) -> None:
        self.default = device_blocks, lower_tier_blocks
        self._set: dict[int, tuple[int, int]] = {}  # by worker id

    def of(self, worker_id: int) -> tuple[int, int]:
        return self._set.get(worker_id, self.default)

    def set(self, worker_id: int, device_blocks: int | None, lower_tier_blocks: int | None) -> None:
        """Set the limits of a worker's ranks; None means the default."""
        device, lower = self.default
        if device_blocks is not None:
            device = device_blocks
        if lower_tier_blocks is not None:
            lower = lower_tier_blocks
        self._set[worker_id] = device, lower

    def forget(self, worker_id: int) -> None:
        self._set.pop(worker_id, None)


# -- the table of engine hashes --------------------------------------------------------------------
# The table of engine hashes that is fast in this form of the package.
#
# Compiled, the packed table is as fast as a dict and takes a sixth of its memory. Interpreted, it
# is thirty times slower. Both behave alike: the index tests run with each.


def engine_hashes() -> EngineHashes:
    """Return an empty table for the engine hashes of one rank's blocks."""
    if not IS_COMPILED:
        return HashesInDict()
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
    """The index of one partition. Local hashes are packed into bytes, 8 per block, little-endian.
    `evicted` counts blocks dropped to save memory: blocks above a rank's limit, and some blocks
    that cannot match because a block before them is gone (see holes.py)."""

    def __init__(
        self,
        block_size: int,
        device_bound: int = DEFAULT_DEVICE_BLOCKS,
        lower_tier_bound: int = DEFAULT_LOWER_TIER_BLOCKS,
        *,
        on_sweep: Callable[["KvIndex"], None] | None = None,
        new_hashes: Callable[[], EngineHashes] = engine_hashes,
        bits: RankBits | None = None,
    ) -> None:
        """`on_sweep` is called with this index when `sweep` gets work. `new_hashes` creates one
        rank's table of engine hashes. `bits` numbers each rank, perhaps for several objects."""
        self.block_size = block_size
        self.evicted = 0
        self.bounds = Bounds(device_bound, lower_tier_bound)
        self._ranks: dict[RankKey, Holdings] = {}  # only ranks with a block
        self._learned: dict[RankKey, LearnedFacts] = {}  # until the rank is cleared
        # By the rank of a source: the blocks that the source has stored for other ranks.
        self.strays: dict[int, KvIndex] = {}
        self._sweeps = Sweeps()
        # How many device blocks may be dropped until the next review of holes.
        self._until_review = holes.REVIEW_AFTER
        self._is_reviewed = False  # whether a review is running, as one of the sweeps
        self.on_sweep = on_sweep
        # Bit numbers of ranks with a block, and of other keys if a user of the index acquires them.
        self.bits = RankBits() if bits is None else bits
        self._device = DeviceTier(self.bits, new_hashes)
        self._lower_matches = LowerMatches(self._device)
        self._lower = self._lower_matches.ranks  # ranks with a block on a lower tier, by bit

    def empty_copy(self) -> "KvIndex":
        """Return an empty index with the same block size, default limits, `on_sweep` and `bits`."""
        bounds, on_sweep = self.bounds.default, self.on_sweep
        return KvIndex(self.block_size, *bounds, on_sweep=on_sweep, bits=self.bits)

    # Reading

    @property
    def total_blocks(self) -> int:
        blocks = sum(holdings.blocks() for holdings in self._ranks.values())
        return blocks + sum(strays.total_blocks for strays in self.strays.values())

    @property
    def is_empty(self) -> bool:
        return not (self._ranks or any(not strays.is_empty for strays in self.strays.values()))

    def ranks(self) -> list[RankKey]:
        """The ranks that hold a block on any tier, sorted."""
        return sorted(set(self._ranks).union(*[each._ranks for each in self.strays.values()]))

    def blocks(self, worker_id: int, dp_rank: int, tier: Tier) -> int:
        """Return how many blocks a rank holds on a tier, including blocks after a missing block."""
        blocks = 0
        if self.strays:
            blocks = sum(each.blocks(worker_id, dp_rank, tier) for each in self.strays.values())
        holdings = self._ranks.get((worker_id, dp_rank))
        if holdings is not None and tier == Tier.DEVICE:
            blocks += holdings.device.blocks
        elif holdings is not None and holdings.lower:
            blocks += len(holdings.lower[tier - 1])
        return blocks

    def match_sets(
        self, local_hashes: bytes
    ) -> tuple[list[tuple[int, int]], list[tuple[Matched, int]]]:
        """Return how many leading blocks of a prompt the ranks hold on each tier, as two lists.
        Sets of ranks with equal matches are bit masks (see `bits`). The first list has pairs
        (leading blocks on the device, ranks), the second has pairs (match, ranks) for matches that
        continue on a lower tier. No rank is in both lists."""
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
        """Return the runs of device blocks on a prompt's path, as far as some rank holds them."""
        return self._device.match_sets(local_hashes)[1]

    def upper_runs(self, most: int, hits: dict[Run, int] | None) -> Iterator[UpperRun | None]:
        """Yield up to `most` large runs, parents first. Yields None where the caller may pause.
        Each yielded run includes its number of matched prompts from `hits`, if given."""
        from lean_selector.core.index.upper_runs import upper_runs

        return upper_runs(self._device.trie.root, self._device.ranks.in_use, most, hits)

    def leading_hashes(self, key: RankKey, local_hashes: bytes, most: int) -> tuple[int, ...]:
        """Return a rank's engine hashes of the leading blocks of a prompt that it holds on its
        device, of at most `most` blocks."""
        holdings = self._ranks.get(key)
        if holdings is None:
            return ()
        bit, rows = holdings.device.bit, holdings.device.hashes.rows
        sets, path = self._device.match_sets(local_hashes)
        blocks = min(most, sum([blocks for blocks, ranks in sets if ranks >> bit & 1]))
        engine_hashes = bytearray()
        for run in path if blocks else ():
            engine_hashes += rows.get(run.strand, b"")[run.start << 3 :][: len(run.label)]
        return u64s(blocks).unpack(engine_hashes[: blocks << 3])

    # What is known of a rank beside its blocks

    def of_strays(self, source: int) -> "KvIndex":
        """Return the index of the blocks that sources of this rank store for other ranks."""
        strays = self.strays.get(source)
        if strays is None:
            strays = self.strays[source] = self.empty_copy()
            strays.bounds = self.bounds
        return strays

    def has_strays(self, key: RankKey) -> bool:
        """Whether other sources hold blocks for a rank."""
        return any(key in strays._ranks for strays in self.strays.values())

    def learned(self, key: RankKey) -> LearnedFacts | None:
        """Return what a rank's events have shown since the rank was last cleared."""
        return self._learned.get(key)

    def learn(self, key: RankKey) -> LearnedFacts:
        """Like `learned`, but begin with nothing if there is nothing yet."""
        facts = self._learned.get(key)
        if facts is None:
            facts = self._learned[key] = LearnedFacts()
        return facts

    # Events

    def store(
        self,
        key: RankKey,
        tier: Tier,
        parent_hash: int | None,
        engine_hashes: bytes,
        local_hashes: bytes,
        counted: bool = False,
    ) -> StoreResult:
        """Apply a `stored` event: blocks after the block `parent_hash` (None: start of a prompt).

        The engine hashes must satisfy `is_chain`; there is at least one, and as many local hashes.
        If the rank then exceeds its limit, its oldest blocks are evicted. If `counted`, each block
        that the rank already held needs one more `removed` event from now on, before it is dropped.
        """
        blocks = len(engine_hashes) >> 3
        if tier is not _DEVICE:
            parent = ROOT if parent_hash is None else parent_hash.to_bytes(8, "little")
            self._store_lower(key, tier, parent, engine_hashes, local_hashes, counted)
            return StoreResult.STORED
        if len(self._sweeps):
            self.sweep(_STEPS_PER_EVENT + (blocks >> 5))
        holdings = self._ranks.get(key)
        address = NOWHERE
        if parent_hash is not None:
            address = holdings.device.hashes.find(parent_hash) if holdings else NOWHERE
            if address == NOWHERE:
                return StoreResult.UNKNOWN_PARENT
        if not self._device.has_room(blocks):
            return StoreResult.FULL
        holdings = holdings or self._admit(key)
        self._device.store(holdings.device, address, engine_hashes, local_hashes, counted)
        bound = self.bounds.of(key[0])[0]
        extra = holdings.device.hashes.extra
        if extra and holdings.device.blocks + extra > bound:  # more blocks than the engine can hold
            holdings.device.hashes.forget_extra(holdings.device.blocks + extra - bound)
        if holdings.device.blocks > bound:
            self._evict_device(holdings, bound, blocks + _EVICTED_PER_STEP)
            self._release_if_empty(key, holdings)
            if self._until_review < 0:
                self._start_review()
        return _STORED

    def store_known(self, key: RankKey, tier: Tier, engine_hashes: bytes, counted: bool) -> int:
        """Apply a `stored` event without tokens. Return how many of `engine_hashes` the
        rank knew: on the device or, for a lower `tier`, on any tier. `counted`: as in `store`."""
        known = 0
        for at in range(0, len(engine_hashes), 8):
            holdings = self._ranks.get(key)
            if holdings is None:
                break
            engine_hash, device = engine_hashes[at : at + 8], holdings.device
            number = int.from_bytes(engine_hash, "little")
            address = device.hashes.find(number)
            if tier is _DEVICE:
                if address == NOWHERE:
                    continue
                self._device.announce(device, address, number, counted)
            else:
                edge = None if address == NOWHERE else self._device.edge_to(device, address)
                for held in holdings.lower if edge is None else ():
                    edge = edge or held.edge_to(engine_hash)
                if edge is None:
                    continue
                self._store_lower(key, tier, edge[:-8], engine_hash, edge[-8:], counted)
            known += 1
        return known

    def knows(self, key: RankKey, tier: Tier, engine_hash: int) -> bool:
        """Whether a rank holds a block with this engine hash on a tier."""
        holdings = self._ranks.get(key)
        if holdings is None:
            return False
        if tier is _DEVICE:
            return holdings.device.hashes.find(engine_hash) != NOWHERE
        packed = engine_hash.to_bytes(8, "little")
        return bool(holdings.lower) and holdings.lower[tier - 1].edge_to(packed) is not None

    def forget_copies(self, key: RankKey, engine_hashes: Sequence[int]) -> None:
        """Let blocks of `engine_hashes` need one `removed` event less, but at least one."""
        holdings = self._ranks.get(key)
        if holdings is not None:
            for engine_hash in engine_hashes:
                holdings.device.hashes.take_copy(engine_hash)

    def remove(self, key: RankKey, tier: Tier, engine_hashes: bytes) -> int:
        """Apply a `removed` event to a rank's blocks with these engine hashes, 8 bytes each. Return
        how many of the blocks were dropped."""
        holdings = self._ranks.get(key)
        if holdings is None:
            return 0
        removed = 0
        if tier is _DEVICE:
            removed = self._device.remove(holdings.device, engine_hashes)
            self._until_review -= removed
        elif holdings.lower:
            held = holdings.lower[tier - 1]
            for at in range(0, len(engine_hashes), 8):
                removed += held.remove(engine_hashes[at : at + 8])
        self._release_if_empty(key, holdings)
        if self._until_review < 0:
            self._start_review()
        return removed

    def clear(self, worker_id: int, *dp_ranks: int) -> int:
        """Drop all blocks of these ranks of the worker, and what was learned of the ranks. Return
        how many blocks. No match finds them from now on; later calls of `sweep` free the memory."""
        dropped = 0
        sweeps: list[Iterator[None]] = []
        for dp_rank in dp_ranks:
            key = (worker_id, dp_rank)
            facts = self._learned.pop(key, None)
            if facts is not None:
                sweeps += [emptied(salts) for salts in facts.salts.values()]
            holdings = self._ranks.get(key)
            if holdings is not None:
                dropped += holdings.blocks()
                self._until_review -= holdings.device.blocks
                if holdings.lower:
                    sweeps.append(self._lower_matches.retire(holdings))
                self._forget(key, holdings)
                sweeps.append(self._device.retire(holdings.device))
        if sweeps:
            self.do_in_steps(chain.from_iterable(sweeps))
            if self._until_review < 0:
                self._start_review()
        return dropped

    def drop_worker(self, worker_id: int) -> int:
        """Drop the limits of a worker, the blocks of all its ranks, and what was learned of it."""
        self.bounds.forget(worker_id)
        for strays in self.strays.values():
            strays.drop_worker(worker_id)
        known = chain(self._learned, self._ranks)
        return self.clear(worker_id, *{dp_rank for worker, dp_rank in known if worker == worker_id})

    def set_bound(
        self, worker_id: int, device_blocks: int | None, lower_tier_blocks: int | None
    ) -> None:
        """Limit the blocks of each rank of a worker, on the device and on each lower tier; None
        means the default. Blocks above the limit are evicted, now or in later calls of `sweep`."""
        self.bounds.set(worker_id, device_blocks, lower_tier_blocks)
        self.do_in_steps(self._keep_bound(worker_id))

    def _keep_bound(self, worker_id: int) -> Iterator[None]:
        for key in [key for key in self._ranks if key[0] == worker_id]:
            while (holdings := self._ranks.get(key)) is not None:
                device, lower = self.bounds.of(worker_id)
                is_over = self._evict_device(holdings, device, _EVICTED_PER_STEP)
                for held in holdings.lower:
                    is_over |= self._evict_lower(held, lower, _EVICTED_PER_STEP)
                self._release_if_empty(key, holdings)
                if not is_over:
                    break
                yield
        if self._until_review < 0:
            self._start_review()

    def abandon(self) -> None:
        """Drop all blocks; `sweep` frees the memory later. The index is unusable afterwards."""
        for strays in self.strays.values():
            strays.abandon()
        self.do_in_steps(self._clear_all())

    def _clear_all(self) -> Iterator[None]:
        for key in list(self._ranks):
            self.clear(*key)
            yield

    # Giving back

    def sweep(self, steps: int) -> bool:
        """Free the memory of dropped blocks, and evict blocks above a limit, in at most `steps`
        steps. Return True if work is left. A step takes some 50 us, and never above 500 us. Memory
        is bounded even if nobody calls this, because each stored event does some steps too."""
        return self._sweeps.go_on(steps)

    def do_in_steps(self, sweep: Iterator[None]) -> None:
        """Run an iterator: a few of its steps now, the others in later calls of `KvIndex.sweep`."""
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

    def dump(
        self,
        worker_id: int | None = None,
        watermarks: dict[RankKey, Watermark] | None = None,
        watermark: Callable[[RankKey], Watermark | None] = lambda _: None,
    ) -> Iterator[list[StoredRun]]:
        """Yield stored events from which the index can be rebuilt, in short lists.

        Ranks are sorted, and have at least one list each. A rank's oldest blocks come first, but
        each device block comes after its parent. On the device, there is one event per run, and
        blocks that cannot match are omitted. On lower tiers, there is one event per block.

        The index may change between two lists, so the lists show the index at different moments. To
        copy a rank, apply each list, then all KV events that the rank published since the moment
        that the list shows. `watermarks` is updated when a rank's last list was taken: with the
        watermarks that `watermark` returned before and after, or with none if the lists and the
        events since do not show all of the rank's blocks and copies."""
        from lean_selector.core.index.kv_dump import RankDump

        for key in self.ranks():
            holdings = self._ranks.get(key)
            if holdings is None or worker_id not in (None, key[0]):
                continue
            facts = self.learn(key)
            ranks_dump = RankDump(self._device.trie, holdings, facts)
            before, retold = watermark(key), holdings.copies_revision()
            yield from ranks_dump.slices()
            if watermarks is None:
                continue
            after = watermark(key)
            is_alike = before == after or (
                holdings is self._ranks.get(key)
                and retold == holdings.copies_revision()
                and not facts.reports.is_open
            )
            if before is None or after is None or not (is_alike and ranks_dump.is_whole):
                watermarks.pop(key, None)
            else:
                watermarks[key] = Watermark(before.seq, after.until, after.unknown)
        for strays in list(self.strays.values()):
            yield from strays.dump(worker_id)

    # Changing

    def _store_lower(
        self,
        key: RankKey,
        tier: Tier,
        parent: bytes,
        engine_hashes: bytes,
        local: bytes,
        counted: bool,
    ) -> None:
        if len(self._sweeps):
            self.sweep(_STEPS_PER_EVENT + (len(engine_hashes) >> 8))
        holdings = self._ranks.get(key) or self._admit(key)
        if not holdings.lower:
            self._lower_matches.admit(holdings)
        held = holdings.lower[tier - 1]
        held.store(parent, engine_hashes, local, counted)
        bound = self.bounds.of(key[0])[1]
        self._evict_lower(held, bound, (len(engine_hashes) >> 3) + _EVICTED_PER_STEP)
        self._release_if_empty(key, holdings)

    def _evict_device(self, holdings: Holdings, bound: int, most: int) -> bool:
        """Evict at most `most` device blocks above the limit. Return True if a surplus remains."""
        surplus = holdings.device.blocks - bound
        if surplus <= 0:
            return False
        now = min(surplus, most)
        self.evicted += now
        self._until_review -= now
        self._device.drop_oldest(holdings.device, now)
        return surplus > most

    def _evict_lower(self, held: LowerTier, bound: int, most: int) -> bool:
        surplus = len(held) - bound
        if surplus <= 0:
            return False
        self.evicted += min(surplus, most)
        held.drop_oldest(min(surplus, most))
        return surplus > most

    def _admit(self, key: RankKey) -> Holdings:
        holdings = self._ranks[key] = Holdings(self._device.ranks.admit(key))
        return holdings

    def _release_if_empty(self, key: RankKey, holdings: Holdings) -> None:
        if holdings.device.blocks and not holdings.lower:
            return
        if any(holdings.lower):
            return
        if holdings.device.blocks:
            self._lower_matches.release(holdings)
        else:
            self._forget(key, holdings)
            self._device.ranks.release(holdings.device)

    def _forget(self, key: RankKey, holdings: Holdings) -> None:
        """Remove a rank from the index, so that no match finds the rank's blocks."""
        self._lower_matches.release(holdings)
        del self._ranks[key]
