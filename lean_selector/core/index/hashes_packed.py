"""Engine hashes of a rank's blocks in a packed hash table. For the compiled form only."""

from collections.abc import Iterator
from typing import Final

from librt.strings import read_i64_le
from librt.vecs import vec
from mypy_extensions import i32, i64

from lean_selector.core.hashing import u64s
from lean_selector.core.index.engine_hashes import NOWHERE, EngineHashes
from lean_selector.core.index.runs import POSITION_MASK

# -- the hash table --------------------------------------------------------------------------------
# A hash table from 64-bit hashes to u32 values, 20 bytes per entry: for the compiled form.
#
# Open addressing, in segments of 12 KiB. The low bits of a mixed hash choose the segment
# (extendible hashing). A full segment is split in two, so the table grows by 20 us at a time,
# however large it is. Like a dict, it does not shrink: a cache that was full is full again.
# A look-up takes 20 ns compiled, and 2 us interpreted.

ABSENT: Final[i64] = -1
# Not larger: mypyc would make a constant of 63 bits an object, and convert it at each use.
_POSITIVE: Final[i64] = 0x3FFFFFFFFFFFFFFF
_MIX: Final[i64] = 0x1E3779B97F4A7C15
_HALF_U32: Final[i64] = 1 << 31  # subtracted from values, which are stored as i32
_FIRST_SLOTS: Final[i64] = 16
_MOST_SLOTS: Final[i64] = 1024
# 2^16 segments hold 50 million well-spread hashes. If too many hashes agree in the bits that choose
# a segment, their segments get larger.
_MOST_BITS: Final[i64] = 16


def mixed(engine_hash: i64) -> i64:
    """Mix the bits of a hash. Return a number from 0 to 2^62 - 1."""
    product: i64 = ((engine_hash ^ (engine_hash >> 32)) * _MIX) & _POSITIVE
    return (product ^ (product >> 32)) & _POSITIVE


class _Segment:
    """Part of a hash table: the hashes whose mixed values have the same low `bits` bits."""

    def __init__(self, slots: i64, bits: i64) -> None:
        self.hashes = vec[i64]([0] * slots)
        self.values = vec[i32]([0] * slots)
        self.used: i64 = 0
        self.bits = bits

    def slot_of(self, engine_hash: i64, hashed: i64) -> i64:
        """Return the slot of a hash. If the hash is absent, return ~slot for a free slot."""
        hashes = self.hashes
        mask: i64 = i64(len(hashes)) - 1
        at: i64 = (hashed >> 20) & mask
        found: i64 = hashes[at]
        while found != engine_hash:
            if found == 0:
                return ~at
            at = (at + 1) & mask
            found = hashes[at]
        return at

    def put(self, at: i64, engine_hash: i64, value: i32) -> None:
        """Write a hash and its value into a free slot."""
        self.hashes[at] = engine_hash
        self.values[at] = value
        self.used += 1

    def free(self, hole: i64) -> None:
        """Empty a slot, and close the gap that this leaves in the probe sequence."""
        hashes, values = self.hashes, self.values
        mask: i64 = i64(len(hashes)) - 1
        at: i64 = (hole + 1) & mask
        engine_hash: i64 = hashes[at]
        while engine_hash != 0:
            home: i64 = (mixed(engine_hash) >> 20) & mask
            if ((at - home) & mask) >= ((at - hole) & mask):
                self.hashes[hole] = engine_hash
                self.values[hole] = values[at]
                hole = at
            at = (at + 1) & mask
            engine_hash = hashes[at]
        self.hashes[hole] = 0
        self.used -= 1


class HashTable:
    """A map from distinct signed 64-bit hashes other than 0 to u32 values."""

    def __init__(self, most_slots: i64 = _MOST_SLOTS) -> None:
        """`most_slots` (a power of two, at least 4) limits the slots of a segment of the table."""
        self._most_slots = most_slots
        self._bits: i64 = 0  # how many low bits of a mixed hash choose among `_segments`
        first: i64 = _FIRST_SLOTS if most_slots > _FIRST_SLOTS else most_slots
        self._segments: list[_Segment] = [_Segment(first, 0)]

    def get(self, engine_hash: i64) -> i64:
        """Return the value of a hash, or ABSENT."""
        hashed: i64 = mixed(engine_hash)
        segment = self._segments[hashed & ((1 << self._bits) - 1)]
        at: i64 = segment.slot_of(engine_hash, hashed)
        return ABSENT if at < 0 else i64(segment.values[at]) + _HALF_U32

    def add(self, engine_hash: i64, value: i64) -> bool:
        """Map a hash to a value. Return False, and do nothing, if the hash is in the table."""
        hashed: i64 = mixed(engine_hash)
        index: i64 = hashed & ((1 << self._bits) - 1)
        segment = self._segments[index]
        at: i64 = segment.slot_of(engine_hash, hashed)
        if at >= 0:
            return False
        while (segment.used + 1) * 5 > i64(len(segment.hashes)) * 4:
            self._grow(index)
            index = hashed & ((1 << self._bits) - 1)
            segment = self._segments[index]
            at = segment.slot_of(engine_hash, hashed)
        segment.put(~at, engine_hash, i32(value - _HALF_U32))
        return True

    def pop(self, engine_hash: i64) -> i64:
        """Remove a hash. Return the value of the hash, or ABSENT."""
        hashed: i64 = mixed(engine_hash)
        segment = self._segments[hashed & ((1 << self._bits) - 1)]
        at: i64 = segment.slot_of(engine_hash, hashed)
        if at < 0:
            return ABSENT
        value: i64 = i64(segment.values[at]) + _HALF_U32
        segment.free(at)
        return value

    def let_go(self) -> bool:
        """Free one segment. Return False if none is left. The table is unusable afterwards."""
        if self._segments:
            self._segments.pop()
        return len(self._segments) > 0

    def _grow(self, index: i64) -> None:
        segment = self._segments[index]
        slots: i64 = i64(len(segment.hashes))
        if slots < self._most_slots or segment.bits >= _MOST_BITS:
            larger = _Segment(slots * 2, segment.bits)
            _move(segment, larger, larger)
            self._place(larger, index)
            return
        if segment.bits == self._bits:
            self._segments = self._segments + self._segments
            self._bits += 1
        low = _Segment(slots, segment.bits + 1)
        high = _Segment(slots, segment.bits + 1)
        _move(segment, low, high)
        half: i64 = 1 << segment.bits
        self._place(low, index & (half - 1))
        self._place(high, (index & (half - 1)) | half)

    def _place(self, segment: _Segment, index: i64) -> None:
        """Set `_segments[i]` to `segment` for all i with the low `segment.bits` bits of `index`."""
        step: i64 = 1 << segment.bits
        at: i64 = index & (step - 1)
        end: i64 = 1 << self._bits
        while at < end:
            self._segments[at] = segment
            at += step


