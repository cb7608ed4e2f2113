"""What lives, as the text of a snapshot: the one that a replica which catches up is given."""

from collections.abc import Callable, Iterable, Iterator
from typing import Final

from lean_selector.core.load.slots import Slots
from lean_selector.core.replication.events import ReplicaTarget
from lean_selector.wire.replica_snapshot import SNAPSHOT_END, SnapshotLines, snapshot_head

# The slots themselves tell a partition from one that has its name later.
Revision = list[tuple[Slots, int]]


class LiveBookings:
    """Of all partitions that `targets` gives."""

    def __init__(
        self,
        targets: Callable[[], Iterable[ReplicaTarget]],
        router_id: int,
        sequence: Callable[[], int],
    ) -> None:
        """`router_id` and `sequence` are the replica's; 0 where it has no peers."""
        self._targets: Final = targets
        self._router_id: Final = router_id
        self._sequence: Final = sequence
        self._lines: Final = SnapshotLines(router_id)

    def revision(self) -> Revision:
        """Differs from an earlier one exactly where something has changed."""
        return [(target.slots, target.slots.revision) for target in self._targets()]

    def parts(self, now: float) -> Iterator[bytes]:
        """The text, a part for each reservation; ages are those at `now`."""
        lines = self._lines
        lines.begin()
        yield snapshot_head(self._router_id, self._sequence())
        end = b"\n"
        for target in list(self._targets()):
            for held in target.slots.by_touch():
                yield end + lines.line(target, held, now)
                end = b",\n"
        yield SNAPSHOT_END
