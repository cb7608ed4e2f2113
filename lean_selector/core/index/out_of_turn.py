"""Batches that are applied before their turn, while a replay that may bring older ones is awaited.

A batch goes missing, the next one comes. A replay endpoint may answer in 0.1 s or never, so the
batch is applied at once, early. Later the replay brings the missing batches, and the early ones
again. To apply an early batch twice is wrong: its removals would take copies that are still there,
and its stores would count as copies. To leave it out is wrong as well: what it could not do when it
came early (a block below one that was in the missing batch) would be missing for ever.

So each event has its effect once. Stores and removals of a block commute, if they are counted:

- An early event that was refused is `left`. When the replay brings its batch, it is applied, and
  nothing else of the batch is.
- A removal that found no block is `owed`, if the block may be in a missing batch. When that batch
  comes and stores the block, the removal is made.

Tried before: to apply early batches again without counting copies (a removal took a second copy),
and to remember early batches as an interval (a batch missing within was taken for an early one)."""

from collections import OrderedDict
from enum import Enum, auto

# Bounds of what a source may owe or leave. Above, the oldest is forgotten, and a replay that then
# brings missing batches leaves the source `degraded`.
MOST_OWED = 8192
MOST_LEFT = 8192


class Turn(Enum):
    """Which part of a batch to apply, judged by when it comes."""

    IN_ORDER = auto()  # all of it
    EARLY = auto()  # all of it, but batches before it are missing, and a replay may bring them
    LATE = auto()  # all of it: it was missing, and batches after it were applied
    AGAIN = auto()  # only what was left when it was applied early


class Delivery:
    """A batch on its way into the index, perhaps in several slices."""

    __slots__ = ("at", "is_copied", "seq", "turn")

    def __init__(self, seq: int, turn: Turn, is_copied: bool) -> None:
        """`is_copied`: blocks that a peer's dump showed may include those of the batch."""
        self.seq = seq
        self.turn = turn
        self.is_copied = is_copied
        self.at = 0  # how many of its events were looked at


class OutOfTurn:
    """What is left or owed of the early batches of one source."""

    def __init__(self) -> None:
        # batch -> positions of its refused events
        self._left: OrderedDict[int, set[int]] = OrderedDict()
        # (rank, tier, engine hash) -> removals
        self._owed: OrderedDict[tuple[int, int, int], int] = OrderedDict()
        self.has_forgotten = False  # whether something above a bound was forgotten

    def __len__(self) -> int:
        return len(self._left) + len(self._owed)

    def clear(self) -> None:
        """Forget all, because no replay will bring a missing batch, or nothing is held."""
        self._left.clear()
        self._owed.clear()
        self.has_forgotten = False

    def has_left(self, seq: int) -> bool:
        """Whether events of a batch are left."""
        return seq in self._left

    def take(self, delivery: Delivery) -> bool:
        """Return whether the event at hand is left; then it no longer is."""
        left = self._left.get(delivery.seq)
        if left is None or delivery.at not in left:
            return False
        left.remove(delivery.at)
        if not left:
            del self._left[delivery.seq]
        return True

    def leave(self, delivery: Delivery) -> None:
        """Record that the event at hand was refused, and may be applied when its turn comes."""
        self._left.setdefault(delivery.seq, set()).add(delivery.at)
        if len(self._left) > MOST_LEFT:
            self._left.popitem(last=False)
            self.has_forgotten = True

    def is_rest_left(self, delivery: Delivery) -> bool:
        """Whether the event before the one at hand is left."""
        return delivery.at - 1 in self._left.get(delivery.seq, ())

    def owe(self, dp_rank: int, tier: int, engine_hash: int) -> None:
        """Record that a block was removed which is not held, and may be in a missing batch."""
        key = dp_rank, tier, engine_hash
        self._owed[key] = self._owed.get(key, 0) + 1
        if len(self._owed) > MOST_OWED:
            self._owed.popitem(last=False)
            self.has_forgotten = True

    def forgive(self, dp_rank: int) -> None:
        """Owe nothing for a rank, because all of its blocks were dropped."""
        for key in [key for key in self._owed if key[0] == dp_rank]:
            del self._owed[key]

    def pay(self, dp_rank: int, tier: int, hashes: bytes) -> bytes:
        """Return the hashes, of those just stored (8 bytes each), whose removal is owed."""
        if not self._owed:
            return b""
        due: list[bytes] = []
        for at in range(0, len(hashes), 8):
            key = dp_rank, tier, int.from_bytes(hashes[at : at + 8], "little")
            owed = self._owed.pop(key, 0)
            if owed:
                due.append(hashes[at : at + 8])
                if owed > 1:
                    self._owed[key] = owed - 1
        return b"".join(due)
