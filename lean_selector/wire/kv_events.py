"""Decode event batches of vLLM, SGLang and TRT-LLM, in all their layouts, into records.

A batch, or a piece of a large one, is decoded by msgspec at once: by a typed decoder for events
that are arrays, or by another for events that are maps. If that decoder refuses it, its events are
decoded one by one without types, which is slow and reads all layouts. An event that cannot be
decoded then is skipped and counted by reason; the others are used. Spec: indexer.md 1.3 and 1.4;
D25."""

from collections.abc import Iterable, Iterator

import msgspec
from msgspec import Raw
from msgspec.msgpack import Decoder

from lean_selector.core.index.shapes import (
    BlockStored,
    Event,
    EventBatch,
    SkippedEvent,
)
from lean_selector.wire.kv_event_records import (
    PART_BLOCKS,
    parts_of,
    rearranged,
    record_of,
    removal_record,
)
from lean_selector.wire.kv_event_shapes import (
    SLICE_EVENTS,
    ArrayEvent,
    ArrayEvents,
    ArrayRemoved,
    Hash,
    MapEvent,
    MapEvents,
    MapRemoved,
    RawArray,
    RawMap,
)
from lean_selector.wire.messagepack import array_header, is_array

MAX_BATCH_BYTES = 4 * 1024 * 1024
# A larger batch is decoded in pieces of at most this many bytes, or of one event.
WINDOW_BYTES = 64 * 1024
DETAIL_CHARACTERS = 200  # a message quotes at most this many characters of a peer's text

# What msgspec raises: invalid or truncated values, wrong types, invalid UTF-8, deep nesting.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_I32 = range(-(2**31), 2**31)
_NO_HASHES: list[Hash] = []  # stands for those of removals that are compared
_EVENT_TYPES = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}

_array_batch = Decoder(ArrayEvents).decode
_map_batch = Decoder(MapEvents).decode
_array_events = Decoder(list[ArrayEvent]).decode
_map_events = Decoder(list[MapEvent]).decode
_raw_array = Decoder(RawArray).decode
_raw_map = Decoder(RawMap).decode
_untyped = Decoder().decode


class NotABatch(ValueError):
    """A message is not a batch of KV events, so nothing in the message can be used."""


def decode_small(payload: bytes) -> EventBatch | None:
    """Decode a small, ordinary batch of KV events at once. Return None for any other batch, which
    `batch_slices` decodes."""
    if len(payload) > WINDOW_BYTES:
        return None
    try:
        batch = (_array_batch if _first_event_is_array(payload) else _map_batch)(payload)
        return _batch(_checked_rank(batch.dp_rank), batch.events)
    except (*_UNREADABLE, NotABatch):
        return None


def _first_event_is_array(payload: bytes) -> bool:
    """Guess whether the first event is an array, from the byte after `[float64 ts, [`. All known
    engines start a batch in this way. A wrong guess only costs time."""
    if len(payload) < 16:
        return False
    start = 11 + {0xDC: 2, 0xDD: 4}.get(payload[10], 0)
    return is_array(payload[start])


def batch_slices(payload: bytes) -> Iterator[EventBatch]:
    """Decode a batch of KV events in pieces, and yield each to be applied in one time slice. Only
    the first step may raise NotABatch. A batch is an array; one revision of vLLM sent a map."""
    try:
        batch = (_raw_array if is_array(payload[0]) else _raw_map)(payload)
    except (*_UNREADABLE, IndexError) as error:
        raise NotABatch(str(error)[:DETAIL_CHARACTERS]) from None
    dp_rank = _checked_rank(batch.rank())
    some: list[Raw] = []
    size = 0
    for raw in batch.events:
        length = len(memoryview(raw))
        if some and (len(some) == SLICE_EVENTS or size + length > WINDOW_BYTES):
            yield from _slices(dp_rank, some)
            some, size = [], 0
        some.append(raw)
        size += length
    yield from _slices(dp_rank, some)


def _slices(dp_rank: int | None, raws: list[Raw]) -> Iterator[EventBatch]:
    batch = _piece(dp_rank, raws)
    if len(raws) == 1:  # perhaps a large event, whose record has several parts
        return one_by_one(batch)
    return iter((batch,))


def one_by_one(batch: EventBatch) -> Iterator[EventBatch]:
    """Yield the records of a batch apart, to be applied in a time slice each."""
    if batch.skipped or not batch.events:
        yield EventBatch(batch.dp_rank, [], batch.skipped)
    for event in batch.events:
        yield EventBatch(batch.dp_rank, [event], [])


def _piece(dp_rank: int | None, raws: list[Raw]) -> EventBatch:
    events = array_header(len(raws)) + b"".join(raws)
    try:
        typed: list[ArrayEvent] | list[MapEvent]
        typed = _array_events(events) if raws and is_array(events[5]) else _map_events(events)
    except _UNREADABLE:
        return _apart(dp_rank, raws)
    return _batch(dp_rank, typed)


def _batch(dp_rank: int | None, typed: Iterable[ArrayEvent | MapEvent]) -> EventBatch:
    batch = EventBatch(dp_rank, [], [])
    removal: ArrayRemoved | MapRemoved | None = None
    names: list[Hash] = []  # its blocks, and those of the removals after it that are like it
    count = 0
    for event in typed:
        if type(event) is ArrayRemoved or type(event) is MapRemoved:
            more, event.block_hashes = event.block_hashes, _NO_HASHES
            if event == removal:
                names += more
                count += 1
                continue
            if removal is not None:
                batch.events.append(removal_record(removal, names, count))
            removal, names, count = event, more, 1
            continue
        if removal is not None:
            batch.events.append(removal_record(removal, names, count))
            removal = None
        try:
            _add(batch, record_of(event))
        except ValueError as error:
            _skip(batch, "BlockStored", error)
    if removal is not None:
        batch.events.append(removal_record(removal, names, count))
    return batch


def _apart(dp_rank: int | None, raws: list[Raw]) -> EventBatch:
    """Decode events one by one and without types, so that an invalid event is skipped alone."""
    batch = EventBatch(dp_rank, [], [])
    for raw in raws:
        tag: object = None
        try:
            fields = rearranged(_untyped(raw))
            tag = fields.get("type")
            _add(batch, record_of(msgspec.convert(fields, MapEvent)))
        except (*_UNREADABLE, ValueError, TypeError) as error:
            _skip(batch, tag, error)
    return batch


def _add(batch: EventBatch, record: Event | None) -> None:
    """Add a record to a batch; None is an event that is ignored."""
    if type(record) is BlockStored and len(record.engine_hashes) > PART_BLOCKS << 3:
        batch.events += parts_of(record)
    elif record is not None:
        batch.events.append(record)


def _skip(batch: EventBatch, tag: object, error: Exception) -> None:
    """Count an event that could not be decoded. `tag` is the event's type."""
    event_type = _EVENT_TYPES.get(tag, "") if isinstance(tag, str) else "unknown"
    kind = event_type or "unknown", "malformed" if event_type else "unknown_type"
    for known in batch.skipped:
        if (known.event_type, known.reason) == kind:
            known.count += 1
            return
    batch.skipped.append(SkippedEvent(*kind, str(error)[:DETAIL_CHARACTERS]))


def _checked_rank(rank: object) -> int | None:
    """Return the rank of a batch; None if it is nil or negative. Raises NotABatch if the value is
    not a 32-bit integer."""
    if rank is None:
        return None
    if type(rank) is not int or rank not in _I32:
        raise NotABatch(f"{str(rank)[:DETAIL_CHARACTERS]} is no dp_rank")
    return rank if rank >= 0 else None
