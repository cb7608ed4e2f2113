"""Decode event batches in their usual layouts into packed lists. Meant to be compiled.

Supports events as tagged maps (what vLLM and SGLang send now) and as arrays. Hashes may be numbers
or bytes, tokens must be u32, and extra keys must be short texts. Any other batch is left
to `kv_events.py`; both modules produce equivalent records. No Python object is created per token or
hash. The compiled form of this module is much faster than `kv_events.py`. The interpreted form is
slower, and is not used. Spec: indexer.md 1.4."""

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

from lean_selector.core.hashing import ENGINE_SALT_PREFIX, unmarked_salt
from lean_selector.core.index.hashes_packed import mixed
from lean_selector.core.index.shapes import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    Tier,
)
from lean_selector.wire.kv_event_records import PART_BLOCKS, parts_of, tier_of
from lean_selector.wire.kv_event_shapes import SLICE_EVENTS

_I32: Final[i64] = 1 << 31
_MOST_KEY: Final[i64] = 63  # characters of an extra key; one of 64 may be a hash in hex
_FEW: Final[i64] = 8  # up to this many hashes are compared pairwise
_WIDTHS: Final = b"\x04\x08\x01\x02\x04\x08\x01\x02\x04\x08"  # sizes of numbers, from 0xCA to 0xD3

_NIL: Final[i64] = 0xC0
_STORED: Final = b"\xabBlockStored"
_REMOVED: Final = b"\xacBlockRemoved"
_CLEARED: Final = b"\xb0AllBlocksCleared"
_TYPE: Final = b"\xa4type"
# The map keys that are read; values of other keys are skipped.
_BLOCKS: Final[i64] = 1
_PARENT: Final[i64] = 2
_TOKENS: Final[i64] = 4
_SIZE: Final[i64] = 8
_MEDIUM: Final[i64] = 16
_ADAPTER: Final[i64] = 32
_KEYS: Final[i64] = 64
_GROUP: Final[i64] = 128
_KIND: Final[i64] = 256
_LOCALITY: Final[i64] = 512
_SALT: Final[i64] = 1024
_OTHER: Final[i64] = 2048  # a field that only `kv_events.py` supports, unless it is nil
_OF_STORED: Final = _PARENT | _TOKENS | _SIZE | _ADAPTER | _KEYS | _SALT  # not allowed in a removal
_FIELDS: Final = {
    b"block_hashes": 1,
    b"parent_block_hash": 2,
    b"token_ids": 4,
    b"block_size": 8,
    b"medium": 16,
    b"lora_name": 32,
    b"extra_keys": 64,
    b"group_idx": 128,
    b"kv_cache_spec_kind": 256,
    b"locality": 512,
    b"cache_salt": 1024,
    b"block_mm_infos": 2048,
    b"ownership": 2048,
    b"lookahead_token_ids": 2048,
    b"type": 2048,  # a repeated key
    b"lora_id": 0,
    b"kv_cache_spec_sliding_window": 0,
    b"session_id": 0,
}


class _Unusual(Exception):
    """Raised for a batch of unusual layout, which `kv_events.py` must decode."""


def packed_batch(payload: bytes) -> EventBatch | None:
    """Decode a batch of KV events; None for an unusual layout, which `kv_events.py` must decode."""
    try:
        return _Reader(payload).batch()
    except (_Unusual, IndexError, UnicodeDecodeError):  # IndexError: truncated
        return None


