"""An event larger than a window, in parts: the blocks of one chain, some at a time.

The event's lists stay where they are and are read as they are needed; its other fields are small,
or nobody reads them. All that names a block is read before the first part, so that an event that
refers to itself is skipped whole. Tokens that cannot be read end the event: the blocks before them
stand, as they would if the engine had told of them alone. Spec: indexer.md 1.4; D25.
"""

from collections.abc import Callable, Generator, Iterator
from typing import Generic, TypeVar

import msgspec
from msgspec.msgpack import Decoder

from lean_selector.core.index.kv_batch import BlockRemoved, BlockStored, Event, Part, SkippedEvent
from lean_selector.wire.kv_event_layouts import (
    Hash,
    MapEvent,
    MapRemoved,
    MapStored,
    MultimodalInfo,
    Token,
)
from lean_selector.wire.kv_event_odd_forms import rearranged
from lean_selector.wire.kv_event_records import UNREADABLE, Skips, record_of, u64s
from lean_selector.wire.messagepack_pieces import (
    WINDOW_BYTES,
    NotMessagePack,
    array_header,
    end_within,
    header,
    is_array,
    is_map,
    passed,
)

# A prompt of 1 M tokens in blocks of 4. Of blocks of 1 token, which some engines can have, 262 144.
MAX_EVENT_BLOCKS = 1 << 18
MAX_BLOCK_TOKENS = WINDOW_BYTES  # of a block in an event that is read in parts; real ones have 256
PART_BLOCKS = 512
PART_TOKENS = 8192
_MAX_FIELDS = 64  # of a map; layouts have had up to 16

_LISTS = ("block_hashes", "token_ids", "extra_keys", "block_mm_infos")
_SMALL = (
    "type",
    "parent_block_hash",
    "block_size",
    "medium",
    "lora_name",
    "group_idx",
    "kv_cache_spec_kind",
    "locality",
    "cache_salt",
)
_POSITIONS = 13  # of the array form, from the tag to the locality
_LIST_POSITIONS = {1: "block_hashes", 3: "token_ids", 8: "extra_keys", 9: "block_mm_infos"}
_LORA_ID = 5  # of any type, and unused

_untyped = Decoder().decode
_hashes = Decoder(list[Hash]).decode
_tokens = Decoder(list[Token]).decode
_keys = Decoder(list[list[object] | None]).decode
_infos = Decoder(list[MultimodalInfo | None]).decode

Slice = tuple[list[Event], list[SkippedEvent]]
_T = TypeVar("_T")


def records_of_large(data: memoryview, at: int) -> Iterator[Slice]:
    """The records of the event at `at`, in slices; empty ones after work without a result.

    The event is known to be MessagePack.
    """
    event = _LargeEvent(data)
    try:
        yield from event.read(at)
        yield from event.records()
    except _OverBound as bound:
        yield [], [SkippedEvent(event.event_type, bound.reason, str(bound))]
    except (*UNREADABLE, NotMessagePack, ValueError, TypeError) as error:
        skips = Skips()
        skips.add(event.tag, error)
        yield [], skips.all()


