"""Which rank holds which block on which tier, for one partition (model_name, tenant_id).

Applies KV events, matches prompts, dumps itself. Composes the trie of runs (what prompts exist,
who holds them), each rank's engine hashes (what the engine calls its blocks) and its lower tiers.
Knows no sockets, no tokens and no registrations: any rank may hold blocks. Spec: indexer.md
sections 3, 4.1 and 7; D16.

Rules where the spec leaves a choice:
- A block has the first hash that its rank stored it under, and the newest other one as a second
  name. Removing it by either removes the block.
- A hash stored again with other tokens names the newer block. The older one stays held; the hash
  names it again when the newer is removed. Bounds, clear and drop free it like any other.
- A removed block leaves those behind it known but out of reach: they count again when it comes
  back.
"""

from collections.abc import Iterator, Sequence
from enum import IntEnum
from struct import pack, unpack

import msgspec

from lean_selector.core.engine_hashes import (
    NOWHERE,
    POSITION_BITS,
    POSITION_MASK,
    EngineHashes,
    cut,
)
from lean_selector.core.lower_tiers import ROOT, LowerTier
from lean_selector.core.runs import MAX_STRANDS, STRAND_BLOCKS, Run, RunTrie, common_prefix

RankKey = tuple[int, int]  # (worker_id, dp_rank), as u64 and u32

# Holdings of a rank whose size nobody told us: 2^21 blocks of 16 tokens are a cache of 33 million
# tokens, ten times that of the largest node today. On a lower tier four times as much, for each of
# the three.
DEFAULT_DEVICE_BLOCKS = 1 << 21
DEFAULT_LOWER_TIER_BLOCKS = 1 << 23
# A run grows at its end only if few others hold it: each of them becomes a partial holder, which
# costs every match of that run a step. With more, the new blocks make a run of their own, which
# costs one step.
_MAX_OTHERS_TO_GROW = 2
_TRIM_BLOCKS = 32  # dead blocks at the end of a run before they are worth cutting off
_MAX_CACHED_MASKS = 1024  # sets of ranks that were just matched together


class Tier(IntEnum):
    DEVICE = 0
    HOST_PINNED = 1
    DISK = 2
    EXTERNAL = 3


class StoreResult(IntEnum):
    """What became of a stored event. Only STORED may have changed anything."""

    STORED = 0
    EMPTY = 1
    SELF_REFERENCE = 2
    UNKNOWN_PARENT = 3
    FULL = 4  # as many runs as can be numbered, some 4 million


class Matched(msgspec.Struct, frozen=True, gc=False):
    """Leading blocks of a prompt that a rank holds: D, then H more, then K + X more (spec 3.5)."""

    device: int
    host: int = 0
    disk: int = 0


class StoredRun(msgspec.Struct, frozen=True, gc=False):
    """One `stored` event of a dump. Hashes are u64; `parent_hash` is the rank's own."""

    worker_id: int
    dp_rank: int
    tier: Tier
    parent_hash: int | None
    block_hashes: tuple[int, ...]
    tokens_hashes: tuple[int, ...]


class _Rank:
    """Everything that one rank holds. `device_blocks` counts the blocks held in the trie."""

    __slots__ = ("bit", "device_blocks", "key", "lower", "names")

    def __init__(self, key: RankKey, bit: int) -> None:
        self.key = key
        self.bit = bit
        self.names = EngineHashes()
        self.device_blocks = 0
        self.lower: list[LowerTier] = []  # none, or host_pinned, disk, external

    def lower_blocks(self) -> int:
        return sum(map(len, self.lower))


