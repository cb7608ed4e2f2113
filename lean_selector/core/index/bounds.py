"""How many blocks a rank may hold, for one partition: by worker, where somebody told."""

# Holdings of a rank whose size nobody told us: 2^21 blocks of 16 tokens are a cache of 33 million
# tokens, ten times that of the largest node today. On a lower tier four times as much, for each of
# the three.
DEFAULT_DEVICE_BLOCKS = 1 << 21
DEFAULT_LOWER_TIER_BLOCKS = 1 << 23


class Bounds:
    """As (blocks on the device, blocks on each lower tier), of each rank of a worker."""

    __slots__ = ("_set", "default")

    def __init__(self, device_blocks: int, lower_tier_blocks: int) -> None:
        self.default = device_blocks, lower_tier_blocks
        self._set: dict[int, tuple[int, int]] = {}  # by worker id, those that differ

    def __len__(self) -> int:
        """Workers with a bound of their own."""
        return len(self._set)

    def of(self, worker_id: int) -> tuple[int, int]:
        return self._set.get(worker_id, self.default)

    def set(self, worker_id: int, device_blocks: int | None, lower_tier_blocks: int | None) -> None:
        """None means the default."""
        device, lower = self.default
        if device_blocks is not None:
            device = device_blocks
        if lower_tier_blocks is not None:
            lower = lower_tier_blocks
        if (device, lower) == self.default:
            self.forget(worker_id)
        else:
            self._set[worker_id] = device, lower

    def forget(self, worker_id: int) -> None:
        self._set.pop(worker_id, None)
