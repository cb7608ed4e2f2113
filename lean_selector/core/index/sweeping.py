"""Memory given back a little at a time, by iterators of which each step is short.

Dropping what a rank holds takes a look at every run and every name of it: up to half a second for a
million blocks. So what is dropped is hidden at once and taken apart in steps, between which the
caller does other work.
"""

from collections.abc import Iterator, MutableMapping
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")

_ENTRIES_PER_STEP = 256  # some 30 us


def emptied(entries: MutableMapping[Key, Value]) -> Iterator[None]:
    """Empties a dict that nobody else uses any more."""
    while entries:
        for _ in range(min(_ENTRIES_PER_STEP, len(entries))):
            entries.popitem()
        yield
