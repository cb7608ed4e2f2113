"""Yield BlockStored events from which a rank's blocks can be rebuilt.

Device memory: one event per run (blocks without a branch), parents before children, no blocks
behind a missing block. Lower tiers: one event per block. Spec: indexer.md sections 4.1 and 7."""

from collections.abc import Iterator
from itertools import chain
from struct import unpack

from msgspec.structs import replace

from lean_selector.core.index.device_tier import DeviceRank
from lean_selector.core.index.lower_tiers import Holdings
from lean_selector.core.index.runs import POSITION_BITS, Run, RunTrie
from lean_selector.core.index.shapes import LearnedFacts, StoredRun, Tier

_SLICE_BLOCKS = 512  # blocks; some 0.1 ms on the device, 0.5 ms on a lower tier
_MOST_UNEQUAL = 4096  # written at once, in some 5 ms


class RankDump:
    """One dump of a rank's blocks. `is_whole` tells whether it has all that was learned of them."""

    def __init__(self, trie: RunTrie, holdings: Holdings, facts: LearnedFacts) -> None:
        self._holdings = holdings
        self._walk = _DeviceWalk(trie, holdings.device)
        self._facts = facts

    @property
    def is_whole(self) -> bool:
        """Whether no block was left out, no engine hash stands for several blocks, and few blocks
        are known to only some of the KV cache groups. Ask after the last slice."""
        listed = self._holdings.device.hashes.listed
        if max(map(len, listed.values()), default=1) > 1:
            return False
        return not self._walk.has_omitted and self._facts.reports.unequal <= _MOST_UNEQUAL

    def slices(self) -> Iterator[list[StoredRun]]:
        """Yield the blocks in lists of limited size; the last list may be empty. Device memory
        comes first. Each tier begins with its oldest blocks. The index may change between lists."""
        runs: list[StoredRun] = []
        blocks = 0
        for run in chain(self._walk.runs(), _lower_blocks(self._holdings)):
            salts = self._facts.salts.get(run.tier)
            runs.append(run if salts is None else _salted(run, salts))
            blocks += len(run.block_hashes)
            if blocks >= _SLICE_BLOCKS:
                yield runs
                runs, blocks = [], 0
        yield runs


def _salted(run: StoredRun, salts: dict[int, str]) -> StoredRun:
    of_blocks = tuple([salts.get(engine_hash) for engine_hash in run.block_hashes])
    return replace(run, salts=of_blocks) if any(of_blocks) else run


def _lower_blocks(holdings: Holdings) -> Iterator[StoredRun]:
    key, tiers = holdings.device.key, holdings.lower
    for tier, held in zip(list(Tier)[1:], tiers, strict=False):
        for parent, engine_hash, local in held.chains():
            if holdings.lower is not tiers:
                return  # all of them are gone
            parent_hash = int.from_bytes(parent, "little") if parent else None
            block_hash, tokens_hash = unpack("<QQ", engine_hash + local)
            copies = held.copies.get(engine_hash, 0) if held.copies else 0
            again = ((block_hash,) * copies,) if copies else None
            yield StoredRun(*key, tier, parent_hash, (block_hash,), (tokens_hash,), None, again)


class _DeviceWalk:
    """Visits the runs (blocks without a branch) in which a rank holds blocks in device memory."""

    def __init__(self, trie: RunTrie, device_rank: DeviceRank) -> None:
        self._trie = trie
        self._device_rank = device_rank
        self._told: set[Run] = set()  # yielded, and held completely: runs below are reachable
        self._cut_off: set[Run] = set()  # unreachable runs
        self.has_omitted = False  # whether blocks of the rank were left out as unreachable

    def runs(self) -> Iterator[StoredRun]:
        """Yield the runs that the rank can match (no earlier block is missing), oldest first, but
        parents before children. The rank's blocks may change while the runs are yielded."""
        rows = self._device_rank.hashes.rows
        # dict's own view, because that of an OrderedDict looks up each key, at ten times the cost.
        for strand in list(dict.keys(rows)):
            # If the rank has no row for the strand, it holds nothing there now, and its bit may
            # belong to another rank.
            if strand in self._device_rank.hashes.rows:
                steps = [step for run in self._trie.pieces(strand) for step in self._path_to(run)]
                yield from steps

    def _path_to(self, run: Run) -> Iterator[StoredRun]:
        """Yield the runs from the prompt's start to `run` that were not yielded before, if the rank
        holds all blocks before `run`."""
        told, cut_off, engine_hashes = self._told, self._cut_off, self._device_rank.hashes
        path: list[Run] = []
        above: Run | None = run
        while above is not None and above.parent is not None and above not in told:
            if above in cut_off or not (above is run or self._holds_whole(above)):
                cut_off.update(path)  # but not `run` itself: its start may be reachable
                self.has_omitted |= run.held_by(self._device_rank.bit) > 0
                return
            path.append(above)
            above = above.parent
        if above is not None and above in told and not self._holds_whole(above):
            # The run changed after it was yielded.
            told.remove(above)
            cut_off.update(path)
            self.has_omitted = True
            return
        for step in reversed(path):
            held = step.held_by(self._device_rank.bit)
            leading = ((held + 1) & ~held).bit_length() - 1
            self.has_omitted |= held >> leading > 0
            if leading << 3 == len(step.label):
                told.add(step)
            if leading:
                packed = engine_hashes.rows[step.strand][
                    step.start << 3 : step.start + leading << 3
                ]
                hashes: tuple[int, ...] = unpack(f"<{leading}Q", packed)
                yield StoredRun(
                    *self._device_rank.key,
                    Tier.DEVICE,
                    self._parent_hash(step),
                    hashes,
                    unpack(f"<{leading}Q", step.label[: leading << 3]),
                    None,
                    self._stored_again(step, hashes) if engine_hashes.extra else None,
                )

    def _stored_again(
        self, run: Run, hashes: tuple[int, ...]
    ) -> tuple[tuple[int, ...], ...] | None:
        engine_hashes, address = self._device_rank.hashes, run.strand << POSITION_BITS | run.start
        again = tuple(
            [
                engine_hashes.stored_again(address + at, engine_hash)
                for at, engine_hash in enumerate(hashes)
            ]
        )
        return again if any(again) else None

    def _holds_whole(self, run: Run) -> bool:
        return (
            bool(run.whole >> self._device_rank.bit & 1)
            and run.strand in self._device_rank.hashes.rows
        )

    def _parent_hash(self, run: Run) -> int | None:
        parent = run.parent
        if parent is None or parent.parent is None:
            return None
        end = parent.start + (len(parent.label) >> 3) - 1
        engine_hash = self._device_rank.hashes.hash_at(parent.strand << POSITION_BITS | end)
        return int.from_bytes(engine_hash, "little")
