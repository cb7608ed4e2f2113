"""The engine's names of the blocks that one rank holds: engine hash -> place, and back.

A place is a u32, `strand << 10 | position` (see runs.py). Owns, per rank, the hashes in place
order (one row of bytes per strand) and a hash table over them. Both are bytes: 16 bytes per block
instead of the 110 of a dict of integers, nothing for the collector to visit, and growth in small
steps. Knows nothing of tokens, tiers or other ranks. Spec: indexer.md sections 3.2 and 7.4.

The table is a multimap, newest first: an engine that uses one hash for two blocks has the hash
name the newer one, and the older one again after that is removed. Hashes are taken to differ in
their low 32 bits, as digests and counters do; if they do not, all stays right but is slow.
"""

from array import array
from struct import Struct

POSITION_BITS = 10  # positions in a strand; 22 bits are left for strands (see runs.py)
POSITION_MASK = (1 << POSITION_BITS) - 1
NOWHERE = -1

# A bucket is a bytearray of 8-byte entries: the low half of the hash, then the place. At this size
# on average, each splits into four. Searching 128 takes 0.2-0.3 us; adding to fewer, larger buckets
# is what the caches like (0.37 us per block against 0.45 with 64; measured).
_ENTRIES_PER_BUCKET = 128
_SPLIT = 4
_PLACE = Struct("=I")
_CUT = [Struct("8s" * count) for count in range(65)]  # n entries in one call: a third of the time


