"""How fast ranks are, learned from what they were given."""

import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from lean_selector.core.load.rank_load import RankCounts
from lean_selector.core.load.shapes import ReservationSpec
from lean_selector.core.load.slots import Slots
from lean_selector.core.load.speeds import (
    LEAST_TOKENS,
    MOST_STEPS,
    ONE_SPEED,
    TRIED_AFTER_S,
    WINDOW,
    Speeds,
)


class Ranks:
    """Ranks that are given a request each, one after the other."""

    def __init__(self, count: int) -> None:
        self.slots, self.speeds, self.now = Slots(), Speeds(), 0.0
        self.loads = [self.slots.add_rank(number, 0) for number in range(count)]
        self._serial = 0

    def serve(
        self, rank: int, seconds_per_token: float, tokens: int = 2_000, completes: bool = True
    ) -> None:
        self._serial += 1
        spec = ReservationSpec(f"{self._serial}", rank, 0, prefill_tokens=tokens)
        held = self.slots.book(spec, b"", self.now)
        self.now += seconds_per_token * tokens
        if completes:
            self.speeds.completed(held, None, self.now)
            self.slots.prefill_complete(spec.request_id, self.now)
        else:
            self.speeds.ended(held, self.now)
        self.slots.free(spec.request_id, self.now)

    def all_serve(self, *seconds_per_token: float, times: int = WINDOW) -> None:
        for _ in range(times):
            for rank, seconds in enumerate(seconds_per_token):
                self.serve(rank, seconds)

    def factors(self) -> list[float]:
        return [round(self.speeds.factor(load), 2) for load in self.loads]


def test_nothing_is_known_before_enough_was_seen() -> None:
    ranks = Ranks(2)
    ranks.all_serve(1e-4, 1e-3, times=WINDOW - 1)
    assert ranks.factors() == [1.0, 1.0]
    assert ranks.speeds.seconds_per_token(ranks.loads[1]) is None
    assert ranks.speeds.sets is ONE_SPEED
    ranks.all_serve(1e-4, 3e-4, times=1)
    assert ranks.speeds.seconds_per_token(ranks.loads[0]) == pytest.approx(1e-4)


def test_factors_are_on_the_median_and_bounded() -> None:
    ranks = Ranks(5)
    ranks.all_serve(1e-4, 1.05e-4, 1e-4, 2.5e-4, 1e-2)
    assert ranks.factors() == [1.0, 1.0, 1.0, 2.38, 4.0]
    assert sorted(ranks.speeds.sets[:-1]) == [(2 ** (5 / 4), 0b01000), (4.0, 0b10000)]
    assert ranks.speeds.sets[-1] == (1.0, ~0b11000)


