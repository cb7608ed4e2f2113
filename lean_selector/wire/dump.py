"""The text of GET /dump: what a partition's index holds, as events that rebuild it.

Writes it in parts of bounded work, and reads what any selector or standalone indexer writes. Beside
the format of the reference an entry of ours says its model_name and tenant_id (the key alone is
ambiguous once a name holds a colon) and the watermarks of its sources; peers skip keys they do not
know. Knows neither HTTP nor what becomes of an event. Spec: indexer.md 4.1, 4.2 and 7.15-7.17.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from lean_selector.core.index.kv_index import RankKey, StoredRun, Tier
from lean_selector.core.u64 import U64_MAX
from lean_selector.wire.scalars import U32, NonNegative

_TIER_NAMES = {tier: tier.name.lower() for tier in Tier}
_TIERS = {name: tier for tier, name in _TIER_NAMES.items()}
# Blocks in one part of the text; encoding them takes some 0.2 ms, as events of one block each 0.5.
_PART_BLOCKS = 512

_encode = msgspec.json.Encoder().encode


class PartitionDump(msgspec.Struct, frozen=True):
    """What is to be written of one partition.

    `watermarks` is how far each source had been followed when `runs` began: what its engine tells
    later may be in `runs` or not, and does no harm when it is applied again.
    """

    model_name: str
    tenant_id: str
    block_size: int
    runs: Iterator[list[StoredRun]]
    watermarks: dict[RankKey, int]


# -- writing --------------------------------------------------------------------------------------


class _Block(msgspec.Struct, frozen=True, gc=False):
    block_hash: int
    tokens_hash: int
    mm_extra_info: None = None


class _Stored(msgspec.Struct, frozen=True, gc=False):
    parent_hash: int | None
    start_position: None
    blocks: list[_Block]


class _StoredData(msgspec.Struct, frozen=True, gc=False):
    stored: _Stored


class _Event(msgspec.Struct, frozen=True, gc=False):
    event_id: int
    data: _StoredData
    dp_rank: int


class _TierEvent(msgspec.Struct, frozen=True, gc=False):
    worker_id: int
    storage_tier: str
    event: _Event


class _Names(msgspec.Struct, frozen=True):
    """What an entry of ours says beyond the reference's; encoded without its braces."""

    model_name: str
    tenant_id: str
    watermarks: dict[str, int]


def encode_dump(partitions: Sequence[PartitionDump]) -> Iterator[bytes]:
    """The whole text in parts, entries in the order given.

    Partitions whose keys would be the same text (model `a:b` of tenant `c`, model `a` of tenant
    `b:c`) all appear: the first has the key, the others have it with colons added, and the names
    inside tell them apart. A peer that reads the key alone gets the first one right.
    """
    if not partitions:
        yield b"{}"
        return
    before = b"{"
    for key, partition in zip(_keys(partitions), partitions, strict=True):
        yield b'%b%b:{"block_size":%d,"events":[' % (before, _encode(key), partition.block_size)
        before = b","
        is_empty = True
        for events in _events(partition.runs):
            yield events if is_empty else b"," + events
            is_empty = False
        if is_empty and not partition.watermarks:
            yield b"]}"
            continue
        watermarks = {
            f"{worker_id}:{dp_rank}": seq
            for (worker_id, dp_rank), seq in sorted(partition.watermarks.items())
        }
        names = _Names(partition.model_name, partition.tenant_id, watermarks)
        yield b"]," + _encode(names)[1:]
    yield b"}"


def _keys(partitions: Sequence[PartitionDump]) -> list[str]:
    plain = [f"{partition.model_name}:{partition.tenant_id}" for partition in partitions]
    taken = set(plain)
    keys: list[str] = []
    seen: set[str] = set()
    for key in plain:
        if key in seen:
            while key in taken:
                key += ":"
        taken.add(key)
        seen.add(key)
        keys.append(key)
    return keys


def _events(runs: Iterator[list[StoredRun]]) -> Iterator[bytes]:
    """Events joined by commas; ids count from 0 within each tier."""
    ids = dict.fromkeys(Tier, 0)
    part: list[bytes] = []
    blocks = 0
    for run in (run for some in runs for run in some):
        part.append(_encode(_tier_event(run, ids[run.tier])))
        ids[run.tier] += 1
        blocks += len(run.block_hashes)
        if blocks >= _PART_BLOCKS:
            yield b",".join(part)
            part.clear()
            blocks = 0
    if part:
        yield b",".join(part)


def _tier_event(run: StoredRun, event_id: int) -> _TierEvent:
    blocks = [
        _Block(block_hash, tokens_hash)
        for block_hash, tokens_hash in zip(run.block_hashes, run.tokens_hashes, strict=True)
    ]
    data = _StoredData(_Stored(run.parent_hash, None, blocks))
    event = _Event(event_id, data, run.dp_rank)
    return _TierEvent(run.worker_id, _TIER_NAMES[run.tier], event)


# -- reading --------------------------------------------------------------------------------------


class NotADump(ValueError):
    """The text as a whole cannot be read; the message says why."""


class BadEvent(ValueError):
    """One event cannot be read; the others of its entry stand."""


class DumpedPartition(msgspec.Struct, frozen=True):
    """One entry as it was read; its events are not, see `decode_event`."""

    model_name: str
    tenant_id: str
    block_size: int
    events: list[Raw]
    watermarks: dict[RankKey, int]


