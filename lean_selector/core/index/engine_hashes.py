"""Map the engine hashes of one rank's blocks to addresses, and back. An address is a u32, `strand
<< 10 | position`. A strand is a sequence of blocks without a branch (see runs.py).

Hashes are engine hashes here. A rank has a row for each strand: the blocks' hashes, with 0 for a
block that the rank does not hold. Rare cases are stored apart from the rows: aliases (further
hashes of a block), copies (a block was stored again under the same hash), and hashes that several
blocks share. Two classes find the address of a hash. `HashesInDict` is fast in plain Python;
`HashesPacked` takes a sixth of the memory, and is fast when compiled. Spec: indexer.md 3.2, 7.4.

If two blocks share a hash, the hash stands for the newer block. After the newer block is removed,
the hash stands for the older one. A block with aliases or copies exists until all its hashes and
copies are removed."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Final

from lean_selector.core.hashing import u64s
from lean_selector.core.index.runs import POSITION_BITS, POSITION_MASK
from lean_selector.core.index.sweeping import emptied

NOWHERE: Final = -1
NO_HASH: Final = bytes(8)


def is_chain(parent_hash: int | None, hashes: Sequence[int]) -> bool:
    """Whether engine hashes differ from each other and from the parent's, as those of consecutive
    blocks do."""
    if len(hashes) == 1:
        return hashes[0] != parent_hash
    distinct = set(hashes)
    return len(distinct) == len(hashes) and parent_hash not in distinct


class EngineHashes:
    """Engine hashes of one rank's blocks, and their addresses in the trie. For each strand
    (part of the trie), `rows` has the blocks' first hashes. Lists of hashes are packed into bytes,
    8 bytes per hash, little-endian. A single hash is an int."""

    def __init__(self) -> None:
        # strand -> 8 bytes per position, oldest strand first. An OrderedDict, because finding the
        # oldest key of a plain dict steps over the holes that removed keys leave.
        self.rows: OrderedDict[int, bytearray] = OrderedDict()
        # Addresses of hashes of several blocks, and of hash 0; the newest address last.
        self.listed: dict[int, list[int]] = {}
        # Further hashes of each block, oldest first; and the address of each further hash.
        self.aliases: OrderedDict[int, int] = OrderedDict()
        self.alias_at: dict[int, list[int]] = {}
        self.copies: OrderedDict[int, int] = OrderedDict()  # hash -> copies beyond the first
        self.extra = 0  # number of further hashes and copies
        self.copies_revision = 0  # how often events changed a number of copies
        # Strands with a block that lost its first hash and got a further one in its place.
        self.rehashed: list[int] = []

    def find(self, engine_hash: int) -> int:
        """Return the address in the trie of the block with this engine hash, or NOWHERE."""
        raise NotImplementedError

    def take(self, packed: bytes) -> dict[int, int]:
        """Remove engine hashes. Return blocks left without a hash: a bit mask per trie part."""
        raise NotImplementedError

    def add(self, address: int, packed: bytes) -> None:
        """Set the engine hashes of the blocks at `address` and the following positions. None of
        these blocks may have a hash yet, and no hash may occur twice in `packed`."""
        raise NotImplementedError

    def dismantled(self) -> Iterator[None]:
        """Free all memory except `rows`, in steps. The object is unusable afterwards."""
        raise NotImplementedError

    def _forget(self, engine_hash: int) -> None:
        raise NotImplementedError

    def _put(self, engine_hash: int, address: int) -> None:
        raise NotImplementedError

    def drop_hash(self, engine_hash: int, address: int) -> None:
        """Remove `engine_hash`, the first engine hash of the block at `address`, from the look-up
        table."""
        addresses = self.listed.get(engine_hash) if self.listed else None
        if addresses is None:
            self._forget(engine_hash)
            return
        addresses.remove(address)
        if not addresses:  # hash 0 stays listed even if it has only one address
            del self.listed[engine_hash]
        elif engine_hash and len(addresses) == 1:
            del self.listed[engine_hash]
            self._put(engine_hash, addresses[0])

    def dismantled_extra(self) -> Iterator[None]:
        yield from emptied(self.aliases)
        yield from emptied(self.alias_at)
        yield from emptied(self.copies)
        yield from emptied(self.listed)

    def empty(self, low: int, high: int, gone: dict[int, int]) -> None:
        """Set hashes at addresses `low` through `high`, all of one strand, to 0. Add the addresses
        to the masks in `gone`."""
        count, strand, position = high - low + 1, low >> POSITION_BITS, low & POSITION_MASK
        row = self.rows[strand]
        row[position << 3 : (position + count) << 3] = bytes(count << 3)
        gone[strand] = gone.get(strand, 0) | ((1 << count) - 1) << position

    def discard(self, address: int) -> None:
        """Remove all engine hashes of the block at `address`. The rank must hold the block."""
        start = (address & POSITION_MASK) << 3
        row = self.rows[address >> POSITION_BITS]
        engine_hash = int.from_bytes(row[start : start + 8], "little")
        row[start : start + 8] = NO_HASH
        self.drop_hash(engine_hash, address)
        if self.extra:
            self._forget_copies(engine_hash)
            for alias in self.alias_at.pop(address, ()):
                del self.aliases[alias]
                self.extra -= 1
                self._forget_copies(alias)

    def hash_at(self, address: int) -> bytes:
        """Return the first engine hash of the block at `address`. The rank must hold the block."""
        start = (address & POSITION_MASK) << 3
        return bytes(self.rows[address >> POSITION_BITS][start : start + 8])

    def alias(self, address: int, engine_hash: int) -> None:
        """Add `engine_hash` as a further engine hash of the block at `address`."""
        self.forget_alias(engine_hash)
        self.aliases[engine_hash] = address
        self.alias_at.setdefault(address, []).append(engine_hash)
        self.extra += 1

    def forget_alias(self, engine_hash: int) -> None:
        address = self.aliases.pop(engine_hash, None)
        if address is not None:
            self.extra -= 1
            self._forget_copies(engine_hash)
            hashes = self.alias_at[address]
            hashes.remove(engine_hash)
            if not hashes:
                del self.alias_at[address]

    def add_copy(self, engine_hash: int) -> None:
        """Count one more copy: the engine stored a block again under the same hash."""
        self.copies[engine_hash] = self.copies.get(engine_hash, 0) + 1
        self.extra += 1
        self.copies_revision += 1

    def take_copy(self, engine_hash: int) -> bool:
        """Decrease the count of repeated stores under this hash. Return False if it was 0."""
        copies = self.copies.get(engine_hash)
        if copies is None:
            return False
        self.extra -= 1
        self.copies_revision += 1
        if copies == 1:
            del self.copies[engine_hash]
        else:
            self.copies[engine_hash] = copies - 1
        return True

    def _forget_copies(self, engine_hash: int) -> None:
        self.extra -= self.copies.pop(engine_hash, 0)

    def stored_again(self, address: int, engine_hash: int) -> tuple[int, ...]:
        """Return the hashes under which the block at `address` was stored after the first time.
        `engine_hash` is its first one."""
        again = [engine_hash] * self.copies.get(engine_hash, 0)
        for alias in self.alias_at.get(address, ()):
            again += [alias] * (1 + self.copies.get(alias, 0))
        return tuple(again)

    def forget_extra(self, count: int) -> None:
        """Forget repeated stores, then blocks' further hashes: at least `count` records, or all."""
        least = self.extra - count
        while self.extra > least and self.copies:
            self.extra -= self.copies.popitem(last=False)[1]
        while self.extra > least and self.aliases:
            self.forget_alias(next(iter(self.aliases)))

    def has_zero(self) -> bool:
        """Whether a held block has the hash 0. If not, a 0 in `rows` means: block not held."""
        return 0 in self.listed

    def hashes_end(self, strand: int) -> int:
        """Return the position after the last nonzero hash in a strand (trie part), or 0 if none."""
        row = self.rows.get(strand)
        if row is None:
            return 0
        end, step = len(row), 8
        while end:
            start = max(0, end - step)
            if row[start:end] == bytes(end - start):
                end, step = start, step << 1
            elif step > 8:
                step = 8
            else:
                break
        return end >> 3

    def cut_row(self, strand: int, positions: int) -> None:
        """Keep only the first `positions` hashes of a trie part. No later block may be held."""
        if positions:
            del self.rows[strand][positions << 3 :]
        else:  # one event removed all blocks of the strand, so the row is already gone
            self.rows.pop(strand, None)

    def write_row(self, address: int, packed: bytes) -> None:
        """Write the hashes of the blocks at `address` and the next addresses of the trie into
        `rows`."""
        strand, start = address >> POSITION_BITS, (address & POSITION_MASK) << 3
        row = self.rows.get(strand)
        if row is None:
            row = self.rows[strand] = bytearray()
        assert len(row) >= start, "the block before, in the same strand, was held when it was named"
        if len(row) == start:
            row += packed
        else:
            row[start : start + len(packed)] = packed

    def is_told_apart(self, hashes: Sequence[int]) -> bool:
        """Whether these hashes must be removed one by one, because a block was stored repeatedly or
        has several hashes, or because several blocks have the same hash."""
        if self.aliases or self.listed:
            return True
        return bool(self.copies) and not self.copies.keys().isdisjoint(hashes)

    def take_each(self, packed: bytes) -> dict[int, int]:
        """Like `take`, but looks up each hash alone. Needed if is_told_apart() returns True."""
        gone: dict[int, int] = {}
        for at in range(0, len(packed), 8):
            engine_hash = int.from_bytes(packed[at : at + 8], "little")
            if self.copies and self.take_copy(engine_hash):
                continue
            if engine_hash in self.aliases:
                self.forget_alias(engine_hash)
                continue
            address = self.find(engine_hash)
            if address in self.alias_at:
                self._rehash(address, engine_hash)
            elif address != NOWHERE:
                self.discard(address)
                strand = address >> POSITION_BITS
                gone[strand] = gone.get(strand, 0) | 1 << (address & POSITION_MASK)
        return gone

    def _rehash(self, address: int, engine_hash: int) -> None:
        """Replace a hash in the row, at `address`, by the block's next one (its oldest alias)."""
        hashes = self.alias_at[address]
        alias = hashes.pop(0)
        if not hashes:
            del self.alias_at[address]
        del self.aliases[alias]
        self.extra -= 1
        self.drop_hash(engine_hash, address)
        self.add(address, alias.to_bytes(8, "little"))
        self.rehashed.append(address >> POSITION_BITS)


