"""Free memory in small steps. A sweep is an iterator that frees a little in each step.

To drop a rank's blocks, every run and hash of the rank must be visited, which takes up to half a
second for a million blocks. So matches ignore dropped blocks at once, and a sweep frees them later.
Between the steps the caller does other work."""

from collections import deque
from collections.abc import Iterator, MutableMapping
from typing import Final, TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

_ENTRIES_PER_STEP = 256  # some 30 us
_STEPS_AT_ONCE = 8  # some 0.3 ms, enough for most ranks
_ENDED: Final = object()


class Sweeps:
    """Unfinished sweeps (iterators that free memory step by step), in order of their start."""

    def __init__(self) -> None:
        self._waiting: deque[Iterator[None]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self, sweep: Iterator[None]) -> bool:
        """Do a sweep's first steps. Return True if the sweep is now the only unfinished sweep."""
        for _ in range(_STEPS_AT_ONCE):
            if next(sweep, _ENDED) is _ENDED:
                return False
        self._waiting.append(sweep)
        return len(self._waiting) == 1

    def go_on(self, steps: int) -> bool:
        """Advance sweeps by at most `steps` steps in total. Return True if a sweep is left."""
        waiting = self._waiting
        while waiting and steps > 0:
            steps -= 1
            try:
                next(waiting[0])
            except StopIteration:
                waiting.popleft()
        return bool(waiting)


def emptied(entries: MutableMapping[Key, Value]) -> Iterator[None]:
    """Empty a dict that nobody else uses, some entries per step of the iterator."""
    while entries:
        for _ in range(min(_ENTRIES_PER_STEP, len(entries))):
            entries.popitem()
        yield
