"""Decode event batches of vLLM, SGLang and TRT-LLM, in all their layouts, into records.

An event that cannot be decoded is skipped and counted by reason; the other events of the batch are
used. A small batch is decoded at once, by a typed decoder for events that are arrays or by another
for events that are maps. A batch that is large, or that the typed decoder refuses, is decoded in
steps of bounded work. An event of unknown layout is decoded without types. An event of more than
WINDOW_BYTES becomes several records. Spec: indexer.md 1.3 and 1.4; D25."""

from collections.abc import Iterable, Iterator, Mapping

import msgspec
from msgspec import Raw
from msgspec.msgpack import Decoder

from lean_selector.core.index.shapes import (
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    EventPart,
    SkippedEvent,
)
from lean_selector.wire.kv_event_records import (
    DETAIL_CHARACTERS,
    TEXT_FIELDS,
    UNREADABLE,
    Skips,
    packed_names,
    rearranged,
    record_of,
    stored_record,
    u64s,
)
from lean_selector.wire.kv_event_shapes import (
    ArrayEvent,
    ArrayEvents,
    ArrayRemoved,
    ArrayStored,
    Hash,
    Lookahead,
    MapEvent,
    MapEvents,
    MapRemoved,
    MapStored,
    MultimodalInfo,
    Token,
)
from lean_selector.wire.messagepack import (
    WINDOW_BYTES,
    Bytes,
    ListReader,
    array_header,
    count_of,
    first_value,
    is_array,
    size_of,
)

# A message is scanned once to find its parts: at this size, some 10 ms if its values are small.
MAX_BATCH_BYTES = 4 * 1024 * 1024
MAX_BATCH_EVENTS = 1 << 16
MAX_EVENT_BLOCKS = 1 << 16  # a prompt of 1 M tokens in blocks of 16
MAX_BLOCK_TOKENS = 4096  # per block, if an event is decoded in parts; real blocks have up to 256
# Events per slice. Those that cannot be decoded take longest, some 8 us each.
SLICE_EVENTS = 256
# Blocks per part; the input of a part must fit into a window.
PART_BLOCKS = 512
PART_BLOCKS_WITH_KEYS = 32
PART_TOKENS = 4096  # pairs of tokens take 45 KB
_MAX_FIELDS = 1024  # in the map or array of a batch or large event; known layouts have up to 16
_MAX_FIELD_BYTES = 4096  # per field of a large event, except lists

# Key of the rank, in a batch that is a map.
_RANK_NAMES = ("data_parallel_rank", "dp_rank", "attn_dp_rank")
_I32 = range(-(2**31), 2**31)
_POSITIONS = 17  # number of positions that are read from an event in array form
_LISTS = ("block_hashes", "token_ids", "extra_keys", "block_mm_infos", "lookahead_token_ids")
_NAMES: set[object] = {*_LISTS, *TEXT_FIELDS, "parent_block_hash", "block_size", "group_idx"}
_NAMES |= {str(name).encode() for name in _NAMES}

_array_events = Decoder(ArrayEvents).decode
_map_events = Decoder(MapEvents).decode
_array_event_list = Decoder(list[ArrayEvent]).decode
_map_event_list = Decoder(list[MapEvent]).decode
_array_event = Decoder(ArrayEvent).decode
_map_event = Decoder(MapEvent).decode
_raw_list = Decoder(list[Raw]).decode
_raw_map = Decoder(dict[str | int, Raw]).decode
_raw_map_of_bin = Decoder(dict[bytes, Raw]).decode
_untyped = Decoder().decode
_hashes = Decoder(list[Hash]).decode
_tokens = Decoder(list[Token]).decode
_keys = Decoder(list[list[object] | None]).decode
_infos = Decoder(list[MultimodalInfo | None]).decode
_lookahead = Decoder(Lookahead).decode

Slices = Iterator[EventBatch | None]  # in order; None: nothing to apply yet


class NotABatch(ValueError):
    """A message is not a batch of KV events, so nothing in the message can be used."""


class TooManyEvents(NotABatch):
    """A message has more than MAX_BATCH_EVENTS KV events; no event was decoded."""


