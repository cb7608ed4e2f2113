"""The choice of a rank: the cost against a plain restatement, who is eligible, the answer."""

import math
import random
from collections import Counter
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from lean_selector.core.errors import BadRequest, Unavailable
from lean_selector.core.index.shapes import Matched, Tier
from lean_selector.core.rank_bits import bits_of
from lean_selector.core.selection.choice import Pricing, all_costs, cells
from lean_selector.core.selection.cost import cached_tokens, overridden
from lean_selector.core.selection.overlap import Matches, as_sets
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.router_settings import RouterOverride, Terms
from lean_selector.core.selection.scheduler import (
    check_pin,
    effective_prefill_tokens,
    eligible,
    place,
)
from lean_selector.core.selection.shapes import Overlap, Placement, SelectionRequest
from tests.support.bookings import book
from tests.support.driven_selector import DrivenSelector, pack

PLAIN = Terms(1.0, 0.0, 1.0, 0.0, True)


def half_away(value: float) -> int:
    whole = math.floor(value)
    return whole + 1 if value - whole >= 0.5 else whole


def costs_of(partition: Partition, request: SelectionRequest, matches: Matches) -> list[float]:
    """Of every eligible rank, in the order in which they came."""
    ranks = eligible(partition, request)
    pricing = Pricing(partition, request, ranks, 0.0)
    found = cells(partition, request, pricing, ranks, as_sets(partition, matches))
    costed = all_costs(partition.order, pricing, found, 0.0)
    costs = {bit: cost for cost, alike in costed for bit in bits_of(alike)}
    return [costs[bit] for bit in sorted(costs)]


# -- the cost -------------------------------------------------------------------------------------


class Rank:
    """What the restatement knows of one rank."""

    def __init__(self, prefill: int, blocks: int, tiers: tuple[int, int, int], shared: int) -> None:
        self.prefill, self.blocks, self.tiers, self.shared = prefill, blocks, tiers, shared


def cost(
    rank: Rank, ranks: list[Rank], terms: Terms, block_size: int, isl: int, new: int, taint: float
) -> float:
    """Spec selection.md 3.2, line by line."""
    device, host, disk = rank.tiers
    cached = half_away((device + 0.75 * host + 0.25 * disk) * block_size)
    uncached = isl - min(isl, cached)
    raw = rank.prefill + uncached + cached if terms.track_prefill else 0
    decay = 1.0
    if terms.track_prefill and terms.decay > 0:
        least = min(other.prefill for other in ranks)
        blocks_of_prompt = -(-isl // block_size)
        waiting = (rank.prefill - least) / block_size
        decay = 1 / (1 + terms.decay * waiting / blocks_of_prompt)
    credit = terms.credit * decay * device + 0.75 * host + 0.25 * disk
    prefill = terms.scale * max(0.0, raw / block_size - credit)
    return (prefill + rank.blocks + new - rank.shared) * math.exp(-math.tanh(taint))


PROMPT = [1, 2, 3, 4, 5, 6]
ranks_of = st.lists(
    st.builds(
        Rank,
        st.integers(0, 200),
        st.integers(0, 5),
        st.tuples(st.integers(0, 6), st.integers(0, 3), st.integers(0, 3)),
        st.integers(0, 6),
    ),
    min_size=1,
    max_size=4,
)
unit = st.floats(0, 1)
terms_of = st.builds(Terms, unit, st.floats(0, 3), st.floats(0, 4), st.just(0.0), st.booleans())


@given(
    ranks=ranks_of,
    terms=terms_of,
    block_size=st.sampled_from([1, 3, 4, 16]),
    isl=st.integers(1, 120),
    taints=st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4) | st.none(),
)
@settings(max_examples=200, deadline=None)
def test_the_cost_is_the_documented_formula(
    ranks: list[Rank], terms: Terms, block_size: int, isl: int, taints: list[float] | None
) -> None:
    driven = DrivenSelector()
    matches = {}
    for worker_id, rank in enumerate(ranks):
        driven.register(worker_id, block_size=block_size, taints=frozenset({f"t{worker_id}"}))
        if any(rank.tiers):
            matches[worker_id, 0] = Matched(*rank.tiers)
        shared = PROMPT[: rank.shared]
        own = list(range(100, 100 + rank.blocks))
        partition = driven.partition
        book(partition.slots, f"s{worker_id}", worker_id, 0, pack(shared), rank.prefill, 0.0)
        book(partition.slots, f"o{worker_id}", worker_id, 0, pack(own), 0, 0.0)
        rank.blocks += rank.shared  # what is shared is active already
    request = driven.request(PROMPT, isl)
    request.terms = terms
    if taints is not None:
        request.preferred_taints = {f"t{n}": taint for n, taint in enumerate(taints)}
    found = costs_of(driven.partition, request, matches)
    expected = [
        cost(rank, ranks, terms, block_size, isl, len(PROMPT), taints[n] if taints else 0.0)
        for n, rank in enumerate(ranks)
    ]
    assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_the_decay_is_counted_from_the_least_loaded_eligible_rank() -> None:
    driven = DrivenSelector()
    for worker_id, prefill in ((1, 4), (2, 8), (3, 0)):
        driven.register(worker_id)
        driven.reserve(f"r{worker_id}", (worker_id, 0), prefill=prefill)
    request = driven.request(PROMPT, 24, allowed={1, 2})
    request.terms = Terms(1.0, 1.0, 1.0, 0.0, True)
    matches = {(2, 0): Matched(6)}
    found = costs_of(driven.partition, request, matches)
    # Worker 2 waits for one block more than worker 1, of a prompt of six blocks.
    assert found[1] == 32 / 4 - 6 / (1 + 1 / 6) + 6


