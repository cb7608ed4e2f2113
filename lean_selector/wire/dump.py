"""The text of GET /dump: events from which a partition's index can be rebuilt.

The text is written in parts, so that no part blocks the event loop for long. The reader accepts
dumps of any selector or standalone indexer. Our entries (one per partition) have more fields, which
the reference ignores: `model_name` and `tenant_id`, because a key MODEL:TENANT may have more
colons; `watermarks`, each rank's last batch number; and `learned`, what its events have shown of
the engine. What they have shown of blocks is in a field `learned` of the blocks' event. Spec:
indexer.md 4.1, 4.2, 4.3."""

import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from lean_selector.core.index.engine_hashes import is_chain
from lean_selector.core.index.shapes import LearnedFacts, StoredRun, Tier, Watermark
from lean_selector.core.numbers import U64_MAX
from lean_selector.core.rank_bits import RankKey
from lean_selector.wire.dump_shapes import (
    Block,
    DumpedPartition,
    Event,
    LearnedBlocks,
    LearnedRank,
    Names,
    PartitionDump,
    ReadEntry,
    Stored,
    StoredBlocks,
    StoredData,
    TierEvent,
)

_TIER_NAMES = {tier: tier.name.lower() for tier in Tier}
_TIERS = {name: tier for tier, name in _TIER_NAMES.items()}
# Blocks per part. A part takes some 0.2 ms to encode, or 0.5 ms if each event has one block.
_PART_BLOCKS = 512

_encode = msgspec.json.Encoder().encode


# -- writing ---------------------------------------------------------------------------------------


def encode_dump(partitions: Sequence[PartitionDump], *, as_1_6: bool = False) -> Iterator[bytes]:
    """Yield the text of GET /dump in parts. `as_1_6` selects the layout of Dynamo 1.6.

    Two partitions can have the same key MODEL:TENANT: model `a:b` of tenant `c`, and model `a` of
    tenant `b:c`. The first one keeps the key, and colons are added to the other keys. The fields
    `model_name` and `tenant_id` tell the partitions apart."""
    if not partitions:
        yield b"{}"
        return
    before = b"{"
    for key, partition in zip(_keys(partitions), partitions, strict=True):
        yield b'%b%b:{"block_size":%d,"events":[' % (before, _encode(key), partition.block_size)
        before = b","
        is_empty = True
        for events in _events(partition.runs, as_1_6):
            yield events if is_empty else b"," + events
            is_empty = False
        if as_1_6 or (is_empty and not partition.watermarks):
            yield b"]}"
            continue
        yield b"]," + _encode(_names(partition))[1:]
    yield b"}"


def _names(partition: PartitionDump) -> Names:
    watermarks: dict[str, int] = {}
    learned: dict[str, LearnedRank] = {}
    for rank, mark in sorted(partition.watermarks.items()):
        facts = partition.learned(rank) or LearnedFacts()
        state = facts.reports.state()
        name = f"{rank[0]}:{rank[1]}"
        watermarks[name] = mark.seq
        learned[name] = LearnedRank(
            None if mark.until == mark.seq else mark.until,
            mark.unknown,
            facts.is_prefix_group,
            facts.reports_hits,
            [list(hashes) for hashes in facts.announced],
            state if any(state) or state[1] is None else None,
        )
    return Names(partition.model_name, partition.tenant_id, watermarks, learned)


def _keys(partitions: Sequence[PartitionDump]) -> list[str]:
    keys = [f"{partition.model_name}:{partition.tenant_id}" for partition in partitions]
    if len(set(keys)) < len(keys):
        for at, key in enumerate(keys):
            while key in keys[:at] or (key != keys[at] and key in keys):
                key += ":"
            keys[at] = key
    return keys


def _events(runs: Iterator[list[StoredRun]], as_1_6: bool) -> Iterator[bytes]:
    """Yield the runs as JSON events, joined by commas. Event ids count from 0 within each tier."""
    ids = dict.fromkeys(Tier, 0)
    part: list[bytes] = []
    blocks = 0
    for some in runs:
        for run in some:
            part.append(_encode(_tier_event(run, ids[run.tier], as_1_6)))
            ids[run.tier] += 1
            blocks += len(run.block_hashes)
            if blocks >= _PART_BLOCKS:
                yield b",".join(part)
                part.clear()
                blocks = 0
    if part:
        yield b",".join(part)


