"""Event batches of vLLM, SGLang and TRT-LLM: bytes to records, every layout they have had.

Tolerant per event: one that cannot be read is skipped with its reason, the others of its batch
stand. msgspec refuses a union of maps and arrays, so two typed decoders stand behind one function,
chosen by looking at the first event. A small batch that they take is read at once; any other is cut
into pieces, each of bounded work: an event that they refuse is read untyped and put in order first,
one that is larger than a piece comes as several records. Knows nothing of the index.
Spec: indexer.md 1.3 and 1.4; D25.
"""

from collections.abc import Iterable, Iterator

import msgspec
from msgspec.msgpack import Decoder

from lean_selector.core.index.kv_batch import BlockRemoved, Event, EventBatch
from lean_selector.wire.kv_event_layouts import (
    ArrayEvent,
    ArrayEvents,
    ArrayRemoved,
    ArrayStored,
    MapEvent,
    MapEvents,
    MapRemoved,
)
from lean_selector.wire.kv_event_odd_forms import rearranged
from lean_selector.wire.kv_event_parts import records_of_large
from lean_selector.wire.kv_event_records import (
    DETAIL_CHARACTERS,
    UNREADABLE,
    Skips,
    record_of,
    stored_record,
    u64s,
)
from lean_selector.wire.messagepack_pieces import (
    WINDOW_BYTES,
    Bytes,
    NotMessagePack,
    Passing,
    array_header,
    header,
    is_array,
    is_map,
    passed,
    pieces,
    trailing_at,
)
from lean_selector.wire.messagepack_values import Piece

# A prompt of 1 M tokens is 62 500 events if its engine tells of it block by block, 16 tokens each:
# four times as many pass, as does the same prompt in blocks of 4.
MAX_BATCH_EVENTS = 1 << 18
# Events of one slice. Those that nobody understands take the longest: some 8 us each.
SLICE_EVENTS = 256

# The names that the rank of a batch has had, as a map.
_RANK_NAMES = ("data_parallel_rank", "dp_rank", "attn_dp_rank")
_I32 = range(-(2**31), 2**31)

_array_events = Decoder(ArrayEvents).decode
_map_events = Decoder(MapEvents).decode
_array_event_list = Decoder(list[ArrayEvent]).decode
_map_event_list = Decoder(list[MapEvent]).decode
_array_event = Decoder(ArrayEvent).decode
_map_event = Decoder(MapEvent).decode
_raw_list = Decoder(list[msgspec.Raw]).decode
_untyped = Decoder().decode


class NotABatch(ValueError):
    """The payload is no event batch at all: nothing in it can be attributed to a rank."""


class TooManyEvents(NotABatch):
    """More events than MAX_BATCH_EVENTS; none of them was looked at."""


def decode_small(payload: Bytes) -> EventBatch | None:
    """Read an ordinary batch at once; None for what `batch_slices` has to look at.

    Bytes after the first msgpack value are ignored.
    """
    if len(payload) > WINDOW_BYTES:
        return None
    try:
        try:
            batch = _typed(payload)
        except msgspec.DecodeError as error:
            end = trailing_at(error)
            if end is None:
                return None
            batch = _typed(payload[:end])
        if len(batch.events) > SLICE_EVENTS:
            return None
        return _batch(_checked_rank(batch.dp_rank), batch.events)
    except (*UNREADABLE, NotABatch):
        return None


def batch_slices(payload: Bytes) -> Iterator[EventBatch | None]:
    """Any batch in slices of bounded work, to be applied in order; None: nothing to apply so far.

    Raises NotABatch, and nothing else, and only before the first slice.
    """
    data = memoryview(payload)
    layout = _Layout()
    try:
        for _ in layout.read(data):
            yield None
    except (*UNREADABLE, NotMessagePack) as error:
        raise NotABatch(str(error)[:DETAIL_CHARACTERS]) from None
    for piece in layout.events:
        if piece.end - piece.start <= WINDOW_BYTES:
            yield _of_piece(layout.dp_rank, data, piece)
            continue
        for records, skipped in records_of_large(data, piece.start):
            batch = EventBatch(layout.dp_rank, records, skipped)
            yield batch if records or skipped else None