@pytest.mark.parametrize(
    ("preferred", "factor"),
    [
        pytest.param({}, 1.0, id="none"),
        pytest.param({"absent": 5.0}, 1.0, id="one it has not"),
        pytest.param({"a": 1.0}, math.exp(-math.tanh(1.0)), id="attracts"),
        pytest.param({"a": -1.0, "b": -0.5}, math.exp(-math.tanh(-1.5)), id="they add up"),
        pytest.param({"a": math.inf}, math.exp(-1.0), id="beyond single precision"),
        pytest.param({"a": math.inf, "b": -math.inf}, 1.0, id="both beyond"),
    ],
)
@pytest.mark.parametrize("pinned", [False, True])
def test_preferred_taints_scale_the_cost_but_not_of_a_pin(
    preferred: dict[str, float], factor: float, pinned: bool
) -> None:
    driven = DrivenSelector()
    driven.register(1, taints=frozenset({"a", "b"}))
    request = driven.request(PROMPT, 24, preferred_taints=preferred)
    if pinned:
        request = driven.request(PROMPT, 24, preferred_taints=preferred, pin=(1, 0))
    (found,) = costs_of(driven.partition, request, {})
    assert found == (6 + 6) * (1.0 if pinned else factor)


@pytest.mark.parametrize(
    ("override", "terms"),
    [
        pytest.param({}, PLAIN, id="nothing"),
        pytest.param({"overlap_score_credit": 0.5}, Terms(0.5, 0.0, 1.0, 0.0, True), id="credit"),
        pytest.param({"prefill_load_scale": 2.0}, Terms(1.0, 0.0, 2.0, 0.0, True), id="scale"),
        pytest.param({"router_temperature": 0.7}, Terms(1.0, 0.0, 1.0, 0.7, True), id="heat"),
        pytest.param({"track_prefill_tokens": False}, Terms(1.0, 0.0, 1.0, 0.0, False), id="track"),
        pytest.param(
            {"overlap_score_weight": 3.0, "overlap_score_credit": 0.5, "prefill_load_scale": 9.0},
            Terms(0.5, 0.0, 3.0, 0.0, True),
            id="the old name sets the scale",
        ),
        pytest.param(
            {"overlap_score_weight": 0.0, "overlap_score_credit": 0.5, "prefill_load_scale": 9.0},
            Terms(0.0, 0.0, 0.0, 0.0, True),
            id="the old name at 0 wins over both",
        ),
        pytest.param(
            {"assume_kv_reuse": False, "shared_cache_multiplier": 0.0}, PLAIN, id="no effect"
        ),
    ],
)
def test_a_request_overrides_single_terms(override: dict[str, Any], terms: Terms) -> None:
    assert overridden(PLAIN, RouterOverride(**override)) == terms


# -- eligibility ----------------------------------------------------------------------------------


