"""Who is taken of some cells: ties that rounding alone decides, and the draw.

Costs are compared to the last bit with those of each rank alone, for a tie that is missed or made
up changes which ranks the draw is among.
"""

import math
import random
from collections import Counter

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Matched
from lean_selector.core.rank_bits import bits_of
from lean_selector.core.selection import choice
from lean_selector.core.selection.choice import Cell, Pricing, all_costs, cheapest, dearest, drawn
from lean_selector.core.selection.cost import credit_blocks, credit_decay, softmax
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.router_settings import CostTerms
from lean_selector.core.selection.shapes import SelectionRequest, WorkerSpec

Load = tuple[int, int]  # prefill tokens, active blocks

block_sizes = st.sampled_from([1, 3, 16, 64, 100])
loads = st.tuples(
    st.sampled_from([0, 1, 16, 32, 48, 300]) | st.integers(0, 100_000),
    st.sampled_from([0, 1, 2, 3, 300]) | st.integers(0, 5_000),
)
prompts = st.sampled_from([0, 1, 15, 16, 48]) | st.integers(0, 100_000)


def loaded(block_size: int, scale: float, held: list[Load]) -> Partition:
    """One worker for each load, its bit the place in the list."""
    partition = Partition("m", "t", block_size, False, KvIndex(block_size), scale)
    for worker_id, load in enumerate(held):
        partition.put_worker(WorkerSpec(worker_id=worker_id))
        rank = partition.slots.ranks[worker_id, 0]
        rank.active_prefill_tokens, rank.active_decode_blocks = load
        partition.order.changed(rank)
        assert rank.bit == worker_id
    return partition


class Asked(msgspec.Struct):
    """A cell, and the terms of the request."""

    terms: CostTerms
    ranks: int
    tokens: int
    device: int
    blocks: int
    factor: float = 1.0

    def found_in(self, partition: Partition) -> tuple[float, set[int], float]:
        """The least cost, who has it, and the greatest; the sets share no rank, none is empty."""
        request = SelectionRequest(Prompt(self.tokens, b"", 0, b"", b""), self.terms)
        pricing = Pricing(partition, request, self.ranks)
        match = Matched(self.device)
        credit = credit_blocks(self.terms, 1.0, match)
        cell = Cell(pricing, self.ranks, match, self.tokens, credit, self.blocks, self.factor)
        least, tied = cheapest(partition.order, pricing, [cell])
        bits = [bits_of(each) for each in tied]
        assert all(bits)
        assert sum(map(len, bits)) == len(set().union(*bits))
        return least, set().union(*bits), dearest(partition.order, pricing, [cell])

    def one_by_one(self, partition: Partition) -> tuple[float, set[int], float]:
        """The same, of each rank alone."""
        costs = {}
        loads = [partition.order.ranks[bit] for bit in bits_of(self.ranks)]
        least_tokens = min(load.active_prefill_tokens for load in loads)
        terms, block_size = self.terms, partition.block_size
        for load in loads:
            tokens = load.active_prefill_tokens
            decay = credit_decay(terms, tokens - least_tokens, self.tokens, block_size)
            credit = credit_blocks(terms, decay, Matched(self.device))
            prefill = 0.0
            if terms.track_prefill:
                prefill = terms.scale * max(0.0, (tokens + self.tokens) / block_size - credit)
            blocks = load.active_decode_blocks + self.blocks
            costs[load.bit] = (prefill + blocks) * self.factor
        least = min(costs.values())
        cheap = {bit for bit, cost in costs.items() if cost == least}
        return least, cheap, max(costs.values())


def terms_of(
    scale: float, *, credit: float = 1.0, decay: float = 0.0, tracks: bool = True
) -> CostTerms:
    return CostTerms(credit, decay, scale, 0.0, tracks)


def test_where_the_credit_decays_a_rank_with_less_load_may_cost_more() -> None:
    partition = loaded(16, 1.0, [(0, 40)] * 4 + [(160, 28)] * 4)
    cell = Asked(terms_of(1.0, decay=4.0), partition.candidates, 480, 30, 0)
    assert cell.found_in(partition) == cell.one_by_one(partition)


