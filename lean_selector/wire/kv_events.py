"""Event batches of vLLM, SGLang and TRT-LLM: bytes to records, every layout they have had.

Tolerant per event: one that cannot be read is skipped with its reason, the others of its batch
stand. msgspec refuses a union of maps and arrays, so two typed decoders stand behind one function,
chosen by looking at the first event; a batch that they refuse is taken apart event by event, and
an event that they refuse is read untyped and put in order first. Knows nothing of the index.
Spec: indexer.md 1.3, 1.4 and 2.2.
"""

import re
from typing import cast

import msgspec
from msgspec.msgpack import Decoder

from lean_selector.core.hashing import ENGINE_SALT_PREFIX
from lean_selector.core.index.kv_batch import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    SkippedEvent,
)
from lean_selector.core.index.kv_index import Tier
from lean_selector.wire.kv_event_layouts import (
    ArrayCleared,
    ArrayEvent,
    ArrayEvents,
    ArrayRemoved,
    ArrayStored,
    ExtraKeys,
    Hash,
    MapCleared,
    MapEvent,
    MapEvents,
    MapRemoved,
    MapStored,
    MultimodalInfos,
    RawArrayBatch,
    RawMapBatch,
    Token,
    rearranged,
)

_U64 = 2**64 - 1
_DP_RANK_MAX = 2**32 - 1
_DETAIL_CHARACTERS = 200  # of a peer's text, in what people are shown
_MM_IDENTIFIER = re.compile(r"[0-9a-fA-F]{64}\Z")
# msgspec's only word about bytes after the first value; a test holds it to this text.
_TRAILING = re.compile(r"trailing characters \(byte (\d+)\)")

# What msgspec raises for bytes that are no value, of the wrong type, no UTF-8, or nested too deep.
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# Names are compared in upper case. vLLM says STORAGE for what it offloads to disk.
_TIERS: dict[str | None, Tier] = {
    **dict.fromkeys((None, "", "GPU", "DEVICE"), Tier.DEVICE),
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1"), Tier.HOST_PINNED),
    **dict.fromkeys(("CPU_TIER2", "DISK", "NVME", "STORAGE"), Tier.DISK),
    **dict.fromkeys(("EXTERNAL", "NETWORK", "REMOTE", "SHARED"), Tier.EXTERNAL),
}

_array_events = Decoder(ArrayEvents).decode
_map_events = Decoder(MapEvents).decode
_array_event = Decoder(ArrayEvent).decode
_map_event = Decoder(MapEvent).decode
_raw_array_batch = Decoder(RawArrayBatch).decode
_raw_map_batch = Decoder(RawMapBatch).decode
_untyped = Decoder().decode


class NotABatch(ValueError):
    """The payload is no event batch at all: nothing in it can be attributed to a rank."""


def decode_batch(payload: bytes | memoryview) -> EventBatch:
    """Read one payload; bytes after its first msgpack value are ignored.

    Raises NotABatch, and nothing else, whatever the payload.
    """
    try:
        try:
            return _decode(payload)
        except msgspec.DecodeError as error:
            trailing = _TRAILING.search(str(error))
            if trailing is None:
                raise
            return _decode(payload[: int(trailing[1])])
    except _UNREADABLE as error:
        raise NotABatch(str(error)) from None


def _decode(payload: bytes | memoryview) -> EventBatch:
    batch: ArrayEvents | MapEvents
    try:
        batch = (_array_events if _first_event_is_array(payload) else _map_events)(payload)
    except (msgspec.ValidationError, UnicodeDecodeError, RecursionError):
        return _decode_apart(payload)
    events: list[Event] = []
    skipped: list[SkippedEvent] = []
    removal: BlockRemoved | None = None  # the last record, if it is one that may grow
    medium: str | None = None  # and its
    for event in batch.events:
        plain = _plain_removal(event)
        if plain is not None and removal is not None and plain.medium == medium:
            removal.block_hashes += _u64s(plain.block_hashes)
            removal.events += 1
            continue
        try:
            record = _stored(event, None, None) if type(event) is ArrayStored else _record(event)
        except ValueError as error:
            skipped.append(_skipped("BlockStored", error))
        else:
            removal = None
            if record is not None:
                events.append(record)
            if plain is not None and isinstance(record, BlockRemoved):
                removal, medium = record, plain.medium
    return EventBatch(_checked_rank(batch.dp_rank), events, skipped)


