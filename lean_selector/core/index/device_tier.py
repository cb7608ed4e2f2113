"""The device tier: which blocks each rank has in device memory, and the engine's hashes of them.

Keeps the trie (which blocks exist, and which ranks hold them) consistent with the engine hashes of
each rank. In the trie, a rank is a bit, a strand is up to 1024 consecutive blocks, and a run is a
part of a strand (see runs.py). Spec: indexer.md sections 3.1, 3.2 and 7."""

from collections.abc import Callable, Iterator

from lean_selector.core.hashing import common_prefix
from lean_selector.core.index.engine_hashes import NOWHERE, EngineHashes
from lean_selector.core.index.runs import (
    MAX_STRANDS,
    POSITION_BITS,
    POSITION_MASK,
    STRAND_BLOCKS,
    Run,
    RunTrie,
)
from lean_selector.core.rank_bits import RankBits, RankKey, bits_of

# -- the ranks of a device tier --------------------------------------------------------------------
# The ranks of a partition's device tier: bits in the trie, records here.
#
# A retired rank is hidden at once. Its bit is reused only after its runs have been swept. Spec:
# indexer.md section 3.1.


class DeviceRank:
    """One rank's blocks in device memory. `bit`: the rank's number in sets of ranks (bit masks)."""

    __slots__ = ("bit", "blocks", "hashes", "key")

    def __init__(self, key: RankKey, bit: int, hashes: EngineHashes) -> None:
        self.key = key
        self.bit = bit
        self.hashes = hashes
        self.blocks = 0  # blocks held in the trie, reachable or not


class DeviceRanks:
    """Gives each rank a bit number, by which the trie of cached blocks refers to the rank."""

    def __init__(self, bits: RankBits, new_hashes: Callable[[], EngineHashes]) -> None:
        self._new_hashes = new_hashes
        self._bits = bits
        self._by_bit: list[DeviceRank | None] = []
        self.in_use = 0  # the bits of all ranks with a record
        # How many retired records with this bit are being swept. Until then, runs may still have
        # the old bit. If the rank was admitted again meanwhile, it is in `reborn`: it only holds
        # blocks in strands for which it has rows. In any other strand its bit is an old one, and is
        # removed before the strand is used.
        self._swept: dict[int, int] = {}
        self.reborn = 0

    def admit(self, key: RankKey) -> DeviceRank:
        """Return a new record for a rank that holds no blocks yet."""
        bit = self._bits.acquire(key)
        device_rank = DeviceRank(key, bit, self._new_hashes())
        self.in_use |= 1 << bit
        self._by_bit += [None] * (bit + 1 - len(self._by_bit))
        self._by_bit[bit] = device_rank
        if bit in self._swept:
            self.reborn |= 1 << bit
        return device_rank

    def release(self, device_rank: DeviceRank) -> None:
        """Free the record of a rank that holds no blocks."""
        assert not device_rank.blocks
        self._hide(device_rank)
        self._bits.release(device_rank.key)

    def retire(self, device_rank: DeviceRank) -> EngineHashes:
        """Take a rank out of look-ups, and return the engine hashes of its blocks. The caller must
        remove these blocks from the trie, then call `swept`."""
        self._hide(device_rank)
        hashes, device_rank.hashes, device_rank.blocks = device_rank.hashes, self._new_hashes(), 0
        self._swept[device_rank.bit] = self._swept.get(device_rank.bit, 0) + 1
        return hashes

    def swept(self, device_rank: DeviceRank) -> None:
        """Release the bit number of a retired rank, after its blocks were removed from the trie."""
        bit = device_rank.bit
        self._swept[bit] -= 1
        if not self._swept[bit]:
            del self._swept[bit]
            self.reborn &= ~(1 << bit)
        self._bits.release(device_rank.key)

    def _hide(self, device_rank: DeviceRank) -> None:
        bit = 1 << device_rank.bit
        self.in_use ^= bit
        self.reborn &= ~bit
        self._by_bit[device_rank.bit] = None

    def rank_in(self, strand: int, bit: int) -> DeviceRank | None:
        """Return the rank with this bit number, or None if the rank holds no block of the strand (a
        part of the trie)."""
        device_rank = self._by_bit[bit]
        return (
            device_rank if device_rank is not None and strand in device_rank.hashes.rows else None
        )

    def hash_at(self, bit: int, address: int) -> bytes:
        """Return the engine hash that a rank has for the block at this address in the trie."""
        device_rank = self._by_bit[bit]
        assert device_rank is not None
        return device_rank.hashes.hash_at(address)


