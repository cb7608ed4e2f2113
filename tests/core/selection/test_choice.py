"""The draw by weight: as often as each rank's weight says, in few steps at every temperature."""

import math
import random
from collections import Counter

import pytest

from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Matched, Tier
from lean_selector.core.rank_bits import bits_of
from lean_selector.core.selection import choice
from lean_selector.core.selection.choice import (
    FEW_LOADS,
    Cell,
    DrawBounds,
    Pricing,
    all_costs,
    cells,
    cheapest,
    choose,
    dearest,
    drawn,
)
from lean_selector.core.selection.cost import overridden, softmax
from lean_selector.core.selection.overlap import match_sets
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.router_settings import CostTerms, RouterOverride
from lean_selector.core.selection.shapes import SelectionRequest, WorkerSpec
from tests.support.blocks import store_blocks
from tests.support.driven_selector import DrivenSelector, pack
from tests.support.operations import lines_run
from tests.support.reservations import book

PROMPT = list(range(1, 41))
TEMPERATURES = [1.0, 0.3, 0.1, 0.03, 0.01, 1e-4, 1e-300]


class Fleet:
    """Ranks of which no two have the same load: each has some blocks, and tokens to prefill.

    Every so manieth rank has the first half of the prompt cached.
    """

    def __init__(self, ranks: int, *, held: int = 0) -> None:
        self.driven = driven = DrivenSelector()
        loads = random.Random(5).sample(range(ranks), ranks)
        for worker_id in range(ranks):
            driven.register(worker_id)
        self.partition = partition = driven.partition
        for worker_id, load in enumerate(loads):
            hashes = pack(1_000 * worker_id + at for at in range(100, 100 + load % 13))
            book(partition.slots, f"r{worker_id}", worker_id, 0, hashes, 9 * load + 1, 0.0)
        for worker_id in range(0, ranks, held) if held else ():
            half = PROMPT[:20]
            store_blocks(partition.index, (worker_id, 0), Tier.DEVICE, None, half, pack(half))

    def request(self, temperature: float) -> SelectionRequest:
        request = self.driven.request(PROMPT, 4 * len(PROMPT))
        override = RouterOverride(router_temperature=temperature)
        request.terms = overridden(request.terms, override)
        return request

    def cells_of(self, request: SelectionRequest) -> tuple[Pricing, list[Cell]]:
        partition = self.partition
        pricing = Pricing(partition, request, partition.candidates)
        matches = match_sets(partition, request.prompt.local_hashes)
        return pricing, cells(partition, request, pricing, partition.candidates, matches)

    def envelope(self, temperature: float) -> DrawBounds:
        pricing, found = self.cells_of(self.request(temperature))
        order = self.partition.order
        least = cheapest(order, pricing, found)[0]
        spread = dearest(order, pricing, found) - least
        return DrawBounds(order, pricing, found, least, spread, temperature)

    def place(self, temperature: float, rng: random.Random) -> int:
        """The bit of the rank that a request is given."""
        request, partition = self.request(temperature), self.partition
        matches = match_sets(partition, request.prompt.local_hashes)
        return choose(partition, request, partition.candidates, matches, rng).bit

    def steps(self, temperature: float, draws: int = 25) -> float:
        """Lines that a selection runs, the mean."""
        rng = random.Random(3)
        return lines_run(lambda: [self.place(temperature, rng) for _ in range(draws)]) / draws


KINDS = {"apart": 0, "one holder": 10_000, "half hold": 2}
kinds = pytest.mark.parametrize("held", KINDS.values(), ids=KINDS)


@kinds
def test_no_temperature_leads_to_the_cost_of_every_load(held: int) -> None:
    fleet = Fleet(800, held=held)
    plain = fleet.steps(0.0)
    for temperature in TEMPERATURES:
        # A look at a load is two lines; its cost and its weight are a dozen.
        assert fleet.steps(temperature) < plain + 2 * 800


@kinds
def test_a_low_temperature_costs_the_same_however_large_the_fleet(held: int) -> None:
    few, many = Fleet(100, held=held), Fleet(1600, held=held)
    for temperature in (1e-4, 1e-6):
        assert many.steps(temperature) < 1.5 * few.steps(temperature)


class Last(random.Random):
    """Draws the very end, as rounding may have it."""

    def random(self) -> float:
        return 1.0


def test_the_ranks_of_a_fleet_are_drawn_by_their_weights() -> None:
    fleet, rng, draws = Fleet(40, held=2), random.Random(7), 4_000
    pricing, found = fleet.cells_of(fleet.request(0.3))
    costed = all_costs(fleet.partition.order, pricing, found)
    assert len(costed) == 40 > FEW_LOADS
    weights = softmax([cost for cost, _ in costed], 0.3)
    assert weights is not None
    drawn_bits = Counter(fleet.place(0.3, rng) for _ in range(draws))
    for (_, mask), weight in zip(costed, weights, strict=True):
        expected = draws * weight / sum(weights)
        assert abs(drawn_bits[mask.bit_length() - 1] - expected) < 5 * expected**0.5 + 1