@given(
    block_size=block_sizes,
    parts=st.sampled_from([7, 10, 49]) | st.integers(1, 100),
    equal=st.lists(st.integers(0, 300), min_size=1, max_size=60),
    tokens=prompts,
    blocks=st.integers(0, 300),
)
# 1 / 49 * 49 is not 1: keys differ in their last bits, and costs less so.
@example(3, 49, [*range(60)], 53_767, 84)
@example(100, 49, [*range(0, 300, 7)], 77_087, 78)
@example(100, 7, [*range(60)], 99_999, 1)
def test_loads_that_are_equal_but_for_rounding_tie_as_they_do_one_by_one(
    block_size: int, parts: int, equal: list[int], tokens: int, blocks: int
) -> None:
    """At a scale of 1 / parts a block weighs as `parts` blocks of tokens do: every rank costs the
    same, and rounding alone says which tie, and which of them the order has first."""
    held = [((300 - each) * block_size * parts, each) for each in equal]
    partition = loaded(block_size, 1 / parts, held)
    everyone = partition.candidates
    for ranks in (everyone, everyone & 0b111_111, everyone & 0b1_010_101):
        cell = Asked(terms_of(1 / parts), ranks, tokens, tokens // block_size // 2, blocks)
        assert cell.found_in(partition) == cell.one_by_one(partition)


# -- the draw -------------------------------------------------------------------------------------


def shares_of(costs: list[float], temperature: float, draws: int) -> list[float]:
    """How often each rank was drawn, of ranks that cost so much."""
    partition = loaded(1, 0.0, [(0, 0)] * len(costs))
    request = SelectionRequest(
        Prompt(0, b"", 0, b"", b""), CostTerms(1.0, 0.0, 0.0, temperature, True)
    )
    pricing = Pricing(partition, request, partition.candidates)
    cells = [
        Cell(pricing, 1 << bit, Matched(0), 0, 0.0, 1 if cost else 0, cost or 1.0)
        for bit, cost in enumerate(costs)
    ]
    rng = random.Random(11)
    counts = Counter(drawn(partition.order, pricing, cells, temperature, rng) for _ in range(draws))
    return [counts[bit] / draws for bit in range(len(costs))]


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1.0, 1.7e308])
def test_costs_beyond_f64_are_never_drawn_before_finite_ones(temperature: float) -> None:
    shares = shares_of([math.inf, 1.0, math.inf], temperature, 50)
    assert shares == [0.0, 1.0, 0.0]
    assert sum(shares_of([math.inf, math.inf], temperature, 50)) == 1.0


@pytest.mark.parametrize("temperature", [5e-324, 1.0, 1.7e308])
def test_of_many_loads_the_cheapest_is_drawn_when_the_dearest_is_beyond_f64(
    temperature: float,
) -> None:
    partition = loaded(1, 1.0, [(blocks, 0) for blocks in range(20)])
    request = SelectionRequest(
        Prompt(0, b"", 0, b"", b""), CostTerms(1.0, 0.0, 1.0, temperature, True)
    )
    pricing = Pricing(partition, request, partition.candidates)
    dear = 1 << 19
    cells = [
        Cell(pricing, partition.candidates ^ dear, Matched(0), 0, 0.0, 0, 1.0),
        Cell(pricing, dear, Matched(0), 0, 0.0, 0, math.inf),
    ]
    rng = random.Random(3)
    assert {drawn(partition.order, pricing, cells, temperature, rng) for _ in range(50)} == {0}


def test_costs_that_rounding_alone_sets_apart_are_drawn_as_the_formula_has_them() -> None:
    """Bounds, which leave room for rounding, say nothing of them: all are costed."""
    block_size, parts, tokens = 3, 49, 53_767
    held = [((300 - each) * block_size * parts, each) for each in range(60)]
    partition = loaded(block_size, 1 / parts, held)
    terms = CostTerms(1.0, 0.0, 1 / parts, 0.1, True)
    request = SelectionRequest(Prompt(tokens, b"", 0, b"", b""), terms)
    pricing = Pricing(partition, request, partition.candidates)
    match = Matched(tokens // block_size // 2)
    cell = Cell(pricing, partition.candidates, match, tokens, match.device, 84, 1.0)
    costed = all_costs(partition.order, pricing, [cell])
    weights = softmax([cost for cost, _ in costed], 0.1)
    assert weights is not None
    rng, draws = random.Random(3), 500
    counts = Counter(drawn(partition.order, pricing, [cell], 0.1, rng) for _ in range(draws))
    for (_, ranks), weight in zip(costed, weights, strict=True):
        chance = weight / sum(weights)
        (bit,) = bits_of(ranks)
        error = 5 * math.sqrt(chance * (1 - chance) / draws)
        assert abs(counts[bit] / draws - chance) <= error + 6 / draws


class Last(random.Random):
    """Draws the very end, as rounding may have it."""

    def random(self) -> float:
        return 1.0


def test_a_draw_that_rounding_leads_beyond_the_last_is_the_last_that_can_be_drawn() -> None:
    costed = [(1.0, 0b0011), (2.0, 0b0100), (9.0, 0b1000)]
    assert choice._by_weight(costed, [1.0, 0.5, 0.0], Last()) == 2
