"""Evict blocks behind holes if these blocks take too much memory. A hole is a part of a prompt that
a rank no longer holds. Until the missing blocks return, the blocks behind a hole cannot match.

A strand is a sequence of up to 1024 blocks without a branch (see runs.py). The index stores the
local hashes of each strand once, and engine hashes once per rank that holds blocks of the strand.
Both include the holes before a held block, so a single block can take 16 KB. Engines that evict the
starts of prompts and keep the ends would fill the memory. So a review removes such ends from the
index, in short steps. Requests and events may change the index between two steps. See D31."""

from collections.abc import Callable, Generator, Iterator

from lean_selector.core.index.device_tier import DeviceRank, DeviceTier
from lean_selector.core.index.runs import Run
from lean_selector.core.rank_bits import bits_of

# Positions (8 bytes each, in labels and rows) per held block that are allowed, in a strand and in
# total. A block on one rank takes two, so above this more than half of a strand is gone.
MOST_POSITIONS = 4
SPARED_POSITIONS = 1 << 19  # 4 MiB: below this, nothing is evicted
REVIEW_AFTER = 1 << 17  # dropped blocks before a review, plus half of those held at the last one
_STRANDS_PER_STEP = 8  # strands measured per step; some 40 us
_RANKS_PER_STEP = 32  # ranks checked per step in a strand with many holders; some 10 us each
_BLOCKS_PER_STEP = 64  # blocks dropped per step; some 50 us
_MOST_RUNS_ABOVE = 256  # runs visited above a strand; some 100 us


def review(
    device: DeviceTier, evicted: Callable[[DeviceRank, int], None]
) -> Generator[None, None, int]:
    """If the index is too large, evict blocks that cannot match because earlier blocks are gone.

    `evicted` gets a rank and the number of blocks that the rank has lost. A step takes some 50 us.
    The generator returns how many blocks all ranks held before these evictions."""
    kept = held = 0
    for strand in range(device.trie.numbered):
        if not strand % _STRANDS_PER_STEP:
            yield
        strand_kept, strand_held, _ = yield from _measured(device, strand)
        kept += strand_kept
        held += strand_held
    if kept <= MOST_POSITIONS * held + SPARED_POSITIONS:
        return held
    for strand in range(device.trie.numbered):
        if not strand % _STRANDS_PER_STEP:
            yield
        strand_kept, strand_held, holders = yield from _measured(device, strand)
        if strand_held and strand_kept + _kept_above(device, strand) > MOST_POSITIONS * strand_held:
            yield from _closed(device, strand, holders, evicted)
    return held


def _measured(device: DeviceTier, strand: int) -> Generator[None, None, tuple[int, int, int]]:
    """For a strand (part of the trie), return how many hashes are stored, how many blocks the ranks
    hold, and the set of these ranks. Approximate: ranks that were cleared may still count."""
    kept = held = holders = looked_at = 0
    for run in device.trie.pieces(strand):
        length = len(run.label) >> 3
        kept += length
        held += run.whole.bit_count() * length
        holders |= run.whole
        for bit, positions in list((run.partial or {}).items()):
            held += positions.bit_count()
            holders |= 1 << bit
            looked_at += 1
            if looked_at > _RANKS_PER_STEP:
                looked_at = 0
                yield
        looked_at += 1
        if looked_at > _RANKS_PER_STEP:
            looked_at = 0
            yield
    for bit in bits_of(holders):
        device_rank = device.ranks.rank_in(strand, bit)
        if device_rank is not None:
            kept += len(device_rank.hashes.rows[strand]) >> 3
        looked_at += 1
        if looked_at > _RANKS_PER_STEP:
            looked_at = 0
            yield
    return kept, held, holders


def _kept_above(device: DeviceTier, strand: int) -> float:
    """Return how many blocks directly before a strand (trie part) are held by no rank. If the trie
    branches after these blocks, their number is divided by the number of branches."""
    kept, share = 0.0, 1
    run = device.trie.strands.get(strand)
    for _ in range(_MOST_RUNS_ABOVE):
        run = run.parent if run is not None else None
        if run is None or run.children is None or run.parent is None:
            break
        share *= len(run.children)
        length = len(run.label) >> 3
        lost = length - _held_end(run)
        kept += lost / share
        if lost < length:
            break
    return kept


def _held_end(run: Run) -> int:
    """Return the number of a run's blocks up to the last block that any rank holds."""
    if run.whole:
        return len(run.label) >> 3
    return max(map(int.bit_length, (run.partial or {}).values()), default=0)


def _behind_holes(device: DeviceTier, device_rank: DeviceRank, strand: int) -> int:
    """Return which blocks of a rank in a strand (part of the trie) to evict, as a bit mask."""
    held = device.held_in(device_rank, strand)
    if _kept_above(device, strand):
        return held
    # All blocks that the rank holds, except the leading ones.
    return held & held + 1 if held.bit_length() > held.bit_count() << 1 else 0


def _closed(
    device: DeviceTier, strand: int, holders: int, evicted: Callable[[DeviceRank, int], None]
) -> Iterator[None]:
    """In a strand (part of the trie), evict what `holders` have there and no prompt can match."""
    for bit in bits_of(holders):
        while (device_rank := device.ranks.rank_in(strand, bit)) is not None:
            device.cut_row(device_rank, strand)
            gone = _behind_holes(device, device_rank, strand)
            if not gone:
                break
            gone_first = sum(1 << at for at in bits_of(gone)[-_BLOCKS_PER_STEP:])
            device.drop(device_rank, strand, gone_first)
            evicted(device_rank, gone_first.bit_count())
            yield
        yield
    device.cut_label(strand)
