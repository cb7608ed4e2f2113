"""The draw by weight: as often as each rank's weight says, in few steps at every temperature."""

import math
import random
from collections import Counter
from typing import Any

import pytest

from lean_selector.core.index.shapes import Matched, Tier
from lean_selector.core.rank_bits import bits_of
from lean_selector.core.selection.choice import (
    Cell,
    Envelope,
    Pricing,
    all_costs,
    cells,
    cheapest,
    dearest,
)
from lean_selector.core.selection.cost import overridden, softmax
from lean_selector.core.selection.overlap import match_sets
from lean_selector.core.selection.router_settings import RouterOverride
from lean_selector.core.selection.scheduler import place
from lean_selector.core.selection.shapes import SelectionRequest
from tests.support.bookings import book
from tests.support.driven_selector import DrivenSelector, pack
from tests.support.operations import lines_run

PROMPT = list(range(1, 41))
TEMPERATURES = [1.0, 0.3, 0.1, 0.03, 0.01, 1e-4, 1e-300]
NOW = 2.0


class Fleet:
    """Ranks of which no two have the same load: each has some blocks, and tokens to prefill.

    Every so manieth rank has the first half of the prompt cached (`held`), or a load that wears off
    (`wearing`).
    """

    def __init__(
        self,
        ranks: int,
        *,
        held: int = 0,
        wearing: int = 0,
        decay: float = 0.0,
        scale: float | None = None,
    ) -> None:
        self.driven = driven = DrivenSelector(overlap_score_credit_decay=decay)
        loads = random.Random(5).sample(range(ranks), ranks)
        for worker_id in range(ranks):
            driven.register(worker_id)
        self.partition = partition = driven.partition
        for worker_id, load in enumerate(loads):
            duration = 10.0 if wearing and worker_id % wearing == 0 else None
            hashes = pack([1_000 * worker_id + at for at in range(100, 100 + load % 13)])
            name = f"r{worker_id}"
            book(
                partition.slots,
                name,
                worker_id,
                0,
                hashes,
                9 * load + 1,
                0.0,
                prefill_duration_s=duration,
            )
        for worker_id in range(0, ranks, held) if held else ():
            half = PROMPT[:20]
            partition.index.store(worker_id, 0, Tier.DEVICE, None, half, pack(half))
        self.scale = scale

    def request(self, temperature: float) -> SelectionRequest:
        request = self.driven.request(PROMPT, 4 * len(PROMPT))
        override = RouterOverride(router_temperature=temperature, prefill_load_scale=self.scale)
        request.terms = overridden(request.terms, override)
        return request

    def cells_of(self, request: SelectionRequest) -> tuple[Pricing, list[Cell]]:
        partition = self.partition
        pricing = Pricing(partition, request, partition.candidates, NOW)
        matches = match_sets(partition, request.prompt.local_hashes)
        return pricing, cells(partition, request, pricing, partition.candidates, matches)

    def envelope(self, temperature: float) -> Envelope:
        pricing, found = self.cells_of(self.request(temperature))
        order = self.partition.order
        least = cheapest(order, pricing, found, NOW)[0]
        spread = dearest(order, pricing, found, NOW) - least
        return Envelope(order, pricing, found, least, spread, temperature, NOW)

    def chances(self, temperature: float) -> dict[int, float]:
        """Of each rank by its bit, as the formula has it."""
        pricing, found = self.cells_of(self.request(temperature))
        costed = all_costs(self.partition.order, pricing, found, NOW)
        weights = softmax([cost for cost, _ in costed], temperature)
        assert weights is not None
        weight_of = {
            bit: weight
            for (_, ranks), weight in zip(costed, weights, strict=True)
            for bit in bits_of(ranks)
        }
        total = sum(weight_of.values())
        return {bit: weight / total for bit, weight in weight_of.items()}

    def place(self, temperature: float, rng: random.Random) -> int:
        """The bit of the rank that a request is given."""
        request, partition = self.request(temperature), self.partition
        matches = match_sets(partition, request.prompt.local_hashes)
        return place(partition, request, partition.candidates, matches, NOW, rng)[0].bit

    def steps(self, temperature: float, draws: int = 25) -> float:
        """Lines that a selection runs, the mean."""
        rng = random.Random(3)
        return lines_run(lambda: [self.place(temperature, rng) for _ in range(draws)]) / draws


KINDS: dict[str, dict[str, Any]] = {
    "apart": {},
    "one holder": {"held": 10_000},
    "half hold": {"held": 2},
    "some wear off": {"held": 4, "wearing": 2},
    "all wear off": {"wearing": 1},
    "decay": {"held": 2, "decay": 2.0},
    "less scale": {"held": 2, "scale": 0.1},
    "more scale": {"held": 2, "scale": 7.0},
    "no scale": {"held": 2, "scale": 0.0},
}
kinds = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


@kinds
def test_each_rank_is_drawn_as_often_as_the_softmax_says(kind: dict[str, Any]) -> None:
    fleet, draws = Fleet(60, **kind), 500
    for temperature in (0.3, 0.03, 1e-300):
        rng = random.Random(11)
        counts = Counter(fleet.place(temperature, rng) for _ in range(draws))
        for bit, chance in fleet.chances(temperature).items():
            # Five standard deviations of a binomial share.
            error = 5 * math.sqrt(chance * (1 - chance) / draws)
            assert abs(counts[bit] / draws - chance) <= error + 6 / draws


@kinds
def test_a_divided_envelope_draws_as_often_too(kind: dict[str, Any]) -> None:
    """One envelope for all draws: once it is fine, nearly every one is kept."""
    fleet, draws = Fleet(60, **kind), 1_000
    for temperature in TEMPERATURES:
        rng, envelope = random.Random(12), fleet.envelope(temperature)
        drawn = [envelope.draw(rng, 1) for _ in range(draws)]
        counts = Counter(bit for bit in drawn if bit >= 0)
        kept = counts.total()
        assert kept > 0.3 * draws
        for bit, chance in fleet.chances(temperature).items():
            error = 5 * math.sqrt(chance * (1 - chance) / kept)
            assert abs(counts[bit] / kept - chance) <= error + 6 / kept


@pytest.mark.parametrize("kind", ["apart", "one holder", "half hold"])
def test_no_temperature_leads_to_the_cost_of_every_load(kind: str) -> None:
    fleet = Fleet(800, **KINDS[kind])
    plain = fleet.steps(0.0)
    for temperature in TEMPERATURES:
        # A look at a load is two lines; its cost and its weight are a dozen.
        assert fleet.steps(temperature) < plain + 2 * 800


@pytest.mark.parametrize("kind", ["apart", "one holder", "half hold"])
def test_a_low_temperature_costs_the_same_however_large_the_fleet(kind: str) -> None:
    few, many = Fleet(100, **KINDS[kind]), Fleet(1600, **KINDS[kind])
    for temperature in (1e-4, 1e-6):
        assert many.steps(temperature) < 1.5 * few.steps(temperature)


class Last(random.Random):
    """Draws the very end, as rounding may have it."""

    def random(self) -> float:
        return 1.0


def test_a_draw_that_rounding_leads_beyond_the_last_is_none() -> None:
    assert Fleet(20).envelope(0.5).draw(Last(), 1) == -1


def test_a_part_knows_what_it_weighs() -> None:
    envelope = Fleet(20, held=2).envelope(0.5)
    for part in envelope.parts:
        assert part.mass == part.ranks.bit_count() * part.bound
    assert {part.cell.match for part in envelope.parts} == {Matched(20), Matched(0)}
