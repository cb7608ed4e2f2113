"""An engine's names of a rank's blocks in a packed table: for the compiled form.

Names are signed here, as the table takes them. 25 bytes per name with the rows, where dicts take
130.
"""

from collections.abc import Iterator

from librt.strings import read_i64_le
from mypy_extensions import i64

from lean_selector.core.index.engine_hashes import NOWHERE, EngineHashes
from lean_selector.core.index.hash_table import HashTable
from lean_selector.core.index.runs import POSITION_BITS, POSITION_MASK
from lean_selector.core.index.sweeping import emptied


class HashesPacked(EngineHashes):
    """All but 0 and names of several blocks are in the table."""

    __slots__ = ("_table",)

    def __init__(self, most_slots: int = 1024) -> None:
        super().__init__()
        self._table = HashTable(most_slots)

    def find(self, name: int) -> int:
        if self.aliases and name in self.aliases:
            return self.aliases[name]
        if self.listed and name in self.listed:
            return self.listed[name][-1]
        return NOWHERE if name == 0 else self._table.get(_signed(name))

    def take(self, packed: bytes) -> dict[int, int]:
        if self.aliases or self.listed:
            return self.take_each(packed)
        gone: dict[int, int] = {}
        table = self._table
        at: i64 = 0
        end: i64 = len(packed)
        low: i64 = 0  # a stretch of places
        high: i64 = -2
        while at < end:
            name: i64 = read_i64_le(packed, at)
            at += 8
            place: i64 = table.pop(name) if name != 0 else NOWHERE
            if place < 0:
                continue
            # Engines evict neighbours together, mostly from the end of a prompt.
            if place == low - 1 and high >= 0 and (low & POSITION_MASK) != 0:
                low = place
            elif place == high + 1 and high >= 0 and (place & POSITION_MASK) != 0:
                high = place
            else:
                if high >= 0:
                    self._empty(low, high, gone)
                low = high = place
        if high >= 0:
            self._empty(low, high, gone)
        return gone

    def _empty(self, low: i64, high: i64, gone: dict[int, int]) -> None:
        """Empty the row from one place to another, and note the positions."""
        count: int = high - low + 1
        strand: int = low >> POSITION_BITS
        position: int = low & POSITION_MASK
        row = self.rows[strand]
        row[position << 3 : (position + count) << 3] = bytes(count << 3)
        gone[strand] = gone.get(strand, 0) | ((1 << count) - 1) << position

    def add(self, place: int, packed: bytes) -> None:
        if self.aliases:
            for at in range(0, len(packed), 8):
                self.forget_alias(int.from_bytes(packed[at : at + 8], "little"))
        table = self._table
        first: i64 = place
        start: i64 = 0
        end: i64 = len(packed)
        is_listed = bool(self.listed)
        while start < end:
            name: i64 = read_i64_le(packed, start)
            if name == 0 or (is_listed and _unsigned(name) in self.listed):
                self.listed.setdefault(_unsigned(name), []).append(first)
            elif not table.add(name, first):
                self.listed[_unsigned(name)] = [table.pop(name), first]
                is_listed = True
            first += 1
            start += 8
        self.write_row(place, packed)

    def drop_name(self, name: int, place: int) -> None:
        places = self.listed.get(name) if self.listed else None
        if places is None:
            self._table.pop(_signed(name))
            return
        places.remove(place)
        if not places:  # only 0 is listed when it has one place
            del self.listed[name]
        elif name and len(places) == 1:
            del self.listed[name]
            self._table.add(_signed(name), places[0])

    def dismantled(self) -> Iterator[None]:
        yield from emptied(self.aliases)
        yield from emptied(self.alias_at)
        yield from emptied(self.listed)
        while self._table.let_go():
            yield


def _signed(name: int) -> int:
    return name - (1 << 64) if name >> 63 else name


def _unsigned(name: int) -> int:
    return name & ((1 << 64) - 1)
