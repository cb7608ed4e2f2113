"""Start-up recovery: fetch a peer's KV index from the peer's /dump, and copy it to our index.

Peers are queried in order. The first usable dump is read completely, then applied, in time slices
between which the loop serves requests. If the first worker of a partition registers later and has
another block size, the partition's recovered blocks are discarded (D3). A rank is skipped if its
engine has sent us events (they are newer than any dump), or if our subscription to it ended during
the recovery. A subscription with a replay endpoint starts after the recovery. Its replay begins
with the dump's last batch, to detect an engine restart (D34). Spec: indexer.md 4.2 and 4.3."""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import TypeVar

from lean_selector.core.hashing import u64s
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.kv_ingest import remember_salt
from lean_selector.core.index.shapes import LearnedFacts, StoreResult
from lean_selector.core.rank_bits import RankKey
from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.partition import Partition
from lean_selector.events.subscriptions import KvSubscriptions
from lean_selector.http.outbound import OutboundClient, OutboundFailed, reason, succeeded
from lean_selector.links.turns import Pauses
from lean_selector.tasks import in_thread
from lean_selector.wire.dump import BadEvent, decode_event, split_dump
from lean_selector.wire.dump_shapes import DumpedPartition, LearnedRank, StoredBlocks

# -- one GET from a peer ---------------------------------------------------------------------------

T = TypeVar("T")


class PeerFailed(Exception):
    """The peer returned nothing usable. `status`: the HTTP status, if the peer answered."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


async def fetched(
    client: OutboundClient,
    url: str,
    left_s: float,
    peers_left: int,
    max_bytes: int,
    read: Callable[[bytes], T],
) -> T:
    """GET `url` from a peer and return `read(body)`. Raises PeerFailed.

    `peers_left` counts this peer and the peers that are asked after it. The request may take
    `left_s` seconds, but fails if the peer sends nothing for `left_s / peers_left` seconds.
    `read` runs in a thread and should be quick, because it holds the GIL."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    ends, share_s = began + left_s, left_s / peers_left
    pieces: list[bytes] = []
    size = 0
    try:
        async with (
            asyncio.timeout(share_s) as limit,
            client.exchange("GET", url, b"", left_s) as exchange,
        ):
            await succeeded(exchange)
            while (piece := await exchange.piece()) is not None:
                limit.reschedule(min(loop.time() + share_s, ends))
                pieces.append(piece)
                size += len(piece)
                if size > max_bytes:
                    raise PeerFailed(f"more than {max_bytes} bytes")
            limit.reschedule(ends)
            return await in_thread("peer-fetch", lambda: read(b"".join(pieces)))
    except TimeoutError:
        raise PeerFailed(f"no answer in {loop.time() - began:.1f} s") from None
    except OutboundFailed as error:
        raise PeerFailed(error.message, error.status) from None
    except PeerFailed:
        raise
    except Exception as error:  # whatever the error, try the next peer
        raise PeerFailed(reason(error)) from None


# -- recovery of an index --------------------------------------------------------------------------

logger = logging.getLogger("lean_selector.recovery")

# Recovered blocks without a worker are dropped after this time. Even during a rolling update, a
# fleet registers within minutes.
RECOVERED_LIFE_S = 600.0
# Sources wait at most this long for the recovery.
MAX_HOLD_S = 10.0
_LOGGED_PROBLEMS = 10  # problems logged per peer; a broken dump may have millions

# 12 million blocks of 86 bytes, more than one process should index. Memory can hold this twice.
MAX_DUMP_BYTES = 1 << 30

RankEvents = dict[RankKey, list[StoredBlocks]]


