"""The lines of the cost, each by example: selection.md 3.2 and 3.3."""

import math

import msgspec
import pytest

from lean_selector.core.index.shapes import Matched
from lean_selector.core.selection.cost import (
    base_terms,
    burden_blocks,
    cached_tokens,
    credit_blocks,
    credit_decay,
    evicted_blocks,
    favoured_blocks,
    overridden,
    preferences,
    probabilities,
    softmax,
    taint_factor,
    terms,
)
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.router_settings import CostTerms, RouterOverride, RouterSettings
from lean_selector.core.selection.shapes import PinnedWorker, SelectionRequest
from lean_selector.core.settings import API_1_3, API_1_6, Dialect
from tests.support.driven_selector import DrivenSelector

PLAIN = CostTerms(1.0, 0.0, 1.0, 0.0, True)


@pytest.mark.parametrize(
    ("match", "block_size", "tokens"),
    [
        (Matched(0), 5, 0),
        (Matched(3), 5, 15),
        (Matched(3, 1), 5, 19),  # 3.75 blocks: 18.75
        (Matched(3, 0, 1), 5, 16),  # 3.25 blocks: 16.25
        (Matched(1, 2, 2), 5, 15),  # 1 + 1.5 + 0.5 blocks: 15
        (Matched(0, 0, 2), 5, 3),  # half a block: 2.5, away from 0
        (Matched(0, 0, 1), 2, 1),  # and so is 0.5
        (Matched(0, 0, 1), 1, 0),  # 0.25
        (Matched(0, 1), 1, 1),  # 0.75
        (Matched(2**40, 1, 1), 2**31, 2**71 + 2**31),
    ],
)
def test_what_is_cached_counts_by_tier_and_is_rounded_once(
    match: Matched, block_size: int, tokens: int
) -> None:
    assert cached_tokens(PLAIN, match, block_size) == tokens


def test_lower_tiers_are_worth_what_the_router_was_told() -> None:
    weighed = msgspec.structs.replace(PLAIN, host_weight=0.5, disk_weight=0.1)
    assert cached_tokens(weighed, Matched(2, 1, 2), 10) == 20 + 5 + 2
    # The next number below a half is not rounded up, though a half more makes it 1.
    almost = msgspec.structs.replace(PLAIN, disk_weight=math.nextafter(0.5, 0.0))
    assert cached_tokens(almost, Matched(0, 0, 1), 1) == 0


def test_a_credit_decays_with_what_waits_beyond_the_least_loaded() -> None:
    decaying = CostTerms(1.0, 0.5, 1.0, 0.0, True)
    # 64 tokens wait, 4 blocks; of a prompt of 2 blocks that is twice.
    assert credit_decay(decaying, 64, 32, 16) == 1.0 / (1.0 + 0.5 * 4 / 2)
    assert credit_decay(decaying, 64, 17, 16) == 1.0 / (1.0 + 0.5 * 4 / 2)  # a block that is begun
    assert credit_decay(decaying, 64, 0, 16) == 1.0 / (1.0 + 0.5 * 4 / 1)
    assert credit_decay(decaying, 0, 32, 16) == 1.0
    assert credit_decay(decaying, -64, 32, 16) == 1.0
    assert credit_decay(PLAIN, 64, 32, 16) == 1.0
    assert credit_decay(CostTerms(1.0, 0.5, 1.0, 0.0, False), 64, 32, 16) == 1.0
    assert credit_decay(CostTerms(1.0, 1.0, 1.0, 0.0, True), 16, 16, 16) == 0.5


def test_a_credit_is_weighed_and_decays_on_the_device_alone() -> None:
    weighed = CostTerms(2.0, 0.0, 1.0, 0.0, True, 0.5, 0.125)
    assert credit_blocks(weighed, 0.25, Matched(8, 4, 16)) == 2.0 * 0.25 * 8 + 0.5 * 4 + 0.125 * 16


def test_a_bonus_is_not_touched_by_the_factor() -> None:
    assert favoured_blocks(3.0, 4.0, 0.5) == -5.0
    assert 0.5 * favoured_blocks(3.0, 4.0, 0.5) == 0.5 * 3.0 - 4.0


def test_a_preferred_taint_makes_cheaper_and_a_disliked_one_dearer() -> None:
    assert taint_factor(0.0) == 1.0
    assert taint_factor(1.0) == math.exp(-math.tanh(1.0))
    assert taint_factor(-1.0) == math.exp(math.tanh(1.0))
    assert taint_factor(math.inf) == math.exp(-1.0)
    assert taint_factor(math.inf - math.inf) == 1.0


def test_a_draw_weighs_by_where_a_cost_lies_between_the_ends() -> None:
    assert softmax([1.0, 3.0, 2.0], 0.5) == [1.0, math.exp(-2.0), math.exp(-1.0)]
    assert softmax([1.0, 3.0], 0.0) is None
    assert softmax([1.0, 3.0], -1.0) is None
    assert softmax([2.0, 2.0], 1.0) is None
    assert softmax([2.0, math.inf], 1.0) is None