def _tier_event(run: StoredRun, event_id: int, as_1_6: bool) -> TierEvent:
    blocks = [
        Block(block_hash, tokens_hash)
        for block_hash, tokens_hash in zip(run.block_hashes, run.tokens_hashes, strict=True)
    ]
    learned: LearnedBlocks | UnsetType = UNSET
    if not as_1_6 and (run.salts is not None or run.again is not None):
        salts = UNSET if run.salts is None else run.salts
        learned = LearnedBlocks(salts, UNSET if run.again is None else run.again)
    data = StoredData(Stored(parent_hash=run.parent_hash, blocks=blocks))
    return TierEvent(
        worker_id=run.worker_id,
        storage_tier=_TIER_NAMES[run.tier],
        residency_domain="worker" if as_1_6 else UNSET,
        event=Event(event_id=event_id, data=data, dp_rank=run.dp_rank),
        learned=learned,
    )


# -- reading ---------------------------------------------------------------------------------------


class NotADump(ValueError):
    """A text is not a valid dump; the error's message says why."""


class BadEvent(ValueError):
    """One event of a dump cannot be read. The other events of its partition can still be used."""


_decode_keys = msgspec.json.Decoder(dict[str, Raw]).decode
_decode_entry = msgspec.json.Decoder(ReadEntry).decode
_decode_watermarks = msgspec.json.Decoder(dict[str, int]).decode
_decode_learned = msgspec.json.Decoder(dict[str, LearnedRank]).decode
_decode_tier_event = msgspec.json.Decoder(TierEvent).decode

T = TypeVar("T")
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def split_dump(body: bytes | bytearray) -> tuple[list[DumpedPartition], list[str]]:
    """Return the partitions in a dump, and why other partitions were skipped. If the names of model
    and tenant are missing, the key MODEL:TENANT is split at the last colon. Raises NotADump."""
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
            problems.append(f"entry `{key}` left out: its key has no tenant")
            continue
        learned = _by_rank(entry.learned, _decode_learned)
        watermarks = {
            rank: Watermark(seq, max(seq, learned[rank].until or 0), learned[rank].unknown)
            for rank, seq in _by_rank(entry.watermarks, _decode_watermarks).items()
            if 0 <= seq < U64_MAX and rank in learned
        }
        partitions.append(
            DumpedPartition(
                model_name, tenant_id, entry.block_size, entry.events, watermarks, learned
            )
        )
    return partitions, problems


def _by_rank(raw: Raw | UnsetType, decode: Callable[[Raw], dict[str, T]]) -> dict[RankKey, T]:
    """Return what an entry has by WORKER:RANK; nothing if it cannot be read. Invalid keys are left
    out."""
    if raw is UNSET:
        return {}
    try:
        by_name = decode(raw)
    except _UNREADABLE:
        return {}
    found: dict[RankKey, T] = {}
    for name, value in by_name.items():
        worker_id, _, dp_rank = name.partition(":")
        if worker_id.isdecimal() and dp_rank.isdecimal():
            found[int(worker_id), int(dp_rank)] = value
    return found


def decode_event(raw: Raw) -> StoredBlocks:
    """Decode one event of a dump. Raises BadEvent."""
    try:
        return _event(_decode_tier_event(raw))
    except (*_UNREADABLE, OverflowError) as error:
        raise BadEvent(str(error)) from None


def _event(read: TierEvent) -> StoredBlocks:
    worker_id, stored = read.worker_id, read.event.data.stored
    tier = _TIERS.get(read.storage_tier or "device")
    if worker_id > U64_MAX:
        raise BadEvent("worker_id beyond 64 bits")
    if tier is None:
        raise BadEvent(f"unknown storage_tier `{read.storage_tier}`")
    blocks, parent_hash = stored.blocks, stored.parent_hash
    if parent_hash is not None:
        _hashes([parent_hash])
    names = _hashes([block.block_hash for block in blocks])
    if not names or not is_chain(parent_hash, names):
        raise BadEvent("no blocks, or a block_hash occurs twice, or is the parent's")
    local = struct.pack(f"<{len(blocks)}Q", *_hashes([block.tokens_hash for block in blocks]))
    learned = LearnedBlocks() if read.learned is UNSET else read.learned
    for again in learned.again or ():
        _hashes(again)
    dp_rank = read.event.dp_rank or 0
    return StoredBlocks(worker_id, dp_rank, tier, parent_hash, names, local, learned)


def _hashes(hashes: Sequence[int]) -> "array[int]":
    """Pack hashes as unsigned 64-bit integers. Raises OverflowError if a hash is out of range."""
    return array("Q", hashes)
