"""Map the engine hashes of one rank's blocks to addresses, and back. An address is a u32, `strand
<< 10 | position`. A strand is a sequence of blocks without a branch (see runs.py).

An engine hash is called a name here. A rank has a row for each strand: the blocks' names, with 0
for a block that the rank does not hold. Rare cases are stored apart from the rows: aliases (further
names of a block), copies (a block was stored again under the same name), and names that several
blocks share. Two classes find the address of a name. `HashesInDicts` is fast in plain Python;
`HashesPacked` takes a fifth of the memory, and is fast when compiled. Spec: indexer.md 3.2, 7.4.

If two blocks share a name, the name stands for the newer block. After the newer block is removed,
the name stands for the older one. A block with aliases or copies exists until all its names and
copies are removed."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Final, cast

from lean_selector.core.hashing import u64s
from lean_selector.core.index.runs import POSITION_BITS, POSITION_MASK, common_prefix
from lean_selector.core.index.sweeping import emptied

NOWHERE: Final = -1
NO_NAME: Final = bytes(8)


class EngineHashes:
    """Engine hashes (names) of one rank's blocks, and their addresses in the trie. For each strand
    (part of the trie), `rows` has the blocks' first names. Lists of names are packed into bytes,
    8 bytes per name, little-endian. A single name is an int."""

    __slots__ = (
        "alias_at",
        "aliases",
        "copies",
        "copies_revision",
        "extra",
        "listed",
        "renamed",
        "rows",
    )

    def __init__(self) -> None:
        # strand -> 8 bytes per position, oldest strand first. An OrderedDict, because finding the
        # oldest key of a plain dict steps over the holes that removed keys leave.
        self.rows: OrderedDict[int, bytearray] = OrderedDict()
        # Addresses of names of several blocks, and of name 0; the newest address last.
        self.listed: dict[int, list[int]] = {}
        # Further names of each block, oldest first; and the address of each further name.
        self.aliases: OrderedDict[int, int] = OrderedDict()
        self.alias_at: dict[int, list[int]] = {}
        self.copies: OrderedDict[int, int] = OrderedDict()  # name -> copies beyond the first
        self.extra = 0  # number of further names and copies
        self.copies_revision = 0  # how often events changed a number of copies
        # Strands with a block that lost its first name and got a further name in its place.
        self.renamed: list[int] = []

    def find(self, name: int) -> int:
        """Return the address in the trie of the block with the engine hash `name`, or NOWHERE."""
        raise NotImplementedError

    def take(self, packed: bytes) -> dict[int, int]:
        """Remove engine hashes. Return blocks left without a hash: a bit mask per trie part."""
        raise NotImplementedError

    def add(self, address: int, packed: bytes) -> None:
        """Set the engine hashes of the blocks at `address` and the following positions. None of
        these blocks may have a hash yet, and no hash may occur twice in `packed`."""
        raise NotImplementedError

    def drop_name(self, name: int, address: int) -> None:
        """Remove `name`, the first engine hash of the block at `address`, from the look-up
        table."""
        raise NotImplementedError

    def dismantled(self) -> Iterator[None]:
        """Free all memory except `rows`, in steps. The object is unusable afterwards."""
        raise NotImplementedError

    def discard(self, address: int) -> None:
        """Remove all engine hashes of the block at `address`. The rank must hold the block."""
        start = (address & POSITION_MASK) << 3
        row = self.rows[address >> POSITION_BITS]
        name = int.from_bytes(row[start : start + 8], "little")
        row[start : start + 8] = NO_NAME
        self.drop_name(name, address)
        if self.extra:
            self._forget_copies(name)
            for alias in self.alias_at.pop(address, ()):
                del self.aliases[alias]
                self.extra -= 1
                self._forget_copies(alias)

    def name_at(self, address: int) -> bytes:
        """Return the first engine hash of the block at `address`. The rank must hold the block."""
        start = (address & POSITION_MASK) << 3
        return bytes(self.rows[address >> POSITION_BITS][start : start + 8])

    def alias(self, address: int, name: int) -> None:
        """Add `name` as a further engine hash of the block at `address`."""
        self.forget_alias(name)
        self.aliases[name] = address
        self.alias_at.setdefault(address, []).append(name)
        self.extra += 1

    def forget_alias(self, name: int) -> None:
        address = self.aliases.pop(name, None)
        if address is not None:
            self.extra -= 1
            self._forget_copies(name)
            names = self.alias_at[address]
            names.remove(name)
            if not names:
                del self.alias_at[address]

    def add_copy(self, name: int) -> None:
        """Count one more copy: the engine stored a block again under the same hash."""
        self.copies[name] = self.copies.get(name, 0) + 1
        self.extra += 1
        self.copies_revision += 1

    def take_copy(self, name: int) -> bool:
        """Decrease the count of repeated stores under this hash. Return False if it was 0."""
        copies = self.copies.get(name)
        if copies is None:
            return False
        self.extra -= 1
        self.copies_revision += 1
        if copies == 1:
            del self.copies[name]
        else:
            self.copies[name] = copies - 1
        return True

    def _forget_copies(self, name: int) -> None:
        self.extra -= self.copies.pop(name, 0)

    def stored_again(self, address: int, name: int) -> tuple[int, ...]:
        """Return the hashes under which the block at `address`, whose first hash is `name`, was
        stored after the first time."""
        again = [name] * self.copies.get(name, 0)
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

    def has_unnamed(self) -> bool:
        """Whether a held block has the hash 0. If not, a 0 in `rows` means: block not held."""
        return 0 in self.listed

    def named_end(self, strand: int) -> int:
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

    def is_told_apart(self, names: Sequence[int]) -> bool:
        """Whether these hashes must be removed one by one, because a block was stored repeatedly or
        has several hashes, or because several blocks have the same hash."""
        if self.aliases or self.listed:
            return True
        return bool(self.copies) and not self.copies.keys().isdisjoint(names)

    def take_each(self, packed: bytes) -> dict[int, int]:
        """Like `take`, but looks up each hash alone. Needed if is_told_apart() returns True."""
        gone: dict[int, int] = {}
        for at in range(0, len(packed), 8):
            name = int.from_bytes(packed[at : at + 8], "little")
            if self.copies and self.take_copy(name):
                continue
            if name in self.aliases:
                self.forget_alias(name)
                continue
            address = self.find(name)
            if address in self.alias_at:
                self._rename(address, name)
            elif address != NOWHERE:
                self.discard(address)
                strand = address >> POSITION_BITS
                gone[strand] = gone.get(strand, 0) | 1 << (address & POSITION_MASK)
        return gone

    def _rename(self, address: int, name: int) -> None:
        """Replace `name` in the row, at `address`, by the block's next hash (its oldest alias)."""
        names = self.alias_at[address]
        alias = names.pop(0)
        if not names:
            del self.alias_at[address]
        del self.aliases[alias]
        self.extra -= 1
        self.drop_name(name, address)
        self.add(address, alias.to_bytes(8, "little"))
        self.renamed.append(address >> POSITION_BITS)