class _Layout:
    """Where the parts of a batch are. `read` finds them; until it ends nothing is certain."""

    def __init__(self) -> None:
        self.dp_rank: int | None = None
        self.events: list[Piece] = []

    def read(self, data: memoryview) -> Iterator[None]:
        """Walk a whole batch: an array, or a map, which one vLLM revision sent."""
        inside, at = header(data, 0)
        if is_array(data[0]):
            if inside < 2:
                raise NotABatch("a batch is [time, events, rank]")
            at = yield from passed(data, at)
            at = yield from self._read_events(data, at)
            for position in range(2, inside):
                end = yield from passed(data, at)
                if position == 2:
                    self.dp_rank = _checked_rank(_small_value(data[at:end]))
                at = end
        elif is_map(data[0]):
            yield from self._read_map(data, at, inside // 2)
        else:
            raise NotABatch("a batch is an array or a map")
        if not self.events:
            self.events = [Piece(at, at, 0)]

    def _read_map(self, data: memoryview, at: int, fields: int) -> Iterator[None]:
        ranks: dict[object, object] = {}
        has_events = False
        for _ in range(fields):
            end = yield from passed(data, at)
            name = _small_value(data[at:end])
            at = end
            if name == "events":
                has_events = True
                at = yield from self._read_events(data, at)
                continue
            end = yield from passed(data, at)
            if isinstance(name, str) and name in _RANK_NAMES:
                ranks[name] = _small_value(data[at:end])
            at = end
        if not has_events:
            raise NotABatch("a batch has events")
        named = (ranks[name] for name in _RANK_NAMES if ranks.get(name) is not None)
        self.dp_rank = _checked_rank(next(named, None))

    def _read_events(self, data: memoryview, at: int) -> Passing:
        count, start = header(data, at)
        if not is_array(data[at]):
            raise NotABatch("the events of a batch are an array")
        if count > MAX_BATCH_EVENTS:
            raise TooManyEvents(f"it has {count} events")
        self.events = []
        for piece in pieces(data, start, count, SLICE_EVENTS):
            if piece is not None:
                self.events.append(piece)
            yield None
        return self.events[-1].end if self.events else start


def _small_value(raw: memoryview) -> object:
    """A name or a number; what is too long for one is neither."""
    return _untyped(raw) if len(raw) <= DETAIL_CHARACTERS else ()


def _typed(payload: Bytes) -> ArrayEvents | MapEvents:
    return (_array_events if _first_event_is_array(payload) else _map_events)(payload)


def _first_event_is_array(payload: Bytes) -> bool:
    """Look past `[float64 ts, [`: every producer met so far starts like that.

    A wrong guess costs time, not correctness.
    """
    if len(payload) < 16:
        return False
    start = 11 + {0xDC: 2, 0xDD: 4}.get(payload[10], 0)
    return is_array(payload[start])


def _of_piece(dp_rank: int | None, data: memoryview, piece: Piece) -> EventBatch:
    if not piece.count:
        return EventBatch(dp_rank, [], [])
    events = array_header(piece.count) + data[piece.start : piece.end]
    try:
        typed: list[ArrayEvent] | list[MapEvent]
        if is_array(data[piece.start]):
            typed = _array_event_list(events)
        else:
            typed = _map_event_list(events)
    except UNREADABLE:
        return _apart(dp_rank, _raw_list(events))
    return _batch(dp_rank, typed)


def _batch(dp_rank: int | None, typed: Iterable[ArrayEvent | MapEvent]) -> EventBatch:
    events: list[Event] = []
    skips: Skips | None = None
    removal: BlockRemoved | None = None  # the last record, if it is one that may grow
    medium: str | None = None  # and its
    for event in typed:
        plain = _plain_removal(event)
        if plain is not None and removal is not None and plain.medium == medium:
            removal.block_hashes += u64s(plain.block_hashes)
            removal.events += 1
            continue
        try:
            record = stored_record(event) if type(event) is ArrayStored else record_of(event)
        except ValueError as error:
            skips = skips or Skips()
            skips.add("BlockStored", error)
        else:
            removal = None
            if record is not None:
                events.append(record)
            if plain is not None and isinstance(record, BlockRemoved):
                removal, medium = record, plain.medium
    return EventBatch(dp_rank, events, skips.all() if skips else [])


def _plain_removal(event: ArrayEvent | MapEvent) -> ArrayRemoved | MapRemoved | None:
    """The event, if it is a removal that says nothing but which blocks, and where they were."""
    if isinstance(event, ArrayRemoved):
        is_plain = event.group_idx is None and event.kind_or_locality is None
        return event if is_plain else None
    if isinstance(event, MapRemoved):
        says_more = event.group_idx is not None or event.kv_cache_spec_kind is not None
        return None if says_more or event.locality is not None else event
    return None


def _apart(dp_rank: int | None, raw_events: list[msgspec.Raw]) -> EventBatch:
    """Event by event, for pieces with something unusual in them."""
    events: list[Event] = []
    skips = Skips()
    for raw in raw_events:
        event = _read_apart(memoryview(raw), skips)
        if event is not None:
            events.append(event)
    return EventBatch(dp_rank, events, skips.all())


def _read_apart(raw: memoryview, skips: Skips) -> Event | None:
    """One event, typed if its layout is known, else brought into one; None for `Ignored`."""
    if is_array(raw[0]):
        decode = _array_event
    elif is_map(raw[0]):
        decode = _map_event
    else:
        skips.add_unreadable()
        return None
    try:
        return record_of(decode(raw))
    except (*UNREADABLE, ValueError):
        pass
    tag: object = None
    try:
        fields = rearranged(_untyped(raw))
        tag = fields.get("type")
        return record_of(msgspec.convert(fields, MapEvent))
    except (*UNREADABLE, ValueError, TypeError) as error:
        skips.add(tag, error)
        return None


def _checked_rank(rank: object) -> int | None:
    """A negative rank means what nil means; what is no i32 fits no worker, as in the reference."""
    if rank is None:
        return None
    if type(rank) is not int or rank not in _I32:
        raise NotABatch(f"{str(rank)[:DETAIL_CHARACTERS]} is no dp_rank")
    return rank if rank >= 0 else None
