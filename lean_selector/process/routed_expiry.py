"""When the approximate index forgets: a little after each block's time, never before it.

Asked to more often than the host's tick where that would be late for what is to live but seconds.
"""

import asyncio
import time
from collections.abc import Callable, Mapping

from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.shapes import PartitionKey

_MOST_LATE_S = 0.5
_LATE = 1 / 40  # of the time that a block lives
_LEAST_S = 0.01

CallLater = Callable[[float, Callable[[], None]], asyncio.TimerHandle]


class RoutedExpiry:
    """Of all partitions; only from the thread of the loop."""

    def __init__(
        self,
        partitions: Mapping[PartitionKey, Partition],
        ttl_s: float,
        call_later: CallLater,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ttl_s` above 0; `call_later` is the loop's."""
        self.interval_s = min(_MOST_LATE_S, max(_LEAST_S, ttl_s * _LATE))
        self._partitions = partitions
        self._call_later = call_later
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._timer = self._call_later(self.interval_s, self._turn)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        self.start()
        now = self._clock()
        for partition in list(self._partitions.values()):
            if partition.routed is not None:
                partition.routed.expire(now)
