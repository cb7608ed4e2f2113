"""The ranks in order of load against a model that computes every rank's cost, one by one.

The order is told of loads as Slots tells it; costs are compared to the last bit, for a tie that is
missed or made up changes which ranks the draw is among.
"""

from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lean_selector.core.load.load_order import Bucket, LoadOrder
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.rank_bits import bits_of
from lean_selector.core.selection.cost import cost_of
from lean_selector.core.selection.settings import RouterSettings, Terms
from lean_selector.core.selection.terms import terms

RANKS = 24  # many more than are computed one by one

block_sizes = st.sampled_from([1, 3, 16, 64, 100])
scales = st.sampled_from([0.0, 0.1, 1.0, 2.5]) | st.floats(0.0, 10.0)
# Few of them, so that ranks meet in one set, and that different loads cost the same: 16 tokens of a
# block size of 16 cost what 1 block does.
buckets = st.tuples(
    st.sampled_from([0, 1, 16, 32, 48, 300]) | st.integers(0, 100_000),
    st.sampled_from([0, 1, 2, 3, 300]) | st.integers(0, 5_000),
)
prompts = st.sampled_from([0, 1, 15, 16, 48]) | st.integers(0, 100_000)


def loaded(bit: int, bucket: Bucket) -> RankLoad:
    load = RankLoad(bit, 0, bit)
    load.active_prefill_tokens, load.active_decode_blocks = bucket
    return load


def terms_of(scale: float) -> Terms:
    return terms(RouterSettings(prefill_load_scale=scale))


def credit_of(share: float, tokens: int, block_size: int) -> float:
    """As many blocks as `share` of a prompt; at 1.0 all of it, which is the limit."""
    return share * (tokens / block_size)


class Model:
    """What each rank holds, and nothing that depends on any other rank."""

    def __init__(self, block_size: int, scale: float) -> None:
        self.block_size = block_size
        self.terms = terms_of(scale)
        self.held: dict[int, Bucket] = {}

    def cost(self, bit: int, tokens: int, credit: float, new_blocks: int) -> float:
        prefill, blocks = self.held[bit]
        return cost_of(self.terms, self.block_size, prefill + tokens, credit, blocks + new_blocks)

    def least(
        self, ranks: int, tokens: int, credit: float, new_blocks: int
    ) -> tuple[float, set[int]]:
        costs = {bit: self.cost(bit, tokens, credit, new_blocks) for bit in bits_of(ranks)}
        least = min(costs.values())
        return least, {bit for bit, cost in costs.items() if cost == least}


def found_by(
    order: LoadOrder, ranks: int, tokens: int, credit: float, new_blocks: int
) -> tuple[float, set[int]]:
    """What the order says, its sets made one; they share no rank, and none is empty."""
    least, tied = order.least(ranks, tokens, credit, new_blocks)
    bits = [bits_of(ranks) for ranks in tied]
    assert all(bits)
    assert sum(map(len, bits)) == len(set().union(*bits))
    return least, set().union(*bits)


class LoadOrderMachine(RuleBasedStateMachine):
    """Ranks come, go and change; whoever asks for the least is told what the model says."""

    @initialize(block_size=block_sizes, scale=scales)
    def begin(self, block_size: int, scale: float) -> None:
        self.order = LoadOrder(block_size, scale)
        self.model = Model(block_size, scale)
        self.loads = [loaded(bit, (0, 0)) for bit in range(RANKS)]

    def _set(self, bit: int, bucket: Bucket) -> None:
        self.loads[bit].active_prefill_tokens, self.loads[bit].active_decode_blocks = bucket

    @rule(bits=st.sets(st.integers(0, RANKS - 1)), bucket=buckets)
    def add(self, bits: set[int], bucket: Bucket) -> None:
        for bit in bits - self.model.held.keys():
            self._set(bit, bucket)
            self.order.add(self.loads[bit])
            self.model.held[bit] = bucket

    @precondition(lambda self: self.model.held)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        bit = data.draw(st.sampled_from(sorted(self.model.held)))
        self.order.remove(self.loads[bit])
        del self.model.held[bit]
        assert self.loads[bit].bucket is None

    @rule(bit=st.integers(0, RANKS - 1), bucket=buckets)
    def change(self, bit: int, bucket: Bucket) -> None:
        """Also of a rank that was not added, or not any more: the order must not take it in."""
        self._set(bit, bucket)
        self.order.changed(self.loads[bit])
        if bit in self.model.held:
            self.model.held[bit] = bucket

    @precondition(lambda self: self.model.held)
    @rule(
        data=st.data(),
        tokens=prompts,
        share=st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0),
        new_blocks=st.integers(-300, 300),
    )
    def ask(self, data: st.DataObject, tokens: int, share: float, new_blocks: int) -> None:
        """All ranks or any of them; blocks that are shared with active requests are taken off."""
        held = st.sampled_from(sorted(self.model.held))
        some = data.draw(st.none() | st.sets(held, min_size=1))
        ranks = self.order.everyone if some is None else sum(1 << bit for bit in some)
        credit = credit_of(share, tokens, self.model.block_size)
        least = self.model.least(ranks, tokens, credit, new_blocks)
        assert found_by(self.order, ranks, tokens, credit, new_blocks) == least

    @invariant()
    def everyone_is_who_was_added_and_not_removed(self) -> None:
        assert set(bits_of(self.order.everyone)) == self.model.held.keys()
        for bit in self.model.held:
            assert self.order.rank(bit) is self.loads[bit]

    @invariant()
    def the_least_key_is_that_of_the_least_loaded(self) -> None:
        if self.model.held:
            keys = (self.model.cost(bit, 0, 0.0, 0) for bit in self.model.held)
            # Multiplied and divided in the other order, so not always the same to the last bit.
            least = min(keys)
            assert abs(self.order.least_key() - least) <= 1e-12 * (1.0 + least)