def decode_small(payload: Bytes) -> EventBatch | None:
    """Decode a small, ordinary batch of KV events at once. Return None for any other batch, which
    `batch_slices` decodes. Bytes after the first MessagePack value are ignored."""
    if len(payload) > WINDOW_BYTES:
        return None
    try:
        batch = first_value(_typed, payload)
        if len(batch.events) > SLICE_EVENTS:
            return None
        return _batch(_checked_rank(batch.dp_rank), batch.events)
    except (*UNREADABLE, NotABatch):
        return None


def batch_slices(payload: Bytes) -> Slices:
    """Decode a batch of KV events in steps of bounded work. Each step yields an EventBatch to
    apply, or None if there is none yet. Only the first step may raise NotABatch."""
    try:
        dp_rank, pieces = _rank_and_pieces(memoryview(payload))
    except NotABatch:
        raise
    except (*UNREADABLE, ValueError) as error:
        raise NotABatch(str(error)[:DETAIL_CHARACTERS]) from None
    yield None
    if not pieces:
        yield EventBatch(dp_rank, [], [])
    for piece, count in pieces:
        if len(piece) > WINDOW_BYTES:
            yield from _slices_of_large(dp_rank, piece)
        else:
            yield _of_piece(dp_rank, piece, count)


def _rank_and_pieces(data: memoryview) -> tuple[int | None, list[tuple[memoryview, int]]]:
    """Return the rank of a batch, and its events in undecoded pieces, each with its number of
    events. A batch is an array; one revision of vLLM sent a map."""
    count, at = count_of(data)
    if count > _MAX_FIELDS:
        raise NotABatch(f"a batch of more than {_MAX_FIELDS} fields")
    ranks: list[object] = []
    if is_array(data[0]):
        if count < 2:
            raise NotABatch("a batch is [time, events, rank]")
        start = at + size_of(data[at:])
        events = ListReader(data[start:], _raw_list)
        pieces = _pieces(events)
        rest = events.rest()
        for position in range(2, count):
            size = size_of(rest)
            if position == 2:
                ranks = [_value(rest[:size], DETAIL_CHARACTERS)]
            rest = rest[size:]
    else:
        named = first_value(_raw_map, data)
        if "events" not in named:
            raise NotABatch("a batch has events")
        pieces = _pieces(ListReader(memoryview(named["events"]), _raw_list))
        raws = [memoryview(named[name]) for name in _RANK_NAMES if name in named]
        ranks = [_value(raw, DETAIL_CHARACTERS) for raw in raws]
    told = [rank for rank in ranks if rank is not None]
    return _checked_rank(told[0] if told else None), pieces


def _pieces(events: ListReader[Raw]) -> list[tuple[memoryview, int]]:
    if events.left > MAX_BATCH_EVENTS:
        raise TooManyEvents(f"it has {events.left} events")
    pieces: list[tuple[memoryview, int]] = []
    while events.left:
        pieces.append(events.piece(SLICE_EVENTS))
    return pieces


def _fields_of(data: Bytes) -> list[Raw] | Mapping[str | int, Raw] | Mapping[bytes, Raw]:
    """Return the undecoded fields of a large event. Raises ValueError if `data` is neither array
    nor map, or has too many fields."""
    count, _ = count_of(data)
    if count > _MAX_FIELDS:
        raise ValueError(f"more than {_MAX_FIELDS} fields")
    if is_array(data[0]):
        return _raw_list(data)
    try:
        return _raw_map(data)
    except msgspec.ValidationError:
        return _raw_map_of_bin(data)


def _value(data: memoryview, most: int) -> object:
    """Decode a value. If it has more than `most` bytes, return (), which no field accepts."""
    return _untyped(data) if len(data) <= most else ()


def _typed(payload: Bytes) -> ArrayEvents | MapEvents:
    return (_array_events if _first_event_is_array(payload) else _map_events)(payload)