@dataclass(eq=False)
class Recovery:
    """One start-up recovery of the KV index from a peer. Used only on the loop's thread.

    `blocks`, `skipped_events` and `skipped_ranks` count what was recovered and what was skipped.

    `timeout_s` limits the total time for fetching the dumps of all `peers`."""

    catalog: Catalog
    subscriptions: KvSubscriptions
    peers: Sequence[str]
    client: OutboundClient
    timeout_s: float = MAX_HOLD_S

    def __post_init__(self) -> None:
        self.blocks = 0
        self.skipped_events = 0
        self.skipped_ranks = 0
        self._pause = Pauses()
        self._ended: Set[RankKey] = frozenset()  # ranks whose source has ended during the recovery

    async def run(self) -> bool:
        """Copy the KV index of the first peer with a usable dump. Return False if that fails."""
        try:
            with (
                self.subscriptions.holding(MAX_HOLD_S),
                self.subscriptions.noting_ends() as self._ended,
            ):
                return await self._recovered()
        except Exception:
            logger.exception("recovery failed; continuing with the current index")
            return False

    async def _recovered(self) -> bool:
        began = time.monotonic()
        for at, peer in enumerate(self.peers):
            left_s = self.timeout_s - (time.monotonic() - began)
            try:
                if left_s <= 0:
                    raise PeerFailed("no time left")
                # With --api 1.6, only `detail` puts names and watermarks into a dump.
                url = peer.rstrip("/") + "/dump?detail=true"
                peers_left = len(self.peers) - at
                dump = await fetched(
                    self.client, url, left_s, peers_left, MAX_DUMP_BYTES, split_dump
                )
                partitions = await self._read(peer, *dump)
            except PeerFailed as error:
                logger.warning("no recovery from %s: %s", peer, error)
                continue
            for partition, ranks in partitions:
                await self._apply(partition, ranks)
            logger.info(
                "recovered %d blocks in %d partitions from %s in %.2f s; "
                "%d events skipped, %d ranks left to their sources",
                *(self.blocks, len(partitions), peer, time.monotonic() - began),
                *(self.skipped_events, self.skipped_ranks),
            )
            return True
        logger.warning("no reachable indexer peer; starting with an empty index")
        return False

    async def forget_unclaimed(self, after_s: float = RECOVERED_LIFE_S) -> None:
        """After `after_s` seconds, drop recovered blocks whose worker has not registered (D3), or
        has no source for their rank, whose events could replace them."""
        await asyncio.sleep(after_s)
        dropped, workers = 0, 0
        for partition in list(self.catalog.partitions.values()):
            for worker_id in partition.unclaimed():
                dropped += partition.forget_unclaimed(worker_id)
                workers += 1
                await self._pause()
            for rank in partition.index.ranks():
                if not self.subscriptions.is_listening(rank):
                    partition.index.clear(*rank)
                    await self._pause()
        self.catalog.discard_waiting()
        if workers:
            text = "dropped %d recovered blocks of %d workers that did not register in %g s"
            logger.info(text, dropped, workers, after_s)

    # Reading

    async def _read(
        self, peer: str, dumped: list[DumpedPartition], problems: list[str]
    ) -> list[tuple[DumpedPartition, RankEvents]]:
        """Decode a dump's events, by partition and rank. Raises PeerFailed if nothing is valid."""
        self.skipped_events = 0
        partitions: list[tuple[DumpedPartition, RankEvents]] = []
        events = 0
        for partition in dumped:
            ranks: RankEvents = {}
            for raw in partition.events:
                try:
                    event = decode_event(raw)
                except BadEvent as error:
                    self.skipped_events += 1
                    problems.append(f"event skipped: {error}")
                    del problems[_LOGGED_PROBLEMS:]
                else:
                    ranks.setdefault((event.worker_id, event.dp_rank), []).append(event)
                    events += 1
                await self._pause()
            partition.events.clear()
            if ranks or partition.watermarks:
                partitions.append((partition, ranks))
        for problem in problems[:_LOGGED_PROBLEMS]:
            logger.warning("%s: %s", peer, problem)
        if problems and not partitions:
            raise PeerFailed("its dump has nothing usable")
        return partitions

    # Applying

    async def _apply(self, dumped: DumpedPartition, ranks: RankEvents) -> None:
        left_alone: set[RankKey] = set()
        for rank, events in sorted(ranks.items()):
            if not await self._apply_rank(dumped, rank, events):
                left_alone.add(rank)
        partition = self._partition(dumped)
        if partition is None:
            log_discarded(dumped)
            return
        self.skipped_ranks += len(left_alone)
        # Set only after all blocks are applied, so that a source that starts at its watermark
        # misses no block. The queue of a source that is connected already may hold batches from
        # before the dump, so its blocks stay tentative.
        for rank in dumped.watermarks.keys() - left_alone:
            if not (self.subscriptions.is_listening(rank) or self._is_ahead(rank)):
                partition.watermarks[rank] = dumped.watermarks[rank]
                _learn(partition.index, rank, dumped.learned[rank]).is_tentative = False

    async def _apply_rank(
        self, dumped: DumpedPartition, rank: RankKey, events: list[StoredBlocks]
    ) -> bool:
        """Apply the dump's events of a rank to our index. Return False if the rank is skipped."""
        waiting: dict[int, list[StoredBlocks]] = {}  # missing parent -> blocks below it
        ready = events[::-1]
        while ready:
            await self._pause()
            if self._is_ahead(rank):
                return False
            partition = self._partition(dumped)
            if partition is None:
                return False
            event, index = ready.pop(), partition.index
            names = u64s(len(event.block_hashes)).pack(*event.block_hashes)
            result = index.store(rank, event.tier, event.parent_hash, names, event.local_hashes)
            if result is StoreResult.STORED:
                index.learn(rank).is_tentative = True
                _store_again(index, event, rank in dumped.watermarks)
                self.blocks += len(event.block_hashes)
                if waiting:
                    for block_hash in event.block_hashes:
                        ready += waiting.pop(block_hash, ())
            elif result is StoreResult.UNKNOWN_PARENT and event.parent_hash is not None:
                waiting.setdefault(event.parent_hash, []).append(event)
            else:
                self.skipped_events += 1
        self.skipped_events += sum(map(len, waiting.values()))
        return True

    def _is_ahead(self, rank: RankKey) -> bool:
        """Whether the engine has sent us events, or our subscription ended during the recovery."""
        return rank in self._ended or self.subscriptions.is_ahead(rank)

    def _partition(self, dumped: DumpedPartition) -> Partition | None:
        """Return or create our partition for `dumped`; None if our block size differs."""
        key = dumped.model_name, dumped.tenant_id
        return self.catalog.recovered_partition(key, dumped.block_size)


