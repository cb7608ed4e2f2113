"""Records of the KV index: KV events, matches and dumps."""

from collections import OrderedDict, deque
from enum import IntEnum

import msgspec

from lean_selector.core.index.kv_groups import GroupReports


class Tier(IntEnum):
    """The tier that holds a block. A prompt is matched on the tiers in this order."""

    DEVICE = 0
    HOST_PINNED = 1
    DISK = 2
    EXTERNAL = 3


class StoredRun(msgspec.Struct, frozen=True, gc=False):
    """Some blocks of a rank in a dump of the index, as one `stored` event. Hashes are u64.
    `parent_hash` is the hash that the engine gave to the parent block."""

    worker_id: int
    dp_rank: int
    tier: Tier
    parent_hash: int | None
    block_hashes: tuple[int, ...]
    tokens_hashes: tuple[int, ...]
    salts: tuple[str | None, ...] | None = None  # cache salt per block; None: no block has one
    # Per block: the hashes under which the engine stored the block again (its own for a copy, or a
    # further one), one for each `removed` event that must come before the last; None: no block.
    again: tuple[tuple[int, ...], ...] | None = None


class Watermark(msgspec.Struct, frozen=True, gc=False):
    """Which batches of its source are in a rank's dumped blocks: all up to number `seq`, and
    perhaps those up to `until`, which came during the dump. Of the batches before, the first
    `unknown` ones are missing."""

    seq: int
    until: int
    unknown: int = 0


class StoreResult(IntEnum):
    """The result of a stored event. If it is not STORED, nothing has changed."""

    STORED = 0
    UNKNOWN_PARENT = 1
    FULL = 2  # the limit of some 4 million runs is reached


class Matched(msgspec.Struct, frozen=True, gc=False):
    """How many leading blocks of a prompt a rank holds: first `device` blocks, then `host` blocks,
    then `disk` blocks (on disk or external; spec 3.5)."""

    device: int
    host: int = 0
    disk: int = 0


class Edge(msgspec.Struct, gc=False):
    """A block after a certain parent on a lower tier, and the set of ranks that hold the block."""

    key: bytes  # engine hash of the parent (empty for a prompt's first block), then local hash
    child: bytes
    ranks: int  # ranks that have the edge: a set, or ~bit for a single rank


class LearnedFacts(msgspec.Struct):
    """What a rank's KV events have shown about the rank's engine and blocks."""

    # group_idx -> whether its blocks count
    is_prefix_group: dict[int, bool] = msgspec.field(default_factory=dict)
    # block hash -> salt, oldest first, for salted blocks that are held
    salts: dict[Tier, OrderedDict[int, str]] = msgspec.field(default_factory=dict)
    # Whether blocks were copied from a peer that could not say from which batch on to continue. The
    # engine's own replay replaces them; until then, no block needs a second `removed` event.
    is_tentative: bool = False
    reports: GroupReports = msgspec.field(default_factory=GroupReports)
    # Whether the engine announces blocks that a request finds cached (`kv_cache_report_mode: full`)
    reports_hits: bool = False
    # In this batch: the last block of a prefix of several blocks, all of which were held already.
    announced_end: int | None = None
    # Hashes of the newest such prefixes, while it is not known whether the engine announces blocks.
    announced: deque[tuple[int, ...]] = msgspec.field(default_factory=lambda: deque(maxlen=64))


# -- what an engine reports ------------------------------------------------------------------------
# What an engine reports about its KV cache, whatever the encoding.
#
# `wire` decodes the layouts of all engines into these records, and the index applies them. Hashes
# are unsigned 64-bit here, tokens are flat, and lists are packed. Spec: indexer.md 1.4.


class EventPart(IntEnum):
    """Which part of an event a record holds. A long event is split into several records."""

    WHOLE = 0
    FIRST = 1
    MIDDLE = 2
    LAST = 3


class BlockStored(msgspec.Struct, gc=False):
    """Consecutive blocks that the engine now holds on one tier. Lists are packed into bytes; they
    may have different lengths, or end within a block."""

    engine_hashes: bytes  # the engine's own hashes of the blocks, u64 little-endian, in chain order
    parent_hash: int | None  # None: the chain starts a prompt; 0 is a valid hash
    tokens: bytes  # u32, little-endian; at most those of the blocks
    block_size: int  # the engine's, in tokens
    tier: Tier | None  # None: unknown medium
    lora_name: str | None = None
    cache_salt: str | None = None  # "" becomes None
    mm_hashes: list[list[int] | None] | None = None  # per block; none for missing blocks at the end
    is_eagle: bool = False  # tokens came as pairs; a block's hash covers block_size + 1 tokens
    group_idx: int | None = None
    kind: str | None = None  # kv_cache_spec_kind
    is_remote: bool = False  # locality is not LOCAL: this worker cannot reach the blocks
    part: EventPart = EventPart.WHOLE
    unknown_keys: dict[str, int] | None = None  # extra keys that cannot be hashed, by kind
    # The token after the last block, if the engine's hash of a block covers the next token.
    next_token: int | None = None
    # Why the blocks cannot be stored: "bad_tokens" (not u32; `tokens` is empty then), or
    # "self_reference" (an engine hash occurs twice, or is the parent's).
    fault: str | None = None


class BlockRemoved(msgspec.Struct, gc=False):
    """Blocks that the engine no longer holds on one tier. Consecutive events that differ only in
    their blocks form one record, because engines send one event per evicted block. A long event is
    split into several records. `events` counts the events that end in this record."""

    engine_hashes: bytes  # u64, little-endian
    tier: Tier | None
    group_idx: int | None = None
    kind: str | None = None
    is_remote: bool = False
    events: int = 1


class AllBlocksCleared(msgspec.Struct, gc=False):
    """An engine's report that a rank no longer holds any block, on any tier."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class SkippedEvent(msgspec.Struct, gc=False):
    """Events that could not be decoded, all for the same reason. The rest of the batch is used."""

    event_type: str  # "stored", "removed", "cleared", or "unknown"
    reason: str  # "malformed" or "unknown_type": a metric label
    detail: str  # description of one such event
    count: int = 1


class EventBatch(msgspec.Struct, gc=False):
    """All or some events of an engine's message. `dp_rank`: the rank in the message, or None."""

    dp_rank: int | None
    events: list[Event]
    skipped: list[SkippedEvent]


class UpperRun(msgspec.Struct, frozen=True, gc=False):
    """A run of the index's trie (blocks that prompts may share), as the web page shows it."""

    parent: int  # index of the parent in the list; -1: prompts begin with this run
    depth: int  # blocks before the run in a prompt
    blocks: int
    holders: int  # ranks that hold a block of the run on the device
    held_blocks: int  # how many blocks of the run they hold in total
    branches: int  # number of runs that follow it
    first_hash: str  # XXH3-64 of its first block, hexadecimal
    hits: int | None  # prompts that matched the run while hits were counted; None: not counted
