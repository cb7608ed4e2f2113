"""Event batches as engines mostly send them, read into packed lists: for the compiled form.

Takes the array layouts of vLLM and SGLang with unsigned hashes, tokens that are u32, and nothing
else that goes into a hash. Any other batch is left to `kv_events.py`; what both take they read
alike. No object of Python's is made per token or hash, which compiled saves most of the work, and
costs as much more interpreted. Knows nothing of the index. Spec: indexer.md 1.4.
"""

from typing import Final

from librt.strings import (
    BytesWriter,
    read_i16_be,
    read_i32_be,
    read_i64_be,
    read_i64_le,
    write_i32_le,
    write_i64_le,
)
from librt.vecs import vec
from mypy_extensions import i32, i64

from lean_selector.core.index.hashes_packed import mixed
from lean_selector.core.index.shapes import (
    AllBlocksCleared,
    Event,
    EventBatch,
    PackedRemoved,
    PackedStored,
    Part,
    Tier,
)
from lean_selector.wire.kv_event_records import tier_of

MAX_PACKED_EVENTS: Final[i64] = 256
PART_BLOCKS: Final[i64] = 512  # of one record, some 0.15 ms to apply
_MOST_BLOCKS: Final[i64] = 1 << 16  # of an event: MAX_EVENT_BLOCKS
_MOST_TOKENS: Final[i64] = 1 << 12  # of a block: MAX_BLOCK_TOKENS
_MOST_FIELDS: Final[i64] = 13
_FEW: Final[i64] = 8  # names that are compared with each other

_NIL: Final[i64] = 0xC0
_STORED: Final = b"\xabBlockStored"
_REMOVED: Final = b"\xacBlockRemoved"
_CLEARED: Final = b"\xb0AllBlocksCleared"


class _Unusual(Exception):
    """The batch is for the other reader."""


def packed_batch(payload: bytes) -> EventBatch | None:
    """Read a whole batch, or None. Events of more than PART_BLOCKS blocks come as several records.

    Bytes after the first value are ignored.
    """
    try:
        return _Reader(payload).batch()
    except (_Unusual, IndexError, UnicodeDecodeError):  # IndexError: truncated
        return None


