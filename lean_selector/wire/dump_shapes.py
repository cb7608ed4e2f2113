"""The structs of GET /dump: what the writer gets, what it writes, and what the reader accepts.

Reading and writing have separate types, because the reader accepts more than we ever write."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from lean_selector.core.index.kv_groups import GroupState
from lean_selector.core.index.shapes import LearnedFacts, StoredRun, Tier, Watermark
from lean_selector.core.numbers import U32, NonNegative
from lean_selector.core.rank_bits import RankKey


class PartitionDump(msgspec.Struct, frozen=True):
    """One partition to write to GET /dump. `runs` is read during the dump, and updates `watermarks`
    (see `KvIndex.dump`). `learned` returns what a rank's events have shown."""

    model_name: str
    tenant_id: str
    block_size: int
    runs: Iterator[list[StoredRun]]
    watermarks: dict[RankKey, Watermark]
    learned: Callable[[RankKey], LearnedFacts | None] = lambda _: None


class LearnedBlocks(msgspec.Struct, frozen=True, gc=False):
    """What else the engine's events have shown of an event's blocks (see `StoredRun`). The
    reference ignores it."""

    salts: Sequence[str | None] | UnsetType = UNSET
    again: Sequence[Sequence[int]] | UnsetType = UNSET


# -- an event, as it is written and read. Only fields without a default must be there. -------------


class Block(msgspec.Struct, frozen=True, gc=False):
    """One block that a rank has cached."""

    block_hash: int
    tokens_hash: int
    mm_extra_info: object = None  # as in the two below, we write null, and ignore what is there


class Stored(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """Consecutive blocks that a rank has cached."""

    parent_hash: int | None = None
    start_position: object = None
    blocks: list[Block]


class StoredData(msgspec.Struct, frozen=True, gc=False):
    """The content of an event. The reference also reads removals and clears; no dump has them."""

    stored: Stored


class Event(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An event of one rank."""

    event_id: object = None
    data: StoredData
    dp_rank: U32 | None = None


class TierEvent(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """An event, together with its worker and the tier of its blocks. `residency_domain` is in dumps
    of Dynamo 1.6, and always "worker"."""

    worker_id: NonNegative
    storage_tier: str | None = None
    residency_domain: str | UnsetType = UNSET
    event: Event
    learned: LearnedBlocks | UnsetType = UNSET


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


_BlockSize = Annotated[int, Meta(ge=1, le=2**32 - 1)]


class ReadEntry(msgspec.Struct):
    block_size: _BlockSize
    events: list[Raw]
    model_name: str | None = None
    tenant_id: str | None = None
    watermarks: Raw | UnsetType = UNSET
    learned: Raw | UnsetType = UNSET