def test_a_draw_that_rounding_leads_beyond_the_last_is_none() -> None:
    assert Fleet(20).envelope(0.5).draw(Last(), 1) == -1


def test_a_part_knows_what_it_weighs() -> None:
    envelope = Fleet(20, held=2).envelope(0.5)
    for part in envelope.parts:
        assert part.mass == part.ranks.bit_count() * part.bound
    assert {part.cell.match for part in envelope.parts} == {Matched(20), Matched(0)}


# -- costs beyond f64 and rounding -----------------------------------------------------------------


class Loaded:
    """Ranks with so many tokens to prefill, and the pricing of a request of none."""

    def __init__(self, tokens: list[int], scale: float, temperature: float) -> None:
        self.partition = partition = Partition("m", "t", 1, False, KvIndex(1), scale)
        for worker_id, waiting in enumerate(tokens):
            partition.put_worker(WorkerSpec(worker_id=worker_id))
            rank = partition.slots.ranks[worker_id, 0]
            rank.active_prefill_tokens = waiting
            partition.order.changed(rank)
        terms = CostTerms(1.0, 0.0, scale, temperature, True)
        request = SelectionRequest(Prompt(0, b"", 0, b"", b""), terms)
        self.pricing = Pricing(partition, request, partition.candidates)
        self.temperature, self.rng = temperature, random.Random(11)

    def cell(self, ranks: int, blocks: int, factor: float) -> Cell:
        return Cell(self.pricing, ranks, Matched(0), 0, 0.0, blocks, factor)

    def drawn(self, cells: list[Cell]) -> set[int]:
        """The bits that are drawn, of 50 draws."""
        order, terms = self.partition.order, (cells, self.temperature, self.rng)
        return {drawn(order, self.pricing, *terms) for _ in range(50)}


def test_the_dearest_of_ranks_whose_credit_exceeds_their_load_has_the_cost_of_its_requests() -> (
    None
):
    partition = Loaded([0] * 20, 1.0, 0.0).partition
    terms = CostTerms(1.0, 0.0, 1.0, 0.0, track_prefill=False, credits_untracked=True)
    request = SelectionRequest(Prompt(0, b"", 0, b"", b""), terms)
    pricing = Pricing(partition, request, partition.candidates)
    cell = Cell(pricing, partition.candidates, Matched(9), 0, 9.0, 0, 1.0, 5.0)
    assert dearest(partition.order, pricing, [cell]) == 5.0


def test_a_credit_for_cached_blocks_lowers_the_cost_of_decoding_to_nothing_at_most() -> None:
    fleet = Fleet(20, held=2)
    request = fleet.request(0.0)
    request.terms = CostTerms(3.0, 0.0, 1.0, 0.0, track_prefill=False, credits_untracked=True)
    pricing, found = fleet.cells_of(request)
    order = fleet.partition.order
    for cost, ranks in all_costs(order, pricing, found):
        for bit in bits_of(ranks):
            load = order.ranks[bit]
            credit = 0 if load.worker_id % 2 else 3 * 20
            assert cost == max(0, load.standing + 40 - credit)


@pytest.mark.parametrize("temperature", [0.0, 5e-324, 1.0, 1.7e308])
def test_costs_beyond_f64_are_never_drawn_before_finite_ones(temperature: float) -> None:
    loaded = Loaded([0] * 3, 0.0, temperature)
    beyond = [loaded.cell(1 << bit, 1, math.inf) for bit in (0, 2)]
    assert loaded.drawn([*beyond, loaded.cell(0b10, 1, 1.0)]) == {1}
    assert loaded.drawn(beyond) == {0, 2}


@pytest.mark.parametrize("temperature", [5e-324, 1.0, 1.7e308])
def test_of_many_loads_the_cheapest_is_drawn_when_the_dearest_is_beyond_f64(
    temperature: float,
) -> None:
    loaded = Loaded([*range(20)], 1.0, temperature)
    dear = 1 << 19
    finite = loaded.cell(loaded.partition.candidates ^ dear, 0, 1.0)
    assert loaded.drawn([finite, loaded.cell(dear, 0, math.inf)]) == {0}


def test_a_draw_that_rounding_leads_beyond_the_last_is_the_last_that_can_be_drawn() -> None:
    costed = [(1.0, 0b0011), (2.0, 0b0100), (9.0, 0b1000)]
    assert choice._by_weight(costed, [1.0, 0.5, 0.0], Last()) == 2
