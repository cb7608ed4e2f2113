"""Expiry in slices of the loop's turns: it keeps up with any rate, and nobody else waits long.

One slice a turn until nothing is overdue, so that the loop looks at its sockets in between. What is
booked meanwhile is overdue one day too, and a turn may have booked more than a slice has steps: so
a slice drops at least twice as many as the turn before it booked, and a backlog shrinks however
fast it is fed. Dropping is the cheaper of the two.
"""

import time
from collections.abc import Callable

# About a millisecond and a half, with what is published to peers: a request meets this pause.
SLICE_STEPS = 250

CallSoon = Callable[[Callable[[], None]], object]


class ExpirySweep:
    """Only from the thread of the loop."""

    def __init__(
        self,
        expire: Callable[[float, int], int],
        arrived: Callable[[], int],
        call_soon: CallSoon,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`expire` drops what is overdue at a time, in at most so many steps, and says how many it
        took: as many as it might means that more may be left. `arrived` counts what was booked,
        ever; `call_soon` is the loop's."""
        self._expire = expire
        self._arrived = arrived
        self._call_soon = call_soon
        self._clock = clock
        self._arrived_before = 0
        self._is_scheduled = False
        self._is_stopped = False

    def begin(self) -> None:
        """Call it about every second: takes the first slice now, the others in turns to come."""
        if not self._is_scheduled:
            self._arrived_before = self._arrived()
            self._slice()

    def stop(self) -> None:
        """No slice is begun any more."""
        self._is_stopped = True

    def _slice(self) -> None:
        self._is_scheduled = False
        if self._is_stopped:
            return
        arrived = self._arrived()
        # A partition that went took its count along: then the difference says nothing.
        steps = max(SLICE_STEPS, 2 * (arrived - self._arrived_before))
        self._arrived_before = arrived
        if self._expire(self._clock(), steps) >= steps:
            self._is_scheduled = True
            self._call_soon(self._slice)
