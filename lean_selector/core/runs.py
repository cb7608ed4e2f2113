"""The trie of runs: which prompts exist, as runs of blocks, and which ranks hold which of their
blocks.

A run is a stretch of consecutive blocks without a branch; its label is the blocks' local hashes, 8
bytes each. Runs split where prompts diverge, and nowhere else. Ranks are bits here. Knows nothing
of engine hashes, worker ids or lower tiers. Spec: indexer.md section 3.1, architecture "runs, not
blocks".

A strand is a run as it grew; splits cut it into several runs, which keep their positions in it. So
a place, (strand, position), means the same block before and after a split, for all ranks that hold
it.
"""

POSITION_BITS = 10  # positions in a strand; 22 bits are left for strands
POSITION_MASK = (1 << POSITION_BITS) - 1
STRAND_BLOCKS = 1 << POSITION_BITS
MAX_STRANDS = 1 << (32 - POSITION_BITS)


class Run:
    """Consecutive blocks of one strand.

    `whole` has the bit of each rank that holds all of the blocks. `partial` has, by bit index, the
    positions held by each rank that holds some: never none, never all.
    """

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
        self.start = start  # position of its first block in the strand
        self.label = bytearray(label)
        self.parent = parent
        self.after: Run | None = None  # the next run of the same strand
        self.children: dict[bytes, Run] | None = None  # by the first 8 bytes of the label
        self.whole = 0
        self.partial: dict[int, int] | None = None
        self._leads: list[tuple[int, int]] | None = None  # as leads() last found them

    def held_by(self, bit: int) -> int:
        """The positions (a bit mask) that the rank with this bit index holds."""
        if self.whole >> bit & 1:
            return (1 << (len(self.label) >> 3)) - 1
        return self.partial.get(bit, 0) if self.partial else 0

    def set_held(self, bit: int, held: int) -> None:
        """Record what the rank with this bit index holds."""
        self._leads = None
        rank = 1 << bit
        if held == (1 << (len(self.label) >> 3)) - 1:
            self.whole |= rank
            held = 0
        elif self.whole & rank:
            self.whole ^= rank
        if held:
            if self.partial is None:
                self.partial = {}
            self.partial[bit] = held
        elif self.partial and self.partial.pop(bit, 0) and not self.partial:
            self.partial = None

    def leads(self) -> list[tuple[int, int]]:
        """(leading blocks, the ranks that hold just so many of them) of the partial holders.

        Those without the first block are left out. Found once per change: where a fleet shares a
        run, many hold a part of it, and every request matches it.
        """
        if self._leads is None:
            leads: dict[int, int] = {}
            for bit, held in (self.partial or {}).items():
                if held & 1:
                    leading = ((held + 1) & ~held).bit_length() - 1
                    leads[leading] = leads.get(leading, 0) | 1 << bit
            self._leads = list(leads.items())
        return self._leads


class RunTrie:
    """All runs of a partition; one stays while a rank holds a block of it or a run hangs on it."""

    __slots__ = ("_free", "root", "strands")

    def __init__(self) -> None:
        self.root = Run(-1, 0, b"", None)
        self.strands: dict[int, Run] = {}  # the first run of each
        self._free: list[int] = []

    def add(self, parent: Run, label: bytes) -> Run:
        """A new run, in a strand of its own, below `parent`."""
        strand = self._free.pop() if self._free else len(self.strands)
        run = self.strands[strand] = Run(strand, 0, label, parent)
        if parent.children is None:
            parent.children = {}
        parent.children[label[:8]] = run
        return run

    def resolve(self, place: int) -> tuple[Run, int]:
        """The run at a place, and the block's position in that run. The block is held."""
        first = self.strands[place >> POSITION_BITS]
        position = place & POSITION_MASK
        if first.after is None:
            return first, position - first.start
        run: Run | None = first
        while run is not None:
            offset = position - run.start
            if offset < len(run.label) >> 3:
                return run, offset
            run = run.after
        raise AssertionError("a held block is in a run")

    def split(self, run: Run, blocks: int) -> Run:
        """Cut the first `blocks` off into a run of their own above `run`, and return that.

        Some rank holds the last of them, so they stay.
        """
        parent = run.parent
        assert parent is not None
        assert parent.children is not None
        cut = blocks << 3
        head = Run(run.strand, run.start, run.label[:cut], parent)
        head.whole = run.whole
        head.after = run
        before = self._before(run)
        if before is None:
            self.strands[run.strand] = head
        else:
            before.after = head
        parent.children[bytes(run.label[:8])] = head
        del run.label[:cut]
        head.children = {bytes(run.label[:8]): run}
        run.parent = head
        run.start += blocks
        low = (1 << blocks) - 1
        for bit, held in list((run.partial or {}).items()):
            head.set_held(bit, held & low)
            run.set_held(bit, held >> blocks)
        self.prune(run)  # it may have been no more than an end that nobody holds any longer
        return head

    def prune(self, run: Run) -> None:
        """Unlink a run that nobody holds and nothing hangs on, then its parents likewise."""
        while not (run.whole or run.partial or run.children) and run.parent is not None:
            parent = run.parent
            assert parent.children is not None
            del parent.children[bytes(run.label[:8])]
            if not parent.children:
                parent.children = None
            before = self._before(run)
            if before is not None:
                before.after = run.after
            elif run.after is not None:
                self.strands[run.strand] = run.after
            else:
                del self.strands[run.strand]
                self._free.append(run.strand)
            run.parent = run.after = None
            run = parent

    def pieces(self, strand: int) -> list[Run]:
        """The runs of a strand in order."""
        runs, run = [], self.strands.get(strand)
        while run is not None:
            runs.append(run)
            run = run.after
        return runs

    def _before(self, run: Run) -> Run | None:
        first: Run | None = self.strands[run.strand]
        if first is run:
            return None
        while first is not None and first.after is not run:
            first = first.after
        return first


def common_prefix(label: bytearray, at: int, hashes: bytes, start: int) -> int:
    """How many bytes of `label` from `at` and of `hashes` from `start` agree, in whole blocks."""
    low, high = 0, (min(len(label) - at, len(hashes) - start) >> 3) + 1
    if label[at : at + (high - 1 << 3)] == hashes[start : start + (high - 1 << 3)]:
        return high - 1 << 3
    while high - low > 1:
        middle = (low + high) >> 1
        span = middle - low << 3
        a, b = at + (low << 3), start + (low << 3)
        if label[a : a + span] == hashes[b : b + span]:
            low = middle
        else:
            high = middle
    return low << 3