class EngineHashes:
    """Names and places of one rank's blocks. Every place in the table has its hash in the row."""

    __slots__ = (
        "_alias_at",
        "_aliases",
        "_count",
        "_directory",
        "_select",
        "_unsplit",
        "_width",
        "rows",
    )

    def __init__(self) -> None:
        self.rows: dict[int, bytearray] = {}  # strand -> 8 bytes per position, oldest strand first
        # directory[byte 0 of the hash][byte 1 % width] is a bucket; one for all until it is full.
        self._directory: list[list[bytearray]] = [[bytearray()]] * 256
        self._width = 0  # a power of 4; 0 while there is one bucket
        self._select = bytes(256)  # byte 1 of a hash -> index in a directory line
        self._unsplit = 0  # directory lines still to be split after the last growth
        self._count = 0
        # A second name for a block that has one. At most one per block: the newest.
        self._aliases: dict[bytes, int] = {}
        self._alias_at: dict[int, bytes] = {}

    def find(self, name: bytes) -> int:
        """The place that `name` (8 bytes) stands for, or NOWHERE."""
        if self._aliases and name in self._aliases:
            return self._aliases[name]
        tag, bucket = name[:4], self._directory[name[0]][self._select[name[1]]]
        at = bucket.rfind(tag)
        while at >= 0:
            if not at & 7:
                place: int = _PLACE.unpack_from(bucket, at + 4)[0]
                start = (place & POSITION_MASK) << 3
                if self.rows[place >> POSITION_BITS].startswith(name, start):
                    return place
            at = bucket.rfind(tag, 0, at + 3)
        return NOWHERE

    def take(self, names: list[bytes]) -> list[int]:
        """Forget the blocks that these names stand for; returns the places of those known."""
        places = []
        if self._aliases:
            for name in names:
                if (place := self.find(name)) != NOWHERE:
                    self.discard(place)
                    places.append(place)
            return places
        directory, select, rows, place_at = self._directory, self._select, self.rows, _PLACE
        for name in names:
            tag, bucket = name[:4], directory[name[0]][select[name[1]]]
            at = bucket.rfind(tag)
            while at >= 0:
                # The loop of find again: a call per block costs a fifth of the removal.
                if not at & 7:
                    place = place_at.unpack_from(bucket, at + 4)[0]
                    start = (place & POSITION_MASK) << 3
                    if rows[place >> POSITION_BITS].startswith(name, start):
                        del bucket[at : at + 8]  # keeps the order: newest last
                        places.append(place)
                        break
                at = bucket.rfind(tag, 0, at + 3)
        self._count -= len(places)
        return places

    def discard(self, place: int) -> None:
        """Forget the names of the block at `place`; it must have one."""
        start = (place & POSITION_MASK) << 3
        tag = self.rows[place >> POSITION_BITS][start : start + 4]
        bucket = self._directory[tag[0]][self._select[tag[1]]]
        entry = tag + _PLACE.pack(place)
        at = bucket.rfind(entry)
        while at > 0 and at & 7:
            at = bucket.rfind(entry, 0, at + 7)
        assert at >= 0, "a place in a row has its entry in the table"
        del bucket[at : at + 8]
        self._count -= 1
        if self._alias_at and (alias := self._alias_at.pop(place, None)):
            del self._aliases[alias]

    def name_at(self, place: int) -> bytes:
        """The first name of the block at `place`, which is held."""
        start = (place & POSITION_MASK) << 3
        return bytes(self.rows[place >> POSITION_BITS][start : start + 8])

    def add(self, place: int, names: bytes) -> None:
        """Name the blocks at `place` and the following positions, none of which has a name."""
        strand, start = place >> POSITION_BITS, (place & POSITION_MASK) << 3
        row = self.rows.get(strand)
        if row is None:
            row = self.rows[strand] = bytearray()
        assert len(row) >= start, "the block before, in the same strand, was held when it was named"
        row[start : start + len(names)] = names
        if self._aliases:
            for at in range(0, len(names), 8):
                self._forget_alias(names[at : at + 8])
        count = len(names) >> 3
        if count == 1:
            entry = names[:4] + _PLACE.pack(place)
            self._directory[entry[0]][self._select[entry[1]]] += entry
        else:
            entries = array("I", names)
            entries[1::2] = array("I", range(place, place + count))
            self._insert(entries.tobytes())
        self._count += count
        if self._unsplit:
            self._split_line()
        elif self._count > _ENTRIES_PER_BUCKET * (self._width * 256 or 1) and self._width < 256:
            self._grow()

    def alias(self, place: int, name: bytes) -> None:
        """Let `name` stand for the block at `place` too, in the stead of an earlier second name."""
        self._forget_alias(name)
        if earlier := self._alias_at.get(place):
            del self._aliases[earlier]
        self._aliases[name] = place
        self._alias_at[place] = name

    def cut_row(self, strand: int, positions: int) -> None:
        """Give back the memory of the positions from `positions` on; none of them is held."""
        if positions:
            del self.rows[strand][positions << 3 :]
        else:
            del self.rows[strand]

    def _forget_alias(self, name: bytes) -> None:
        place = self._aliases.pop(name, None)
        if place is not None:
            del self._alias_at[place]

    def _insert(self, entries: bytes) -> None:
        directory, columns = self._directory, entries[1::8].translate(self._select)
        for line, column, entry in zip(entries[::8], columns, cut(entries), strict=True):
            directory[line][column] += entry

    def _grow(self) -> None:
        """Widen the directory. A line's new places are the old buckets again until it is split."""
        if not self._width:
            entries = bytes(self._directory[0][0])
            self._directory = [[bytearray()] for _ in range(256)]
            self._width = 1
            self._insert(entries)
            return
        for line in self._directory:
            line *= _SPLIT
        self._width *= _SPLIT
        self._select = bytes(index % self._width for index in range(256))
        self._unsplit = 256

    def _split_line(self) -> None:
        # One line of 256 per call, so that no call meets the whole table.
        self._unsplit -= 1
        line = self._directory[self._unsplit]
        old = line[: self._width // _SPLIT]
        line[:] = [bytearray() for _ in line]
        for bucket in old:
            self._insert(bytes(bucket))


def cut(names: bytes) -> list[bytes]:
    """Hashes, 8 bytes each, one by one."""
    size, pieces = _CUT[-1].size, list[bytes]()
    for start in range(0, len(names), size):
        chunk = names[start : start + size]
        pieces += _CUT[len(chunk) >> 3].unpack(chunk)
    return pieces
