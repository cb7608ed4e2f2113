"""Which ranks may call blocks of a strand otherwise than the other ranks that hold them.

Engines that hash alike do not: then what one of them calls a block all do, and a match that asks
for the names of many ranks asks one. Spec: indexer.md section 3.2.
"""


class OddNames:
    """strand -> the odd ranks. Of all others any two call each block that both hold the same."""

    __slots__ = ("_odd",)

    def __init__(self) -> None:
        self._odd: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._odd)

    def of(self, strand: int) -> int:
        """The set of them."""
        return self._odd.get(strand, 0)

    def add(self, strand: int, bit: int) -> None:
        """The rank with this bit index is one."""
        self._odd[strand] = self._odd.get(strand, 0) | 1 << bit

    def forget(self, strand: int, bit: int) -> None:
        """The rank holds nothing of the strand any more."""
        if self._odd and (odd := self._odd.get(strand)):
            odd &= ~(1 << bit)
            if odd:
                self._odd[strand] = odd
            else:
                del self._odd[strand]
