"""Free memory in small steps, by iterators.

To drop a rank's blocks, every run and hash of the rank must be visited, which takes up to half a
second for a million blocks. So dropped blocks are hidden at once and freed in steps. Between the
steps the caller does other work."""

from collections import deque
from collections.abc import Iterator, MutableMapping
from typing import Final, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

_ENTRIES_PER_STEP = 256  # some 30 us
_STEPS_AT_ONCE = 8  # some 0.3 ms, enough for most ranks
_ENDED: Final = object()


class Sweeps:
    """Memory to free, step by step, in the order in which blocks were dropped."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: deque[Iterator[None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self, sweep: Iterator[None]) -> bool:
        """Take the first steps of a sweep. Returns True if work is left and none was before."""
        for _ in range(_STEPS_AT_ONCE):
            if next(sweep, _ENDED) is _ENDED:
                return False
        self._waiting.append(sweep)
        return len(self._waiting) == 1

    def go_on(self, steps: int) -> bool:
        """Take this many steps. Returns True if there is more to do."""
        waiting = self._waiting
        while waiting and steps > 0:
            steps -= 1
            try:
                next(waiting[0])
            except StopIteration:
                waiting.popleft()
        return bool(waiting)


def emptied(entries: MutableMapping[Key, Value]) -> Iterator[None]:
    """Empty, in steps, a dict that nobody else uses."""
    while entries:
        for _ in range(min(_ENTRIES_PER_STEP, len(entries))):
            entries.popitem()
        yield
