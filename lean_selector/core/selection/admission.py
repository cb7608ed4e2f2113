"""Who of those parked may go now, after something may have come free (D11).

What one event can free is one rank. So an event costs next to nothing while no rank came below its
threshold; when one did, the lines that lead there are found by one look at each, and after that
only who goes is visited, in the order of the queue.
"""

import heapq
from collections.abc import Callable

from lean_selector.core.errors import Unavailable
from lean_selector.core.load.busy import Headroom
from lean_selector.core.selection.cells import MatchSets, as_sets, match_sets
from lean_selector.core.selection.parking import Line, Parked, Place
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.records import Placement, SelectionRequest
from lean_selector.core.selection.scheduler import NO_ENDPOINTS, eligible, not_busy

PlaceNow = Callable[[Partition, SelectionRequest, int, MatchSets, float], Placement]


class Admission:
    """Lets parked requests go."""

    def __init__(self, place: PlaceNow, refresh_after_s: float | None) -> None:
        """`place` chooses among ranks and books, or raises. The overlap of who has
        waited for `refresh_after_s` is looked up again."""
        self._place = place
        self._refresh_after_s = refresh_after_s

    def admit(self, partition: Partition, now: float, hopeless_after_s: float = 0.0) -> None:
        """Answers those who can go now, in order, and tells those whom nobody can serve any more.

        Of the latter those who came less than `hopeless_after_s` ago are left where they are.
        """
        parked = partition.parked
        if not len(parked):
            return
        for line in list(parked.hopeless):
            for item in line.items.copy():
                if now - item.arrived_at >= hopeless_after_s and parked.leave(item):
                    item.on_answer(item, Unavailable(NO_ENDPOINTS))
        self.admit_next(partition, now)

    def admit_next(self, partition: Partition, now: float) -> None:
        """Answers those who can go now, in order, and nobody else."""
        room, parked = partition.room, partition.parked
        if room is None or not len(parked) or parked.is_moving:
            return  # if they are on the move, who moves them looks again
        room.advance(now)
        parked.is_moving = True
        try:
            while room.came_free:
                self._let_go(partition, room)
        finally:
            parked.is_moving = False

    def _let_go(self, partition: Partition, room: Headroom) -> None:
        """Lets go whoever may use what came free, until nobody may or something else came free."""
        came_free, room.came_free = room.came_free, 0
        open_lines: list[tuple[Place, Line]] = []
        blocked: Place | None = None  # the foremost of those who stay
        try:
            for line in partition.parked.lines():
                head = line.items[0].key
                if line.leads_to & came_free and line.is_open(room):
                    open_lines.append((head, line))
                elif line.ranks and (blocked is None or head < blocked):
                    blocked = head
            heapq.heapify(open_lines)
            while open_lines and not room.came_free:
                key, line = open_lines[0]
                if not line.items:
                    heapq.heappop(open_lines)
                elif line.items[0].key != key:
                    heapq.heapreplace(open_lines, (line.items[0].key, line))
                elif not line.is_open(room):
                    heapq.heappop(open_lines)
                    if blocked is None or key < blocked:
                        blocked = key
                else:
                    passes = blocked is not None and blocked < key
                    self._go(partition, room, line.items[0], passes)
        finally:
            if open_lines:
                room.came_free |= came_free

    def _go(self, partition: Partition, room: Headroom, parked: Parked, passes: bool) -> None:
        """Answers one; who passes others gives no more load to what they wait for."""
        request, now = parked.request, room.now
        waited_s = now - parked.arrived_at
        partition.parked.leave(parked)
        answer: Placement | Exception
        try:
            ranks = not_busy(partition, request, eligible(partition, request), now)
            if passes:
                ranks &= room.below
            if self._refresh_after_s is not None and waited_s >= self._refresh_after_s:
                matches = match_sets(partition, request.prompt.local_hashes)
            else:
                matches = as_sets(partition, request.matches)
            answer = self._place(partition, request, ranks, matches, now)
            partition.parked.admitted += 1
            partition.parked.waited_s += waited_s
        except Exception as error:  # what broke is told to this request, and to no other's call
            answer = error
        parked.on_answer(parked, answer)