def test_chances_say_which_way_the_draw_goes() -> None:
    assert probabilities([7.0], 1.0) == ([1.0], "only_candidate")
    assert probabilities([2.0, 1.0], 0.0) == ([0.0, 1.0], "lowest_cost")
    assert probabilities([2.0, 1.0, 1.0, 2.0], 0.0) == ([0.0, 0.5, 0.5, 0.0], "uniform_tie")
    chances, draw = probabilities([1.0, 2.0], 1.0)
    assert draw == "softmax"
    assert chances == [1.0 / (1.0 + math.exp(-1.0)), math.exp(-1.0) / (1.0 + math.exp(-1.0))]


@pytest.mark.parametrize("dialect", [API_1_3, API_1_6])
def test_terms_are_those_of_the_router_each_in_its_place(dialect: Dialect) -> None:
    settings = RouterSettings(
        overlap_score_credit=0.1,
        overlap_score_credit_decay=0.2,
        prefill_load_scale=0.3,
        temperature=0.4,
        track_prefill_tokens=False,
        host_weight=0.5,
        disk_weight=0.6,
        active_request_weight=0.7,
        dialect=dialect,
    )
    credits = dialect is API_1_6
    assert terms(settings) == CostTerms(0.1, 0.2, 0.3, 0.4, False, 0.5, 0.6, 0.7, credits)


BASE = CostTerms(0.1, 0.2, 0.3, 0.4, True, 0.5, 0.6, 0.7, True)


@pytest.mark.parametrize(
    ("override", "changed"),
    [
        (RouterOverride(), {}),
        (RouterOverride(overlap_score_credit=0.9), {"credit": 0.9}),
        (RouterOverride(prefill_load_scale=0.8), {"scale": 0.8}),
        (RouterOverride(router_temperature=0.7), {"temperature": 0.7}),
        (RouterOverride(track_prefill_tokens=False), {"track_prefill": False}),
        # The old weight is the scale, and of 0 the credit counts no more either.
        (RouterOverride(overlap_score_weight=2.0, prefill_load_scale=0.8), {"scale": 2.0}),
        (
            RouterOverride(overlap_score_weight=0.0, overlap_score_credit=0.9),
            {"scale": 0.0, "credit": 0.0},
        ),
        (RouterOverride(overlap_score_credit=0.0), {"credit": 0.0}),
        (RouterOverride(router_temperature=0.0), {"temperature": 0.0}),
    ],
)
def test_an_override_changes_what_it_names_alone(
    override: RouterOverride, changed: dict[str, float]
) -> None:
    assert overridden(BASE, override) == msgspec.structs.replace(BASE, **changed)


def test_the_policy_latency_weighs_prefill_and_what_is_evicted() -> None:
    given = RouterSettings(prefill_load_scale=3.0, overlap_score_credit_decay=0.5)
    chosen = terms(msgspec.structs.replace(given, policy="latency"))
    assert (chosen.decay, chosen.scale, chosen.eviction, chosen.knows_speeds) == (0, 30, 30, True)
    # 24 tokens are one block and a half.
    assert burden_blocks(chosen, 24, 16) == 45.0
    assert evicted_blocks(chosen, 40, 16, 0, 16) == 22.5
    assert evicted_blocks(chosen, 40, 16, 8, 16) == 52.5
    assert evicted_blocks(chosen, 40, 16, 99, 16) == 82.5  # no more than is cached

    base = base_terms(msgspec.structs.replace(given, policy="latency"))
    assert overridden(base, RouterOverride(), "latency") == chosen
    assert overridden(base, RouterOverride(policy="dynamo"), "latency") == terms(given)
    assert overridden(base, RouterOverride(policy="latency")) == chosen
    untracked = overridden(base, RouterOverride(policy="latency", track_prefill_tokens=False))
    assert untracked.eviction == 0.0


def test_preferred_taints_count_where_a_rank_is_to_be_chosen() -> None:
    request = SelectionRequest(Prompt(0, b"", 0, b"", b""), PLAIN)
    request.preferred_taints = {"spot": 0.5}
    assert preferences(request) == {"spot": 0.5}
    request.pinned = PinnedWorker(1, 0)
    assert preferences(request) == {}


def test_a_model_may_have_a_policy_of_its_own() -> None:
    """The order of its loads and of its queue are kept by that, too."""
    driven = DrivenSelector(model_policies={"slow": "latency"}, queue_threshold=1.0)
    for worker_id, model_name in enumerate(("slow", "plain")):
        driven.register(worker_id, model_name=model_name)
    slow, plain = (
        driven.selector.catalog.ready_partition(model, "default") for model in ("slow", "plain")
    )
    terms_of = driven.selector.terms_of
    assert terms_of("slow") == terms(RouterSettings(policy="latency"))
    assert terms_of("plain") == terms(RouterSettings())
    assert (slow.order.scale, plain.order.scale) == (terms_of("slow").scale, 1.0)
    assert (slow.queue.asks_work, plain.queue.asks_work) == (True, False)
