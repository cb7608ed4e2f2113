"""The approximate index: assumes for some time that a routed prompt is cached on its rank.

This index is used for engines without KV events, and for other engines until their events arrive:
from the event with a prompt's last block on, the events alone tell what is cached of the prompt. A
block expires some time after the last prompt with this block was routed to the rank. The block
expires earlier if the rank is known to have no room for all its blocks, or if the rank computed
none of the prompts. A routed prompt renews all its blocks, so a prefix never expires before its
continuation.

Each rank has a trie of its routed prompts (`PromptTrie`). So adding a prompt costs one step per
branch, plus one per new block. For matching and dumping, the blocks are also entered in a `KvIndex`
that has no other blocks. Callers pass the current time. D40."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from lean_selector.core.hashing import u64s
from lean_selector.core.index.engine_hashes import is_chain
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Tier
from lean_selector.core.load.prompt_trie import HASH_BYTES, PromptTrie
from lean_selector.core.load.rank_load import BlockWeights
from lean_selector.core.load.shapes import ActiveRun
from lean_selector.core.rank_bits import RankKey

_ALONE: Final = 1  # the set that contains only the rank of the trie
_RANKS_PER_STEP: Final = 64


class RoutedPrompt:
    """A prompt that was routed to a rank, perhaps several times."""

    __slots__ = ("expires_at", "local_hashes", "reservations")

    def __init__(self, local_hashes: bytes) -> None:
        self.local_hashes = local_hashes  # that events can report; empty if none are expected
        self.reservations = 0
        self.expires_at = 0.0


class RankPrompts:
    """The prompts that were routed to one rank and have not expired."""

    def __init__(self) -> None:
        self.trie = PromptTrie()
        self.blocks = 0  # distinct blocks
        # By the last run of each prompt, in order of expiry.
        self.recent: OrderedDict[ActiveRun, RoutedPrompt] = OrderedDict()
        # The local hash of a prompt's last block -> the last runs of such prompts. Empty if no
        # events are expected.
        self.ends: dict[bytes, list[ActiveRun]] = {}


class RoutedPrompts:
    """The routed prompts of one partition, by rank. `index` has the blocks of these prompts."""

    def __init__(self, index: KvIndex, ttl_s: float, *, until_events: bool = False) -> None:
        """`until_events`: the ranks' events will be told to `stored`."""
        self.index = index
        self._ttl_s = ttl_s
        self._until_events = until_events
        self._ranks: dict[RankKey, RankPrompts] = {}  # only ranks with a prompt
        self._bounds: dict[int, int] = {}  # known bounds, by worker id
        self._is_expiring = False
        self._no_weights = BlockWeights()  # required by the trie, unused here

    def add(
        self,
        key: RankKey,
        local_hashes: bytes,
        engine_hashes: bytes,
        now: float,
        known_blocks: int | None = None,
    ) -> None:
        """Add a prompt that was routed to a rank. `local_hashes` and `engine_hashes` (in place of
        them, sequence hashes) have 8 bytes per complete block. If they have different lengths,
        nothing is added. Events can report only the first `known_blocks` (None: all)."""
        if not local_hashes or len(local_hashes) != len(engine_hashes):
            return
        rank = self._ranks.get(key)
        if rank is None:
            rank = self._ranks[key] = RankPrompts()
        run, new_blocks = rank.trie.insert(engine_hashes, _ALONE)
        prompt = rank.recent.get(run)
        if prompt is not None:
            rank.trie.remove(run, _ALONE, self._no_weights)
            rank.recent.move_to_end(run)
        else:
            known = local_hashes
            if known_blocks is not None:
                known = local_hashes[: known_blocks * HASH_BYTES]
            prompt = rank.recent[run] = RoutedPrompt(known if self._until_events else b"")
            if prompt.local_hashes:
                rank.ends.setdefault(known[-HASH_BYTES:], []).append(run)
        prompt.reservations += 1
        prompt.expires_at = now + self._ttl_s
        if not new_blocks:
            return
        rank.blocks += new_blocks
        # Not above the limit of the index: blocks that it evicts would never be stored again.
        bound = self.index.bounds.of(key[0])[0]
        bound = min(self._bounds.get(key[0], bound), bound)
        while rank.blocks > bound and len(rank.recent) > 1:
            self._forget_oldest(key, rank)
        start = len(engine_hashes) - new_blocks * HASH_BYTES
        parent = (
            int.from_bytes(engine_hashes[start - HASH_BYTES : start], "little") if start else None
        )
        if is_chain(parent, u64s(new_blocks).unpack(engine_hashes[start:])):
            self.index.store(key, Tier.DEVICE, parent, engine_hashes[start:], local_hashes[start:])

    def take_back(self, key: RankKey, engine_hashes: bytes) -> None:
        """Undo one `add`, because the rank computed nothing of the prompt."""
        rank = self._ranks.get(key)
        if rank is None or not engine_hashes:
            return
        run, _ = rank.trie.insert(engine_hashes, _ALONE)  # finds the run
        prompt = rank.recent.get(run)
        rank.trie.remove(run, _ALONE, self._no_weights)
        if prompt is not None:
            prompt.reservations -= 1
            if not prompt.reservations:
                self._forget(key, rank, run)

    def stored(self, key: RankKey, local_hashes: bytes) -> None:
        """Drop the prompts whose last block an event has now reported, with these blocks."""
        rank = self._ranks.get(key)
        if rank is None or not rank.ends:
            return
        for end in range(HASH_BYTES, len(local_hashes) + 1, HASH_BYTES):
            for run in list(rank.ends.get(local_hashes[end - HASH_BYTES : end], ())):
                prompt = rank.recent[run].local_hashes
                start = max(0, end - len(prompt))
                if prompt.endswith(local_hashes[start:end]):
                    self._forget(key, rank, run)

    def set_bound(self, worker_id: int, blocks: int | None) -> None:
        """Set how many blocks each rank of a worker can hold; None means unknown. Above this limit,
        `add` drops the prompts that were routed longest ago, but never the newest prompt."""
        if blocks is None:
            self._bounds.pop(worker_id, None)
        else:
            self._bounds[worker_id] = blocks

    def expire(self, now: float) -> None:
        """Begin to drop expired prompts; later calls of `KvIndex.sweep` do the rest. Call often."""
        if not self._is_expiring and self._ranks:
            self._is_expiring = True
            self.index.do_in_steps(self._expired(now))

    def _expired(self, now: float) -> Iterator[None]:
        for number, key in enumerate(list(self._ranks)):
            rank = self._ranks.get(key)
            while rank is not None and rank.recent and _oldest(rank).expires_at <= now:
                self._forget_oldest(key, rank)
                yield
                rank = self._ranks.get(key)  # the rank may have been dropped meanwhile
            if rank is not None and not rank.recent:
                del self._ranks[key]
            if not number % _RANKS_PER_STEP:
                yield
        self._is_expiring = False

    def _forget_oldest(self, key: RankKey, rank: RankPrompts) -> None:
        self._forget(key, rank, next(iter(rank.recent)))

    def _forget(self, key: RankKey, rank: RankPrompts, run: ActiveRun) -> None:
        prompt = rank.recent.pop(run)
        if prompt.local_hashes:
            last = prompt.local_hashes[-HASH_BYTES:]
            rank.ends[last].remove(run)
            if not rank.ends[last]:
                del rank.ends[last]
        engine_hashes = rank.trie.hashes_of(run)
        gone = rank.trie.remove(run, _ALONE, self._no_weights)
        if gone:
            rank.blocks -= gone
            self.index.remove(key, Tier.DEVICE, engine_hashes[-gone * HASH_BYTES :])

    def drop_rank(self, key: RankKey) -> None:
        """Drop the prompts of a rank that was removed or whose cache was emptied."""
        self.index.clear(*key)
        rank = self._ranks.pop(key, None)
        if rank is not None:
            self.index.do_in_steps(self._dismantled(rank))

    def drop_worker(self, worker_id: int) -> None:
        """Drop the prompts on all ranks of a worker, and the limit from `set_bound`."""
        self._bounds.pop(worker_id, None)
        for key in [key for key in self._ranks if key[0] == worker_id]:
            self.drop_rank(key)

    def abandon(self) -> None:
        """Drop all prompts of all ranks. The object is unusable afterwards."""
        for key in list(self._ranks):
            self.drop_rank(key)
        self.index.abandon()

    def _dismantled(self, rank: RankPrompts) -> Iterator[None]:
        while rank.recent:
            run, _ = rank.recent.popitem()
            rank.trie.remove(run, _ALONE, self._no_weights)
            yield


def _oldest(rank: RankPrompts) -> RoutedPrompt:
    return next(iter(rank.recent.values()))