class _OverBound(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class _List(Generic[_T]):
    """A list of an event, read from its start."""

    def __init__(self, data: memoryview, at: int, decode: Callable[[bytes], list[_T]]) -> None:
        self._data = data
        self._decode = decode
        self.left, self._at = header(data, at)

    def take(self, count: int) -> list[_T]:
        """The next values, fewer at the end; ValueError if one is larger than a window."""
        count = min(count, self.left)
        self.left -= count
        values: list[_T] = []
        step = count
        while count:
            step = min(step, count)
            end = end_within(self._data, self._at, step)
            if end is None:
                if step == 1:
                    raise ValueError("a value in a list of the event is too large")
                step = max(1, step // 4)
                continue
            values += self._decode(array_header(step) + self._data[self._at : end])
            self._at = end
            count -= step
        return values


class _LargeEvent:
    """Where the lists of an event are, and its other fields."""

    def __init__(self, data: memoryview) -> None:
        self.tag: object = None
        self._data = data
        self._lists: dict[str, int] = {}  # where each begins
        self._event: MapEvent | None = None  # its lists empty

    @property
    def event_type(self) -> str:
        return "stored" if isinstance(self._event, MapStored) else "removed"

    def read(self, at: int) -> Iterator[Slice]:
        """Find the fields; raises ValueError if they make no event."""
        inside, first = header(self._data, at)
        fields: object = None
        if is_array(self._data[at]):
            fields = yield from self._by_position(inside, first)
        elif is_map(self._data[at]):
            fields = yield from self._by_name(inside // 2, first)
        named = rearranged(fields)
        self.tag = named.get("type")
        named.update((name, []) for name in ("block_hashes", "token_ids") if name in self._lists)
        for name in ("extra_keys", "block_mm_infos"):
            if name in self._lists:
                named[name] = None
        self._event = msgspec.convert(named, MapEvent)

    def _by_position(self, count: int, at: int) -> Generator[Slice, None, list[object]]:
        values: list[object] = []
        for position in range(min(count, _POSITIONS + 1)):
            value: object = None
            name = _LIST_POSITIONS.get(position)
            if position == 9 and not is_array(self._data[at]):
                name = None
            end = yield from self._passed(at)
            if name is not None and is_array(self._data[at]):
                self._lists[name] = at
                value = []
            elif position != _LORA_ID:
                value = self._small(at, end)
            values.append(value)
            at = end
        return values

    def _by_name(self, count: int, at: int) -> Generator[Slice, None, dict[str, object]]:
        if count > _MAX_FIELDS:
            raise ValueError(f"an event has at most {_MAX_FIELDS} fields")
        fields: dict[str, object] = {}
        for _ in range(count):
            middle = yield from self._passed(at)
            end = yield from self._passed(middle)
            name = self._small(at, middle)
            if isinstance(name, bytes):
                name = name.decode()
            if isinstance(name, str) and name in _LISTS and is_array(self._data[middle]):
                self._lists[name] = middle
            elif name in _LISTS or name in _SMALL:
                fields[name] = self._small(middle, end)
            at = end
        return fields

    def _passed(self, at: int) -> Generator[Slice, None, int]:
        passing = passed(self._data, at)
        while True:
            try:
                next(passing)
            except StopIteration as stop:
                return int(stop.value)
            yield [], []

    def _small(self, at: int, end: int) -> object:
        """A field's value; an empty tuple, which none can be, if it is too large."""
        return _untyped(self._data[at:end]) if end - at <= WINDOW_BYTES else ()

    def records(self) -> Iterator[Slice]:
        event = self._event
        if isinstance(event, MapStored):
            yield from self._stored(event)
        elif isinstance(event, MapRemoved):
            yield from self._removed(event)
        else:
            assert event is not None, "the fields were not read"
            record = record_of(event)
            yield [record] if record is not None else [], []

    def _list(self, name: str, decode: Callable[[bytes], list[_T]]) -> _List[_T] | None:
        at = self._lists.get(name)
        return None if at is None else _List(self._data, at, decode)

    def _names(self) -> _List[Hash]:
        """The list of hashes; _OverBound if there are too many."""
        names = self._list("block_hashes", _hashes)
        assert names is not None, "the event would not have been one"
        if names.left > MAX_EVENT_BLOCKS:
            raise _OverBound("too_many_blocks", f"it has {names.left} blocks")
        return names

    def _removed(self, event: MapRemoved) -> Iterator[Slice]:
        names = self._names()
        while True:
            part = msgspec.structs.replace(event, block_hashes=names.take(PART_BLOCKS))
            record = record_of(part)
            assert isinstance(record, BlockRemoved)
            record.events = 0 if names.left else 1
            yield [record], []
            if not names.left:
                return

    def _stored(self, event: MapStored) -> Iterator[Slice]:
        names = self._names()
        size = event.block_size
        if size > MAX_BLOCK_TOKENS:
            raise _OverBound("oversize_block", f"its blocks have {size} tokens")
        hashes: list[int] = []
        named = [] if event.parent_block_hash is None else [event.parent_block_hash]
        distinct = set(u64s(named))
        while names.left:
            more = u64s(names.take(PART_TOKENS))
            distinct.update(more)
            hashes += more
            if len(distinct) != len(hashes) + len(named):
                hashes = hashes[:1] * 2  # refused for the same reason, if for no other before it
                break
            yield [], []
        tokens = self._list("token_ids", _tokens)
        assert tokens is not None, "the event would not have been one"
        keys = self._list("extra_keys", _keys)
        infos = self._list("block_mm_infos", _infos)
        blocks = min(len(hashes), tokens.left // size) if size else 0
        step = max(1, min(PART_BLOCKS, PART_TOKENS // max(1, size)))
        salt: str | None = None
        parent = event.parent_block_hash
        for at in range(0, max(1, blocks), step):
            end = min(blocks, at + step)
            part = msgspec.structs.replace(
                event,
                block_hashes=hashes[at:end] if blocks else hashes[:1],
                token_ids=tokens.take((end - at) * size),
                parent_block_hash=parent,
                extra_keys=keys.take(end - at) if keys else None,
                block_mm_infos=infos.take(end - at) if infos else None,
            )
            record = record_of(part)
            assert isinstance(record, BlockStored)
            if at == 0:
                salt = record.cache_salt
            else:
                record.cache_salt = salt
            is_last = end == blocks
            if at == 0:
                record.part = Part.WHOLE if is_last else Part.FIRST
            else:
                record.part = Part.LAST if is_last else Part.MIDDLE
            yield [record], []
            parent = hashes[end - 1] if end else None
