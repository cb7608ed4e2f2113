"""Selections that are remembered for a while, so that their id alone books them later.

Owns what `/select` chose under an id, by partition and id; bounded in age, number and bytes, the
oldest go first. Nothing here is booked. Knows no workers: whether a choice still stands is for who
books it (`Bookings.replay`). Spec selection_16.md 5.1. Time is an argument.
"""

from collections import OrderedDict

from lean_selector.core.selection.records import CachedSelection
from lean_selector.core.selection.settings import SelectionCacheSettings
from lean_selector.core.selection.workers import PartitionKey


class _Entry:
    __slots__ = ("expires_at", "selection", "size")

    def __init__(self, selection: CachedSelection, expires_at: float, size: int) -> None:
        self.selection = selection
        self.expires_at = expires_at
        self.size = size


class SelectionCache:
    """Of all partitions of one process."""

    __slots__ = ("_entries", "_settings", "evicted", "expired", "size_bytes", "stored", "used")

    def __init__(self, settings: SelectionCacheSettings) -> None:
        self._settings = settings
        self._entries: OrderedDict[tuple[PartitionKey, str], _Entry] = OrderedDict()  # oldest first
        self.size_bytes = 0
        # Ever: stored = held + used + expired + evicted + replaced or dropped by a caller.
        self.stored = self.used = self.expired = self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(
        self, key: PartitionKey, selection_id: str, selection: CachedSelection, now: float
    ) -> None:
        """Remembers a choice under an id, in place of an earlier one. What is larger than all that
        may be kept drives out everything, and then goes itself, as in the reference."""
        settings = self._settings
        if not settings.max_entries or not settings.max_bytes:
            return
        self.drop(key, selection_id)
        self.expire(now)
        size = _size_of(key, selection_id, selection)
        self._entries[key, selection_id] = _Entry(selection, now + settings.ttl_s, size)
        self.size_bytes += size
        self.stored += 1
        while len(self._entries) > settings.max_entries or self.size_bytes > settings.max_bytes:
            self._drop_oldest()
            self.evicted += 1

    def get(self, key: PartitionKey, selection_id: str, now: float) -> CachedSelection | None:
        """What was chosen under an id; it stays."""
        self.expire(now)
        entry = self._entries.get((key, selection_id))
        return None if entry is None else entry.selection

    def use_up(self, key: PartitionKey, selection_id: str) -> None:
        """It was booked."""
        self.drop(key, selection_id)
        self.used += 1

    def drop(self, key: PartitionKey, selection_id: str) -> None:
        """Forgets what was chosen under an id, if anything was."""
        entry = self._entries.pop((key, selection_id), None)
        if entry is not None:
            self.size_bytes -= entry.size

    def expire(self, now: float) -> None:
        """Forgets what is too old."""
        entries = self._entries
        while entries and next(iter(entries.values())).expires_at <= now:
            self._drop_oldest()
            self.expired += 1

    def _drop_oldest(self) -> None:
        _, entry = self._entries.popitem(last=False)
        self.size_bytes -= entry.size


def _size_of(key: PartitionKey, selection_id: str, selection: CachedSelection) -> int:
    """In bytes, as the reference counts: hashes and names."""
    prompt = selection.prompt
    size = 8 * prompt.sequence_count + len(prompt.local_hashes)
    for name in (*key, selection_id, prompt.lora_name, selection.session_id):
        if name is not None:
            size += len(name) if name.isascii() else len(name.encode())
    return size