TestLoadOrderMachine = LoadOrderMachine.TestCase
TestLoadOrderMachine.settings = settings(max_examples=120, stateful_step_count=30)


@given(
    block_size=block_sizes,
    parts=st.sampled_from([7, 10, 49]) | st.integers(1, 100),
    equal=st.lists(st.integers(0, 300), min_size=1, max_size=60),
    tokens=prompts,
    share=st.sampled_from([0.0, 1.0]) | st.floats(0.0, 1.0),
    new_blocks=st.integers(-300, 300),
)
# 1 / 49 * 49 is not 1: keys differ in their last bits, and costs less so.
@example(3, 49, [*range(60)], 53_767, 0.0, 84)
@example(100, 49, [*range(0, 300, 7)], 77_087, 0.25, 78)
@example(100, 7, [*range(60)], 99_999, 1.0, 1)
def test_loads_that_are_equal_but_for_rounding_tie_as_they_do_one_by_one(
    block_size: int, parts: int, equal: list[int], tokens: int, share: float, new_blocks: int
) -> None:
    """At a scale of 1 / parts a block weighs as `parts` blocks of tokens do: every rank costs the
    same, and rounding alone says which tie, and which of them the order has first."""
    scale = 1 / parts
    model, order = Model(block_size, scale), LoadOrder(block_size, scale)
    for bit, blocks in enumerate(equal):
        bucket = (300 - blocks) * block_size * parts, blocks
        model.held[bit] = bucket
        order.add(loaded(bit, bucket))
    credit = credit_of(share, tokens, block_size)
    for ranks in (order.everyone, order.everyone & 0b111_111, order.everyone & 0b1_010_101):
        assert found_by(order, ranks, tokens, credit, new_blocks) == model.least(
            ranks, tokens, credit, new_blocks
        )


@given(
    held=st.lists(buckets, min_size=1, max_size=40),
    tokens=prompts,
    block_size=block_sizes,
    new_blocks=st.integers(0, 300),
)
def test_a_prompt_that_is_cached_to_its_last_token_costs_what_the_rank_holds(
    held: list[Bucket], tokens: int, block_size: int, new_blocks: int
) -> None:
    """The limit of `credit`: nothing of the prompt is left, and nothing goes below zero."""
    order = LoadOrder(block_size, 1.0)
    for bit, bucket in enumerate(held):
        order.add(loaded(bit, bucket))
    whole = tokens * block_size  # in blocks without a remainder
    least, tied = found_by(order, order.everyone, whole, float(tokens), new_blocks)
    costs = [prefill / block_size + blocks + new_blocks for prefill, blocks in held]
    assert abs(least - min(costs)) <= 1e-9 * (1.0 + least)
    assert all(abs(costs[bit] - least) <= 1e-9 * (1.0 + least) for bit in tied)


def test_a_set_of_equal_ranks_ties_as_one_and_only_those_that_were_asked_for() -> None:
    order = LoadOrder(16, 1.0)
    for bit in range(20):
        order.add(loaded(bit, (16, 2) if bit % 2 else (32, 1)))  # 3 blocks each
    least, tied = order.least(order.everyone, 16, 1.0, 0)
    even = sum(1 << bit for bit in range(0, 20, 2))
    assert (least, sorted(tied)) == (3.0, [even, even << 1])
    asked = 0xFF << 8
    assert found_by(order, asked, 16, 1.0, 0) == (3.0, set(range(8, 16)))
