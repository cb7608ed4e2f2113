"""Evict blocks behind holes if these blocks take too much memory. Such blocks cannot match, because
blocks before them are gone.

A run's label stays while another run hangs below the run, and a rank's row of hashes reaches to the
rank's last block. So if an engine evicts the starts of prompts and keeps the ends, the index keeps
both in memory, up to 16 KB for one block. The ends cannot match until the starts return. If the
ends take too much memory, they are evicted; the engine may store them again. The review visits one
strand at a time, in short steps, between which the index may change. D31."""

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
    """Measure all strands, and evict blocks behind holes where these take too much memory.

    `evicted` is called with each rank that loses blocks, and the number of blocks. A step takes
    some 50 us. The generator returns how many blocks are held."""
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
    """Return how many positions a strand takes, how many blocks are held in it, and the set of
    ranks that hold them. Approximate, because ranks that are being swept count too."""
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
        rank = device.ranks.rank_in(strand, bit)
        if rank is not None:
            kept += len(rank.names.rows[strand]) >> 3
        looked_at += 1
        if looked_at > _RANKS_PER_STEP:
            looked_at = 0
            yield
    return kept, held, holders


def _kept_above(device: DeviceTier, strand: int) -> float:
    """Count the positions, in the runs directly above a strand, that no rank holds. If several
    strands share these runs, each strand counts its share."""
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


def _behind_holes(device: DeviceTier, rank: DeviceRank, strand: int) -> int:
    """Return the positions (a bit mask) to evict from a rank's row; 0: none."""
    held = device.held_in(rank, strand)
    if _kept_above(device, strand):
        return held
    # All blocks that the rank holds, except the leading ones.
    return held & held + 1 if held.bit_length() > held.bit_count() << 1 else 0


def _closed(
    device: DeviceTier, strand: int, holders: int, evicted: Callable[[DeviceRank, int], None]
) -> Iterator[None]:
    """For each rank whose row is mostly holes, evict the blocks behind holes."""
    for bit in bits_of(holders):
        while (rank := device.ranks.rank_in(strand, bit)) is not None:
            device.cut_row(rank, strand)
            gone = _behind_holes(device, rank, strand)
            if not gone:
                break
            gone_first = sum(1 << at for at in bits_of(gone)[-_BLOCKS_PER_STEP:])
            device.drop(rank, strand, gone_first)
            evicted(rank, gone_first.bit_count())
            yield
        yield
    device.cut_label(strand)