class _Reader:
    """Decodes one batch of KV events, from the first byte to the last."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at: i64 = 0
        self._events: list[Event] = []
        # Consecutive removals that differ only in their blocks form one record.
        self._gone = BytesWriter()
        self._gone_tier: Tier | None = None
        self._gone_group: int | None = None
        self._gone_events = 0
        # The fields of the event that is being read.
        self._first: i64 = 0  # where its block hashes start
        self._names = b""
        self._parent: int | None = None
        self._its_tokens = b""
        self._size: i64 = 0
        self._medium: str | None = None
        self._adapter: str | None = None
        self._salt: str | None = None
        self._marked: list[str] | None = None  # the first block's extra keys that look like a salt
        self._group: int | None = None
        self._kind: str | None = None

    def batch(self) -> EventBatch:
        inside: i64 = self._array()
        if inside < 2 or inside > 3 or self._byte() != 0xCB:
            raise _Unusual
        self._at += 8
        count: i64 = self._array()
        if count > SLICE_EVENTS:
            raise _Unusual
        while count > 0:
            count -= 1
            self._event()
        self._end_removals()
        rank: int | None = None
        if inside == 3 and not self._passes_nil():
            rank = self._below(_I32)
        if self._at != len(self._data):
            raise _Unusual  # other fields, or bytes behind the batch
        return EventBatch(rank, self._events, [])

    def _event(self) -> None:
        self._parent = self._medium = self._adapter = self._group = self._kind = None
        self._salt = None
        self._marked = None
        tag: i64 = self._data[self._at]
        if tag & 0xF0 == 0x80 or tag == 0xDE:
            self._of_map()
            return
        fields: i64 = self._array()
        if self._passes(_STORED):
            if fields < 5:
                raise _Unusual
            self._end_removals()
            self._stored(fields)
        elif self._passes(_REMOVED):
            if fields < 2:
                raise _Unusual
            self._removed(fields)
        elif fields == 1 and self._passes(_CLEARED):
            self._cleared()
        else:
            raise _Unusual

    def _of_map(self) -> None:
        tag: i64 = self._byte()
        fields: i64 = tag & 15
        if tag == 0xDE:
            self._at += 2
            fields = i64(read_i16_be(self._data, self._at - 2)) & 0xFFFF
        if fields == 0 or not self._passes(_TYPE):
            raise _Unusual
        if self._passes(_STORED):
            self._end_removals()
            seen: i64 = self._fields(fields - 1, True)
            if seen & (_BLOCKS | _TOKENS | _SIZE) != _BLOCKS | _TOKENS | _SIZE:
                raise _Unusual
            self._add_stored()
        elif self._passes(_REMOVED):
            if not self._fields(fields - 1, False) & _BLOCKS:
                raise _Unusual
            self._add_removed()
        elif fields == 1 and self._passes(_CLEARED):
            self._cleared()
        else:
            raise _Unusual

    def _fields(self, count: i64, is_stored: bool) -> i64:
        """Read an event's fields from a map, in any order. Return a bit mask of the fields read."""
        seen: i64 = 0
        while count > 0:
            count -= 1
            tag: i64 = self._byte()
            length: i64 = tag & 31
            if tag & 0xE0 != 0xA0:
                raise _Unusual
            start = self._at
            self._at += length
            field: i64 = _FIELDS.get(self._data[start : self._at], -1)
            if field < 0:
                self._data[start : self._at].decode()  # one that is no UTF-8 is unusual
                field = 0
            if seen & field & ~_OTHER:
                raise _Unusual  # repeated
            seen |= field
            if field == _BLOCKS:
                self._first = self._at
                if is_stored:
                    self._names = self._hashes()
                else:
                    self._step_over()
            elif field == 0 or (not is_stored and field & _OF_STORED):
                self._step_over()
            elif field == _TOKENS:
                self._its_tokens = self._tokens()
            elif field == _SIZE:
                self._size = self._below(_I32)
            elif self._passes_nil():
                continue
            elif field == _PARENT:
                self._parent = self._unsigned_hash()
            elif field == _MEDIUM:
                self._medium = self._text()
            elif field == _ADAPTER:
                self._adapter = self._text()
            elif field == _KEYS:
                self._plain_keys()
            elif field == _SALT:
                self._salt = self._text()
            elif field == _LOCALITY:
                self._check_locality()
            elif field == _GROUP:
                self._group = self._below(_I32)
            elif field == _KIND and is_stored:
                self._kind = self._text()
            else:
                raise _Unusual
        return seen

    def _stored(self, fields: i64) -> None:
        self._names = self._hashes()
        if not self._passes_nil():
            self._parent = self._unsigned_hash()
        self._its_tokens = self._tokens()
        self._size = self._below(_I32)
        if fields > 5 and not self._passes_nil():
            self._below(_I32)  # lora_id: unused
        if fields > 6:
            self._medium = self._text()
        if fields > 7:
            self._adapter = self._text()
        if fields > 8 and not self._passes_nil():
            self._plain_keys()
        if fields > 9 and not self._passes_nil():
            self._group = self._below(_I32)
        if fields > 10:
            self._kind = self._text()
        if fields > 11 and not self._passes_nil():
            self._below(_I32)  # a sliding window: unused
        if fields > 12:
            self._check_locality()
        if fields > 13:
            self._unused()  # ownership
        if fields > 14:
            self._step_over()  # session_id: unused
        if fields > 15:
            self._unused()  # lookahead_token_ids
        self._step_over(fields - 16)
        self._add_stored()

    def _add_stored(self) -> None:
        names, parent, tokens, size = self._names, self._parent, self._its_tokens, self._size
        if size == 0 or not _differ(names, parent):
            raise _Unusual
        salt = self._salt
        # reported in its own field, but with the prefix that was given to the engine
        if salt is not None:
            salt = unmarked_salt(salt)
        salt = salt or self._salt_of_keys()
        blocks: i64 = min(i64(len(names)) >> 3, (i64(len(tokens)) >> 2) // size)
        names, tokens = names[: blocks << 3], tokens[: (blocks * size) << 2]
        tier, adapter = tier_of(self._medium), self._adapter or None
        event = BlockStored(names, parent, tokens, size, tier, adapter, salt)
        event.group_idx, event.kind = self._group, self._kind
        if blocks <= PART_BLOCKS:
            self._events.append(event)
        else:
            self._events += parts_of(event)

    def _removed(self, fields: i64) -> None:
        self._first = self._at
        self._step_over()  # skip to the fields after it
        if fields > 2:
            self._medium = self._text()
        if fields > 3 and not self._passes_nil():
            self._group = self._below(_I32)
        if fields > 4:
            self._check_locality()  # older layouts have the kind here
        if fields > 5:
            self._unused()  # ownership
        self._step_over(fields - 6)
        self._add_removed()

    def _add_removed(self) -> None:
        tier = tier_of(self._medium)
        end = self._at
        is_full: bool = len(self._gone) >= PART_BLOCKS << 3
        if self._gone_events and (
            is_full or tier is not self._gone_tier or self._group != self._gone_group
        ):
            self._end_removals()
        self._at = self._first
        self._hashes_into(self._gone)
        self._at = end
        self._gone_tier = tier
        self._gone_group = self._group
        self._gone_events += 1

    def _cleared(self) -> None:
        self._end_removals()
        self._events.append(AllBlocksCleared())

    def _end_removals(self) -> None:
        if self._gone_events:
            names, events = self._gone.getvalue(), self._gone_events
            group = self._gone_group
            self._events.append(BlockRemoved(names, self._gone_tier, group, events=events))
            self._gone, self._gone_events = BytesWriter(), 0

    def _byte(self) -> i64:
        value: i64 = self._data[self._at]
        self._at += 1
        return value

    def _array(self) -> i64:
        """Read the header of an array, and return the array's length."""
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
        """Read a list of hashes into `out`, 8 bytes each."""
        count: i64 = self._array()
        while count > 0:
            count -= 1
            write_i64_le(out, self._hash())

    def _hash(self) -> i64:
        """Read a hash as a signed 64-bit number. A hash in bytes is cut to its last eight bytes."""
        data, at = self._data, self._at
        tag: i64 = data[at]
        if tag == 0xCF or tag == 0xD3:
            self._at = at + 9
            return read_i64_be(data, at + 1)
        if tag == 0xC4:
            length: i64 = data[at + 1]
            if length < 8:
                raise _Unusual
            self._at = at + 2 + length
            return read_i64_be(data, self._at - 8)
        if tag >= 0xE0:
            self._at = at + 1
            return tag - 256
        if tag == 0xD2:
            self._at = at + 5
            return i64(read_i32_be(data, at + 1))
        if tag == 0xD1:
            self._at = at + 3
            return i64(read_i16_be(data, at + 1))
        if tag == 0xD0:
            self._at = at + 2
            low: i64 = data[at + 1]
            return low - 256 if low > 127 else low
        return self._below(1 << 32)

    def _unsigned_hash(self) -> int:
        packed = BytesWriter()
        write_i64_le(packed, self._hash())
        return int.from_bytes(packed.getvalue(), "little")

    def _below(self, limit: i64) -> i64:
        """Read an unsigned number below `limit`."""
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
        """Read a list of u32 numbers, packed to 4 bytes each."""
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
        """Read a short string or nil."""
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

    def _check_locality(self) -> None:
        """Read the locality of an event's blocks. Raises _Unusual unless it is LOCAL or nil."""
        word = self._text()
        if word is not None and word.upper() != "LOCAL":
            raise _Unusual

    def _plain_keys(self) -> None:
        """Read an event's extra keys, which are short texts. Store those of the first block that
        begin with ENGINE_SALT_PREFIX, for `_salt_of_keys`. Skip other texts."""
        count: i64 = self._array()
        is_first = True
        while count > 0:
            count -= 1
            if not self._passes_nil():
                keys: i64 = self._array()
                while keys > 0:
                    keys -= 1
                    key = self._text()
                    if key is None:
                        raise _Unusual
                    if key.startswith(ENGINE_SALT_PREFIX):
                        if is_first:
                            self._marked = [*(self._marked or ()), key]
                    elif len(key) > _MOST_KEY:
                        raise _Unusual
            is_first = False

    def _salt_of_keys(self) -> str | None:
        """Return the salt among the extra keys, one of which is the adapter's name."""
        marked = self._marked
        if marked is None:
            return None
        at: i64 = 1 if marked[0] == self._adapter else 0
        return unmarked_salt(marked[at]) if at < i64(len(marked)) else None

    def _step_over(self, left: i64 = 1) -> None:
        """Skip `left` values of any kind, with everything nested in them."""
        data, size = self._data, i64(len(self._data))
        while left > 0:
            left -= 1
            tag: i64 = self._byte()
            if tag < 0x80 or tag >= 0xE0 or tag == 0xC0 or tag == 0xC2 or tag == 0xC3:
                continue
            if tag < 0x90:
                left += (tag & 15) * 2
            elif tag < 0xA0:
                left += tag & 15
            elif tag < 0xC0 or tag == 0xD9:
                self._at -= 1
                self._text()  # one that is no UTF-8 makes the event unusual, used or not
            elif tag == 0xC4:
                length: i64 = self._byte()
                self._at += length
            elif tag == 0xC5 or tag == 0xDA:
                start = self._at + 2
                self._at = start + (i64(read_i16_be(data, self._at)) & 0xFFFF)
                if tag == 0xDA:
                    data[start : self._at].decode()
            elif tag >= 0xCA and tag <= 0xD3:
                self._at += _WIDTHS[tag - 0xCA]
            elif tag == 0xDC:
                self._at += 2
                left += i64(read_i16_be(data, self._at - 2)) & 0xFFFF
            elif tag == 0xDD:
                self._at += 4
                left += i64(read_i32_be(data, self._at - 4)) & 0xFFFFFFFF
            else:  # kinds that engines do not send here: extensions, large maps, very long texts
                raise _Unusual
            if self._at > size:
                raise _Unusual

    def _unused(self) -> None:
        """Skip a field that is not used. Raises _Unusual if the value is a text or a list."""
        tag: i64 = self._data[self._at]
        is_fixed: bool = tag >= 0x90 and tag < 0xC0
        if is_fixed or (tag >= 0xC4 and tag <= 0xC6) or (tag >= 0xD9 and tag <= 0xDD):
            raise _Unusual
        self._step_over()

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
    """Whether all block hashes differ from each other and from the parent's hash."""
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
