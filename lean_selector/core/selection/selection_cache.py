"""Recent choices of `/select`, which can be booked later by their ids.

Stored by partition and id; limited in age, number and bytes; the oldest are evicted first. Nothing
here is booked. `Reservations.replay` checks whether a cached choice is still valid. Spec
selection_16.md 5.1. Time is an argument."""

from collections import OrderedDict

from lean_selector.core.selection.router_settings import SelectionCacheSettings
from lean_selector.core.selection.shapes import CachedSelection, PartitionKey

_Entry = tuple[CachedSelection, float, int]  # with when it expires, and its size in bytes


class SelectionCache:
    """Recent choices of `/select`, of all partitions, that can still be booked by their ids."""

    def __init__(self, settings: SelectionCacheSettings) -> None:
        self._settings = settings
        self._entries: OrderedDict[tuple[PartitionKey, str], _Entry] = OrderedDict()  # oldest first
        self.size_bytes = 0
        # Totals: stored = live + used + expired + evicted + replaced or dropped.
        self.stored = self.used = self.expired = self.evicted = 0

    def __len__(self) -> int:
        return len(self._entries)

    def put(
        self, key: PartitionKey, selection_id: str, selection: CachedSelection, now: float
    ) -> None:
        """Store a choice under an id, in place of an earlier choice with this id. As in Dynamo, a
        choice larger than the whole cache evicts all others, and then itself."""
        settings = self._settings
        if not settings.max_entries or not settings.max_bytes:
            return
        self.drop(key, selection_id)
        self.expire(now)
        size = _size_of(key, selection_id, selection)
        self._entries[key, selection_id] = selection, now + settings.ttl_s, size
        self.size_bytes += size
        self.stored += 1
        while len(self._entries) > settings.max_entries or self.size_bytes > settings.max_bytes:
            self._drop_oldest()
            self.evicted += 1

    def get(self, key: PartitionKey, selection_id: str, now: float) -> CachedSelection | None:
        self.expire(now)
        entry = self._entries.get((key, selection_id))
        return None if entry is None else entry[0]

    def use_up(self, key: PartitionKey, selection_id: str) -> None:
        """Drop a selection, because it was booked."""
        self.drop(key, selection_id)
        self.used += 1

    def drop(self, key: PartitionKey, selection_id: str) -> None:
        entry = self._entries.pop((key, selection_id), None)
        if entry is not None:
            self.size_bytes -= entry[2]

    def expire(self, now: float) -> None:
        entries = self._entries
        while entries and next(iter(entries.values()))[1] <= now:
            self._drop_oldest()
            self.expired += 1

    def _drop_oldest(self) -> None:
        _, entry = self._entries.popitem(last=False)
        self.size_bytes -= entry[2]


def _size_of(key: PartitionKey, selection_id: str, selection: CachedSelection) -> int:
    """Return the size of a cached choice as Dynamo counts it: bytes of hashes and names."""
    prompt = selection.prompt
    size = 8 * prompt.sequence_count + len(prompt.local_hashes)
    for name in (*key, selection_id, prompt.lora_name, selection.session_id):
        if name is not None:
            size += len(name) if name.isascii() else len(name.encode())
    return size