class _Reader:
    """Reads a message from its start to its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at: i64 = 0
        self._events: list[Event] = []
        # Removals in a row that differ in their blocks alone become one record.
        self._gone = BytesWriter()
        self._gone_tier: Tier | None = None
        self._gone_events = 0

    def batch(self) -> EventBatch:
        inside: i64 = self._array()
        if inside < 2 or inside > 3 or self._byte() != 0xCB:
            raise _Unusual
        self._at += 8
        count: i64 = self._array()
        if count > MAX_PACKED_EVENTS:
            raise _Unusual
        while count > 0:
            count -= 1
            self._event()
        self._end_removals()
        rank: int | None = None
        if inside == 3 and not self._passes_nil():
            rank = self._below(1 << 31)
        return EventBatch(rank, self._events, [])

    def _event(self) -> None:
        fields: i64 = self._array()
        if self._passes(_STORED):
            if fields < 5 or fields > _MOST_FIELDS:
                raise _Unusual
            self._end_removals()
            self._stored(fields)
        elif self._passes(_REMOVED):
            if fields < 2 or fields > 5:
                raise _Unusual
            self._removed(fields)
        elif fields == 1 and self._passes(_CLEARED):
            self._end_removals()
            self._events.append(AllBlocksCleared())
        else:
            raise _Unusual

    def _stored(self, fields: i64) -> None:
        names = self._hashes()
        parent: int | None = None
        if not self._passes_nil():
            before = BytesWriter()
            write_i64_le(before, self._hash())
            parent = int.from_bytes(before.getvalue(), "little")
        tokens = self._tokens()
        size: i64 = self._below(_MOST_TOKENS)
        if fields > 5 and not self._passes_nil():
            self._below(1 << 31)  # lora_id: unused
        medium = self._text() if fields > 6 else None
        if fields > 7 and not self._passes_nil():
            raise _Unusual  # an adapter
        if fields > 8:
            self._no_keys()
        group: int | None = None
        if fields > 9 and not self._passes_nil():
            group = self._below(1 << 31)
        kind = self._text() if fields > 10 else None
        if fields > 11 and not self._passes_nil():
            self._below(1 << 31)  # a sliding window: unused
        if fields > 12 and not self._passes_nil():
            raise _Unusual  # locality
        if size == 0 or not _differ(names, parent):
            raise _Unusual
        tier = tier_of(medium)
        blocks: i64 = min(i64(len(names)) >> 3, (i64(len(tokens)) >> 2) // size)
        if blocks <= PART_BLOCKS:
            names, tokens = names[: blocks << 3], tokens[: (blocks * size) << 2]
            record = PackedStored(names, parent, tokens, size, tier, group, kind)
            self._events.append(record)
            return
        first: i64 = 0
        part = Part.FIRST
        while first < blocks:
            end: i64 = min(first + PART_BLOCKS, blocks)
            if end == blocks:
                part = Part.LAST
            here = names[first << 3 : end << 3]
            theirs = tokens[(first * size) << 2 : (end * size) << 2]
            self._events.append(PackedStored(here, parent, theirs, size, tier, group, kind, part))
            parent = int.from_bytes(here[-8:], "little")
            part = Part.MIDDLE
            first = end

    def _removed(self, fields: i64) -> None:
        first = self._at
        count: i64 = self._array()
        while count > 0:  # only to see what comes after them
            count -= 1
            self._hash()
        medium = self._text() if fields > 2 else None
        tier = tier_of(medium)
        group: int | None = None
        if fields > 3 and not self._passes_nil():
            group = self._below(1 << 31)
        if fields > 4 and not self._passes_nil():
            raise _Unusual  # a kind, or a locality
        end = self._at
        is_full: bool = len(self._gone) >= PART_BLOCKS << 3
        if group is not None or is_full or (self._gone_events and tier is not self._gone_tier):
            self._end_removals()
        self._at = first
        self._hashes_into(self._gone)
        self._at = end
        self._gone_tier = tier
        self._gone_events += 1
        if group is not None:
            self._end_removals(group)

    def _end_removals(self, group: int | None = None) -> None:
        if self._gone_events:
            names, events = self._gone.getvalue(), self._gone_events
            self._events.append(PackedRemoved(names, self._gone_tier, group, events=events))
            self._gone, self._gone_events = BytesWriter(), 0

    def _byte(self) -> i64:
        value: i64 = self._data[self._at]
        self._at += 1
        return value

    def _array(self) -> i64:
        """The length of an array, whose header is passed."""
        tag: i64 = self._byte()
        if tag & 0xF0 == 0x90:
            return tag & 15
        if tag == 0xDC:
            self._at += 2
            return i64(read_i16_be(self._data, self._at - 2)) & 0xFFFF
        if tag == 0xDD:
            self._at += 4
            return i64(read_i32_be(self._data, self._at - 4)) & 0xFFFFFFFF
        raise _Unusual

    def _hashes(self) -> bytes:
        out = BytesWriter()
        self._hashes_into(out)
        return out.getvalue()

    def _hashes_into(self, out: BytesWriter) -> None:
        """A list of hashes, eight bytes each."""
        count: i64 = self._array()
        if count > _MOST_BLOCKS:
            raise _Unusual
        while count > 0:
            count -= 1
            write_i64_le(out, self._hash())

    def _hash(self) -> i64:
        """An unsigned number of 64 bits, as a signed one."""
        data, at = self._data, self._at
        tag: i64 = data[at]
        if tag == 0xCF:
            self._at = at + 9
            return read_i64_be(data, at + 1)
        return self._below(1 << 32)

    def _below(self, limit: i64) -> i64:
        """An unsigned number of at most 32 bits."""
        tag: i64 = self._byte()
        value: i64 = tag
        if tag == 0xCC:
            value = self._byte()
        elif tag == 0xCD:
            self._at += 2
            value = i64(read_i16_be(self._data, self._at - 2)) & 0xFFFF
        elif tag == 0xCE:
            self._at += 4
            value = i64(read_i32_be(self._data, self._at - 4)) & 0xFFFFFFFF
        elif tag >= 0x80:
            raise _Unusual
        if value >= limit:
            raise _Unusual
        return value

    def _tokens(self) -> bytes:
        """A list of u32, four bytes each."""
        count: i64 = self._array()
        out = BytesWriter()
        data, at = self._data, self._at
        while count > 0:
            count -= 1
            tag: i64 = data[at]
            if tag < 0x80:
                write_i32_le(out, i32(tag))
                at += 1
            elif tag == 0xCE:
                write_i32_le(out, read_i32_be(data, at + 1))
                at += 5
            elif tag == 0xCD:
                write_i32_le(out, i32(i64(read_i16_be(data, at + 1)) & 0xFFFF))
                at += 3
            elif tag == 0xCC:
                low: i64 = data[at + 1]
                write_i32_le(out, i32(low))
                at += 2
            else:
                raise _Unusual
        self._at = at
        return out.getvalue()

    def _text(self) -> str | None:
        """A short text, or nil."""
        if self._passes_nil():
            return None
        tag: i64 = self._byte()
        length: i64 = tag & 31
        if tag & 0xE0 != 0xA0:
            if tag != 0xD9:
                raise _Unusual
            length = self._byte()
        start = self._at
        self._at += length
        if self._at > len(self._data):
            raise _Unusual
        return self._data[start : self._at].decode()

    def _no_keys(self) -> None:
        """Extra keys that are none: nil, or nil for each block."""
        if self._passes_nil():
            return
        count: i64 = self._array()
        while count > 0:
            count -= 1
            if not self._passes_nil():
                raise _Unusual

    def _passes_nil(self) -> bool:
        tag: i64 = self._data[self._at]
        if tag != _NIL:
            return False
        self._at += 1
        return True

    def _passes(self, text: bytes) -> bool:
        end: i64 = self._at + len(text)
        if self._data[self._at : end] != text:
            return False
        self._at = end
        return True


def _differ(names: bytes, parent: int | None) -> bool:
    """Whether the names differ from each other and from the parent."""
    count: i64 = i64(len(names)) >> 3
    others = names
    if parent is not None:
        others = names + parent.to_bytes(8, "little")
        count += 1
    at: i64 = 0
    if count <= _FEW:
        while at < count:
            before: i64 = 0
            while before < at:
                if read_i64_le(others, before << 3) == read_i64_le(others, at << 3):
                    return False
                before += 1
            at += 1
        return True
    slots: i64 = 32
    while slots < count * 2:
        slots *= 2
    seen = vec[i64]([0] * slots)
    has_zero = False
    while at < count:
        name: i64 = read_i64_le(others, at << 3)
        at += 1
        if name == 0:
            if has_zero:
                return False
            has_zero = True
            continue
        slot: i64 = mixed(name) & (slots - 1)
        while seen[slot] != 0:
            if seen[slot] == name:
                return False
            slot = (slot + 1) & (slots - 1)
        seen[slot] = name
    return True