def test_a_few_requests_say_little_and_short_ones_nothing() -> None:
    ranks = Ranks(3)
    ranks.all_serve(1e-4, 1e-4, 1e-4)
    for _ in range(WINDOW // 2 - 1):
        ranks.serve(2, 1e-2)
    ranks.serve(1, 1.0, tokens=LEAST_TOKENS - 1)
    assert ranks.factors() == [1.0, 1.0, 1.0]


def test_a_delay_that_every_request_has_makes_no_rank_slow() -> None:
    """The rank that prompts hit computes little of them, so most of its time is the delay."""
    ranks, delay_s, token_s = Ranks(2), 0.03, 1 / 14_000
    for _ in range(2 * WINDOW):
        for rank, computed in ((0, 300), (1, 6_000), (0, 800), (0, 2_500), (1, 3_000)):
            ranks.serve(rank, delay_s / computed + token_s, computed)
    assert ranks.factors() == [1.0, 1.0]


@pytest.mark.parametrize("completes", [True, False])
def test_a_rank_that_thrashes_or_hangs_is_slow_after_ten(completes: bool) -> None:
    ranks = Ranks(3)
    ranks.all_serve(1e-4, 1e-4, 1e-4)
    for _ in range(10):
        ranks.serve(2, 1e-2, completes=completes)
    assert ranks.factors() == [1.0, 1.0, 4.0]


def test_a_first_token_that_took_no_time_says_nothing() -> None:
    ranks = Ranks(1)
    ranks.all_serve(0.0)
    assert ranks.speeds.seconds_per_token(ranks.loads[0]) is None


def test_who_hangs_up_early_says_nothing() -> None:
    ranks = Ranks(2)
    ranks.all_serve(1e-4, 1e-4)
    for _ in range(WINDOW):
        ranks.serve(1, 1e-6, completes=False)
    assert ranks.factors() == [1.0, 1.0]


def test_a_slow_rank_is_tried_again_and_soon_believed() -> None:
    ranks = Ranks(3)
    ranks.all_serve(1e-4, 1e-4, 1e-3)
    assert ranks.factors()[2] == 4.0
    ranks.speeds.settle(ranks.now + TRIED_AFTER_S - 0.1)
    assert ranks.factors()[2] == 4.0
    ranks.now += TRIED_AFTER_S
    ranks.speeds.settle(ranks.now)
    assert ranks.factors()[2] == 1.0
    ranks.serve(2, 1e-3)  # still slow
    assert ranks.factors()[2] == 4.0
    trials = 0
    while ranks.factors()[2] > 1.0:
        ranks.now += TRIED_AFTER_S
        ranks.speeds.settle(ranks.now)
        ranks.serve(2, 1e-4)
        trials += 1
    assert trials <= 4


def test_a_rank_is_forgotten_with_all_that_it_was() -> None:
    ranks = Ranks(3)
    ranks.all_serve(1e-4, 1e-4, 1e-3)
    ranks.speeds.forget(ranks.loads[2])
    assert ranks.factors() == [1.0, 1.0, 1.0]
    assert ranks.speeds.sets is ONE_SPEED
    ranks.speeds.forget(ranks.loads[2])
    ranks.all_serve(1e-4, 1e-4, 1e-3)
    assert ranks.factors()[2] == 4.0


def test_predictions_are_held_against_what_came() -> None:
    ranks = Ranks(1)
    ranks.all_serve(1e-4)
    counts = ranks.loads[0].counts
    assert (counts.predictions, counts.prediction_error) == (0, None)
    ranks.serve(0, 2e-4)
    assert counts.predictions == 1
    assert counts.predicted_s == pytest.approx(0.2)
    assert counts.observed_s == pytest.approx(0.4)
    assert counts.prediction_error == pytest.approx(0.5)


def test_what_the_index_predicted_is_held_against_what_was_cached() -> None:
    counts = RankCounts()
    assert counts.index_accuracy is None
    counts.compare(found=30, cached=40)
    counts.compare(found=20, cached=10)
    fades = 1 - 1 / 64
    accuracy = 1 - (10 * fades + 10) / (40 * fades + 20)
    assert counts.index_accuracy == pytest.approx(accuracy)


def test_the_counts_of_two_ranks_add_up_each_with_its_own() -> None:
    one, other = RankCounts(), RankCounts()
    names = [name for name in dir(one) if type(getattr(one, name)) in (int, float)]
    for place, name in enumerate(names, 1):
        kind = type(getattr(one, name))
        setattr(one, name, kind(place))
        setattr(other, name, kind(100 * place))
    one.add(other)
    assert [getattr(one, name) for name in names] == [101 * at for at in range(1, len(names) + 1)]
    assert len(names) >= 18


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_the_sets_say_what_the_factors_do(seed: int, count: int) -> None:
    draws = random.Random(seed)  # hypothesis' own draws would be too many for an example
    ranks = Ranks(count)
    speed = [10 ** draws.uniform(-5, -3) for _ in range(count)]
    for _ in range(150):
        rank = draws.randrange(count)
        action = draws.random()
        if action < 0.02:
            ranks.speeds.forget(ranks.loads[rank])
        elif action < 0.05:
            ranks.now += TRIED_AFTER_S
            ranks.speeds.settle(ranks.now)
        elif action < 0.1:
            speed[rank] *= draws.choice([0.25, 4.0])
        ranks.serve(rank, speed[rank] * draws.uniform(0.8, 1.2), completes=draws.random() < 0.9)
        seen = 0
        for factor, alike in ranks.speeds.sets:
            assert not seen & alike
            seen |= alike
            assert abs(4 * math.log2(factor)) <= MOST_STEPS
            for load in ranks.loads:
                if alike & load.mask:
                    assert ranks.speeds.factor(load) == factor
        assert seen == -1
