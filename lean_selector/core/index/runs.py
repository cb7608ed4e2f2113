"""The trie of runs: all prompts as runs of blocks, and the ranks that hold each block.

A fleet holds millions of blocks, and a prompt of 100 000 tokens has 6 000 of them. With a node for
each block, a match visits 6 000 dicts, each block costs several objects, and the garbage collector
walks all of them. But few prompts part at any block. So a run is a sequence of blocks in which no
prompt parts from another; its label is bytes, 8 per block (the local hash, which covers the block's
own tokens but not its prefix), and a prompt is compared with it at the speed of memcmp. A run is
split where prompts part, and nowhere else.

What goes wrong with runs is everything that refers to a block. A rank has the address of each of
its engine hashes, and a split in the middle of a run must not rewrite thousands of them, for every
rank that holds the run. So an address outlives splits: a run begins a strand, of up to 1024 blocks.
Splits divide the strand into several runs, but each block keeps its position in the strand, and an
address is (strand, position).

The other trouble is holders. A rank is a number here, a set of ranks a bit mask, so the holders of
a whole run are one int. But a rank evicts single blocks, and then holds a run in part. Such ranks
are kept apart, each with a mask of its blocks. What a match needs of them, how many leading blocks
each holds, is kept in step with the rank that changes. Tried before: to compute it at each match
after a change (1.2 ms with 4 000 ranks).

Engine hashes and lower tiers are stored elsewhere. Spec: indexer.md section 3.1."""

from bisect import bisect_left, bisect_right
from collections.abc import ItemsView

from lean_selector.core.hashing import common_prefix

POSITION_BITS = 10  # positions in a strand; 22 bits are left for strands
POSITION_MASK = (1 << POSITION_BITS) - 1
STRAND_BLOCKS = 1 << POSITION_BITS
MAX_STRANDS = 1 << (32 - POSITION_BITS)


class Run:
    """Consecutive blocks without a branch.

    `whole` is the set of the ranks that hold all of these blocks. `partial` has the ranks that hold
    only some: bit number of the rank -> positions in the run (a bit mask) of the held blocks."""

    __slots__ = (
        "_leads",
        "after",
        "children",
        "label",
        "parent",
        "partial",
        "start",
        "strand",
        "whole",
    )

    def __init__(self, strand: int, start: int, label: bytes | bytearray, parent: "Run | None"):
        self.strand = strand
        self.start = start  # position of the run's first block in the strand
        self.label = bytearray(label)
        self.parent = parent
        self.after: Run | None = None  # the next run of the same strand
        self.children: dict[bytes, Run] | None = None  # by the first 8 bytes of their labels
        self.whole = 0
        self.partial: dict[int, int] | None = None
        # The result of `leads`, since its first call: if a fleet shares a run, many ranks hold a
        # part of it, and each change concerns only one rank.
        self._leads: dict[int, int] | None = None

    def held_by(self, bit: int) -> int:
        """Return which blocks of the run the rank with this bit number holds, as a bit mask."""
        if self.whole >> bit & 1:
            return (1 << (len(self.label) >> 3)) - 1
        return self.partial.get(bit, 0) if self.partial else 0

    def set_held(self, bit: int, held: int) -> None:
        """Record which blocks of the run (a bit mask) the rank with this bit number holds."""
        rank_set = 1 << bit
        partial = self.partial
        before = partial.get(bit, 0) if partial else 0
        if held == (1 << (len(self.label) >> 3)) - 1:
            self.whole |= rank_set
            held = 0
        elif self.whole & rank_set:
            self.whole ^= rank_set
        if held:
            if partial is None:
                self.partial = {bit: held}
            else:
                partial[bit] = held
        elif before and partial:
            del partial[bit]
            if not partial:
                self.partial = self._leads = None
        if self._leads is not None:
            self._update_leads(rank_set, before, held)

    def _update_leads(self, rank_set: int, before: int, held: int) -> None:
        """Update the cached result of `leads` after one rank has gained or lost blocks."""
        leads, old, new = self._leads, _leading(before), _leading(held)
        assert leads is not None
        if old == new:
            return
        if old:
            rest = leads[old] ^ rank_set
            if rest:
                leads[old] = rest
            else:
                del leads[old]
        if new:
            leads[new] = leads.get(new, 0) | rank_set

    def leads(self) -> ItemsView[int, int]:
        """Group ranks that hold only a part of the run by how many of its leading blocks they hold.
        Return pairs (leading blocks, set of ranks). Ranks without the first block are omitted."""
        if self._leads is None:
            leads = self._leads = {}
            for bit, held in (self.partial or {}).items():
                if held & 1:
                    leading = _leading(held)
                    leads[leading] = leads.get(leading, 0) | 1 << bit
        return self._leads.items()


def _leading(held: int) -> int:
    """Count the consecutive bits that are set, starting at the lowest bit."""
    return ((held + 1) & ~held).bit_length() - 1


class _Pieces:
    """The parts of a run that was split, in order, and the position at which each part starts."""

    __slots__ = ("runs", "starts")

    def __init__(self, run: Run) -> None:
        self.starts = [run.start]
        self.runs = [run]


