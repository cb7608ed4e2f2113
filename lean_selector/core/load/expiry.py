"""What nothing was heard of for too long, among everything that one process holds (D12).

A step drops one reservation, and a call takes a bounded number of steps, so that who calls can look
after others in between. A call that runs out of steps is continued by the next one behind where it
stopped: no partition waits for another's backlog. Time is an argument: monotonic seconds.
"""

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from lean_selector.core.load.slots import Reservation, Slots

# Copies that peers admitted outlive the limit by this much: their owner expires them first (D12).
REPLICA_GRACE_S = 60.0


class Holder(Protocol):
    """A partition or a tracker."""

    slots: Slots


H = TypeVar("H", bound=Holder)


class Expiry(Generic[H]):
    """The limit, and whose turn it is."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: how long a request that was admitted here lives after its last touch."""
        self._limit_s = limit_s
        self._turn = 0

    def expire(
        self, holders: Sequence[H], now: float, max_steps: int
    ) -> list[tuple[H, list[Reservation]]]:
        """Releases at most `max_steps` overdue reservations; returns them by holder.

        As many as max_steps: call again, there may be more.
        """
        gone: list[tuple[H, list[Reservation]]] = []
        copies_limit_s = self._limit_s + REPLICA_GRACE_S
        start = self._turn
        for at in range(start, start + len(holders)):
            holder = holders[at % len(holders)]
            expired = holder.slots.expire(now, self._limit_s, copies_limit_s, max_steps)
            if expired:
                gone.append((holder, expired))
                max_steps -= len(expired)
                if not max_steps:
                    self._turn = (at + 1) % len(holders)
                    break
        return gone
