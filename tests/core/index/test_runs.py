"""Runs and their holders, against a model that keeps a set of blocks for each rank."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lean_selector.core.index.runs import POSITION_BITS, Run, RunTrie

RANKS = 4
LABEL = b"".join(number.to_bytes(8, "little") for number in range(1, 13))  # twelve blocks


class Holders(RuleBasedStateMachine):
    """One strand of twelve blocks that ranks hold, let go of, and that prompts split."""

    @initialize()
    def start(self) -> None:
        self.trie = RunTrie()
        self.run = self.trie.add(self.trie.root, LABEL)
        self.strand = self.run.strand
        self.held: list[set[int]] = [set() for _ in range(RANKS)]
        self.take(0, set(range(12)))  # a run lives while somebody holds a block of it

    def pieces(self) -> list[Run]:
        return self.trie.pieces(self.strand)

    def take(self, rank: int, blocks: set[int]) -> None:
        self.held[rank] = blocks
        for run in self.pieces():
            here = range(run.start, run.start + (len(run.label) >> 3))
            run.set_held(rank, sum(1 << block - run.start for block in blocks if block in here))

    @rule(rank=st.integers(1, RANKS - 1), blocks=st.sets(st.integers(0, 11)))
    def a_rank_holds(self, rank: int, blocks: set[int]) -> None:
        self.take(rank, blocks)

    @rule(data=st.data())
    def a_prompt_splits_a_run(self, data: st.DataObject) -> None:
        long = [run for run in self.pieces() if len(run.label) > 8]
        if long:
            run = data.draw(st.sampled_from(long))
            self.trie.split(run, data.draw(st.integers(1, (len(run.label) >> 3) - 1)))

    @invariant()
    def each_rank_holds_its_blocks_and_no_others(self) -> None:
        for rank in range(RANKS):
            found = {
                run.start + at
                for run in self.pieces()
                for at in range(len(run.label) >> 3)
                if run.held_by(rank) >> at & 1
            }
            assert found == self.held[rank]

    @invariant()
    def leading_blocks_are_told_of_those_who_hold_a_part(self) -> None:
        for run in self.pieces():
            blocks = len(run.label) >> 3
            expected: dict[int, int] = {}
            for rank in range(RANKS):
                held = run.held_by(rank)
                leading = next((at for at in range(blocks) if not held >> at & 1), blocks)
                if 0 < leading < blocks:
                    expected[leading] = expected.get(leading, 0) | 1 << rank
            assert dict(run.leads()) == expected

    @invariant()
    def places_outlive_splits(self) -> None:
        for block in range(12):
            run, at = self.trie.resolve(self.strand << POSITION_BITS | block)
            assert run.label[at << 3 : at + 1 << 3] == LABEL[block << 3 : block + 1 << 3]

    @invariant()
    def the_pieces_in_order_are_the_strand(self) -> None:
        assert b"".join(run.label for run in self.pieces()) == LABEL
        assert self.trie.strands[self.strand] is self.pieces()[0]
        assert [run.after for run in self.pieces()] == [*self.pieces()[1:], None]

    @precondition(lambda self: len(self.pieces()) > 1)
    @rule()
    def an_end_that_nobody_holds_goes_and_comes_again(self) -> None:
        """The last piece is let go of by all; what is left is a shorter strand, then grown anew."""
        last = self.pieces()[-1]
        for rank in range(RANKS):
            last.set_held(rank, 0)
        self.trie.prune(last)
        assert last not in self.pieces()
        assert [run.after for run in self.pieces()] == [*self.pieces()[1:], None]
        self.start()


TestHolders = Holders.TestCase
TestHolders.settings = settings(max_examples=60, stateful_step_count=25)


def test_a_strand_that_nobody_holds_is_given_to_the_next_run() -> None:
    trie = RunTrie()
    first = trie.add(trie.root, LABEL[:16])
    trie.add(trie.root, LABEL[16:32]).set_held(0, 0b11)
    trie.prune(first)
    assert trie.pieces(first.strand) == []
    assert trie.add(trie.root, LABEL[32:48]).strand == first.strand


def test_a_run_stays_while_another_hangs_on_it() -> None:
    trie = RunTrie()
    above = trie.add(trie.root, LABEL[:16])
    below = trie.add(above, LABEL[16:32])
    below.set_held(3, 0b01)
    trie.prune(above)
    assert trie.pieces(above.strand) == [above]
    below.set_held(3, 0)
    trie.prune(below)
    assert trie.strands == {}


def test_a_prompt_that_ends_within_a_run_is_matched_to_its_end_by_whoever_holds_more() -> None:
    trie = RunTrie()
    start = trie.add(trie.root, LABEL[:32])
    rest = trie.add(start, LABEL[32:])
    for bit in (0, 1):
        start.set_held(bit, 0b1111)
    rest.set_held(0, 0b11111111)
    rest.set_held(1, 0b11111)
    assert trie.match_sets(0b11, LABEL[:48]) == ([(6, 0b10), (6, 0b01)], [start, rest])
    assert trie.match_sets(0b11, LABEL) == ([(9, 0b10), (12, 0b01)], [start, rest])


def test_a_match_tells_no_set_of_ranks_that_were_not_asked_for() -> None:
    trie = RunTrie()
    run = trie.add(trie.root, LABEL)
    for bit, held in enumerate((0b111111111111, 0b11, 0b111, 0b1111)):
        run.set_held(bit, held)
    assert trie.match_sets(0b1101, LABEL)[0] == [(3, 0b100), (4, 0b1000), (12, 0b001)]