class RunTrie:
    """All runs of device blocks of a partition. A run exists as long as a rank holds one of its
    blocks, or as long as the run has a child."""

    def __init__(self) -> None:
        self.root = Run(-1, 0, b"", None)
        self.strands: dict[int, Run] = {}  # strand -> its first run
        self._split: dict[int, _Pieces] = {}  # strands that consist of several runs
        self._free: list[int] = []

    @property
    def numbered(self) -> int:
        """How many strand numbers were ever in use. Strand: a run, or all parts of a split run."""
        return len(self.strands) + len(self._free)

    def add(self, parent: Run, label: bytes) -> Run:
        """Add a run below `parent`. `label` has 8 bytes per block: the hash of its own tokens."""
        strand = self._free.pop() if self._free else len(self.strands)
        run = self.strands[strand] = Run(strand, 0, label, parent)
        if parent.children is None:
            parent.children = {}
        parent.children[label[:8]] = run
        return run

    def resolve(self, address: int) -> tuple[Run, int]:
        """Return the run of the block numbered `address`, and the block's position in this run."""
        strand, position = address >> POSITION_BITS, address & POSITION_MASK
        pieces = self._split.get(strand)
        if pieces is None:
            run = self.strands[strand]
        else:
            run = pieces.runs[bisect_right(pieces.starts, position) - 1]
        return run, position - run.start

    def split(self, run: Run, blocks: int) -> Run:
        """Make the first `blocks` blocks of `run` a new run above `run`, and return the new run.
        Some rank must hold the last of these blocks."""
        parent = run.parent
        assert parent is not None
        assert parent.children is not None
        cut = blocks << 3
        head = Run(run.strand, run.start, run.label[:cut], parent)
        head.whole = run.whole
        head.after = run
        pieces = self._split.get(run.strand)
        if pieces is None:
            pieces = self._split[run.strand] = _Pieces(run)
        at = bisect_left(pieces.starts, run.start)
        if at:
            pieces.runs[at - 1].after = head
        else:
            self.strands[run.strand] = head
        pieces.runs.insert(at, head)
        pieces.starts.insert(at + 1, run.start + blocks)
        parent.children[bytes(run.label[:8])] = head
        del run.label[:cut]
        head.children = {bytes(run.label[:8]): run}
        run.parent = head
        run.start += blocks
        low = (1 << blocks) - 1
        for bit, held in list((run.partial or {}).items()):
            head.set_held(bit, held & low)
            run.set_held(bit, held >> blocks)
        self.prune(run)  # no rank may hold any of the blocks left in `run`
        return head

    def prune(self, run: Run) -> None:
        """Remove `run` if no rank holds it and it has no child. Then do the same to its parents."""
        while not (run.whole or run.partial or run.children) and run.parent is not None:
            parent = run.parent
            assert parent.children is not None
            del parent.children[bytes(run.label[:8])]
            if not parent.children:
                parent.children = None
            self._leave_strand(run)
            run.parent = run.after = None
            run = parent

    def _leave_strand(self, run: Run) -> None:
        pieces = self._split.get(run.strand)
        if pieces is None:
            del self.strands[run.strand]
            self._free.append(run.strand)
            return
        at = bisect_left(pieces.starts, run.start)
        del pieces.starts[at], pieces.runs[at]
        assert at, "a piece that begins a strand has those behind it hanging on it"
        pieces.runs[at - 1].after = run.after
        if len(pieces.runs) == 1:
            del self._split[run.strand]

    def match_sets(
        self, ranks: int, local_hashes: bytes
    ) -> tuple[list[tuple[int, int]], list[Run]]:
        """Return how many leading blocks of a prompt each of `ranks` holds, and the runs along the
        prompt. The first list has pairs (leading blocks, set of ranks). A rank without the first
        block is in no pair; any other rank is in one pair."""
        result: list[tuple[int, int]] = []
        path: list[Run] = []
        children = self.root.children
        alive = ranks  # ranks that hold every block up to here
        at = 0
        while children is not None:
            run = children.get(local_hashes[at : at + 8])
            if run is None:
                break
            path.append(run)
            label = run.label
            if local_hashes.startswith(label, at):
                same = len(label)
            else:
                same = common_prefix(label, 0, local_hashes, at)
            stay = alive & run.whole
            gone = alive ^ stay
            if gone:
                if run.partial:
                    before, most = at >> 3, same >> 3
                    for leading, mask in run.leads():
                        if mask & gone:
                            result.append((before + min(leading, most), mask & gone))
                            gone &= ~mask
                if at and gone:
                    result.append((at >> 3, gone))
            alive = stay
            at += same
            if not alive or same < len(label):
                break
            children = run.children
        if alive and at:
            result.append((at >> 3, alive))
        return result, path

    def pieces(self, strand: int) -> list[Run]:
        """Return the runs of a strand (a run, or parts of a split run) in order; [] if unknown."""
        pieces = self._split.get(strand)
        if pieces is not None:
            return list(pieces.runs)
        run = self.strands.get(strand)
        return [] if run is None else [run]
