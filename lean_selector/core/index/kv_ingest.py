"""Apply the KV events of one source to the index: skip events that do not count, hash the tokens of
the others, and count events by result.

Remembers, for each rank, the attention kind of each KV cache group, and the cache salts of blocks,
because later events may omit both. Bad data from an engine raises no exception: an invalid event is
skipped, and counted by the reason. Spec: indexer.md 1.4, 3.2."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from lean_selector.core.hashing import (
    BASE_SEED,
    any_local_hashes,
    hash_seed,
    packed_local_hashes,
    packed_tokens,
    u64s,
)
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.out_of_turn import Delivery, OutOfTurn, Turn
from lean_selector.core.index.shapes import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    EventBatch,
    EventPart,
    LearnedFacts,
    StoreResult,
    Tier,
)
from lean_selector.core.rank_bits import RankKey

# The kinds of attention over the whole prompt, on which prefix matching relies. Other kinds
# (sliding window, mamba, ...) store and evict blocks by other rules.
_PREFIX_KINDS = frozenset(("full_attention", "mla_attention", "sink_full_attention"))
_NO_KIND = "unknown"  # vLLM's kind for a group that it cannot classify
_PARTIAL_IS_DOUBTED = (
    8  # events of smaller blocks, without one of a whole block, until the block size is doubted
)

# Reasons for refusing an event that a missing batch may take away.
_MAY_PASS = frozenset(("unknown_parent", "unknown_block", "partial", "other_group"))
_IN_TURN = Turn.IN_ORDER
_IN_ORDER = Delivery(0, _IN_TURN, is_copied=False)

_DEVICE = Tier.DEVICE
_STORED = StoreResult.STORED
_WHOLE = EventPart.WHOLE

MAX_RANKS = 4096  # per source; the largest data_parallel_size that registration accepts (D6)
MAX_GROUPS = 1024  # per rank; hybrid models have fewer than ten
# Per rank and tier: 16 M tokens in blocks of 16. The oldest are dropped first.
MAX_SALTED_BLOCKS = 1 << 20


class EventCounts:
    """Counts of a source's KV events by result, since the source was created."""

    def __init__(self) -> None:
        self.stored = 0
        self.removed = 0
        self.cleared = 0
        self.blocks_stored = 0
        self.blocks_removed = 0
        self.skipped: dict[tuple[str, str], int] = {}  # by (event type, reason); few values

    def skip(self, event_type: str, reason: str, count: int = 1) -> None:
        key = event_type, reason
        self.skipped[key] = self.skipped.get(key, 0) + count

    def add(self, other: "EventCounts") -> None:
        """Add the counts of a closed source to these counts."""
        self.stored += other.stored
        self.removed += other.removed
        self.cleared += other.cleared
        self.blocks_stored += other.blocks_stored
        self.blocks_removed += other.blocks_removed
        for (event_type, reason), count in other.skipped.items():
            self.skip(event_type, reason, count)

    def results(self) -> Iterator[tuple[str, str, int]]:
        """Yield (event type, result, count); the result is "applied" or the reason for skipping."""
        yield "stored", "applied", self.stored
        yield "removed", "applied", self.removed
        yield "cleared", "applied", self.cleared
        for (event_type, reason), count in self.skipped.items():
            yield event_type, reason, count


