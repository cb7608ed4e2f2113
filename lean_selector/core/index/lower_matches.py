"""Where a match goes on when a rank's device blocks end.

Keeps the ranks that hold anything on a lower tier, and asks of them only those that can go on:
together as long as they have the same blocks under the same names. Spec: indexer.md section 3.5.
"""

from collections.abc import Iterator

from lean_selector.core.index.continuations import Continuations
from lean_selector.core.index.device_tier import DeviceTier
from lean_selector.core.index.holdings import Holdings
from lean_selector.core.index.lower_edges import Edges
from lean_selector.core.index.lower_tiers import ROOT, LowerTier
from lean_selector.core.index.matched import Matched
from lean_selector.core.index.runs import Run

_LAST = 2  # after host_pinned and disk, external


class LowerMatches:
    """The lower tiers of all ranks of one partition."""

    __slots__ = ("_bits", "_continuations", "_device", "_dismantled", "_tiers", "ranks")

    def __init__(self, device: DeviceTier) -> None:
        self.ranks: dict[int, Holdings] = {}  # by bit, those with lower tiers
        self._bits = 0  # the same as a set
        self._continuations = Continuations()
        self._tiers: list[Edges] = []  # none, which is small, before a rank has them
        self._device = device
        self._dismantled: dict[int, int] = {}  # by bit, how often, where it is not done

    def admit(self, rank: Holdings) -> None:
        """Give a rank its lower tiers, which are empty."""
        if not self._tiers:
            self._tiers = [Edges(self._continuations) for _ in range(_LAST + 1)]
        bit = rank.device.bit
        rank.lower = [LowerTier(edges, bit) for edges in self._tiers]
        self.ranks[bit] = rank
        self._bits |= 1 << bit
        if bit in self._dismantled:
            for edges in self._tiers:
                edges.doubtful |= 1 << bit

    def release(self, rank: Holdings) -> None:
        """The rank, whose lower tiers are empty, has none any more, if it had."""
        bit = rank.device.bit
        if self.ranks.pop(bit, None) is not None:
            rank.lower = []
            self._bits ^= 1 << bit
            for edges in self._tiers:
                edges.release(bit)
                edges.doubtful &= ~(1 << bit)

    def retire(self, rank: Holdings) -> Iterator[None]:
        """The same for one whose tiers are not empty: nothing of it is seen any more.

        The iterator returned gives the memory back, in steps between which anything may happen.
        """
        bit, tiers = rank.device.bit, rank.lower
        self.release(rank)
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
        """The ranks for which a lower tier goes on where their device blocks end, as sets of those
        that hold the same; the sets are apart and not empty.

        Looks only at those that have the prompt's next block there, below whatever other block.
        """
        found: dict[tuple[int, int, int], int] = {}
        going_on: dict[int, int] = {}  # by device blocks
        rest = self._bits
        for blocks, mask in sets:
            here = rest & mask
            if here:
                rest ^= here
                if here := here & self._continuations.of(local_hashes, blocks << 3):
                    going_on[blocks] = going_on.get(blocks, 0) | here
        for blocks, here in going_on.items():
            self._walk(self._device.last_names(here, path, blocks), blocks, local_hashes, found)
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
        """On from the last device block, by what ranks call it, tier by tier, never stepping back
        (spec 3.5)."""
        start, end = device << 3, len(local_hashes)
        # (ranks, the last block's name, the tier where they go on, where in the prompt that is,
        # where they left the host tier): they part where they have different blocks.
        parted = [(ranks, name, 0, start, start) for name, ranks in named]
        while parted:
            ranks, name, tier, at, host_end = parted.pop()
            edges = self._tiers[tier]
            while ranks:
                name, at = edges.along(ranks, name, local_hashes, at)
                if at == end:
                    break
                key = name + local_hashes[at : at + 8]
                child, going = edges.follow(ranks, key)
                if rest := ranks ^ going:
                    for other, having in edges.others(rest, key).items():
                        rest ^= having
                        parted.append((having, other, tier, at + 8, host_end))
                    if rest and tier < _LAST:
                        parted.append((rest, name, tier + 1, at, host_end if tier else at))
                    elif rest and at > start:
                        match = device, host_end - start >> 3, at - host_end >> 3
                        found[match] = found.get(match, 0) | rest
                ranks, name, at = going, child, at + 8
            if ranks and at > start:
                if not tier:
                    host_end = at
                match = device, host_end - start >> 3, at - host_end >> 3
                found[match] = found.get(match, 0) | ranks