# -- a dict, for the interpreted form --------------------------------------------------------------


class HashesInDict(EngineHashes):
    """A dict maps each hash to an address. It lacks hash 0 and hashes that several blocks share."""

    def __init__(self) -> None:
        super().__init__()
        self._at: dict[int, int] = {}

    def find(self, engine_hash: int) -> int:
        if self.aliases and engine_hash in self.aliases:
            return self.aliases[engine_hash]
        if self.listed and engine_hash in self.listed:
            return self.listed[engine_hash][-1]
        return self._at.get(engine_hash, NOWHERE)

    def take(self, packed: bytes) -> dict[int, int]:
        hashes = u64s(len(packed) >> 3).unpack(packed)
        if self.is_told_apart(hashes):
            return self.take_each(packed)
        gone: dict[int, int] = {}
        low, high = 0, NOWHERE
        for address in map(self._at.pop, hashes, repeat(NOWHERE)):
            if address == NOWHERE:
                continue
            if high != NOWHERE and address == low - 1 and low & POSITION_MASK:
                low = address
            elif high != NOWHERE and address == high + 1 and address & POSITION_MASK:
                high = address
            else:
                if high != NOWHERE:
                    self.empty(low, high, gone)
                low = high = address
        if high != NOWHERE:
            self.empty(low, high, gone)
        return gone

    def add(self, address: int, packed: bytes) -> None:
        hashes: Sequence[int] = u64s(len(packed) >> 3).unpack(packed)
        for engine_hash in hashes if self.aliases else ():
            self.forget_alias(engine_hash)
        at, listed = self._at, self.listed
        if len(hashes) > 1 and not listed and 0 not in hashes and at.keys().isdisjoint(hashes):
            at.update(zip(hashes, range(address, address + len(hashes)), strict=True))
        else:
            for each, engine_hash in enumerate(hashes, address):
                if not engine_hash or engine_hash in listed:
                    listed.setdefault(engine_hash, []).append(each)
                elif engine_hash in at:
                    listed[engine_hash] = [at.pop(engine_hash), each]
                else:
                    at[engine_hash] = each
        self.write_row(address, packed)

    def _forget(self, engine_hash: int) -> None:
        del self._at[engine_hash]

    def _put(self, engine_hash: int, address: int) -> None:
        self._at[engine_hash] = address

    def dismantled(self) -> Iterator[None]:
        yield from self.dismantled_extra()
        yield from emptied(self._at)