class KvIngest:
    """Applies the KV event batches of one source, in the given order, to one worker's blocks."""

    def __init__(
        self,
        index: KvIndex,
        worker_id: int,
        dp_rank: int,
        on_emptied: Callable[[int, int], None] | None = None,
        is_eagle: bool = False,
        on_stored: Callable[[RankKey, bytes], None] | None = None,
    ) -> None:
        """`on_emptied` is called with the worker id and the rank when all blocks of a rank are
        dropped; `on_stored` when it has stored device blocks, with their local hashes as well. With
        `is_eagle`, a prompt block's hash also covers the token after the block."""
        self._on_emptied = on_emptied
        self._on_stored = on_stored
        self.is_eagle = is_eagle
        self.worker_id = worker_id
        self.dp_rank = dp_rank  # the rank of batches that do not name one
        self._key: RankKey = (worker_id, dp_rank)
        self.counts = EventCounts()
        self._index = index
        self._delivery = _IN_ORDER
        self._is_out = False  # whether the batch comes out of its turn
        self.out_of_turn = OutOfTurn()
        self._is_uncounted = False  # whether blocks that are stored again are no copies
        self._is_rest_refused = False  # the remaining parts of the current event are skipped
        # Since the source started: how many stored events had another block size, and the last such
        # size.
        self.stored_of_other_size = self.other_size = 0
        # Also since then: stored events of smaller blocks, as an engine of our size also sends; and
        # blocks whose hash covers the next token while those of prompts do not, or vice versa.
        self.stored_partial = self.stored_unlike_prompts = 0
        self._stored_before = 0
        # Also since then: events for another rank than the source's, and the last such rank.
        self.stray_events = self.stray_rank = 0
        self._strays: dict[int, KvIngest] = {}  # by that rank, at most MAX_RANKS
        self._has_told = False  # whether there were events for the source's own rank

    @property
    def block_size(self) -> int:
        """The block size with which the worker was registered."""
        return self._index.block_size

    @property
    def stored(self) -> int:
        """How many stored events were applied since the source started or was cleared."""
        return self.counts.stored - self._stored_before

    @property
    def is_mismatched(self) -> bool:
        """Whether most of the source's blocks cannot match prompts. Either their block size is
        wrong, or only one side (engine or prompts) includes the token after a block in its hash."""
        return (
            self.stored_of_other_size > self.stored
            or (not self.stored and self.stored_partial >= _PARTIAL_IS_DOUBTED)
            or self.stored_unlike_prompts << 1 > self.stored
        )

    def apply(self, batch: EventBatch, delivery: Delivery = _IN_ORDER) -> bool:
        """Apply a batch, or what its turn asks for. Return True if the batch cleared a rank, and
        the source's events so far were all for this rank."""
        counts, early = self.counts, self.out_of_turn
        is_out = delivery.turn is not _IN_TURN
        if not is_out and len(early):
            early.clear()
        for skipped in batch.skipped if delivery.turn is not Turn.AGAIN else ():
            counts.skip(skipped.event_type, skipped.reason, skipped.count)
        dp_rank = self.dp_rank if batch.dp_rank is None else batch.dp_rank
        if dp_rank == self.dp_rank:
            self._has_told = True
            has_cleared = self._apply_events(batch.events, delivery)
            is_all = not self._strays
        else:
            strays = self._strays_of(dp_rank)
            if strays is None:
                counts.skip("unknown", "too_many_ranks", len(batch.events))
                return False
            self.stray_events += len(batch.events)
            self.stray_rank = dp_rank
            has_cleared = strays._apply_events(batch.events, delivery)
            is_all = len(self._strays) == 1 and not self._has_told
        if has_cleared and is_all:
            early.clear()
        elif has_cleared and is_out:
            early.has_forgotten = True  # which blocks of this rank come late is not known
        return has_cleared and is_all

    def _apply_events(self, events: Sequence[Event], delivery: Delivery) -> bool:
        """Apply events of the ingest's own rank. Return True if one of them cleared it."""
        dp_rank, early = self.dp_rank, self.out_of_turn
        self._delivery = delivery
        self._is_out = is_out = delivery.turn is not _IN_TURN
        is_again = is_out and delivery.turn is Turn.AGAIN
        rank = self._index.learn((self.worker_id, dp_rank))
        rank.announced_end = None
        self._is_uncounted = delivery.is_copied or rank.is_tentative
        has_cleared = False
        for event in events:
            if is_out:
                delivery.at += 1
                if is_again and not early.take(delivery):
                    continue
            if type(event) is BlockStored:
                self._store(rank, event)
            elif type(event) is BlockRemoved:
                self._remove(rank, event)
            else:
                assert type(event) is AllBlocksCleared
                self._clear()
                groups, reports_hits = rank.is_prefix_group, rank.reports_hits
                rank = self._index.learn((self.worker_id, dp_rank))
                rank.is_prefix_group, rank.reports_hits = groups, reports_hits
                self._is_uncounted = delivery.is_copied
                early.forgive(dp_rank)
                self.counts.cleared += 1
                has_cleared = True
        return has_cleared

    def _strays_of(self, dp_rank: int) -> "KvIngest | None":
        """Return what applies batches for another rank than the source's; None if there are too
        many ranks. Their blocks count there, as in the reference. But that may be the rank of
        another source, so they are kept apart: a clear or restart of one engine leaves the blocks
        of the other."""
        strays = self._strays.get(dp_rank)
        if strays is None:
            if len(self.dp_ranks) >= MAX_RANKS:
                return None
            index = self._index.of_strays(self.dp_rank)
            where = self.worker_id, dp_rank, self._on_emptied
            strays = KvIngest(index, *where, is_eagle=self.is_eagle)
            strays.counts, strays.out_of_turn = self.counts, self.out_of_turn
            self._strays[dp_rank] = strays
            copied = self._index.learned((self.worker_id, dp_rank))
            if copied is not None and copied.is_tentative:  # no other source would replace them
                self._index.clear(self.worker_id, dp_rank)
        return strays

    def clear(self) -> None:
        """Reset the source: drop the blocks of all its ranks, and forget the cache salts and KV
        cache groups that its events have shown."""
        self._clear()
        self.close()
        self.stored_of_other_size = self.stored_partial = self.stored_unlike_prompts = 0
        self._stored_before = self.counts.stored
        self.stray_events = 0
        self._has_told = False
        self.out_of_turn.clear()

    def close(self) -> None:
        """Drop the blocks that the source has stored for other ranks than its own."""
        for strays in self._strays.values():
            strays.clear()
        self._strays.clear()

    @property
    def is_alone(self) -> bool:
        """Whether all events were for the registered rank, and its blocks are all of this source's
        events."""
        has_strays = self.stray_events > 0 or self._index.has_strays((self.worker_id, self.dp_rank))
        return not (has_strays or self.is_tentative)

    @property
    def is_tentative(self) -> bool:
        """Whether blocks of the registered rank were copied from a peer that could not say from
        which batch on to continue, and no events have replaced them yet."""
        facts = self._index.learned((self.worker_id, self.dp_rank))
        return facts is not None and facts.is_tentative

    @property
    def dp_ranks(self) -> set[int]:
        """The ranks in the source's events, and the rank for which the source is registered."""
        return {*self._strays, self.dp_rank}

    def _clear(self) -> None:
        self._index.clear(self.worker_id, self.dp_rank)
        if self._on_emptied is not None:
            self._on_emptied(self.worker_id, self.dp_rank)

    def _store(self, rank: LearnedFacts, event: BlockStored) -> None:
        tier, size = event.tier, event.block_size
        if not self._is_wanted(rank, event) or tier is None:
            return
        if size != self.block_size:
            self._store_known(rank, event, tier)
            return
        key, engine_hashes, parent, group = (
            self._key,
            event.engine_hashes,
            event.parent_hash,
            event.group_idx,
        )
        salt = event.cache_salt
        if salt is None and rank.salts and parent is not None:
            salt = _salt_of(rank, tier, parent)
        seed = BASE_SEED
        if salt is not None or event.lora_name is not None:
            seed = hash_seed(event.lora_name, salt)
        tokens, is_eagle = event.tokens, event.is_eagle
        next_token = event.next_token if self.is_eagle else None
        if is_eagle or event.mm_hashes or next_token is not None:
            try:
                if next_token is not None:
                    blocks = min(len(engine_hashes) >> 3, (len(tokens) >> 2) // size)
                    tokens = tokens[: (blocks * size) << 2] + packed_tokens([next_token])
                    is_eagle = True
                local = any_local_hashes(tokens, size, seed, event.mm_hashes, is_eagle)
            except ValueError:
                self._refuse("bad_tokens")
                return
        else:
            local = packed_local_hashes(tokens, size, seed)
        if event.fault is not None or not engine_hashes or not local:
            self._refuse(event.fault or "empty")
            return
        if len(engine_hashes) != len(local):
            end = min(len(engine_hashes), len(local))
            engine_hashes, local = engine_hashes[:end], local[:end]
        counted = not self._is_uncounted and (
            not rank.reports_hits or self._is_copy(rank, tier, parent, engine_hashes)
        )
        is_of_several = group is not None and counted and group != rank.reports.only
        if group is not None and is_of_several:
            rank.reports.join(group)
            if rank.reports.is_following(group, tier << 1, engine_hashes):
                rank.reports.leading(group, tier << 1, engine_hashes)
                self._count_stored(event.part, 0)
                return
        may_report = tier is _DEVICE and (parent is None or parent == rank.announced_end)
        before = self._index.blocks(*key, tier) if may_report else 0
        result = self._index.store(key, tier, parent, engine_hashes, local, counted)
        if result is not _STORED:
            self._refuse(result.name.lower())
            return
        if self._is_out:
            self._pay(tier, engine_hashes)
        if group is not None and is_of_several:
            self._undo_following(rank, group, tier, engine_hashes)
        if may_report:
            self._note_report(rank, parent, engine_hashes, before)
        else:
            rank.announced_end = None
        if self._on_stored is not None and tier is _DEVICE:
            self._on_stored(key, local)
        self._count_stored(event.part, len(engine_hashes) >> 3)
        self.stored_unlike_prompts += is_eagle is not self.is_eagle
        if salt is not None:
            hashes = u64s(len(engine_hashes) >> 3).unpack(engine_hashes)
            remember_salt(rank.salts.setdefault(tier, OrderedDict()), hashes, salt)
        if event.unknown_keys is not None:
            for kind, keys in event.unknown_keys.items():
                self.counts.skip("block", f"extra_key_{kind}", keys)

    def _undo_following(
        self, rank: LearnedFacts, group: int, tier: Tier, engine_hashes: bytes
    ) -> None:
        """Record a group's report of blocks that were just stored. Takes back those of them that
        another group has reported before."""
        leading = rank.reports.leading(group, tier << 1, engine_hashes)
        if len(leading) < len(engine_hashes):
            there = {leading[at : at + 8] for at in range(0, len(leading), 8)}
            each = [engine_hashes[at : at + 8] for at in range(0, len(engine_hashes), 8)]
            following = b"".join([engine_hash for engine_hash in each if engine_hash not in there])
            self._index.remove(self._key, tier, following)

    def _is_wanted(self, rank: LearnedFacts, event: BlockStored) -> bool:
        """Whether to apply a stored event, judging by its KV cache group, block size and tier. If
        not, counts the event as skipped. A long event that comes in several parts counts once."""
        if event.part:
            if event.part is EventPart.FIRST:
                self._is_rest_refused = False
            elif self._is_rest_refused:
                if self.out_of_turn.is_rest_left(self._delivery):
                    self.out_of_turn.leave(self._delivery)
                return False
        group_idx, kind = event.group_idx, event.kind
        if group_idx is not None and kind is not None and kind != _NO_KIND:
            self._learn(rank, group_idx, kind)
        reason = _objection(rank, group_idx, kind, event.is_remote)
        if reason is None and event.block_size != self.block_size and not self._is_part(event):
            reason = "block_size"
            self.stored_of_other_size += 1
            self.other_size = event.block_size
        if reason is None and event.tier is None:
            reason = "unknown_medium"
        if reason is not None:
            self._refuse(reason)
        return reason is None

    def _is_part(self, event: BlockStored) -> bool:
        """Whether to accept an event of another block size. True if it has no block size and no
        tokens, or if that size divides ours (on the device, only if the event has one block)."""
        size = event.block_size
        if not size:
            return not event.tokens and event.fault is None
        is_single = len(event.engine_hashes) == 8 or event.tier is not _DEVICE
        return self.block_size % size == 0 and is_single

    def _store_known(self, rank: LearnedFacts, event: BlockStored, tier: Tier) -> None:
        """Apply a stored event to blocks that the rank already holds, without using tokens."""
        engine_hashes, group = event.engine_hashes, event.group_idx
        leading = engine_hashes
        if group is not None and not self._is_uncounted:
            rank.reports.join(group)
            leading = rank.reports.leading(group, tier << 1, engine_hashes)
        blocks = self._index.store_known(self._key, tier, leading, not self._is_uncounted)
        if blocks or len(leading) < len(engine_hashes):
            self._count_stored(_WHOLE, blocks)
            if self._is_out:
                self._pay(tier, leading)
        else:
            self._refuse("partial" if event.block_size else "unknown_block")
            self.stored_partial += event.block_size > 0 and tier is _DEVICE

    def _is_copy(
        self, rank: LearnedFacts, tier: Tier, parent: int | None, engine_hashes: bytes
    ) -> bool:
        """Whether blocks stored again by an engine that reports cache hits count once more, so that
        one more `removed` must follow."""
        if parent is not None or tier is not _DEVICE:
            return True
        return not self._index.knows(self._key, tier, int.from_bytes(engine_hashes[:8], "little"))

    def _note_report(
        self, rank: LearnedFacts, parent: int | None, engine_hashes: bytes, before: int
    ) -> None:
        """Look whether a stored event may report a cache hit: it has the first blocks of a prompt,
        more than one, and none of them is new. (A single block may be a prompt that was computed
        anew: engines compute the last token of a prompt even if they have all of its blocks.) If
        the batch's next stored event adds new blocks to this prompt, the engine reports cache hits.
        From then on, hits need no `removed` events of their own."""
        if self._is_uncounted:
            return  # it was perhaps stored for the first time
        is_new = self._index.blocks(*self._key, _DEVICE) != before
        if is_new and parent is not None and not rank.reports_hits:  # it is the announced end
            rank.reports_hits = True
            for hashes in rank.announced:
                self._index.forget_copies(self._key, hashes)
            rank.announced.clear()
        is_hit = parent is None and not is_new and len(engine_hashes) > 8
        rank.announced_end = int.from_bytes(engine_hashes[-8:], "little") if is_hit else None
        if is_hit and not rank.reports_hits:
            rank.announced.append(u64s(len(engine_hashes) >> 3).unpack(engine_hashes))

    def _count_stored(self, part: EventPart, blocks: int) -> None:
        if part is _WHOLE or part is EventPart.LAST:
            self.counts.stored += 1
        self.counts.blocks_stored += blocks

    def _refuse(self, reason: str) -> None:
        """Skip a whole event, or a part of a long event. The remaining parts of the event will be
        skipped too, because their blocks follow the blocks of this part."""
        self._is_rest_refused = True
        self.counts.skip("stored", reason)
        self._leave(reason)

    def _leave(self, reason: str) -> None:
        """Keep a refused event of an early batch for the turn of the batch, if that may help."""
        turn = self._delivery.turn
        if (turn is Turn.EARLY or turn is Turn.AGAIN) and reason in _MAY_PASS:
            self.out_of_turn.leave(self._delivery)

    def _pay(self, tier: Tier, engine_hashes: bytes) -> None:
        """Remove blocks that were just stored late, but whose removal came early."""
        turn = self._delivery.turn
        if turn is Turn.LATE or turn is Turn.AGAIN:
            due = self.out_of_turn.pay(self.dp_rank, tier, engine_hashes)
            if due:
                self._index.remove(self._key, tier, due)

    def _remove(self, rank: LearnedFacts, event: BlockRemoved) -> None:
        tier, group = event.tier, event.group_idx
        reason = _objection(rank, group, event.kind, event.is_remote)
        if tier is None or reason is not None:
            if event.events:
                self.counts.skip("removed", reason or "unknown_medium", event.events)
            self._leave(reason or "unknown_medium")
            return
        engine_hashes = event.engine_hashes
        if group is not None and group != rank.reports.only:
            engine_hashes = self._leading_removals(rank, group, tier, engine_hashes)
        self.counts.removed += event.events
        if self._is_out:
            self.counts.blocks_removed += self._remove_early(tier, engine_hashes)
        else:
            self.counts.blocks_removed += self._index.remove(self._key, tier, engine_hashes)
        if rank.salts:
            self._forget_salts_of(rank, tier, engine_hashes)

    def _remove_early(self, tier: Tier, engine_hashes: bytes) -> int:
        """Remove blocks. Return how many were dropped. Those that are not held are owed, because
        they may be in a batch that is missing."""
        removed = 0
        for at in range(0, len(engine_hashes), 8):
            engine_hash = int.from_bytes(engine_hashes[at : at + 8], "little")
            if self._index.knows(self._key, tier, engine_hash):
                removed += self._index.remove(self._key, tier, engine_hashes[at : at + 8])
            else:
                self.out_of_turn.owe(self.dp_rank, tier, engine_hash)
        return removed

    def _leading_removals(
        self, rank: LearnedFacts, group: int, tier: Tier, engine_hashes: bytes
    ) -> bytes:
        """Return which hashes of a group's removal no other group has removed before. A block that
        is not held, and in no batch that may come, does not count: other groups may have removed it
        before the first batch that we know."""
        reports, kind = rank.reports, tier << 1 | 1
        if not self._is_out:
            counting: list[bytes] = []
            for at in range(0, len(engine_hashes), 8):
                engine_hash = engine_hashes[at : at + 8]
                is_held = self._index.knows(self._key, tier, int.from_bytes(engine_hash, "little"))
                if is_held or reports.is_following(group, kind, engine_hash):
                    counting.append(engine_hash)
            engine_hashes = b"".join(counting)
        return reports.leading(group, kind, engine_hashes)

    def _forget_salts_of(self, rank: LearnedFacts, tier: Tier, engine_hashes: bytes) -> None:
        salts = rank.salts.get(tier)
        for engine_hash in u64s(len(engine_hashes) >> 3).unpack(engine_hashes) if salts else ():
            if (
                salts
                and engine_hash in salts
                and not self._index.knows(self._key, tier, engine_hash)
            ):
                del salts[engine_hash]

    def _learn(self, rank: LearnedFacts, group_idx: int, kind: str) -> None:
        groups = rank.is_prefix_group
        if group_idx in groups or len(groups) < MAX_GROUPS:
            groups[group_idx] = kind in _PREFIX_KINDS
            if not groups[group_idx]:
                rank.reports.leave(group_idx)


def _objection(
    rank: LearnedFacts, group_idx: int | None, kind: str | None, is_remote: bool
) -> str | None:
    """Return why to skip an event, or None. A KV cache group of unknown kind must be group 0."""
    if is_remote:
        return "remote"
    if kind is not None and kind != _NO_KIND:
        return None if kind in _PREFIX_KINDS else "other_kind"
    if group_idx is None or rank.is_prefix_group.get(group_idx, group_idx == 0):
        return None
    return "other_group"


def _salt_of(rank: LearnedFacts, tier: Tier, parent_hash: int) -> str | None:
    """Return the cache salt of a parent block, or None. Looks at `tier` before other tiers."""
    salts_here = rank.salts.get(tier)
    if salts_here and (own := salts_here.get(parent_hash)) is not None:
        return own
    found = (salts.get(parent_hash) for salts in rank.salts.values())
    return next((salt for salt in found if salt is not None), None)


def remember_salt(salts: OrderedDict[int, str], hashes: Sequence[int], salt: str) -> None:
    """Record the salt of blocks on one tier of a rank. Forgets the oldest above a limit."""
    for block_hash in hashes:
        salts[block_hash] = salt
    for _ in range(len(salts) - MAX_SALTED_BLOCKS):
        salts.popitem(last=False)
