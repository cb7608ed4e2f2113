"""Where a match goes on when a rank's device blocks end.

Keeps the ranks that hold anything on a lower tier, and asks of them only those that can go on.
Spec: indexer.md section 3.5.
"""

from lean_selector.core.index.device_tier import DeviceTier
from lean_selector.core.index.holdings import Holdings
from lean_selector.core.index.lower_tiers import ROOT, Continuations, LowerTier
from lean_selector.core.index.matched import Matched
from lean_selector.core.index.runs import Run
from lean_selector.core.rank_bits import RankKey, bits_of


class LowerMatches:
    """The lower tiers of all ranks of one partition."""

    __slots__ = ("_bits", "_continuations", "_device", "ranks")

    def __init__(self, device: DeviceTier) -> None:
        self.ranks: dict[int, Holdings] = {}  # by bit, those with lower tiers
        self._bits = 0  # the same as a set
        self._continuations = Continuations()
        self._device = device

    def admit(self, rank: Holdings) -> None:
        """Give a rank its lower tiers, which are empty."""
        bit = rank.device.bit
        rank.lower = [LowerTier(self._continuations, bit) for _ in range(3)]
        self.ranks[bit] = rank
        self._bits |= 1 << bit

    def release(self, rank: Holdings) -> None:
        """The rank has no lower tiers any more, if it had."""
        if self.ranks.pop(rank.device.bit, None) is not None:
            self._bits ^= 1 << rank.device.bit

    def extended(
        self, sets: list[tuple[int, int]], path: list[Run], local_hashes: bytes
    ) -> dict[RankKey, Matched]:
        """The ranks for which a lower tier goes on where their device blocks end.

        Looks only at those that have the prompt's next block there, below whatever other block.
        """
        found: dict[RankKey, Matched] = {}
        rest = self._bits
        for blocks, mask in sets:
            here = rest & mask
            if here:
                rest ^= here
                if here := here & self._continuations.of(local_hashes, blocks << 3):
                    self._walk(here, blocks, path, local_hashes, found)
        if rest := rest & self._continuations.of(local_hashes, 0):
            self._walk(rest, 0, path, local_hashes, found)
        return found

    def _walk(
        self,
        bits: int,
        device: int,
        path: list[Run],
        local_hashes: bytes,
        found: dict[RankKey, Matched],
    ) -> None:
        """On from the last device block tier by tier, never stepping back (spec 3.5)."""
        start = device << 3
        for bit in bits_of(bits):
            rank = self.ranks[bit]
            name = self._device.last_name(rank.device, path, device) if device else ROOT
            name, host_end = rank.lower[0].walk(name, local_hashes, start)
            name, disk_end = rank.lower[1].walk(name, local_hashes, host_end)
            name, end = rank.lower[2].walk(name, local_hashes, disk_end)
            if end > start:
                host, disk = host_end - start >> 3, end - host_end >> 3
                found[rank.device.key] = Matched(device, host, disk)