def _first_event_is_array(payload: Bytes) -> bool:
    """Guess whether the first event is an array, from the byte after `[float64 ts, [`. All known
    engines start a batch in this way. A wrong guess only costs time."""
    if len(payload) < 16:
        return False
    start = 11 + {0xDC: 2, 0xDD: 4}.get(payload[10], 0)
    return is_array(payload[start])


def _of_piece(dp_rank: int | None, piece: memoryview, count: int) -> EventBatch:
    events = array_header(count) + piece
    try:
        typed: list[ArrayEvent] | list[MapEvent]
        typed = _array_event_list(events) if is_array(piece[0]) else _map_event_list(events)
    except UNREADABLE:
        return _apart(dp_rank, _raw_list(events))
    return _batch(dp_rank, typed)


def _batch(dp_rank: int | None, typed: Iterable[ArrayEvent | MapEvent]) -> EventBatch:
    events: list[Event] = []
    skips: Skips | None = None
    removal: BlockRemoved | None = None  # the last record, if the next event may extend it
    medium: str | None = None  # the medium of the event that made the record
    more: list[Hash] = []  # block hashes that extend the record
    for event in typed:
        plain = _plain_removal(event)
        if (
            plain is not None
            and removal is not None
            and (plain.medium == medium and plain.group_idx == removal.group_idx)
        ):
            more += plain.block_hashes
            removal.events += 1
            continue
        if more and removal is not None:
            removal.names += packed_names(more)
            more = []
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
    if more and removal is not None:
        removal.names += packed_names(more)
    return EventBatch(dp_rank, events, skips.all() if skips else [])


def _plain_removal(event: ArrayEvent | MapEvent) -> ArrayRemoved | MapRemoved | None:
    """Return `event` if it is a removal that has only block hashes, a tier and a group; otherwise
    None."""
    if isinstance(event, ArrayRemoved):
        is_plain = event.kind_or_locality is None and event.ownership is None
        return event if is_plain else None
    if isinstance(event, MapRemoved):
        says_more = event.kv_cache_spec_kind is not None or event.locality is not None
        return None if says_more or event.ownership is not None else event
    return None


def _apart(dp_rank: int | None, raw_events: list[Raw]) -> EventBatch:
    """Decode events one by one, so that an invalid event is skipped alone."""
    events: list[Event] = []
    skips = Skips()
    for raw in raw_events:
        event = _read_apart(memoryview(raw), skips)
        if event is not None:
            events.append(event)
    return EventBatch(dp_rank, events, skips.all())


def _read_apart(raw: memoryview, skips: Skips) -> Event | None:
    """Decode one event, without types if the typed decoder refuses the event. Return None if the
    event is ignored, or is invalid and counted in `skips`."""
    decode = _array_event if is_array(raw[0]) else _map_event
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


def _slices_of_large(dp_rank: int | None, data: memoryview) -> Slices:
    """Yield the records of an event of more than WINDOW_BYTES, part by part.

    All hashes are decoded before the first part, so that an event with a repeated hash is skipped
    as a whole. An invalid token ends the event: the parts before this token are used, as if the
    engine had sent no other blocks."""
    tag: object = None
    try:
        fields, lists = _large_fields(data)
        tag = fields.get("type")
        event = msgspec.convert(fields, MapEvent)
        yield None
        if isinstance(event, MapStored | MapRemoved):
            names = lists["block_hashes"]
            bound = _bound_of(event, count_of(memoryview(names))[0])
            if bound is not None:
                yield EventBatch(dp_rank, [], [bound])
                return
            hashes = u64s(_hashes(names))
            yield None
            if isinstance(event, MapStored):
                parts = _stored_parts(event, hashes, lists)
            else:
                parts = _removed_parts(event, hashes)
            for part in parts:
                yield EventBatch(dp_rank, [part], [])
        elif (record := record_of(event)) is not None:
            yield EventBatch(dp_rank, [record], [])
    except (*UNREADABLE, ValueError, TypeError) as error:
        skips = Skips()
        skips.add(tag, error)
        yield EventBatch(dp_rank, [], skips.all())