@pytest.fixture
def fleet() -> DrivenSelector:
    """Worker 1 with two ranks and a taint, worker 2 with ranks from 4 on and two taints."""
    driven = DrivenSelector()
    driven.register(1, data_parallel_size=2, taints=frozenset({"a"}))
    driven.register(
        2, data_parallel_start_rank=4, data_parallel_size=2, taints=frozenset({"a", "b"})
    )
    return driven


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        pytest.param({}, [(1, 0), (1, 1), (2, 4), (2, 5)], id="anyone"),
        pytest.param({"allowed": {2, 9}}, [(2, 4), (2, 5)], id="allowed"),
        pytest.param({"allowed": set()}, [], id="nobody allowed"),
        pytest.param({"required_taints": frozenset({"a"})}, [(1, 0), (1, 1), (2, 4), (2, 5)]),
        pytest.param({"required_taints": frozenset({"a", "b"})}, [(2, 4), (2, 5)], id="both"),
        pytest.param({"required_taints": frozenset({"c"})}, [], id="a taint of nobody"),
        pytest.param({"pin": (1, 1)}, [(1, 1)], id="pin"),
        pytest.param({"pin": (2, 0)}, [], id="pin outside the ranks"),
        pytest.param({"pin": (9, 0)}, [], id="pin to nobody"),
        pytest.param({"pin": (1, 0), "required_taints": frozenset({"b"})}, [], id="pin and taint"),
        pytest.param({"pin": (1, 0), "allowed": {1}}, [(1, 0)], id="pin among the allowed"),
    ],
)
def test_who_is_eligible(
    fleet: DrivenSelector, changes: dict[str, Any], keys: list[tuple[int, int]]
) -> None:
    request = fleet.request([], 4, **changes)
    check_pin(request)
    ranks = eligible(fleet.partition, request)
    assert [fleet.partition.order.rank(bit).key for bit in bits_of(ranks)] == keys
    if not keys:
        with pytest.raises(Unavailable, match="no endpoints available to route work"):
            place(fleet.partition, request, ranks, [], 0.0, random.Random(1))


def test_a_pin_that_is_not_allowed_is_refused(fleet: DrivenSelector) -> None:
    with pytest.raises(BadRequest, match="pinned worker 1 is not in allowed worker set"):
        check_pin(fleet.request([], 4, pin=(1, 0), allowed={2}))


# -- what is answered -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("match", "isl", "effective"),
    [
        pytest.param(Matched(0), 32, 32, id="nothing cached"),
        pytest.param(Matched(2, 1, 2), 32, 19, id="the example of section 4"),
        pytest.param(Matched(8), 32, 0, id="all cached"),
        pytest.param(Matched(9), 32, 0, id="more cached than asked"),
        pytest.param(Matched(0, 0, 1), 32, 31, id="a quarter of a block"),
    ],
)
def test_effective_prefill_is_what_the_weighted_cache_leaves(
    match: Matched, isl: int, effective: int
) -> None:
    assert effective_prefill_tokens(PLAIN, isl, match, 4) == effective


@pytest.mark.parametrize(
    ("match", "block_size", "tokens"),
    [
        (Matched(0, 0, 1), 2, 1),  # 0.5 is rounded away from zero
        (Matched(1, 0, 1), 2, 3),  # and so is 2.5
        (Matched(0, 1, 1), 3, 3),
        (Matched(0, 0, 1), 1, 0),  # 0.25
        (Matched(0, 1, 0), 1, 1),  # 0.75
        (Matched(2**40, 1, 1), 2**31, 2**71 + 2**31),
    ],
)
def test_cached_tokens_are_rounded_once_and_away_from_zero(
    match: Matched, block_size: int, tokens: int
) -> None:
    assert cached_tokens(PLAIN, match, block_size) == tokens


def test_lower_tiers_are_worth_what_the_router_was_told() -> None:
    terms = msgspec.structs.replace(PLAIN, host_weight=0.5, disk_weight=0.1)
    assert cached_tokens(terms, Matched(2, 1, 2), 10) == 20 + 5 + 2
    assert cached_tokens(terms, Matched(0, 0, 1), 4) == 0
    none = msgspec.structs.replace(PLAIN, host_weight=0.0, disk_weight=0.0)
    assert cached_tokens(none, Matched(2, 5, 5), 10) == 20
    # The next number below a half is not rounded up, though a half more makes it 1.
    almost = msgspec.structs.replace(PLAIN, disk_weight=math.nextafter(0.5, 0.0))
    assert cached_tokens(almost, Matched(0, 0, 1), 1) == 0


