"""The choice by sets of ranks against the choice rank by rank: the same ranks, each as often.

Random fleets, loads, overlaps, taints and terms; block sizes that are no power of two, so that
costs which are equal on paper differ in the last bit or do not, and both must agree on which.
"""

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import example, given, settings

from lean_selector.core.errors import AllWorkersBusy
from lean_selector.core.index.shapes import Tier
from lean_selector.core.load.shapes import BusyThreshold
from lean_selector.core.rank_bits import bits_of
from lean_selector.core.selection import choice, overlap
from lean_selector.core.selection.choice import (
    FAR,
    FEW_LOADS,
    DrawBounds,
    Pricing,
    all_costs,
    cells,
    cheapest,
    dearest,
)
from lean_selector.core.selection.cost import cached_tokens, softmax
from lean_selector.core.selection.overlap import match_by_rank, match_sets
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.placement import placed
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.scheduler import eligible, not_busy
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.shapes import (
    PinnedWorker,
    Placement,
    SelectionRequest,
    WorkerSpec,
)
from lean_selector.core.settings import API_1_3, API_1_6
from tests.support import naive_choice
from tests.support.blocks import store_blocks
from tests.support.driven_selector import Sources, pack, teach
from tests.support.reservations import book

SHARE_ERROR = 1e-4
LAST_NUMBER = 1 - 2**-53  # that a random source gives
PATH = [1, 2, 3, 4, 5, 6, 7]


class Fixed(random.Random):
    """A random source that says what it is told."""

    numbers: list[float]

    def random(self) -> float:
        return self.numbers.pop(0)


class RankState(msgspec.Struct, frozen=True):
    """How a rank stands: blocks that are active, on the prompt's path or not; prefill tokens;
    blocks of the prompt on each tier, and those that are believed to be on the device, if anything
    is; and requests without any block."""

    active: int
    shares: bool
    tokens: int
    device: int
    host: int
    disk: int
    believed: int = 0
    empty: int = 0


