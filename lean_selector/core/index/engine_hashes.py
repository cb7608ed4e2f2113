"""The engine's names of the blocks that one rank holds: engine hash -> place, and back.

A place is a u32, `strand << 10 | position` (see runs.py). Owns, per rank, the hashes in place order
(one row of bytes per strand, 0 where nothing is held), and what is rare: second names, and names
of several blocks. How a name leads to its place is known to the two classes that complete this one:
`hashes_in_dicts.py`, which is quick as plain Python, and `hashes_packed.py`, which takes a fifth of
the memory and is quick when compiled. Knows nothing of tokens, tiers or other ranks. Spec:
indexer.md sections 3.2 and 7.4.

A hash that stands for two blocks names the newer one, and the older one again after that is
removed; such hashes have lists of places.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from lean_selector.core.index.runs import POSITION_BITS, POSITION_MASK

NOWHERE: Final = -1
NO_NAME: Final = bytes(8)


class EngineHashes:
    """Names and places of one rank's blocks. A name that is not 0 stands in a row where it is held,
    and nowhere else. Lists of names are bytes, 8 each, little-endian; one name is an int."""

    __slots__ = ("alias_at", "aliases", "listed", "rows")

    def __init__(self) -> None:
        # strand -> 8 bytes per position, oldest strand first. A plain dict would step over all that
        # left before it, each time the oldest is asked for.
        self.rows: OrderedDict[int, bytearray] = OrderedDict()
        self.listed: dict[int, list[int]] = {}  # names of several blocks, and 0; newest place last
        # A second name for a block that has one. At most one per block: the newest.
        self.aliases: dict[int, int] = {}
        self.alias_at: dict[int, int] = {}

    def find(self, name: int) -> int:
        """The place that `name` stands for, or NOWHERE."""
        raise NotImplementedError

    def take(self, packed: bytes) -> dict[int, int]:
        """Forget the blocks that these names stand for.

        Returns strand -> the positions (a bit mask) of those known.
        """
        raise NotImplementedError

    def add(self, place: int, packed: bytes) -> None:
        """Name the blocks at `place` and the following positions, none of which has a name.

        The names differ.
        """
        raise NotImplementedError

    def drop_name(self, name: int, place: int) -> None:
        """Let `name` no longer stand for the block at `place`, which it was the first name of."""
        raise NotImplementedError

    def dismantled(self) -> Iterator[None]:
        """Gives the memory back step by step, but for the rows; of no use afterwards."""
        raise NotImplementedError

    def discard(self, place: int) -> None:
        """Forget the names of the block at `place`; it must have one."""
        start = (place & POSITION_MASK) << 3
        row = self.rows[place >> POSITION_BITS]
        name = int.from_bytes(row[start : start + 8], "little")
        row[start : start + 8] = NO_NAME
        self.drop_name(name, place)
        if self.alias_at and (alias := self.alias_at.pop(place, None)) is not None:
            del self.aliases[alias]

    def name_at(self, place: int) -> bytes:
        """The first name of the block at `place`, which is held."""
        start = (place & POSITION_MASK) << 3
        return bytes(self.rows[place >> POSITION_BITS][start : start + 8])

    def alias(self, place: int, name: int) -> None:
        """Let `name` stand for the block at `place` too, in the stead of an earlier second name."""
        self.forget_alias(name)
        earlier = self.alias_at.get(place)
        if earlier is not None:
            del self.aliases[earlier]
        self.aliases[name] = place
        self.alias_at[place] = name

    def forget_alias(self, name: int) -> None:
        place = self.aliases.pop(name, None)
        if place is not None:
            del self.alias_at[place]

    def has_unnamed(self) -> bool:
        """Whether a block is named 0, which a row cannot tell from none."""
        return 0 in self.listed

    def named_end(self, strand: int) -> int:
        """Positions of a row up to the last that has a name other than 0; 0 without a row."""
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
        """Give back the memory of the positions from `positions` on; none of them is held."""
        if positions:
            del self.rows[strand][positions << 3 :]
        else:  # gone already where one event took all of a strand's blocks, run by run
            self.rows.pop(strand, None)

    def write_row(self, place: int, packed: bytes) -> None:
        """Write names into the row of a strand, at its end or into a hole."""
        strand, start = place >> POSITION_BITS, (place & POSITION_MASK) << 3
        row = self.rows.get(strand)
        if row is None:
            row = self.rows[strand] = bytearray()
        assert len(row) >= start, "the block before, in the same strand, was held when it was named"
        if len(row) == start:
            row += packed
        else:
            row[start : start + len(packed)] = packed

    def take_each(self, packed: bytes) -> dict[int, int]:
        """`take` where some names are second ones, or stand for several blocks."""
        gone: dict[int, int] = {}
        for at in range(0, len(packed), 8):
            place = self.find(int.from_bytes(packed[at : at + 8], "little"))
            if place != NOWHERE:
                self.discard(place)
                strand = place >> POSITION_BITS
                gone[strand] = gone.get(strand, 0) | 1 << (place & POSITION_MASK)
        return gone