class StoredBlocks(msgspec.Struct, frozen=True, gc=False):
    """Consecutive blocks that a rank holds. `local_hashes` is 8 bytes per block, little-endian."""

    worker_id: int
    dp_rank: int
    tier: Tier
    parent_hash: int | None
    block_hashes: "array[int]"
    local_hashes: bytes


class RemovedBlocks(msgspec.Struct, frozen=True, gc=False):
    worker_id: int
    dp_rank: int
    tier: Tier
    block_hashes: "array[int]"


class ClearedRank(msgspec.Struct, frozen=True, gc=False):
    worker_id: int
    dp_rank: int


DumpEvent = StoredBlocks | RemovedBlocks | ClearedRank

_BlockSize = Annotated[int, Meta(ge=1, le=2**32 - 1)]


class _Entry(msgspec.Struct):
    block_size: _BlockSize
    events: list[Raw]
    model_name: str | None = None
    tenant_id: str | None = None
    watermarks: Raw | UnsetType = UNSET


class _ReadBlock(msgspec.Struct, gc=False):
    block_hash: int
    tokens_hash: int


class _ReadStored(msgspec.Struct, gc=False):
    blocks: list[_ReadBlock]
    parent_hash: int | None = None


class _ReadRemoved(msgspec.Struct, gc=False):
    block_hashes: list[int]


class _ReadData(msgspec.Struct, gc=False):
    stored: _ReadStored | UnsetType = UNSET
    removed: _ReadRemoved | UnsetType = UNSET
    cleared: Raw | UnsetType = UNSET


class _ReadEvent(msgspec.Struct, gc=False):
    data: _ReadData | str  # "cleared" comes as a bare word too
    dp_rank: U32 | None = None


class _ReadTierEvent(msgspec.Struct, gc=False):
    worker_id: NonNegative
    event: _ReadEvent
    storage_tier: str | None = None


_decode_keys = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_entry = msgspec.json.Decoder(_Entry).decode
_decode_watermarks = msgspec.json.Decoder(dict[str, int]).decode
_decode_tier_event = msgspec.json.Decoder(_ReadTierEvent).decode

_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def split_dump(body: bytes | bytearray) -> tuple[list[DumpedPartition], list[str]]:
    """The entries of a dump, and what is wrong with those that are left out.

    A key is split at its last colon unless the names are inside. Raises NotADump.
    """
    try:
        entries = _decode_keys(body)
    except _UNREADABLE as error:
        raise NotADump(f"not a dump: {error}") from None
    partitions: list[DumpedPartition] = []
    problems: list[str] = []
    for key, raw in entries.items():
        try:
            entry = _decode_entry(raw)
        except _UNREADABLE as error:
            said = bytes(memoryview(raw)[:200]).decode(errors="replace")
            problems.append(f"entry `{key}` left out, {error}: {said}")
            continue
        model_name, colon, tenant_id = key.rpartition(":")
        if entry.model_name is not None and entry.tenant_id is not None:
            model_name, tenant_id = entry.model_name, entry.tenant_id
        elif not colon:
            problems.append(f"entry `{key}` left out: its key names no tenant")
            continue
        watermarks = _watermarks(entry.watermarks)
        partitions.append(
            DumpedPartition(model_name, tenant_id, entry.block_size, entry.events, watermarks)
        )
    return partitions, problems


def _watermarks(raw: Raw | UnsetType) -> dict[RankKey, int]:
    """Those that can be read; going without one costs a replay, no more."""
    if raw is UNSET:
        return {}
    try:
        by_name = _decode_watermarks(raw)
    except _UNREADABLE:
        return {}
    watermarks: dict[RankKey, int] = {}
    for name, seq in by_name.items():
        worker_id, _, dp_rank = name.partition(":")
        if worker_id.isdecimal() and dp_rank.isdecimal() and 0 <= seq < U64_MAX:
            watermarks[int(worker_id), int(dp_rank)] = seq
    return watermarks


def decode_event(raw: Raw) -> DumpEvent:
    """One event of an entry. Raises BadEvent."""
    try:
        return _event(_decode_tier_event(raw))
    except (*_UNREADABLE, OverflowError) as error:
        raise BadEvent(str(error)) from None


def _event(read: _ReadTierEvent) -> DumpEvent:
    worker_id, dp_rank = read.worker_id, read.event.dp_rank or 0
    tier = _TIERS.get(read.storage_tier or "device")
    data = read.event.data
    if worker_id > U64_MAX:
        raise BadEvent("worker_id beyond 64 bits")
    if tier is None:
        raise BadEvent(f"unknown storage_tier `{read.storage_tier}`")
    if isinstance(data, str):
        if data != "cleared":
            raise BadEvent(f"unknown data `{data}`")
        return ClearedRank(worker_id, dp_rank)
    if data.stored is not UNSET:
        blocks, parent_hash = data.stored.blocks, data.stored.parent_hash
        if parent_hash is not None:
            _hashes([parent_hash])
        names = _hashes([block.block_hash for block in blocks])
        local = struct.pack(f"<{len(blocks)}Q", *_hashes([block.tokens_hash for block in blocks]))
        return StoredBlocks(worker_id, dp_rank, tier, parent_hash, names, local)
    if data.removed is not UNSET:
        return RemovedBlocks(worker_id, dp_rank, tier, _hashes(data.removed.block_hashes))
    if data.cleared is not UNSET:
        return ClearedRank(worker_id, dp_rank)
    raise BadEvent("data of no known kind")


def _hashes(hashes: list[int]) -> "array[int]":
    """As unsigned 64-bit; OverflowError for any other number."""
    return array("Q", hashes)
