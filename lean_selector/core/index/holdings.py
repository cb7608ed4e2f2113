"""What one rank holds on all of its tiers."""

from enum import IntEnum

from lean_selector.core.index.device_ranks import DeviceRank
from lean_selector.core.index.lower_tiers import LowerTier


class Tier(IntEnum):
    """Where a block is; also the order in which a match goes on."""

    DEVICE = 0
    HOST_PINNED = 1
    DISK = 2
    EXTERNAL = 3


class Holdings:
    """Everything that one rank holds."""

    __slots__ = ("device", "lower")

    def __init__(self, device: DeviceRank) -> None:
        self.device = device
        self.lower: list[LowerTier] = []  # none, or host_pinned, disk, external

    def blocks(self) -> int:
        """Blocks on all tiers, in reach or not."""
        return self.device.blocks + sum(map(len, self.lower))