# -- dicts, for the interpreted form ---------------------------------------------------------------
# Dicts that map an engine hash to the segment of a row: for the interpreted form.

# To grow a dict of 40 000 entries takes 1 ms, of 100 000 takes 3, of 1 000 000 takes 50 (measured).
# So a rank's first dict holds at most this many blocks. Further blocks go to other dicts, whose
# number is a power of 2. The hash chooses the dict, which costs 0.1 us more per block.
_FRONT_BLOCKS = 40_000
_SHARDS = 32
# The dicts map to a segment of a row, not to an address. So all blocks of a segment share one int,
# and to find a hash among the segment's 64 takes 0.1 us.
_SEGMENT_BITS = 6
_STRAND_SHIFT = POSITION_BITS - _SEGMENT_BITS
_SEGMENT_MASK = (1 << _STRAND_SHIFT) - 1
_SEGMENT_BYTES = 8 << _SEGMENT_BITS
_RECENT_SEGMENTS = 256  # cached ints, shared by events that fill a segment one block at a time
_LISTED = -1  # dict value of a name whose addresses are in `listed`


class HashesInDicts(EngineHashes):
    """Dicts map each hash to a group of 64 blocks, which is then searched. Fast in plain Python."""

    __slots__ = ("_front", "_recent", "_shards")

    def __init__(self) -> None:
        super().__init__()
        # Rows use 0 for "not held", so name 0 is always listed.
        self._front: dict[int, int] = {0: _LISTED}
        self._shards: list[dict[int, int]] = []  # empty until the first dict is full
        self._recent: dict[int, int] = {}  # segment -> the int object for it

    def find(self, name: int) -> int:
        if self.aliases and name in self.aliases:
            return self.aliases[name]
        segment = self._front.get(name)
        if segment is None:
            if self._shards:
                segment = self._shards[name & (_SHARDS - 1)].get(name)
            if segment is None:
                return NOWHERE
        if segment == _LISTED:
            addresses = self.listed.get(name)
            return addresses[-1] if addresses else NOWHERE
        eight = name.to_bytes(8, "little")
        strand = segment >> _STRAND_SHIFT
        row = self.rows[strand]
        if row.endswith(eight):  # usually: the last block is the next one's parent
            return strand << POSITION_BITS | (len(row) >> 3) - 1
        return self._locate(eight, segment)

    def _dict_of(self, name: int) -> dict[int, int] | None:
        if name not in self._front and self._shards:
            shard = self._shards[name & (_SHARDS - 1)]
            return shard if name in shard else None
        return self._front if name in self._front else None

    def _locate(self, name: bytes, segment: int) -> int:
        strand = segment >> _STRAND_SHIFT
        row = self.rows[strand]
        start = (segment & _SEGMENT_MASK) * _SEGMENT_BYTES
        at = row.find(name, start, start + _SEGMENT_BYTES)
        while at & 7:
            at = row.find(name, at + 1, start + _SEGMENT_BYTES)
        assert at >= start, "a name in a dict has its entry in the row"
        return strand << POSITION_BITS | at >> 3

    def take(self, packed: bytes) -> dict[int, int]:
        names = u64s(len(packed) >> 3).unpack(packed)
        if self.is_told_apart(names):
            return self.take_each(packed)
        gone: dict[int, int] = {}
        front, shards, mask = self._front, self._shards, _SHARDS - 1
        if len(names) == 1:  # usual for an engine that evicts a block per decoded block
            holder = self._dict_of(names[0])
            if holder is not None and names[0]:
                address = self._locate(packed, holder.pop(names[0]))
                strand, start = address >> POSITION_BITS, (address & POSITION_MASK) << 3
                self.rows[strand][start : start + 8] = NO_NAME
                gone[strand] = 1 << (address & POSITION_MASK)
            return gone
        segments = list(map(front.pop, names, repeat(None)))
        if shards:
            pairs = zip(names, segments, strict=True)
            segments = [
                shards[name & mask].pop(name, None) if segment is None else segment
                for name, segment in pairs
            ]
        if 0 not in front:  # 0 was among the names, but no block has it
            front[0] = _LISTED
            segments = [None if segment == _LISTED else segment for segment in segments]
        if not all(segments):  # segment 0 is known, but false
            pairs = zip(names, segments, strict=True)
            known = [(name, segment) for name, segment in pairs if segment is not None]
            names = tuple(name for name, _ in known)
            segments = [segment for _, segment in known]
        if names:
            self._empty_rows(names, cast("list[int]", segments), gone)
        return gone

    def _empty_rows(self, names: Sequence[int], segments: list[int], gone: dict[int, int]) -> None:
        """Set `names` to 0 in `rows`. Add their positions to the bit masks in `gone` (by strand).
        `segments`: per name, the number of its group of 64 row entries. Fast if blocks adjoin."""
        count = len(names)
        address = self._locate(names[0].to_bytes(8, "little"), segments[0])
        before = address & POSITION_MASK and count > 1
        if before and names[1] == int.from_bytes(self.name_at(address - 1), "little"):
            names = names[::-1]
            segments.reverse()
        packed = u64s(count).pack(*names)
        at = 0
        while at < count:
            address = self._locate(packed[at << 3 : (at + 1) << 3], segments[at])
            strand, position = address >> POSITION_BITS, address & POSITION_MASK
            row = self.rows[strand]
            same = common_prefix(row, position << 3, packed, at << 3)
            row[position << 3 : (position << 3) + same] = bytes(same)
            gone[strand] = gone.get(strand, 0) | (1 << (same >> 3)) - 1 << position
            at += same >> 3

    def drop_name(self, name: int, address: int) -> None:
        holder = self._dict_of(name)
        assert holder is not None
        if holder[name] != _LISTED:
            del holder[name]
            return
        addresses = self.listed[name]
        addresses.remove(address)
        if not addresses:  # name 0 stays listed even if it has only one address
            del self.listed[name]
        elif name and len(addresses) == 1:
            holder[name] = addresses[0] >> _SEGMENT_BITS
            del self.listed[name]

    def add(self, address: int, packed: bytes) -> None:
        names: Sequence[int] = u64s(len(packed) >> 3).unpack(packed)
        if self.aliases:
            for name in names:
                self.forget_alias(name)
        front, shards, mask, recent = self._front, self._shards, _SHARDS - 1, self._recent
        first, end = address, address + len(names)
        while first < end:
            segment = first >> _SEGMENT_BITS
            segment = recent.setdefault(segment, segment)
            last = (segment + 1) << _SEGMENT_BITS
            is_all = first == address and end <= last
            here = names if is_all else names[first - address : last - address]
            if not shards and front.keys().isdisjoint(here):
                for name in here:
                    front[name] = segment
                first = last
                continue
            for name in here:
                holder = shards[name & mask] if shards else front
                if name in front or name in holder:
                    self._add_another(name, address + names.index(name))
                else:
                    holder[name] = segment
            first = last
        if len(recent) > _RECENT_SEGMENTS:
            recent.clear()
        if not shards and len(front) > _FRONT_BLOCKS:
            self._shards = [{} for _ in range(_SHARDS)]
        # Add names last, because a name that is already in a row would be found there instead.
        self.write_row(address, packed)

    def _add_another(self, name: int, address: int) -> None:
        holder = self._dict_of(name)
        assert holder is not None
        if holder[name] != _LISTED:
            self.listed[name] = [self._locate(name.to_bytes(8, "little"), holder[name])]
            holder[name] = _LISTED
        self.listed.setdefault(name, []).append(address)

    def dismantled(self) -> Iterator[None]:
        for holder in (self._front, *self._shards, self.aliases, self.copies):
            yield from emptied(holder)
        yield from emptied(self.alias_at)
        yield from emptied(self.listed)