def _plain_removal(event: ArrayEvent | MapEvent) -> ArrayRemoved | MapRemoved | None:
    """The event, if it is a removal that says nothing but which blocks, and where they were."""
    if isinstance(event, ArrayRemoved):
        is_plain = event.group_idx is None and event.kind_or_locality is None
        return event if is_plain else None
    if isinstance(event, MapRemoved):
        says_more = event.group_idx is not None or event.kv_cache_spec_kind is not None
        return None if says_more or event.locality is not None else event
    return None


def _first_event_is_array(payload: bytes | memoryview) -> bool:
    """Look past `[float64 ts, [`: every producer met so far starts like that.

    A wrong guess costs time, not correctness.
    """
    if len(payload) < 16:
        return False
    start = 11 + {0xDC: 2, 0xDD: 4}.get(payload[10], 0)
    return payload[start] & 0xF0 == 0x90 or payload[start] in (0xDC, 0xDD)


def _decode_apart(payload: bytes | memoryview) -> EventBatch:
    """Event by event, for batches with something unusual in them."""
    batch: RawArrayBatch | RawMapBatch
    try:
        batch = _raw_array_batch(payload)
        rank = batch.dp_rank
    except msgspec.ValidationError:
        batch = _raw_map_batch(payload)
        ranks = (batch.data_parallel_rank, batch.dp_rank, batch.attn_dp_rank)
        rank = next((raw for raw in ranks if bytes(raw) != b"\xc0"), batch.dp_rank)
    dp_rank = _checked_rank(_untyped(rank))
    events: list[Event] = []
    skipped: list[SkippedEvent] = []
    for raw in batch.events:
        event = _read_apart(memoryview(raw))
        if isinstance(event, SkippedEvent):
            skipped.append(event)
        elif event is not None:
            events.append(event)
    return EventBatch(dp_rank, events, skipped)


def _read_apart(raw: memoryview) -> Event | SkippedEvent | None:
    """One event, typed if its layout is known, else brought into one; None for `Ignored`."""
    is_array = raw[0] & 0xF0 == 0x90 or raw[0] in (0xDC, 0xDD)
    try:
        return _record(_array_event(raw) if is_array else _map_event(raw))
    except (*_UNREADABLE, ValueError):
        pass
    tag: object = None
    try:
        fields = rearranged(_untyped(raw))
        tag = fields.get("type")
        return _record(msgspec.convert(fields, MapEvent))
    except (*_UNREADABLE, ValueError, TypeError) as error:
        return _skipped(tag, error)


def _skipped(tag: object, error: Exception) -> SkippedEvent:
    known = {"BlockStored": "stored", "BlockRemoved": "removed", "AllBlocksCleared": "cleared"}
    event_type = known.get(tag) if isinstance(tag, str) else None
    reason = "malformed" if event_type or not isinstance(tag, str) else "unknown_type"
    return SkippedEvent(event_type or "unknown", reason, str(error)[:_DETAIL_CHARACTERS])


def _checked_rank(rank: object) -> int | None:
    """A negative rank means what nil means; one beyond u32 or of another type fits no worker."""
    if rank is None:
        return None
    if type(rank) is not int or rank > _DP_RANK_MAX:
        raise NotABatch(f"{str(rank)[:_DETAIL_CHARACTERS]} is no dp_rank")
    return rank if rank >= 0 else None


def _record(event: ArrayEvent | MapEvent) -> Event | None:
    """The layout-free record of a typed event; ValueError where its fields contradict."""
    if isinstance(event, ArrayStored):
        return _stored(event, None, None)
    if isinstance(event, MapStored):
        return _stored(event, event.cache_salt, event.block_mm_infos)
    if isinstance(event, MapRemoved):
        locality, spec_kind = event.locality, event.kv_cache_spec_kind
    elif isinstance(event, ArrayRemoved):
        locality, spec_kind = None, event.kind_or_locality
        if spec_kind is not None and spec_kind.upper() in ("LOCAL", "REMOTE"):
            locality, spec_kind = spec_kind, None
    else:
        return AllBlocksCleared() if isinstance(event, MapCleared | ArrayCleared) else None
    hashes = _u64s(event.block_hashes)
    tier = _tier(event.medium)
    return BlockRemoved(hashes, tier, event.group_idx, spec_kind, _is_remote(locality))