class KvIndex:
    """The index of one partition. Lists of local hashes are bytes, 8 per block, little-endian.

    `evicted` counts holdings dropped because a rank went beyond its bound.
    """

    def __init__(
        self,
        block_size: int,
        device_bound: int = DEFAULT_DEVICE_BLOCKS,
        lower_tier_bound: int = DEFAULT_LOWER_TIER_BLOCKS,
    ) -> None:
        self.block_size = block_size
        self.evicted = 0
        self._default_bound = (device_bound, lower_tier_bound)
        self._bounds: dict[RankKey, tuple[int, int]] = {}
        self._ranks: dict[RankKey, _Rank] = {}  # those with a holding, no others
        self._lower: dict[RankKey, _Rank] = {}  # those of them with one on a lower tier
        self._by_bit: list[_Rank | None] = []
        self._all = 0  # the bits in use
        self._keys: dict[int, tuple[RankKey, ...]] = {}  # set of bits -> ranks; a cache
        self._trie = RunTrie()

    # Reading

    @property
    def total_blocks(self) -> int:
        return sum(rank.device_blocks + rank.lower_blocks() for rank in self._ranks.values())

    @property
    def is_empty(self) -> bool:
        return not self._ranks

    def ranks(self) -> list[RankKey]:
        """The ranks that hold anything, sorted."""
        return sorted(self._ranks)

    def blocks(self, worker_id: int, dp_rank: int, tier: Tier) -> int:
        """Blocks that a rank holds on a tier, in reach or not."""
        rank = self._ranks.get((worker_id, dp_rank))
        if rank is None:
            return 0
        if tier == Tier.DEVICE:
            return rank.device_blocks
        return len(rank.lower[tier - 1]) if rank.lower else 0

    def match(self, local_hashes: bytes) -> dict[RankKey, Matched]:
        """What each rank holds of the start of a prompt. Ranks without a hit are left out."""
        result: dict[RankKey, Matched] = {}
        path: list[Run] = []
        children = self._trie.root.children
        alive = self._all  # the ranks that hold every block before `at`
        at = 0
        while children is not None:
            run = children.get(local_hashes[at : at + 8])
            if run is None:
                break
            path.append(run)
            label = run.label
            if local_hashes.startswith(label, at):
                same = len(label)
            else:
                same = common_prefix(label, 0, local_hashes, at)
            stay = alive & run.whole
            gone = alive ^ stay
            if gone:
                if run.partial:
                    gone = self._match_partial(run.partial, gone, at >> 3, same >> 3, result)
                if at:
                    result.update(dict.fromkeys(self._keys_of(gone), Matched(at >> 3)))
            alive = stay
            at += same
            if not alive or same < len(label):
                break
            children = run.children
        if alive and at:
            result.update(dict.fromkeys(self._keys_of(alive), Matched(at >> 3)))
        if self._lower:
            self._match_lower(local_hashes, path, result)
        return result

    def _match_partial(
        self,
        partial: dict[int, int],
        gone: int,
        before: int,
        same: int,
        result: dict[RankKey, Matched],
    ) -> int:
        """Record the ranks of `gone` that hold the first blocks of this run; returns the others."""
        for bit, held in partial.items():
            if gone >> bit & 1 and held & 1:
                leading = ((held + 1) & ~held).bit_length() - 1
                rank = self._by_bit[bit]
                assert rank is not None
                result[rank.key] = Matched(before + min(leading, same))
                gone ^= 1 << bit
        return gone

    def _keys_of(self, bits: int) -> tuple[RankKey, ...]:
        keys = self._keys.get(bits)
        if keys is None:
            if len(self._keys) >= _MAX_CACHED_MASKS:
                self._keys.clear()
            keys = self._keys[bits] = tuple(
                rank.key for bit, rank in enumerate(self._by_bit) if rank and bits >> bit & 1
            )
        return keys

    def _match_lower(
        self, local_hashes: bytes, path: list[Run], result: dict[RankKey, Matched]
    ) -> None:
        """Extend the device matches tier by tier, never stepping back (spec 3.5)."""
        for key, rank in self._lower.items():
            matched = result.get(key)
            device = matched.device if matched else 0
            start = device << 3
            name, at = ROOT, start
            if device:
                last = device - 1
                for run in path:
                    blocks = len(run.label) >> 3
                    if last < blocks:
                        place = run.strand << POSITION_BITS | run.start + last
                        name = rank.names.name_at(place)
                        break
                    last -= blocks
            name, host_end = rank.lower[0].walk(name, local_hashes, at)
            name, at = rank.lower[1].walk(name, local_hashes, host_end)
            name, at = rank.lower[2].walk(name, local_hashes, at)
            if at > start:
                result[key] = Matched(device, host_end - start >> 3, at - host_end >> 3)

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
        blocks = min(len(block_hashes), len(local_hashes) >> 3)
        if not blocks:
            return StoreResult.EMPTY
        if len(block_hashes) == 1:  # a decoding engine sends most of its blocks one by one
            if block_hashes[0] == parent_hash:
                return StoreResult.SELF_REFERENCE
            names = block_hashes[0].to_bytes(8, "little")
        else:
            distinct = set(block_hashes)
            if parent_hash in distinct or len(distinct) != len(block_hashes):
                return StoreResult.SELF_REFERENCE
            names = pack(f"<{len(block_hashes)}Q", *block_hashes)[: blocks << 3]
        key = (worker_id, dp_rank)
        rank = self._ranks.get(key)
        local = local_hashes[: blocks << 3]
        parent = ROOT if parent_hash is None else parent_hash.to_bytes(8, "little")
        if tier != Tier.DEVICE:
            rank = rank or self._admit(key)
            self._store_lower(rank, tier, parent, names, local)
            return StoreResult.STORED
        run, position = self._trie.root, 0
        if parent_hash is not None:
            place = rank.names.find(parent) if rank else NOWHERE
            if place == NOWHERE:
                return StoreResult.UNKNOWN_PARENT
            run, position = self._trie.resolve(place)
            position += 1
        # One event may split a run and start a strand per STRAND_BLOCKS.
        if len(self._trie.strands) + blocks // STRAND_BLOCKS + 2 > MAX_STRANDS:
            return StoreResult.FULL
        rank = rank or self._admit(key)
        self._store_device(rank, run, position, names, local)
        bound = self._bounds.get(key, self._default_bound)[0]
        if rank.device_blocks > bound:
            self._evict_device(rank, rank.device_blocks - bound)
            self._release_if_empty(rank)
        return StoreResult.STORED

    def remove(self, worker_id: int, dp_rank: int, tier: Tier, block_hashes: Sequence[int]) -> int:
        """Apply a `removed` event; unknown blocks are skipped. Returns the blocks removed."""
        rank = self._ranks.get((worker_id, dp_rank))
        if rank is None:
            return 0
        names = cut(pack(f"<{len(block_hashes)}Q", *block_hashes))
        if tier == Tier.DEVICE:
            places = rank.names.take(names)
            if places:
                self._drop_places(rank, places)
            removed = len(places)
        else:
            removed = sum(map(rank.lower[tier - 1].remove, names)) if rank.lower else 0
        self._release_if_empty(rank)
        return removed

    def clear(self, worker_id: int, dp_rank: int) -> int:
        """Drop all that this rank holds, on all tiers; returns the blocks dropped."""
        rank = self._ranks.get((worker_id, dp_rank))
        if rank is None:
            return 0
        dropped = rank.device_blocks + rank.lower_blocks()
        for strand in rank.names.rows:
            for run in self._trie.pieces(strand):
                run.set_held(rank.bit, 0)
                self._trie.prune(run)
        rank.names = EngineHashes()
        rank.device_blocks = 0
        rank.lower = []
        self._release_if_empty(rank)
        return dropped

    def drop_worker(self, worker_id: int) -> int:
        """Drop all that a worker holds, on all ranks that ever appeared, and its bounds."""
        for key in [key for key in self._bounds if key[0] == worker_id]:
            del self._bounds[key]
        return sum(self.clear(*key) for key in self.ranks() if key[0] == worker_id)

    def set_bound(
        self, worker_id: int, dp_rank: int, device_blocks: int | None, lower_tier_blocks: int | None
    ) -> None:
        """Bound a rank's holdings, on the device and on each lower tier; None means the default.

        Beyond it the oldest go: the run that was stored first, from its end.
        """
        device = self._default_bound[0] if device_blocks is None else device_blocks
        lower = self._default_bound[1] if lower_tier_blocks is None else lower_tier_blocks
        key = (worker_id, dp_rank)
        self._bounds[key] = (device, lower)
        rank = self._ranks.get(key)
        if rank is None:
            return
        if rank.device_blocks > device:
            self._evict_device(rank, rank.device_blocks - device)
        for held in rank.lower:
            self._evict_lower(held, lower)
        self._release_if_empty(rank)

    # Dump

    def dump(self, worker_id: int | None = None) -> Iterator[list[StoredRun]]:
        """Stored events that rebuild the index, a list per rank, sorted, parents before children.

        Device: a run each, only blocks that can be reached. Lower tiers: a block each. A caller may
        let events in between two lists: a list is made when it is asked for.
        """
        for key in self.ranks():
            rank = self._ranks.get(key)
            if rank is not None and worker_id in (None, key[0]):
                yield [*self._dump_device(rank), *self._dump_lower(rank)]

    def _dump_device(self, rank: _Rank) -> Iterator[StoredRun]:
        stack: list[tuple[int | None, Run]] = _children(None, self._trie.root)
        while stack:
            parent_hash, run = stack.pop()
            held = run.held_by(rank.bit)
            leading = ((held + 1) & ~held).bit_length() - 1
            if not leading:
                continue
            row = rank.names.rows[run.strand]
            names = row[run.start << 3 : run.start + leading << 3]
            hashes = unpack(f"<{leading}Q", names)
            local = unpack(f"<{leading}Q", run.label[: leading << 3])
            yield StoredRun(*rank.key, Tier.DEVICE, parent_hash, hashes, local)
            if leading << 3 == len(run.label):
                stack += _children(hashes[-1], run)

    def _dump_lower(self, rank: _Rank) -> Iterator[StoredRun]:
        for tier, held in zip(list(Tier)[1:], rank.lower, strict=False):
            for parent, name, local in held.chains():
                parent_hash = int.from_bytes(parent, "little") if parent else None
                block_hash, tokens_hash = unpack("<QQ", name + local)
                yield StoredRun(*rank.key, tier, parent_hash, (block_hash,), (tokens_hash,))

    # Changing

    def _store_device(
        self, rank: _Rank, run: Run, position: int, names: bytes, local: bytes
    ) -> None:
        """Walk down from `position` of `run`; hold the blocks that are there, add the others."""
        done = 0
        while done < len(local):
            label = run.label
            if position << 3 < len(label):
                same = common_prefix(label, position << 3, local, done)
                if same:
                    self._hold(rank, run, position, names[done : done + same])
                    position += same >> 3
                    done += same
                if done < len(local) and position << 3 < len(label):
                    run = self._trie.split(run, position)
                continue
            child = run.children.get(local[done : done + 8]) if run.children else None
            if child is not None:
                run, position = child, 0
                continue
            run, done = self._extend(rank, run, names, local, done)
            position = len(run.label) >> 3

    def _extend(
        self, rank: _Rank, run: Run, names: bytes, local: bytes, done: int
    ) -> tuple[Run, int]:
        """Add blocks after `run`, up to a strand's end; returns their run and the new `done`."""
        mine = 1 << rank.bit
        length = len(run.label) >> 3
        room = STRAND_BLOCKS - run.start - length
        others = 0
        if run.whole != mine or run.partial:
            others = (run.whole & ~mine).bit_count() + len(run.partial or ())
        is_open = run.parent is not None and run.after is None and not run.children and room > 0
        if not is_open or others > _MAX_OTHERS_TO_GROW:
            end = min(len(local), done + (STRAND_BLOCKS << 3))
            run = self._trie.add(run, local[done:end])
            run.whole = mine
            self._name(rank, run, 0, names[done:end])
            return run, end
        end = min(len(local), done + (room << 3))
        run.label += local[done:end]
        if run.whole != mine or run.partial:
            whole, run.whole = run.whole, 0
            held = (1 << length) - 1 if whole & mine else (run.partial or {}).get(rank.bit, 0)
            for bit in _bits(whole & ~mine):
                run.set_held(bit, (1 << length) - 1)
            run.set_held(rank.bit, held | ((1 << (end - done >> 3)) - 1) << length)
        self._name(rank, run, length, names[done:end])
        return run, end

    def _hold(self, rank: _Rank, run: Run, position: int, names: bytes) -> None:
        """Let the rank hold blocks that exist, from `position` of `run` on."""
        blocks = len(names) >> 3
        held = run.held_by(rank.bit)
        span = (1 << blocks) - 1 << position
        both = held & span
        if not both:
            self._name(rank, run, position, names)
        else:
            place = run.strand << POSITION_BITS | run.start + position
            for at in range(blocks):
                name = names[at << 3 : (at + 1) << 3]
                if not both >> (position + at) & 1:
                    self._name(rank, run, position + at, name)
                elif rank.names.name_at(place + at) != name:
                    rank.names.alias(place + at, name)
        if both != span:
            run.set_held(rank.bit, held | span)

    def _name(self, rank: _Rank, run: Run, position: int, names: bytes) -> None:
        rank.names.add(run.strand << POSITION_BITS | run.start + position, names)
        rank.device_blocks += len(names) >> 3

    def _drop_places(self, rank: _Rank, places: list[int]) -> None:
        """Let the rank hold no more the blocks at `places`, whose names are forgotten already."""
        gone: dict[int, int] = {}  # strand -> positions: a run is visited once, not per block
        low, high = min(places), max(places)
        if high - low == len(places) - 1 and low >> POSITION_BITS == high >> POSITION_BITS:
            # One stretch, as engines evict: a mask per block would be most of the work.
            gone[low >> POSITION_BITS] = (1 << len(places)) - 1 << (low & POSITION_MASK)
            places = []
        for place in places:
            strand = place >> POSITION_BITS
            gone[strand] = gone.get(strand, 0) | 1 << (place & POSITION_MASK)
        for strand, positions in gone.items():
            first = self._trie.strands[strand]
            if first.after is None:
                self._drop_blocks(rank, first, positions >> first.start)
                continue
            for run in self._trie.pieces(strand):
                here = (positions >> run.start) & ((1 << (len(run.label) >> 3)) - 1)
                if here:
                    self._drop_blocks(rank, run, here)

    def _drop_blocks(self, rank: _Rank, run: Run, gone: int) -> None:
        """The same for blocks of one run, `gone` being their positions in it."""
        held = run.held_by(rank.bit) ^ gone
        rank.device_blocks -= gone.bit_count()
        run.set_held(rank.bit, held)
        if not held:
            ends = [
                piece.start + piece.held_by(rank.bit).bit_length()
                for piece in self._trie.pieces(run.strand)
                if piece.held_by(rank.bit)
            ]
            rank.names.cut_row(run.strand, ends[-1] if ends else 0)
            self._trie.prune(run)
        elif not run.whole and held.bit_length() << 4 <= len(run.label):
            self._trim(run)

    def _trim(self, run: Run) -> None:
        """Cut the end off a run when half of it is held by nobody and nothing follows."""
        assert run.partial is not None
        blocks, top = len(run.label) >> 3, max(map(int.bit_length, run.partial.values()))
        if run.after or run.children or blocks - top < _TRIM_BLOCKS or top << 1 > blocks:
            return
        del run.label[top << 3 :]
        for bit, held in list(run.partial.items()):
            rank = self._by_bit[bit]
            assert rank is not None
            rank.names.cut_row(run.strand, run.start + top)
            run.set_held(bit, held)

    def _store_lower(
        self, rank: _Rank, tier: Tier, parent: bytes, names: bytes, local: bytes
    ) -> None:
        if not rank.lower:
            rank.lower = [LowerTier(), LowerTier(), LowerTier()]
        held = rank.lower[tier - 1]
        held.store(parent, names, local)
        self._lower[rank.key] = rank
        self._evict_lower(held, self._bounds.get(rank.key, self._default_bound)[1])
        self._release_if_empty(rank)

    def _evict_lower(self, held: LowerTier, bound: int) -> None:
        if len(held) > bound:
            self.evicted += len(held) - bound
            held.drop_oldest(len(held) - bound)

    def _evict_device(self, rank: _Rank, blocks: int) -> None:
        self.evicted += blocks
        while blocks:
            strand = next(iter(rank.names.rows))
            for run in reversed(self._trie.pieces(strand)):
                base = run.strand << POSITION_BITS | run.start
                places = [base + at for at in _bits(run.held_by(rank.bit))]
                places = places[max(0, len(places) - blocks) :]
                if not places:
                    continue
                for place in places:
                    rank.names.discard(place)
                self._drop_places(rank, places)
                blocks -= len(places)

    def _admit(self, key: RankKey) -> _Rank:
        bit = (~self._all & self._all + 1).bit_length() - 1
        rank = self._ranks[key] = _Rank(key, bit)
        self._all |= 1 << bit
        if bit == len(self._by_bit):
            self._by_bit.append(None)
        self._by_bit[bit] = rank
        return rank

    def _release_if_empty(self, rank: _Rank) -> None:
        if rank.lower and not rank.lower_blocks():
            rank.lower = []
            del self._lower[rank.key]
        elif not rank.lower:
            self._lower.pop(rank.key, None)
        if not rank.device_blocks and not rank.lower:
            del self._ranks[rank.key]
            self._all ^= 1 << rank.bit
            self._by_bit[rank.bit] = None
            self._keys.clear()


def _children(parent_hash: int | None, run: Run) -> list[tuple[int | None, Run]]:
    """The runs below one, last first: a stack gives them back sorted."""
    below = sorted((run.children or {}).items(), reverse=True)
    return [(parent_hash, child) for _, child in below]


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = (mask & -mask).bit_length() - 1
        yield bit
        mask ^= 1 << bit