# -- hash aliases ----------------------------------------------------------------------------------
# Hash aliases: ranks whose engine hashes of a strand differ from those of other holders.
#
# Engines with the same hash function give a block the same hash, so a match looks up the hash of
# one rank for all of them. Spec: indexer.md section 3.2.

_MAX_COMPARED = 8  # at most this many ranks are tried in search of one to compare with
_MAX_PARTS = 64  # at most this many partial holders of a run are tried


class HashAliases:
    """For each strand (up to 1024 consecutive blocks of the trie), the ranks whose engine hashes
    may differ from other ranks' hashes of the same blocks. All other ranks use the same hashes."""

    def __init__(self, ranks: DeviceRanks) -> None:
        self._ranks = ranks
        self._odd: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._odd)

    def of(self, strand: int) -> int:
        """Return which ranks' hashes in this trie part may differ from the rest (bit mask)."""
        return self._odd.get(strand, 0)

    def forget(self, strand: int, bit: int) -> None:
        """Record that the rank no longer holds blocks of this part of the trie."""
        if self._odd and (odd := self._odd.get(strand)):
            odd &= ~(1 << bit)
            if odd:
                self._odd[strand] = odd
            else:
                del self._odd[strand]

    def hashes_at(self, ranks: int, address: int) -> list[tuple[bytes, int]]:
        """Return the engine hashes of the block at this address in the trie, each with the set of
        ranks that use this hash. All of `ranks` must hold the block."""
        odd = ranks & self.of(address >> POSITION_BITS)
        alike, found = ranks ^ odd, dict[bytes, int]()
        if alike:
            found[self._ranks.hash_at(alike.bit_length() - 1, address)] = alike
        for bit in bits_of(odd):
            engine_hash = self._ranks.hash_at(bit, address)
            found[engine_hash] = found.get(engine_hash, 0) | 1 << bit
        return list(found.items())

    def add(self, strand: int, bit: int) -> None:
        """Record that the rank's hashes of the strand's blocks may differ from other ranks'."""
        self._odd[strand] = self.of(strand) | 1 << bit

    def compare(self, device_rank: DeviceRank, run: Run, span: int, address: int) -> None:
        """Compare a rank's engine hashes of blocks in a run with those of other ranks. If hashes
        differ, or a comparison takes too long, record that they may differ. `span`: the blocks'
        positions in the run (a bit mask). `address`: the address of the first block in the trie."""
        strand, bit = run.strand, device_rank.bit
        mine = 1 << bit
        odd = self.of(strand)
        if odd & mine:
            return
        others = run.whole & self._ranks.in_use & ~(odd | mine)
        for _ in range(_MAX_COMPARED):
            if not others:
                if not self._agrees_with_parts(device_rank, run, span, address):
                    break
                return
            other = self._ranks.rank_in(strand, others.bit_length() - 1)
            if other is not None:
                if not _hash_alike(device_rank, other, address, span.bit_count()):
                    break
                return
            others ^= 1 << (others.bit_length() - 1)  # an old bit of a rank that was retired
        self._odd[strand] = odd | mine

    def _agrees_with_parts(
        self, device_rank: DeviceRank, run: Run, span: int, address: int
    ) -> bool:
        """Whether the rank's hashes agree with those of ranks that hold only parts of the run."""
        partial, mine = run.partial, 1 << device_rank.bit
        if partial is None or (len(partial) == 1 and device_rank.bit in partial):
            return True
        ours = self._ranks.in_use & ~(self.of(run.strand) | mine)
        longest, lead = device_rank, 0
        for leading, mask in run.leads():
            if leading > lead and mask & ours:
                other = self._ranks.rank_in(run.strand, (mask & ours).bit_length() - 1)
                if other is not None:
                    longest, lead = other, leading
        told = span & (1 << lead) - 1
        if told and not _hash_alike(device_rank, longest, address, told.bit_count()):
            return False
        left = span ^ told
        if not left:
            return True
        if len(partial) > _MAX_PARTS:
            return False
        for bit, held in partial.items():
            if held & left and ours >> bit & 1 and self._ranks.rank_in(run.strand, bit) is not None:
                return False  # it holds blocks behind a hole, which were not compared
        return True


