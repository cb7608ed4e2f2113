"""Requests that wait for a worker, in the order in which they may go.

Order (spec selection.md 3.4): strict_priority, highest first; then the score
max(priority_jump, 0) - arrival, highest first; then arrival. Every request is looked at in that
order whenever capacity may have come free, so a blocked head does not hold those behind it (D11).
The queue is bounded by the connections that wait in it: each holds at most one.
"""

import bisect
from collections.abc import Callable

from lean_selector.core.errors import SelectorError
from lean_selector.core.selection.records import Placement, SelectionRequest


class Parked:
    """A request in the queue. `on_answer` hears once: a placement, or why there is none."""

    __slots__ = ("arrived_at", "key", "on_answer", "request")

    def __init__(
        self,
        request: SelectionRequest,
        arrived_at: float,
        serial: int,
        on_answer: Callable[["Parked", Placement | SelectorError], None],
    ) -> None:
        self.request = request
        self.arrived_at = arrived_at
        self.on_answer = on_answer
        jump = max(request.priority_jump, 0.0)
        self.key = (-request.strict_priority, arrived_at - jump, serial)


class ParkedQueue:
    """The parked requests of one partition."""

    __slots__ = ("_items", "_serial", "admitted", "isl_tokens", "waited_s")

    def __init__(self) -> None:
        self._items: list[Parked] = []  # sorted by key
        self._serial = 0
        self.isl_tokens = 0  # sum over the items
        self.admitted = 0  # requests that left for a worker, ever, and how long they had waited
        self.waited_s = 0.0

    def __len__(self) -> int:
        return len(self._items)

    def in_order(self) -> list[Parked]:
        """A copy, so that items may leave while the caller walks."""
        return self._items.copy()

    def park(
        self,
        request: SelectionRequest,
        now: float,
        on_answer: Callable[[Parked, Placement | SelectorError], None],
    ) -> Parked:
        self._serial += 1
        parked = Parked(request, now, self._serial, on_answer)
        bisect.insort(self._items, parked, key=lambda item: item.key)
        self.isl_tokens += request.prompt.isl_tokens
        return parked

    def leave(self, parked: Parked) -> bool:
        """Takes an item out; False when it has left already."""
        at = bisect.bisect_left(self._items, parked.key, key=lambda item: item.key)
        if at == len(self._items) or self._items[at] is not parked:
            return False
        del self._items[at]
        self.isl_tokens -= parked.request.prompt.isl_tokens
        return True
