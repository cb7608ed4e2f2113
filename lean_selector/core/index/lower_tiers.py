"""The lower tiers (host memory, disk): each rank's blocks, and how a match continues there."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from lean_selector.core.index.device_tier import DeviceRank, DeviceTier
from lean_selector.core.index.runs import Run
from lean_selector.core.index.shapes import Edge, Matched
from lean_selector.core.rank_bits import bits_of

# -- which ranks may have the next block -----------------------------------------------------------
# Which ranks may have the next block of a prompt on a lower tier.
#
# One map for all ranks, so that a match looks only at these ranks. Spec: indexer.md section 3.5.

# The shared maps are split into this many dicts, chosen by the first byte of the local hash. To
# grow a single dict of a million entries would take 50 ms.
SHARDS: Final = 64
MASK: Final = SHARDS - 1


class Continuations:
    """Maps a block's local hash (of its own tokens) to the ranks that have such a block on a lower
    tier. Hashes with the same first 7 bytes share an entry."""

    def __init__(self) -> None:
        # A set of ranks, or ~bit for a single rank. Most blocks are on one rank, and the set of one
        # of 4 000 ranks takes 560 bytes. So `_alone` has a shared int per rank.
        self._ranks: list[dict[int, int]] = []  # an entry is created with its first block
        self._alone: list[int] = []
        # By bit: how many more blocks with this hash the rank has than the one in `_ranks`.
        self._again: dict[int, dict[int, int]] = {}

    def of(self, hashes: bytes, at: int) -> int:
        """Return the ranks that have a block whose local hash starts at byte `at` of `hashes`."""
        if not self._ranks:
            return 0
        block = int.from_bytes(hashes[at : at + 7], "little")
        ranks = self._ranks[block & MASK].get(block, 0)
        return 1 << ~ranks if ranks < 0 else ranks

    def add(self, bit: int, local: bytes) -> None:
        """Record that a rank has one more block with this local hash."""
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
        """Record that a rank has one block less with this local hash."""
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
        """Return ~bit, which is stored for a set with only this rank. The int object is shared."""
        while len(self._alone) <= bit:
            self._alone.append(~len(self._alone))
        return self._alone[bit]


# -- the edges of all ranks on one lower tier ------------------------------------------------------
# The edges of all ranks on one lower tier, so that a prompt is walked once for all of them.
#
# Engines with the same hash function have the same hashes for the same blocks. Such edges are
# stored once, with the set of ranks that have them, and a match follows all these ranks together.
# `LowerTier` has the blocks of a single rank. Spec: indexer.md section 3.5.


class Edges:
    """Blocks on one tier: (parent's engine hash + local hash) -> (engine hash, set of ranks)."""

    def __init__(self, continuations: Continuations) -> None:
        """`continuations` is updated whenever a rank gains or loses a block."""
        self._continuations = continuations
        # Split by local hash, like `continuations`.
        self._edges: list[dict[bytes, Edge]] = [{} for _ in range(SHARDS)]
        # By edge and bit: the child, for a rank whose edge leads to another block than the same
        # edge of other ranks.
        self._odd: dict[bytes, dict[int, bytes]] = {}
        self._held: dict[int, dict[bytes, bytes]] = {}  # by bit: child -> edge of the rank
        # Ranks that returned while their former blocks are still being freed. If an edge has their
        # bit, it may be an old edge; so look up the blocks that the rank holds.
        self.doubtful = 0

    def admit(self, bit: int, held: dict[bytes, bytes]) -> None:
        """Add a rank. `held` has its blocks: engine hash -> parent's engine hash + local hash."""
        self._held[bit] = held

    def release(self, bit: int) -> None:
        """Remove a rank. The caller must then discard the rank's remaining blocks."""
        del self._held[bit]

    def store(self, bit: int, key: bytes, child: bytes, held: dict[bytes, bytes]) -> bool:
        """Record that a rank has the block `child` (engine hash) at `key` (parent's engine hash +
        local hash). Return False, and change nothing, if the rank has another block at `key`, or
        has `child` at another key. `held` has the rank's blocks on this tier."""
        edges = self._edges[key[-8] & MASK]
        edge = edges.get(key)
        if edge is not None and held.get(edge.child) == key:
            return edge.child == child
        if self._odd and (odd := self._odd.get(key)) is not None:
            other = odd.get(bit)
            if other is not None and held.get(other) == key:
                return other == child
        if child in held:
            return False
        self._continuations.add(bit, key[-8:])
        if edge is None:
            edges[key] = Edge(key, child, self._continuations.only(bit))
        elif edge.child == child:
            ranks = edge.ranks
            if ranks != ~bit:  # otherwise it was an old edge of the same rank
                edge.ranks = (1 << ~ranks if ranks < 0 else ranks) | 1 << bit
            key, child = edge.key, edge.child  # all ranks share one object
        else:
            self._odd.setdefault(key, {})[bit] = child
        held[child] = key
        return True

    def discard(self, bit: int, key: bytes, child: bytes) -> None:
        """Record that a rank no longer has block `child` at `key` (parent hash + local hash)."""
        self._continuations.discard(bit, key[-8:])
        self._discard(bit, key, child)

    def discard_old(self, bit: int, key: bytes, child: bytes) -> None:
        """Like `discard`, for a block that the rank had before all its blocks were dropped. If the
        rank has stored the same block again since, the new block stays."""
        self._continuations.discard(bit, key[-8:])
        held = self._held.get(bit)
        if held is None or held.get(child) != key:
            self._discard(bit, key, child)

    def _discard(self, bit: int, key: bytes, child: bytes) -> None:
        edges = self._edges[key[-8] & MASK]
        edge = edges.get(key)
        if edge is not None and edge.child == child:
            ranks = edge.ranks
            if ranks == ~bit:
                del edges[key]
            elif ranks >= 0:
                ranks &= ~(1 << bit)
                is_one = not ranks & (ranks - 1)
                edge.ranks = self._continuations.only(ranks.bit_length() - 1) if is_one else ranks
        if self._odd and (odd := self._odd.get(key)) is not None and odd.get(bit) == child:
            del odd[bit]
            if not odd:
                del self._odd[key]

    def along(self, ranks: int, engine_hash: bytes, hashes: bytes, at: int) -> tuple[bytes, int]:
        """Follow a prompt's `hashes` from byte `at` on, while all `ranks` have the blocks.
        `engine_hash` is that of the block before. Return the last block's, and the byte after it.
        """
        if ranks & self.doubtful:
            return engine_hash, at
        alone = -ranks.bit_length() if not ranks & (ranks - 1) else 0
        edges, end = self._edges, len(hashes)
        while at < end:
            edge = edges[hashes[at] & MASK].get(engine_hash + hashes[at : at + 8])
            if edge is None:
                break
            having = edge.ranks
            if having != alone and (having < 0 or ranks & ~having):
                break
            engine_hash = edge.child
            at += 8
        return engine_hash, at

    def follow(self, ranks: int, key: bytes) -> tuple[bytes, int]:
        """`key`: parent's engine hash, then child's local hash. Return the child's engine hash, and
        which of `ranks` use it. Other ranks may use another hash there: see `others`."""
        edge = self._edges[key[-8] & MASK].get(key)
        if edge is None:
            return b"", 0
        having = edge.ranks
        having = ranks & (1 << ~having if having < 0 else having)
        if doubtful := having & self.doubtful:
            for bit in bits_of(doubtful):
                if self._held[bit].get(edge.child) != key:
                    having ^= 1 << bit
        return edge.child, having

    def others(self, ranks: int, key: bytes) -> dict[bytes, int]:
        """Return the engine hashes at `key` that `follow` does not return: hash -> set of ranks."""
        found: dict[bytes, int] = {}
        if self._odd and (odd := self._odd.get(key)) is not None:
            for bit in bits_of(ranks):
                child = odd.get(bit)
                if child is not None and self._held[bit].get(child) == key:
                    found[child] = found.get(child, 0) | 1 << bit
        return found


# -- one rank's blocks on one lower tier -----------------------------------------------------------
# One rank's blocks on one lower tier (host_pinned, disk or external).
#
# A tier is a set of edges: (parent's engine hash, local hash) -> engine hash of the child. The
# parent may be on another tier, or unknown. `Edges` has the edges of all ranks, for matching. Spec:
# indexer.md sections 3.3 and 3.5.

ROOT = b""  # the parent of a prompt's first block
_BLOCKS_PER_STEP = 64  # some 50 us


class LowerTier:
    """One rank's blocks on one tier below the device. Each hash has 8 bytes."""

    def __init__(self, edges: Edges, bit: int) -> None:
        """`edges` has all ranks' blocks on this tier; `bit` is the bit number of this rank."""
        self._edges = edges
        self._bit = bit
        # child -> parent + local hash, oldest first: a full tier evicts its oldest blocks.
        self._edge: OrderedDict[bytes, bytes] = OrderedDict()
        self.copies: dict[bytes, int] = {}  # child -> copies beyond the first
        self.copies_revision = 0  # how often events changed a number of copies
        edges.admit(bit, self._edge)

    def __len__(self) -> int:
        return len(self._edge)

    def edge_to(self, engine_hash: bytes) -> bytes | None:
        """Return a block's parent hash + local hash; None if the block is not on this tier."""
        return self._edge.get(engine_hash)

    def store(
        self, parent: bytes, engine_hashes: bytes, local: bytes, counted: bool = False
    ) -> None:
        """Add consecutive blocks after `parent`. Stops at a block that contradicts the stored
        blocks: another engine hash for the same block, or the same engine hash for another block.
        With `counted`, a block that is stored again needs one more removal."""
        edges, bit, mine = self._edges, self._bit, self._edge
        for at in range(0, len(local), 8):
            engine_hash = engine_hashes[at : at + 8]
            if counted and mine.get(engine_hash) == parent + local[at : at + 8]:
                self.copies[engine_hash] = self.copies.get(engine_hash, 0) + 1
                self.copies_revision += 1
            elif not edges.store(bit, parent + local[at : at + 8], engine_hash, mine):
                return
            parent = engine_hash

    def remove(self, engine_hash: bytes) -> bool:
        """Drop a block and return True; False if it needs further removals, or is not on this tier.
        Blocks after this block stay, but cannot match until the block returns."""
        if self.copies and (copies := self.copies.pop(engine_hash, 0)):
            self.copies_revision += 1
            if copies > 1:
                self.copies[engine_hash] = copies - 1
            return False
        edge = self._edge.pop(engine_hash, None)
        if edge is None:
            return False
        self._edges.discard(self._bit, edge, engine_hash)
        return True

    def drop_oldest(self, blocks: int) -> None:
        """Drop the oldest `blocks` blocks. The tier must have at least `blocks` blocks."""
        for _ in range(blocks):
            engine_hash, edge = self._edge.popitem(last=False)
            self.copies.pop(engine_hash, None)
            self._edges.discard(self._bit, edge, engine_hash)

    def dismantled(self) -> Iterator[None]:
        """Drop all blocks, some per step. Call `Edges.release` for the rank before."""
        while self._edge:
            for _ in range(min(_BLOCKS_PER_STEP, len(self._edge))):
                engine_hash, edge = self._edge.popitem(last=False)
                self._edges.discard_old(self._bit, edge, engine_hash)
            yield

    def chains(self) -> Iterator[tuple[bytes, bytes, bytes]]:
        """Yield (parent's engine hash, engine hash, local hash) of every block, oldest first.
        Blocks may be added and removed between two items."""
        # dict's own view, because that of an OrderedDict looks up each key, at ten times the cost.
        for engine_hash in list(dict.keys(self._edge)):
            edge = self._edge.get(engine_hash)
            if edge is not None:
                yield edge[:-8], engine_hash, edge[-8:]


class Holdings:
    """The blocks of one rank, on all tiers."""

    def __init__(self, device: DeviceRank) -> None:
        self.device = device
        self.lower: list[LowerTier] = []  # empty, or all of host_pinned, disk, external

    def blocks(self) -> int:
        """How many blocks the rank holds on all tiers, including blocks after a missing block."""
        return self.device.blocks + sum(map(len, self.lower))

    def copies_revision(self) -> int:
        """Return a number that grows whenever a number of copies changes."""
        return self.device.hashes.copies_revision + sum(
            [held.copies_revision for held in self.lower]
        )


# -- continuing a match ----------------------------------------------------------------------------
# Continue a match where a rank's device blocks end.
#
# Tracks the ranks with blocks on a lower tier, and visits only those whose match can continue.
# Follows ranks together as long as they have the same blocks under the same hashes. Spec:
# indexer.md section 3.5.

_LAST = 2  # index of the last tier: host_pinned, disk, external


class LowerMatches:
    """Continues matches on the lower tiers, for all ranks of one partition."""

    def __init__(self, device: DeviceTier) -> None:
        self.ranks: dict[int, Holdings] = {}  # ranks with lower tiers, by bit
        self._bits = 0  # the same ranks as a set
        self._continuations = Continuations()
        self._tiers: list[Edges] = []  # empty until some rank has a lower tier
        self._device = device
        self._dismantled: dict[int, int] = {}  # by bit: how many former tiers are being freed

    def admit(self, holdings: Holdings) -> None:
        """Give a rank lower tiers (host memory, disk, external) that have no blocks yet."""
        if not self._tiers:
            self._tiers = [Edges(self._continuations) for _ in range(_LAST + 1)]
        bit = holdings.device.bit
        holdings.lower = [LowerTier(edges, bit) for edges in self._tiers]
        self.ranks[bit] = holdings
        self._bits |= 1 << bit
        if bit in self._dismantled:
            for edges in self._tiers:
                edges.doubtful |= 1 << bit

    def release(self, holdings: Holdings) -> None:
        """Drop the lower tiers of a rank, if it has any. These must have no blocks."""
        bit = holdings.device.bit
        if self.ranks.pop(bit, None) is not None:
            holdings.lower = []
            self._bits ^= 1 << bit
            for edges in self._tiers:
                edges.release(bit)
                edges.doubtful &= ~(1 << bit)

    def retire(self, holdings: Holdings) -> Iterator[None]:
        """Drop a rank's lower tiers, which have blocks. From now on, no match finds these blocks.
        Return an iterator that frees their memory in steps. The index may change between steps."""
        bit, tiers = holdings.device.bit, holdings.lower
        self.release(holdings)
        self._dismantled[bit] = self._dismantled.get(bit, 0) + 1
        return self._dismantle(bit, tiers)

    def _dismantle(self, bit: int, tiers: list[LowerTier]) -> Iterator[None]:
        for held in tiers:
            yield from held.dismantled()
        self._dismantled[bit] -= 1
        if not self._dismantled[bit]:
            del self._dismantled[bit]
            for edges in self._tiers:
                edges.doubtful &= ~(1 << bit)

    def extended(
        self, sets: list[tuple[int, int]], path: list[Run], local_hashes: bytes
    ) -> list[tuple[Matched, int]]:
        """Return pairs (match, set of ranks) for ranks whose match continues on a lower tier. No
        rank is in two sets. `sets` has the matches on the device: pairs (leading blocks, set of
        ranks). `path` has the runs of device blocks along the prompt."""
        found: dict[tuple[int, int, int], int] = {}
        going_on: dict[int, int] = {}  # number of device blocks -> ranks
        rest = self._bits
        for blocks, mask in sets:
            here = rest & mask
            if here:
                rest ^= here
                if here := here & self._continuations.of(local_hashes, blocks << 3):
                    going_on[blocks] = going_on.get(blocks, 0) | here
        for blocks, here in going_on.items():
            self._walk(self._device.last_hashes(here, path, blocks), blocks, local_hashes, found)
        if rest := rest & self._continuations.of(local_hashes, 0):
            self._walk([(ROOT, rest)], 0, local_hashes, found)
        return [
            (Matched(blocks, host, disk), ranks) for (blocks, host, disk), ranks in found.items()
        ]

    def _walk(
        self,
        named: list[tuple[bytes, int]],
        device: int,
        local_hashes: bytes,
        found: dict[tuple[int, int, int], int],
    ) -> None:
        """Match on after `device` device blocks: in host memory, then on disk. Adds to `found`:
        (device, host, disk blocks) -> ranks. `named`: pairs (last device block's hash, ranks)."""
        start, end = device << 3, len(local_hashes)
        # (ranks, hash of the last block, tier to continue on, position in the prompt, end of the
        # host tier). Ranks are split where their blocks differ.
        parted = [(ranks, engine_hash, 0, start, start) for engine_hash, ranks in named]
        while parted:
            ranks, engine_hash, tier, at, host_end = parted.pop()
            edges = self._tiers[tier]
            while ranks:
                engine_hash, at = edges.along(ranks, engine_hash, local_hashes, at)
                if at == end:
                    break
                key = engine_hash + local_hashes[at : at + 8]
                child, going = edges.follow(ranks, key)
                if rest := ranks ^ going:
                    for other, having in edges.others(rest, key).items():
                        rest ^= having
                        parted.append((having, other, tier, at + 8, host_end))
                    if rest and tier < _LAST:
                        parted.append((rest, engine_hash, tier + 1, at, host_end if tier else at))
                    elif rest and at > start:
                        match = device, host_end - start >> 3, at - host_end >> 3
                        found[match] = found.get(match, 0) | rest
                ranks, engine_hash, at = going, child, at + 8
            if ranks and at > start:
                if not tier:
                    host_end = at
                match = device, host_end - start >> 3, at - host_end >> 3
                found[match] = found.get(match, 0) | ranks