class Fleet(msgspec.Struct, frozen=True):
    ranks: list[RankState]
    per_worker: int
    taints: list[frozenset[str]]  # of worker after worker, again and again
    block_size: int
    busy_above: int | None  # tokens
    seconds_per_token: tuple[float, ...] = ()  # of rank after rank, in turn; none: not known
    capacities: tuple[int | None, ...] = (None,)  # in blocks, of worker after worker, in turn

    def partition(self, router: RouterSettings) -> Partition:
        return self.selector(router).catalog.ready_partition("default", "default")

    def selector(self, router: RouterSettings) -> Selector:
        selector = Selector(router, Sources(), random.Random(0))
        per_worker = self.per_worker
        for worker_id in range(-(-len(self.ranks) // per_worker)):
            spec = WorkerSpec(
                worker_id=worker_id,
                endpoint="w",
                block_size=self.block_size,
                data_parallel_size=min(per_worker, len(self.ranks) - worker_id * per_worker),
                taints=self.taints[worker_id % len(self.taints)],
                total_kv_blocks=self.capacities[worker_id % len(self.capacities)],
            )
            selector.upsert_worker(spec, 0.0)
        partition = selector.catalog.ready_partition("default", "default")
        for number, state in enumerate(self.ranks):
            worker_id, dp_rank = divmod(number, per_worker)
            own = PATH[: state.active] if state.shares else [100 + number] * state.active
            rank = worker_id, dp_rank
            book(partition.slots, f"r{number}", *rank, pack(own), state.tokens, 0.0)
            for empty in range(state.empty):
                book(partition.slots, f"e{number}/{empty}", *rank, b"", 0, 0.0)
            held = 0
            for tier, blocks in enumerate((state.device, state.host, state.disk)):
                parent = PATH[held - 1] if held else None
                names = PATH[held : held + blocks]
                store_blocks(partition.index, rank, Tier(tier), parent, names, pack(names))
                held += len(names)
            if state.believed:
                if partition.predicted is None:
                    partition.predicted = partition.index.empty_copy()
                names = PATH[: state.believed]
                store_blocks(partition.predicted, rank, Tier.DEVICE, None, names, pack(names))
            if self.seconds_per_token:
                load = partition.slots.ranks[rank]
                seconds = self.seconds_per_token[number % len(self.seconds_per_token)]
                teach(partition, load, seconds)
        partition.set_threshold(BusyThreshold(active_prefill_tokens=self.busy_above))
        return selector


rank_states = st.builds(
    RankState,
    active=st.integers(0, 3),
    shares=st.booleans(),
    tokens=st.sampled_from([0, 1, 3, 7, 48, 96, 1000]),
    device=st.integers(0, 5),
    host=st.integers(0, 2),
    disk=st.integers(0, 2),
    believed=st.just(0) | st.integers(0, 7),
    empty=st.sampled_from([0, 0, 1, 2]),
)
taint_sets = st.frozensets(st.sampled_from("abc"))
fleets = st.builds(
    Fleet,
    # Also more than are costed one by one, alike and not.
    ranks=st.lists(rank_states, min_size=1, max_size=12)
    | st.lists(rank_states, min_size=16, max_size=20)
    | st.lists(st.integers(0, 60), min_size=16, max_size=24, unique=True).flatmap(
        lambda loads: st.lists(rank_states, min_size=1, max_size=4).map(
            lambda states: [
                msgspec.structs.replace(states[number % len(states)], tokens=tokens)
                for number, tokens in enumerate(loads)
            ]
        )
    )
    | st.lists(st.sampled_from([0, 7, 96]), min_size=8, max_size=40).map(
        lambda loads: [RankState(0, False, tokens, 0, 0, 0) for tokens in loads]
    ),
    per_worker=st.integers(1, 3),
    taints=st.lists(taint_sets, min_size=1, max_size=4),
    block_size=st.sampled_from([3, 7, 16, 48]),
    busy_above=st.none() | st.sampled_from([0, 7, 50]),
    seconds_per_token=st.just(())
    | st.lists(st.sampled_from([1e-4, 1.3e-4, 3e-4, 1e-3]), min_size=1, max_size=4).map(tuple),
    capacities=st.lists(
        st.sampled_from([None, 0, 3, 4, 5, 6, 8, 40, 1000]), min_size=1, max_size=4
    ),
)
scales = st.sampled_from([0.0, 0.1, 1.0, 2.7])
routers = st.builds(
    RouterSettings,
    policy=st.sampled_from(["dynamo", "dynamo", "latency"]),
    use_kv_events=st.just(False),
    prefill_load_scale=scales,
    overlap_score_credit=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    overlap_score_credit_decay=st.sampled_from([0.0, 0.0, 0.4, 3.0]),
    temperature=st.sampled_from([0.0, 0.0, 0.1, 1.0, 5e-324]),
    track_prefill_tokens=st.sampled_from([True, True, False]),
    active_request_weight=st.sampled_from([0.0, 0.0, 0.3, 2.0]),
    host_weight=st.sampled_from([0.75, 0.0, 1.0, 0.1]),
    disk_weight=st.sampled_from([0.25, 0.0, 1.0, 0.7]),
    dialect=st.sampled_from([API_1_3, API_1_3, API_1_6]),
)
untracked = routers.map(
    lambda router: msgspec.structs.replace(router, dialect=API_1_6, track_prefill_tokens=False)
)
weights = st.sampled_from([0.1, 0.3, -0.7, 5.0, float("inf"), float("-inf")])
options = st.fixed_dictionaries(
    {},
    optional={
        "pinned": st.builds(PinnedWorker, st.integers(0, 3), st.integers(0, 2)),
        "allowed_worker_ids": st.frozensets(st.integers(0, 12)) | st.just(frozenset(range(30))),
        "required_taints": taint_sets,
        "preferred_taints": st.dictionaries(st.sampled_from("abcd"), weights),
        "favoured": st.integers(0, 2**12),
        "bonus_blocks": st.sampled_from([0.1, 1.0, 64.0, 1e6]),
    },
)


def request_of(partition: Partition, router: RouterSettings, isl_tokens: int) -> SelectionRequest:
    selector_terms = Selector(router, Sources(), random.Random(0)).terms
    packed = pack(PATH)
    prompt = Prompt(isl_tokens, packed, len(PATH), packed[:8], lambda: packed)
    return SelectionRequest(prompt, selector_terms)


@settings(max_examples=250)
@given(
    fleet=fleets,
    router=routers | untracked,
    changes=options,
    scale=st.none() | scales,
    isl_tokens=st.integers(0, 400),
    looks=st.sampled_from([0, overlap._LOOKS_PER_RANK]),
    few=st.sampled_from([0, choice._FEW_RANKS]),
)
def test_sets_of_ranks_are_chosen_among_as_each_rank_alone_would_be(
    fleet: Fleet,
    router: RouterSettings,
    changes: dict[str, Any],
    scale: float | None,
    isl_tokens: int,
    looks: int,
    few: int,
) -> None:
    """Also as if the sets were many, so that it is looked up which of them a rank is in, and as if
    none were so small that each of its ranks is looked at."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(overlap, "_LOOKS_PER_RANK", looks)
        patched.setattr(choice, "_FEW_RANKS", few)
        hold_each_rank_to_the_model(fleet, router, changes, scale, isl_tokens)


def hold_each_rank_to_the_model(
    fleet: Fleet,
    router: RouterSettings,
    changes: dict[str, Any],
    scale: float | None,
    isl_tokens: int,
) -> None:
    partition = fleet.partition(router)
    request = request_of(partition, router, isl_tokens)
    if scale is not None:  # not the one that the order of loads is kept by
        request.terms = msgspec.structs.replace(request.terms, scale=scale)
    for name, value in changes.items():
        setattr(request, name, value)
    everyone = naive_choice.candidates(partition, request)
    found = eligible(partition, request)
    assert keys_of(partition, found) == {load.key for _, load in everyone}
    try:
        among = naive_choice.not_busy(partition, request, everyone)
    except AllWorkersBusy:
        try:
            not_busy(partition, request, found)
        except AllWorkersBusy:
            return
        raise AssertionError("all of them are busy") from None
    found = not_busy(partition, request, found)
    assert keys_of(partition, found) == {load.key for _, load in among}
    if among:
        hold_to_the_model(partition, request, found, among)


def hold_to_the_model(
    partition: Partition, request: SelectionRequest, found: int, among: list[naive_choice.Candidate]
) -> None:
    hashes = request.prompt.local_hashes
    by_rank, matches = naive_choice.matches_of(partition, hashes), match_sets(partition, hashes)
    assert match_by_rank(partition, hashes) == by_rank
    owed = 7 * len(by_rank)
    for load in partition.slots.ranks.values() if owed else ():
        if partition.fullness.full() & load.mask and load.mask != partition.everyone:
            partition.fullness.booked(load, partition.everyone, owed, "both")
            break
    costs = naive_choice.rank_costs(
        partition, request, among, by_rank, partition.fullness.owed_tokens(found, "both")
    )
    cost_of = {load.bit: cost for (_, load), cost in zip(among, costs, strict=True)}

    # The costs, to the last bit, and the cheapest.
    pricing = Pricing(partition, request, found)
    parts = cells(partition, request, pricing, found, matches)
    assert apart([cell.ranks for cell in parts]) == found
    costed = all_costs(partition.order, pricing, parts)
    assert apart([ranks for _, ranks in costed]) == found
    assert {bit: cost for cost, ranks in costed for bit in bits_of(ranks)} == cost_of
    least, tied = cheapest(partition.order, pricing, parts)
    assert dearest(partition.order, pricing, parts) == max(costs)
    for bucket in partition.order.loads:
        for cell in parts:
            bound = pricing.at_least(cell, pricing.slope * bucket.key)  # may be NaN
            assert not any(bound > cost_of[bit] for bit in bits_of(cell.ranks & bucket.ranks))
    cheap = [bit for bit, cost in cost_of.items() if cost == min(costs)]
    assert (least, bits_of(apart(tied))) == (min(costs), sorted(cheap))

    # How often each is drawn, and what is answered.
    temperature = request.terms.temperature
    chances = naive_choice.chances(costs, temperature)
    weights = softmax(costs, temperature)
    rng, answered = Fixed(), set[int]()

    def drawn(*numbers: float) -> int:
        rng.numbers = [*numbers]
        load = choice.choose(partition, request, found, matches, rng)
        if load.bit not in answered:
            answered.add(load.bit)
            answer = placed(partition, load, request, matches)
            assert_overlap_is_that_of_the_worker(partition, request, answer, by_rank)
        return load.bit

    order = partition.order
    if weights is not None and len(order.loads) > FEW_LOADS:
        spread = max(costs) - least
        envelope = DrawBounds(order, pricing, parts, least, spread, temperature)
        weight_of = dict(zip([load.bit for _, load in among], weights, strict=True))
        hold_to_the_weights(envelope, found, weight_of)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(choice, "TRIES", 0)  # as if no try was kept
        if weights is None:
            counts = Counter(drawn((turn + 0.5) / len(cheap)) for turn in range(len(cheap)))
            shares = {bit: count / len(cheap) for bit, count in counts.items()}
        else:
            shares = shares_of_numbers(drawn)
    for (_, load), chance in zip(among, chances, strict=True):
        assert abs(shares.get(load.bit, 0.0) - chance) <= SHARE_ERROR


def hold_to_the_weights(envelope: DrawBounds, found: int, weight_of: dict[int, float]) -> None:
    """Each rank is drawn evenly under its bound and kept as often as its weight says, however often
    the envelope was divided because it was not."""
    rng = Fixed()
    for _ in range(12):
        assert apart([part.ranks for part in envelope.parts]) == found
        total = sum(part.mass for part in envelope.parts)
        before, loosest, far = 0.0, 1.0, [0.0, 0.0]
        for part in envelope.parts:
            for at, bit in enumerate(bits_of(part.ranks)):
                weight = weight_of[bit]
                assert weight <= part.bound
                if part.bound < 1e-6 * total:
                    continue  # its draw is too small a stretch to be told apart
                number = (before + (at + 0.5) * part.bound) / total
                share = weight / part.bound
                if share > 1e-200:
                    rng.numbers = [number, share * (1 - 1e-9)]
                    assert envelope.draw(rng, 1) == bit
                if share < loosest:
                    loosest, far = share, [number, max(1e-200, share * (1 + 1e-9))]
            before += part.mass
        if loosest < 1.0:
            rng.numbers = far
            assert envelope.draw(rng, 1) == -1
        if loosest >= FAR:
            return


def shares_of_numbers(drawn: Callable[[float], int]) -> dict[int, float]:
    """How much of the numbers from 0 to 1 leads to each rank: one stretch of them for each, whose
    ends are looked for by halving."""
    shares: defaultdict[int, float] = defaultdict(float)
    stretches = [(0.0, drawn(0.0), 1.0, drawn(LAST_NUMBER))]
    while stretches:
        start, first, end, last = stretches.pop()
        if first == last or end - start < SHARE_ERROR:
            shares[first] += end - start
            continue
        middle = (start + end) / 2
        between = drawn(middle)
        stretches += [(start, first, middle, between), (middle, between, end, last)]
    return shares


def apart(sets: list[int]) -> int:
    """The union of sets that are not empty and share nothing."""
    assert all(sets)
    union = 0
    for ranks in sets:
        assert not union & ranks
        union |= ranks
    return union


def keys_of(partition: Partition, ranks: int) -> set[tuple[int, int]]:
    return {partition.order.ranks[bit].key for bit in bits_of(ranks)}


def assert_overlap_is_that_of_the_worker(
    partition: Partition,
    request: SelectionRequest,
    placement: Placement,
    by_rank: naive_choice.Matches,
) -> None:
    block_size, isl = partition.block_size, request.prompt.isl_tokens
    worker = partition.workers[placement.worker_id]
    held = {load.dp_rank: by_rank.get(load.key) for load in worker.loads}
    gpu, cpu, disk = (
        max(blocks) * block_size
        for blocks in zip(
            *(
                (m.device, m.device + m.host, m.device + m.host + m.disk) if m else (0, 0, 0)
                for m in held.values()
            ),
            strict=True,
        )
    )
    overlap = placement.overlap
    assert (overlap.gpu, overlap.cpu, overlap.disk) == (gpu, cpu, disk)
    assert overlap.longest_matched == max(gpu, cpu, disk)
    assert overlap.dp == {str(rank): m.device * block_size if m else 0 for rank, m in held.items()}
    own = held[placement.dp_rank]
    left = max(0, isl - cached_tokens(request.terms, own, block_size)) if own else isl
    assert placement.effective_prefill_tokens == left


@pytest.mark.parametrize("request_weight", [0.0, 0.3])
def test_many_ranks_of_one_cell_are_drawn_as_their_loads_say(request_weight: float) -> None:
    """So many that a part of them is cut by its loads."""
    ranks = [RankState(number % 4, False, 9 * number, 0, 0, 0) for number in range(40)]
    router = RouterSettings(
        use_kv_events=False, temperature=0.1, active_request_weight=request_weight
    )
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(choice, "_FEW_RANKS", 0)
        hold_each_rank_to_the_model(Fleet(ranks, 1, [frozenset()], 16, None), router, {}, None, 100)


@settings(max_examples=60)
@given(
    block_size=st.sampled_from([1, 3, 16, 64, 100]),
    parts=st.sampled_from([7, 10, 49]) | st.integers(1, 100),
    equal=st.lists(st.integers(0, 300), min_size=1, max_size=60),
    isl_tokens=st.sampled_from([0, 15, 48]) | st.integers(0, 100_000),
    temperature=st.sampled_from([0.0, 0.0, 0.0, 0.1]),
)
# 1 / 49 * 49 is not 1: keys differ in their last bits, and costs less so.
@example(3, 49, [*range(60)], 53_767, 0.1)
@example(100, 49, [*range(0, 300, 7)], 77_087, 0.0)
@example(100, 7, [*range(60)], 99_999, 0.0)
def test_loads_that_are_equal_but_for_rounding_tie_as_they_do_one_by_one(
    block_size: int, parts: int, equal: list[int], isl_tokens: int, temperature: float
) -> None:
    """At a scale of 1 / parts a block weighs as `parts` blocks of tokens do: every rank costs the
    same, and rounding alone says which tie, and which of them the order has first."""
    ranks = [RankState(each, False, (300 - each) * block_size * parts, 5, 0, 0) for each in equal]
    router = RouterSettings(
        use_kv_events=False, prefill_load_scale=1 / parts, temperature=temperature
    )
    fleet = Fleet(ranks, 1, [frozenset()], block_size, None)
    for allowed in (None, frozenset(range(6)), frozenset((0, 2, 4, 6))):
        hold_each_rank_to_the_model(
            fleet, router, {"allowed_worker_ids": allowed}, None, isl_tokens
        )
