"""The structs of GET /dump: what the writer gets, what it writes, and what the reader accepts.

Reading and writing have separate types, because the reader accepts more than we ever write."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from lean_selector.core.index.kv_groups import GroupState
from lean_selector.core.index.shapes import LearnedFacts, StoredRun, Tier, Watermark
from lean_selector.core.rank_bits import RankKey
from lean_selector.wire.scalars import U32, NonNegative


class PartitionDump(msgspec.Struct, frozen=True):
    """One partition to write to GET /dump. `runs` is read during the dump, and updates `watermarks`
    (see `KvIndex.dump`). `learned` returns what a rank's events have shown."""

    model_name: str
    tenant_id: str
    block_size: int
    runs: Iterator[list[StoredRun]]
    watermarks: dict[RankKey, Watermark]
    learned: Callable[[RankKey], LearnedFacts | None] = lambda _: None


class Block(msgspec.Struct, frozen=True, gc=False):
    """One block that a rank has cached, in an event of GET /dump."""

    block_hash: int
    tokens_hash: int
    mm_extra_info: None = None


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Consecutive blocks that a rank has cached, in an event of GET /dump."""

    parent_hash: int | None
    start_position: None
    blocks: list[Block]


class StoredData(msgspec.Struct, frozen=True, gc=False):
    """The content of an event in GET /dump: blocks that a rank has cached."""

    stored: Stored


class Event(msgspec.Struct, frozen=True, gc=False):
    """An event of one rank in GET /dump."""

    event_id: int
    data: StoredData
    dp_rank: int


class LearnedBlocks(msgspec.Struct, frozen=True, gc=False):
    """What else the engine's events have shown of an event's blocks (see `StoredRun`). The
    reference ignores it."""

    salts: Sequence[str | None] | UnsetType = UNSET
    again: Sequence[Sequence[int]] | UnsetType = UNSET


class TierEvent(msgspec.Struct, frozen=True, gc=False):
    """An event in GET /dump, together with its worker and the tier of its blocks."""

    worker_id: int
    storage_tier: str
    event: Event
    learned: LearnedBlocks | UnsetType = UNSET


class DomainTierEvent(msgspec.Struct, frozen=True, gc=False):
    """A `TierEvent` in the layout of Dynamo 1.6. `residency_domain` is always "worker"."""

    worker_id: int
    storage_tier: str
    residency_domain: str
    event: Event


class LearnedRank(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a rank's events have shown of its engine (see `LearnedFacts`), and the rest of its
    `Watermark`. A rank without it comes from a dump that also lacks what its blocks need."""

    until: int | None = None  # None: the watermark itself
    unknown: NonNegative = 0
    groups: dict[int, bool] = {}
    reports_hits: bool = False
    announced: list[list[int]] = []
    reports: GroupState | None = None


class Names(msgspec.Struct, frozen=True):
    """Fields that we write for each partition of a dump, and the reference does not. By WORKER:RANK
    are `watermarks`, only of ranks whose dump has all of their blocks, and `learned`."""

    model_name: str
    tenant_id: str
    watermarks: dict[str, int]
    learned: dict[str, LearnedRank]


class DumpedPartition(msgspec.Struct, frozen=True):
    """One partition, as read from a dump. `decode_event` decodes an element of `events`."""

    model_name: str
    tenant_id: str
    block_size: int
    events: list[Raw]
    watermarks: dict[RankKey, Watermark]  # of ranks in `learned`
    learned: dict[RankKey, LearnedRank]


class StoredBlocks(msgspec.Struct, frozen=True, gc=False):
    """Consecutive cached blocks. `local_hashes`: an 8-byte hash of each block's own tokens. The
    lists of `learned` have one element per block, or are missing."""

    worker_id: int
    dp_rank: int
    tier: Tier
    parent_hash: int | None
    block_hashes: "array[int]"
    local_hashes: bytes
    learned: LearnedBlocks


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


class ReadEntry(msgspec.Struct):
    block_size: _BlockSize
    events: list[Raw]
    model_name: str | None = None
    tenant_id: str | None = None
    watermarks: Raw | UnsetType = UNSET
    learned: Raw | UnsetType = UNSET


class ReadBlock(msgspec.Struct, gc=False):
    block_hash: int
    tokens_hash: int


class ReadStored(msgspec.Struct, gc=False):
    blocks: list[ReadBlock]
    parent_hash: int | None = None


class ReadRemoved(msgspec.Struct, gc=False):
    block_hashes: list[int]


class ReadData(msgspec.Struct, gc=False):
    stored: ReadStored | UnsetType = UNSET
    removed: ReadRemoved | UnsetType = UNSET
    cleared: Raw | UnsetType = UNSET


class ReadEvent(msgspec.Struct, gc=False):
    data: ReadData | str  # "cleared" may also be a plain string
    dp_rank: U32 | None = None


class ReadTierEvent(msgspec.Struct, gc=False):
    worker_id: NonNegative
    event: ReadEvent
    storage_tier: str | None = None
    learned: LearnedBlocks = LearnedBlocks()