def log_discarded(of: Partition | DumpedPartition) -> None:
    """Log that recovered blocks are dropped because the workers have another block size (D3)."""
    text = "recovered blocks of model=%s tenant=%s dropped: block size %d differs from the workers'"
    logger.warning(text, of.model_name, of.tenant_id, of.block_size)


def _store_again(index: KvIndex, event: StoredBlocks, is_exact: bool) -> None:
    """Apply what else a peer has learned of blocks that were just stored. Copies count only if the
    dump of the rank `is_exact`; otherwise a block might stay for ever."""
    key, tier, parent = (event.worker_id, event.dp_rank), event.tier, event.parent_hash
    again, salts = event.learned.again or (), event.learned.salts or ()
    for at in range(min(len(event.block_hashes), max(len(again), len(salts)))):
        name, others = event.block_hashes[at], again[at] if at < len(again) else ()
        local = event.local_hashes[at << 3 : (at + 1) << 3]
        for other in others:
            index.store(key, tier, parent, other.to_bytes(8, "little"), local, counted=is_exact)
        salt = salts[at] if at < len(salts) else None
        if salt is not None:
            known = index.learn(key).salts.setdefault(tier, OrderedDict())
            remember_salt(known, (name, *others), salt)
        parent = name


def _learn(index: KvIndex, rank: RankKey, learned: LearnedRank) -> LearnedFacts:
    facts = index.learn(rank)
    facts.is_prefix_group.update(learned.groups)
    if learned.reports is not None:
        facts.reports.restore(learned.reports)
    facts.reports_hits = learned.reports_hits
    facts.announced.extend(map(tuple, learned.announced))
    return facts