def _stored(
    event: ArrayStored | MapStored, salt: str | None, infos: MultimodalInfos | None
) -> BlockStored:
    is_eagle = bool(event.token_ids) and type(event.token_ids[0]) is not int
    tokens = _flattened(event.token_ids) if is_eagle else cast("list[int]", event.token_ids)
    parent = event.parent_block_hash
    mm_hashes = None
    if salt is not None:  # its engine keeps it apart, but was given it marked all the same
        salt = salt.removeprefix(ENGINE_SALT_PREFIX)
    if event.extra_keys:
        salt = salt or _salt_of(event.extra_keys[0])
        mm_hashes = _mm_hashes_of_keys(event.extra_keys)
    if infos is not None:
        mm_hashes = _mm_hashes_of_infos(infos)
    if parent is not None and (isinstance(parent, bytes) or parent < 0):
        parent = _u64(parent)
    medium = event.medium
    return BlockStored(
        _u64s(event.block_hashes),
        parent,
        tokens,
        event.block_size,
        _TIERS[medium] if medium in _TIERS else _tier(medium),
        event.lora_name or None,
        salt or None,
        mm_hashes,
        is_eagle,
        event.group_idx,
        event.kv_cache_spec_kind,
        event.locality is not None and _is_remote(event.locality),
    )


def _u64(value: Hash) -> int:
    """Negative: the same bits unsigned. Bytes: the last eight, big-endian, as vLLM's own ints."""
    return int.from_bytes(value[-8:], "big") if isinstance(value, bytes) else value & _U64


def _u64s(values: list[Hash]) -> list[int]:
    numbers = cast("list[int]", values)
    try:
        if (min(numbers) if len(numbers) > 1 else numbers[0] if numbers else 0) >= 0:
            return numbers
    except TypeError:
        pass  # bytes among them
    return [_u64(value) for value in values]


def _flattened(pairs: list[Token]) -> list[int]:
    """[(a, b), (b, c), ...] -> [a, b, c, ...]."""
    tokens: list[int] = []
    second = 0
    for pair in pairs:
        if not isinstance(pair, tuple):
            raise ValueError("token pairs and plain tokens are mixed")
        first, second = pair
        tokens.append(first)
    tokens.append(second)
    return tokens


def _tier(medium: str | None) -> Tier | None:
    tier = _TIERS.get(medium)
    return _TIERS.get(medium.upper()) if tier is None and medium is not None else tier


def _is_remote(locality: object) -> bool:
    """Text other than LOCAL names blocks elsewhere; a value of another type says nothing."""
    return isinstance(locality, str) and locality.upper() not in ("", "LOCAL")


def _salt_of(keys: list[object] | None) -> str | None:
    for key in keys or ():
        if isinstance(key, str) and key.startswith(ENGINE_SALT_PREFIX):
            return key.removeprefix(ENGINE_SALT_PREFIX)
    return None


def _mm_hashes_of_keys(extra_keys: ExtraKeys) -> list[list[int] | None] | None:
    if not any(extra_keys):
        return None
    return [_mm_hashes_of_block(keys) if keys else None for keys in extra_keys]


def _mm_hashes_of_block(keys: list[object]) -> list[int] | None:
    """Identifiers are 64 hex digits, alone or before an offset; the first 16 are the hash."""
    hashes = []
    for key in keys:
        if isinstance(key, list):
            if not key:
                continue
            if len(key) == 1 or type(key[1]) is not int:
                raise ValueError("an extra key is [identifier, offset]")
            key = key[0]
        elif key is None or isinstance(key, float | dict):
            raise ValueError("an extra key is a text, bytes, an integer, or [identifier, offset]")
        if isinstance(key, str) and _MM_IDENTIFIER.match(key):
            hashes.append(int(key[:16], 16))
    return hashes or None


def _mm_hashes_of_infos(infos: MultimodalInfos) -> list[list[int] | None]:
    """These win over extra keys, even when they name nothing."""
    return [[o.mm_hash for o in info.mm_objects] or None if info else None for info in infos]