def _move(segment: _Segment, low: _Segment, high: _Segment) -> None:
    """Distribute all entries of a segment to two segments, by the next bit of each mixed hash."""
    hashes = segment.hashes
    at: i64 = 0
    end: i64 = i64(len(hashes))
    while at < end:
        engine_hash: i64 = hashes[at]
        if engine_hash != 0:
            hashed: i64 = mixed(engine_hash)
            into = high if (hashed >> segment.bits) & 1 else low
            into.put(~into.slot_of(engine_hash, hashed), engine_hash, segment.values[at])
        at += 1


# -- a rank's engine hashes ------------------------------------------------------------------------
# A rank's engine hashes in a packed table: for the compiled form.
#
# Hashes are signed here, as in the table. One takes 25 bytes with its row, against 130 bytes with
# dicts.


class HashesPacked(EngineHashes):
    """Finds addresses by a hash table. The table lacks hash 0 and hashes that several blocks
    share."""

    def __init__(self, most_slots: int = 1024) -> None:
        super().__init__()
        self._table = HashTable(most_slots)

    def find(self, engine_hash: int) -> int:
        if self.aliases and engine_hash in self.aliases:
            return self.aliases[engine_hash]
        if self.listed and engine_hash in self.listed:
            return self.listed[engine_hash][-1]
        return NOWHERE if engine_hash == 0 else self._table.get(_signed(engine_hash))

    def take(self, packed: bytes) -> dict[int, int]:
        if (self.extra or self.listed) and self.is_told_apart(
            u64s(len(packed) >> 3).unpack(packed)
        ):
            return self.take_each(packed)
        gone: dict[int, int] = {}
        table = self._table
        at: i64 = 0
        end: i64 = len(packed)
        low: i64 = 0  # where a stretch of consecutive addresses begins
        high: i64 = -2
        while at < end:
            engine_hash: i64 = read_i64_le(packed, at)
            at += 8
            address: i64 = table.pop(engine_hash) if engine_hash != 0 else NOWHERE
            if address < 0:
                continue
            # Engines evict neighbours together, mostly at the end of a prompt.
            if address == low - 1 and high >= 0 and (low & POSITION_MASK) != 0:
                low = address
            elif address == high + 1 and high >= 0 and (address & POSITION_MASK) != 0:
                high = address
            else:
                if high >= 0:
                    self.empty(low, high, gone)
                low = high = address
        if high >= 0:
            self.empty(low, high, gone)
        return gone

    def add(self, address: int, packed: bytes) -> None:
        if self.aliases:
            for at in range(0, len(packed), 8):
                self.forget_alias(int.from_bytes(packed[at : at + 8], "little"))
        table = self._table
        first: i64 = address
        start: i64 = 0
        end: i64 = len(packed)
        is_listed = bool(self.listed)
        while start < end:
            engine_hash: i64 = read_i64_le(packed, start)
            if engine_hash == 0 or (is_listed and _unsigned(engine_hash) in self.listed):
                self.listed.setdefault(_unsigned(engine_hash), []).append(first)
            elif not table.add(engine_hash, first):
                self.listed[_unsigned(engine_hash)] = [table.pop(engine_hash), first]
                is_listed = True
            first += 1
            start += 8
        self.write_row(address, packed)

    def _forget(self, engine_hash: int) -> None:
        self._table.pop(_signed(engine_hash))

    def _put(self, engine_hash: int, address: int) -> None:
        self._table.add(_signed(engine_hash), address)

    def dismantled(self) -> Iterator[None]:
        yield from self.dismantled_extra()
        while self._table.let_go():
            yield


def _signed(engine_hash: int) -> int:
    return engine_hash - (1 << 64) if engine_hash >> 63 else engine_hash


def _unsigned(engine_hash: int) -> int:
    return engine_hash & ((1 << 64) - 1)