def chosen(driven: DrivenSelector) -> int:
    placement = driven.submit("s", driven.request([1], 4))
    assert isinstance(placement, Placement)
    return placement.worker_id


def test_each_active_request_counts_for_its_weight_in_blocks() -> None:
    driven = DrivenSelector(active_request_weight=3.0)
    driven.register(1)
    driven.register(2)
    driven.reserve("a", (1, 0), hashes=[], prefill=None)
    driven.reserve("b", (2, 0), hashes=[8, 9], prefill=None)
    assert chosen(driven) == 1  # 3 against 2 + 3
    driven.reserve("c", (1, 0), hashes=[], prefill=None)
    assert chosen(driven) == 2  # 6 against 5
    driven.selector.output_block("b", None, 0.0)
    driven.selector.output_block("b", None, 0.0)
    assert chosen(driven) == 1  # 6 against 7
    driven.selector.free("b", 0.0)
    assert chosen(driven) == 2


def test_the_overlap_is_about_the_worker_and_the_effective_tokens_about_the_rank() -> None:
    driven = DrivenSelector()
    driven.register(1, data_parallel_size=3)
    driven.register(2)
    index = driven.partition.index
    index.store(1, 0, Tier.DEVICE, None, [1, 2], pack([1, 2]))
    index.store(1, 0, Tier.HOST_PINNED, 2, [3], pack([3]))
    index.store(1, 1, Tier.DEVICE, None, [1], pack([1]))
    index.store(1, 1, Tier.DISK, 1, [2, 3, 4, 5], pack([2, 3, 4, 5]))
    placement = driven.submit("r", driven.request(PROMPT, 24, pin=(1, 1)))
    assert isinstance(placement, Placement)
    assert (placement.worker_id, placement.dp_rank) == (1, 1)
    assert placement.overlap == Overlap(20, 8, {"0": 8, "1": 4, "2": 0}, 12, 20)
    assert placement.effective_prefill_tokens == 24 - 8  # one block and a quarter of four


def test_an_overlap_is_not_cut_to_the_prompt_and_zero_lists_every_rank() -> None:
    driven = DrivenSelector()
    driven.register(1, data_parallel_start_rank=4, data_parallel_size=2)
    driven.partition.index.store(1, 4, Tier.DEVICE, None, [1, 2, 3], pack([1, 2, 3]))
    placement = driven.submit("r", driven.request([1, 2, 3], 7, pin=(1, 5)))
    assert isinstance(placement, Placement)
    assert placement.overlap == Overlap(12, 12, {"4": 12, "5": 0}, 12, 12)
    assert placement.effective_prefill_tokens == 7
    nothing = driven.submit("r", driven.request([9], 7, pin=(1, 5)))
    assert isinstance(nothing, Placement)
    assert nothing.overlap == Overlap(0, 0, {"4": 0, "5": 0}, 0, 0)


def test_equal_ranks_are_drawn_evenly_over_ranks_not_workers() -> None:
    driven = DrivenSelector()
    driven.register(1)
    driven.register(2, data_parallel_size=3)
    for changes in ({}, {"allowed": {1, 2}}):  # all of them, or all that are named
        counts: Counter[tuple[int, int]] = Counter()
        for _ in range(4000):
            placement = driven.submit("r", driven.request([], 4, **changes))
            assert isinstance(placement, Placement)
            counts[placement.worker_id, placement.dp_rank] += 1
        assert len(counts) == 4
        assert max(abs(count - 1000) for count in counts.values()) < 150


@pytest.mark.parametrize(
    ("isl", "booked"), [(24, 24 - 13), (12, 0)], ids=["part of it", "all cached"]
)
def test_what_is_booked_is_what_is_answered_whatever_the_credit(isl: int, booked: int) -> None:
    driven = DrivenSelector(overlap_score_credit=0.0)
    driven.register(1)
    index = driven.partition.index
    index.store(1, 0, Tier.DEVICE, None, [1, 2], pack([1, 2]))
    index.store(1, 0, Tier.HOST_PINNED, 2, [3], pack([3]))
    index.store(1, 0, Tier.DISK, 3, [4, 5], pack([4, 5]))
    placement = driven.book("r", hashes=PROMPT, isl_tokens=isl)
    assert isinstance(placement, Placement)
    assert placement.effective_prefill_tokens == booked
    assert driven.loads()["default", "default"][1, 0] == (booked, 6, 1)