def _hash_alike(one: DeviceRank, other: DeviceRank, address: int, blocks: int) -> bool:
    """Whether two ranks have the same engine hashes for this many blocks, from `address` on."""
    strand, start = address >> POSITION_BITS, (address & POSITION_MASK) << 3
    end = start + (blocks << 3)
    return one.hashes.rows[strand][start:end] == other.hashes.rows[strand][start:end]


# A run is extended only if few other ranks hold it. Each of these becomes a partial holder, which
# costs every match of the run one step. If more ranks hold it, the new blocks form a run of their
# own, which costs one step.
_MAX_OTHERS_TO_GROW = 2
_TRIM_BLOCKS = 32  # from this many on, unheld blocks at the end of a run are cut off,
_MAX_OTHERS_TO_TRIM = 16  # if at most so many ranks hold a part of it; some 1 us


class DeviceTier:
    """The blocks that all ranks of one partition hold in device memory."""

    def __init__(self, bits: RankBits, new_hashes: Callable[[], EngineHashes]) -> None:
        self.trie = RunTrie()
        self.ranks = DeviceRanks(bits, new_hashes)
        self._odd = HashAliases(self.ranks)

    def retire(self, device_rank: DeviceRank) -> Iterator[None]:
        """Hide the blocks of a rank at once. Return an iterator that frees the memory in steps;
        the index may change between two steps."""
        return self._sweep(device_rank, self.ranks.retire(device_rank))

    def _sweep(self, device_rank: DeviceRank, hashes: EngineHashes) -> Iterator[None]:
        bit = device_rank.bit
        while hashes.rows:
            strand, _ = hashes.rows.popitem()
            if self.ranks.rank_in(strand, bit) is None:
                self._odd.forget(strand, bit)
                self._settle(bit, strand)
            yield
        yield from hashes.dismantled()
        self.ranks.swept(device_rank)

    def _settle(self, bit: int, strand: int) -> None:
        """Remove a retired rank (by its bit number) from the holders of this part of the trie."""
        for run in self.trie.pieces(strand):
            if run.held_by(bit):
                run.set_held(bit, 0)
                self.trie.prune(run)

    def _settle_along(self, local_hashes: bytes) -> None:
        """From the holders of each trie part along a prompt, remove ranks without blocks there."""
        old: list[tuple[int, int]] = []
        ranks = self.ranks
        children, at = self.trie.root.children, 0
        while children is not None:
            run = children.get(local_hashes[at : at + 8])
            if run is None:
                break
            bits = bits_of(run.whole & ranks.reborn)
            bits += [bit for bit in run.partial or () if ranks.reborn >> bit & 1]
            old += [(bit, run.strand) for bit in bits if ranks.rank_in(run.strand, bit) is None]
            if not local_hashes.startswith(run.label, at):
                break
            at += len(run.label)
            children = run.children
        for bit, strand in old:
            self._settle(bit, strand)

    def has_room(self, blocks: int) -> bool:
        """Whether the trie can still take a chain of this many new blocks."""
        # A chain may split one run, and starts a strand per STRAND_BLOCKS.
        return len(self.trie.strands) + blocks // STRAND_BLOCKS + 2 <= MAX_STRANDS

    def match_sets(self, local_hashes: bytes) -> tuple[list[tuple[int, int]], list[Run]]:
        """Return how many leading blocks of a prompt the ranks hold, and the runs along the prompt.

        The first list has pairs (leading blocks, set of ranks). No rank is in two sets, and no set
        is empty. A run is a sequence of blocks of the trie, without a branch."""
        if self.ranks.reborn:
            self._settle_along(local_hashes)
        return self.trie.match_sets(self.ranks.in_use, local_hashes)

    def last_hashes(self, ranks: int, path: list[Run], blocks: int) -> list[tuple[bytes, int]]:
        """Return the engine hashes of block number `blocks` (from 1) along `path`, each with the
        set of ranks that use this hash. All of `ranks` must hold the blocks up to this one."""
        last = blocks - 1
        for run in path:  # pragma: no branch: no rank matches more than the path has
            length = len(run.label) >> 3
            if last < length:
                break
            last -= length
        return self._odd.hashes_at(ranks, run.strand << POSITION_BITS | run.start + last)

    def store(
        self,
        device_rank: DeviceRank,
        parent: int,
        hashes: bytes,
        local: bytes,
        counted: bool = False,
    ) -> None:
        """Store a chain of blocks on a rank, after the block at the address `parent` in the trie,
        or NOWHERE for a prompt's start. `hashes`, `local`: the blocks' engine and local hashes, 8
        bytes each. If `counted`, a block that the rank already holds must be removed once more
        later."""
        run, position = self.trie.root, 0
        if parent != NOWHERE:
            run, position = self.trie.resolve(parent)
            position += 1
            # A prompt's end that only this rank holds: usual while an engine decodes.
            if (
                position << 3 == len(run.label)
                and run.whole == 1 << device_rank.bit
                and run.partial is None
                and run.children is None
                and run.after is None
                and run.start + position + (len(hashes) >> 3) <= STRAND_BLOCKS
            ):
                run.label += local
                device_rank.hashes.add(parent + 1, hashes)
                device_rank.blocks += len(hashes) >> 3
                return
        # Walk down the trie: let the rank hold the blocks that exist, and add the others.
        done = 0
        while done < len(local):
            label = run.label
            if position << 3 < len(label):
                same = common_prefix(label, position << 3, local, done)
                if same:
                    end = done + same
                    self._hold(device_rank, run, position, hashes[done:end], counted)
                    position += same >> 3
                    done = end
                if done < len(local) and position << 3 < len(label):
                    run = self.trie.split(run, position)
                continue
            child = run.children.get(local[done : done + 8]) if run.children else None
            is_reborn = self.ranks.reborn >> device_rank.bit & 1
            if child and is_reborn and child.strand not in device_rank.hashes.rows:
                self._settle(device_rank.bit, child.strand)  # its only holder may be an old bit
                child = run.children.get(local[done : done + 8]) if run.children else None
            if child is not None:
                run, position = child, 0
                continue
            run, position, end = self._extend(device_rank, run, local, done)
            at = run.strand << POSITION_BITS | run.start + position
            device_rank.hashes.add(at, hashes[done:end])
            device_rank.blocks += end - done >> 3
            position += end - done >> 3
            done = end

    def _extend(
        self, device_rank: DeviceRank, run: Run, local: bytes, done: int
    ) -> tuple[Run, int, int]:
        """Add the blocks of `local` after `run`, from byte `done` on, until the strand is full.
        Return the run that has them, the first one's position in it, and their end in `local`."""
        mine = 1 << device_rank.bit
        length = len(run.label) >> 3
        room = STRAND_BLOCKS - run.start - length
        others = 0
        if run.whole != mine or run.partial:
            others = (run.whole & ~mine).bit_count() + len(run.partial or ())
        is_open = run.parent is not None and run.after is None and not run.children and room > 0
        if not is_open or others > _MAX_OTHERS_TO_GROW:
            end = min(len(local), done + (STRAND_BLOCKS << 3))
            run = self.trie.add(run, local[done:end])
            run.whole = mine
            return run, 0, end
        end = min(len(local), done + (room << 3))
        run.label += local[done:end]
        if run.whole != mine or run.partial:
            whole, run.whole = run.whole, 0
            held = (
                (1 << length) - 1 if whole & mine else (run.partial or {}).get(device_rank.bit, 0)
            )
            for bit in bits_of(whole & ~mine):
                run.set_held(bit, (1 << length) - 1)
            run.set_held(device_rank.bit, held | ((1 << (end - done >> 3)) - 1) << length)
        return run, length, end

    def _hold(
        self, device_rank: DeviceRank, run: Run, position: int, hashes: bytes, counted: bool
    ) -> None:
        """Record that the rank holds the blocks from `position` in `run` on, with these hashes."""
        held = run.held_by(device_rank.bit)
        span = (1 << (len(hashes) >> 3)) - 1 << position
        both = held & span
        address = run.strand << POSITION_BITS | run.start + position
        if not both:
            device_rank.hashes.add(address, hashes)
            device_rank.blocks += len(hashes) >> 3
        else:
            for at in range(len(hashes) >> 3):
                engine_hash = hashes[at << 3 : (at + 1) << 3]
                if not both >> (position + at) & 1:
                    device_rank.hashes.add(address + at, engine_hash)
                    device_rank.blocks += 1
                else:
                    self.announce(
                        device_rank, address + at, int.from_bytes(engine_hash, "little"), counted
                    )
        if both != span:
            self._odd.compare(device_rank, run, span, address)
            run.set_held(device_rank.bit, held | span)

    def announce(
        self, device_rank: DeviceRank, address: int, engine_hash: int, counted: bool
    ) -> None:
        """Record that an engine stored a held block again, perhaps under another hash."""
        hashes = device_rank.hashes
        is_first = int.from_bytes(hashes.hash_at(address), "little") == engine_hash
        if not is_first and hashes.aliases.get(engine_hash, NOWHERE) != address:
            hashes.alias(address, engine_hash)
        elif counted:
            hashes.add_copy(engine_hash)

    def edge_to(self, device_rank: DeviceRank, address: int) -> bytes:
        """Return the local hash of the block at this address in the trie, preceded by the engine
        hash of the block before it (nothing for a prompt's first block)."""
        run, position = self.trie.resolve(address)
        local = bytes(run.label[position << 3 : (position + 1) << 3])
        if not position:
            above = run.parent
            assert above is not None
            if above.parent is None:
                return local
            run, position = above, len(above.label) >> 3
        before = run.strand << POSITION_BITS | run.start + position - 1
        row = device_rank.hashes.rows.get(run.strand, b"")
        start = (before & POSITION_MASK) << 3
        return bytes(row[start : start + 8]) + local

    def remove(self, device_rank: DeviceRank, hashes: bytes) -> int:
        """Remove a rank's blocks by engine hash (8 bytes each). Return how many were dropped: a
        block that was stored n times, or under n hashes, is dropped by its n-th removal."""
        before = device_rank.blocks
        gone = device_rank.hashes.take(hashes)
        while (
            device_rank.hashes.rehashed
        ):  # before the drops, which forget strands that the rank leaves
            self._odd.add(device_rank.hashes.rehashed.pop(), device_rank.bit)
        for strand, positions in gone.items():
            self._drop_positions(device_rank, strand, positions)
        return before - device_rank.blocks

    def _drop_positions(self, device_rank: DeviceRank, strand: int, positions: int) -> None:
        """Drop a rank's blocks at these positions (a bit mask), after their hashes were removed."""
        first = self.trie.strands[strand]
        if first.after is None:
            self._drop_blocks(device_rank, first, positions >> first.start)
            return
        while positions:
            lowest = (positions & -positions).bit_length() - 1
            run, _ = self.trie.resolve(strand << POSITION_BITS | lowest)
            here = (positions >> run.start) & ((1 << (len(run.label) >> 3)) - 1)
            positions ^= here << run.start
            self._drop_blocks(device_rank, run, here)

    def _drop_blocks(self, device_rank: DeviceRank, run: Run, gone: int) -> None:
        """Drop the rank's blocks at these positions (a bit mask) of one run."""
        held = run.held_by(device_rank.bit) ^ gone
        device_rank.blocks -= gone.bit_count()
        run.set_held(device_rank.bit, held)
        if not held:
            end = self._held_end(device_rank, run.strand)
            device_rank.hashes.cut_row(run.strand, end)
            if not end:
                self._odd.forget(run.strand, device_rank.bit)
            self.trie.prune(run)
        elif not run.whole and held.bit_length() << 4 <= len(run.label):
            self._trim(run)

    def _held_end(self, device_rank: DeviceRank, strand: int) -> int:
        """Return the position after the rank's last block in a strand (part of the trie), or 0."""
        if not device_rank.hashes.has_zero():
            return device_rank.hashes.hashes_end(strand)
        # A row cannot distinguish a block with hash 0 from none.
        ends = [
            run.start + held.bit_length()
            for run in self.trie.pieces(strand)
            if (held := run.held_by(device_rank.bit))
        ]
        return ends[-1] if ends else 0

    def _trim(self, run: Run) -> None:
        """Cut off the last blocks of a run (part of the trie) if no rank holds them, they are at
        least 32 blocks and at least half of the run, no other run follows, and few ranks are left
        to be looked at. Of what many ranks share, a review cuts off the end (see holes.py)."""
        blocks, holders = len(run.label) >> 3, run.partial
        if run.after or run.children or not holders or len(holders) > _MAX_OTHERS_TO_TRIM:
            return
        limit = min(blocks >> 1, blocks - _TRIM_BLOCKS)
        if max(map(int.bit_length, holders.values())) <= limit:
            self._cut(run)

    def _cut(self, run: Run) -> None:
        """Cut off the last blocks of a run (trie part) if no rank holds them. No run may follow."""
        assert run.partial is not None
        top = max(map(int.bit_length, run.partial.values()))
        del run.label[top << 3 :]
        for bit, held in list(run.partial.items()):
            device_rank = self.ranks.rank_in(run.strand, bit)
            if device_rank is not None:  # None: the bit is an old one
                device_rank.hashes.cut_row(run.strand, run.start + top)
            run.set_held(bit, held)

    def held_in(self, device_rank: DeviceRank, strand: int) -> int:
        """Return which positions of a strand (a part of the trie) the rank holds, as a bit mask.
        The rank must hold a block of the strand."""
        held = 0
        for run in self.trie.pieces(strand):
            held |= run.held_by(device_rank.bit) << run.start
        return held

    def drop(self, device_rank: DeviceRank, strand: int, positions: int) -> None:
        """Drop blocks that the rank holds, at `positions` (a bit mask) of a strand (trie part)."""
        for position in bits_of(positions):
            device_rank.hashes.discard(strand << POSITION_BITS | position)
        self._drop_positions(device_rank, strand, positions)

    def cut_row(self, device_rank: DeviceRank, strand: int) -> None:
        """Free the engine hashes stored after the rank's last block in a strand (trie part)."""
        device_rank.hashes.cut_row(strand, self._held_end(device_rank, strand))

    def cut_label(self, strand: int) -> None:
        """If no rank holds the last blocks of a strand (a part of the trie), free their memory."""
        for run in self.trie.pieces(strand)[-1:]:
            if run.partial and not run.whole and not run.children:
                self._cut(run)

    def drop_oldest(self, device_rank: DeviceRank, blocks: int) -> None:
        """Drop `blocks` blocks of a rank, from the end of its oldest strand (part of the trie)."""
        while blocks:
            strand = next(iter(device_rank.hashes.rows))
            last = self._held_end(device_rank, strand) - 1
            run, offset = self.trie.resolve(strand << POSITION_BITS | last)
            held = run.held_by(device_rank.bit)
            positions = bits_of(held & (2 << offset) - 1)[-blocks:]
            for position in positions:
                device_rank.hashes.discard(strand << POSITION_BITS | run.start + position)
            self._drop_blocks(device_rank, run, sum(1 << position for position in positions))
            blocks -= len(positions)
