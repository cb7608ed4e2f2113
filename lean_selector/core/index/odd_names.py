"""Which ranks may call blocks of a strand otherwise than the other ranks that hold them.

Engines that hash alike do not: then what one of them calls a block all do, and a match that asks
for the names of many ranks asks one. Spec: indexer.md section 3.2.
"""

from lean_selector.core.index.device_ranks import DeviceRank, DeviceRanks
from lean_selector.core.index.runs import POSITION_BITS, POSITION_MASK, Run
from lean_selector.core.rank_bits import bits_of

_MAX_COMPARED = 8  # ranks that are looked at for one to compare names with
_MAX_PARTS = 64  # the same for holders of a part of a run


class OddNames:
    """strand -> the odd ranks. Of all others any two call each block that both hold the same."""

    __slots__ = ("_odd", "_ranks")

    def __init__(self, ranks: DeviceRanks) -> None:
        self._ranks = ranks
        self._odd: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._odd)

    def of(self, strand: int) -> int:
        """The set of them."""
        return self._odd.get(strand, 0)

    def forget(self, strand: int, bit: int) -> None:
        """The rank holds nothing of the strand any more."""
        if self._odd and (odd := self._odd.get(strand)):
            odd &= ~(1 << bit)
            if odd:
                self._odd[strand] = odd
            else:
                del self._odd[strand]

    def names_at(self, ranks: int, place: int) -> list[tuple[bytes, int]]:
        """What these ranks call the block at a place, which all of them hold: each name, and the
        set of those that use it."""
        odd = ranks & self.of(place >> POSITION_BITS)
        alike, found = ranks ^ odd, dict[bytes, int]()
        if alike:
            found[self._ranks.name_at(alike.bit_length() - 1, place)] = alike
        for bit in bits_of(odd):
            name = self._ranks.name_at(bit, place)
            found[name] = found.get(name, 0) | 1 << bit
        return list(found.items())

    def compare(self, rank: DeviceRank, run: Run, span: int, place: int) -> None:
        """Note whether the rank calls the blocks of this span of a run, which it had not all, as
        others do. One that holds all of them speaks for all that are not odd. Where that is not
        told soon, the rank is taken for odd."""
        strand, bit = run.strand, rank.bit
        mine = 1 << bit
        odd = self.of(strand)
        if odd & mine:
            return
        others = run.whole & self._ranks.in_use & ~(odd | mine)
        for _ in range(_MAX_COMPARED):
            if not others:
                if not self._agrees_with_parts(rank, run, span, place):
                    break
                return
            other = self._ranks.rank_in(strand, others.bit_length() - 1)
            if other is not None:
                if not _name_alike(rank, other, place, span.bit_count()):
                    break
                return
            others ^= 1 << (others.bit_length() - 1)  # from before it was retired
        self._odd[strand] = odd | mine

    def _agrees_with_parts(self, rank: DeviceRank, run: Run, span: int, place: int) -> bool:
        """The same where nobody else holds all of the run."""
        partial, mine = run.partial, 1 << rank.bit
        if partial is None or (len(partial) == 1 and rank.bit in partial):
            return True
        ours = self._ranks.in_use & ~(self.of(run.strand) | mine)
        longest, lead = rank, 0
        for leading, mask in run.leads():
            if leading > lead and mask & ours:
                other = self._ranks.rank_in(run.strand, (mask & ours).bit_length() - 1)
                if other is not None:
                    longest, lead = other, leading
        told = span & (1 << lead) - 1
        if told and not _name_alike(rank, longest, place, told.bit_count()):
            return False
        left = span ^ told
        if not left:
            return True
        if len(partial) > _MAX_PARTS:
            return False
        for bit, held in partial.items():
            if held & left and ours >> bit & 1 and self._ranks.rank_in(run.strand, bit) is not None:
                return False  # behind a hole
        return True


def _name_alike(one: DeviceRank, other: DeviceRank, place: int, blocks: int) -> bool:
    """Whether two ranks call so many blocks from `place` on the same."""
    strand, start = place >> POSITION_BITS, (place & POSITION_MASK) << 3
    end = start + (blocks << 3)
    return one.names.rows[strand][start:end] == other.names.rows[strand][start:end]