def _large_fields(data: memoryview) -> tuple[dict[str, object], dict[str, Raw]]:
    """Return the fields of a large event by name, and separately its lists, still undecoded."""
    unread = _fields_of(data)
    fields: dict[str, object] = {}
    if isinstance(unread, list):
        fields = rearranged([_unless_array(value) for value in unread[:_POSITIONS]])
    else:
        known = [item for item in unread.items() if item[0] in _NAMES]
        fields = rearranged({name: _unless_array(value) for name, value in known})
    lists: dict[str, Raw] = {}
    for name in _LISTS:
        value = fields.get(name)
        if isinstance(value, Raw):
            lists[name] = value
            fields[name] = [] if name in ("block_hashes", "token_ids") else None
    return fields, lists


def _unless_array(raw: Raw) -> object:
    data = memoryview(raw)
    return raw if is_array(data[0]) else _value(data, _MAX_FIELD_BYTES)


def _bound_of(event: MapStored | MapRemoved, blocks: int) -> SkippedEvent | None:
    """Return a SkippedEvent if `event` has too many blocks or tokens per block, and None if not."""
    event_type = "stored" if isinstance(event, MapStored) else "removed"
    if blocks > MAX_EVENT_BLOCKS:
        return SkippedEvent(event_type, "too_many_blocks", f"it has {blocks} blocks")
    if isinstance(event, MapStored) and event.block_size > MAX_BLOCK_TOKENS:
        detail = f"its blocks have {event.block_size} tokens"
        return SkippedEvent(event_type, "oversize_block", detail)
    return None


def _removed_parts(event: MapRemoved, hashes: list[int]) -> Iterator[Event]:
    for at in range(0, max(1, len(hashes)), PART_BLOCKS):
        end = at + PART_BLOCKS
        event.block_hashes = [*hashes[at:end]]
        record = record_of(event)
        assert isinstance(record, BlockRemoved)
        record.events = 0 if end < len(hashes) else 1
        yield record


def _stored_parts(event: MapStored, hashes: list[int], lists: dict[str, Raw]) -> Iterator[Event]:
    size, parent = event.block_size, event.parent_block_hash
    above = [] if parent is None else u64s([parent])
    is_twice = len({*above, *hashes}) != len(above) + len(hashes)
    if is_twice:
        hashes = hashes[:1] * 2  # two suffice: the record is refused for the duplicate
    tokens = ListReader(lists["token_ids"], _tokens)
    keys = ListReader(lists["extra_keys"], _keys) if "extra_keys" in lists else None
    infos = ListReader(lists["block_mm_infos"], _infos) if "block_mm_infos" in lists else None
    following = lists.get("lookahead_token_ids")
    lookahead = ListReader(following, _lookahead) if following is not None else None
    blocks = min(len(hashes), tokens.left // size) if size else 0
    most = PART_BLOCKS_WITH_KEYS if keys or infos else PART_BLOCKS
    step = 2 if is_twice else max(1, min(most, PART_TOKENS // max(1, size)))
    salt: str | None = None
    for at in range(0, max(1, blocks), step):
        end = min(blocks, at + step)
        event.block_hashes = [*(hashes[at:end] if blocks else hashes[:1])]
        event.token_ids = tokens.take((end - at) * size)
        event.parent_block_hash = parent
        event.extra_keys = keys.take(end - at) if keys else None
        event.block_mm_infos = infos.take(end - at) if infos else None
        event.lookahead_token_ids = lookahead.take(end - at) if lookahead else None
        record = record_of(event)
        assert isinstance(record, BlockStored)
        if at == 0:
            salt = record.cache_salt
            record.part = EventPart.WHOLE if end == blocks else EventPart.FIRST
        else:
            record.cache_salt = salt
            record.part = EventPart.LAST if end == blocks else EventPart.MIDDLE
        yield record
        parent = hashes[end - 1] if end else None


def _checked_rank(rank: object) -> int | None:
    """Return the rank of a batch; None if it is nil or negative. Raises NotABatch if the value is
    not a 32-bit integer."""
    if rank is None:
        return None
    if type(rank) is not int or rank not in _I32:
        raise NotABatch(f"{str(rank)[:DETAIL_CHARACTERS]} is no dp_rank")
    return rank if rank >= 0 else None
