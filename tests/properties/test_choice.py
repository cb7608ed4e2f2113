"""The choice by load order against the choice rank by rank: the same ranks, each as often.

Random fleets, loads and overlaps; block sizes that are no power of two, so that costs which are
equal on paper differ in the last bit or do not, and both ways must agree on which.
"""

import random

import hypothesis.strategies as st
from hypothesis import given, settings

from lean_selector.core.index.kv_index import Tier
from lean_selector.core.selection.cost import rank_costs
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.records import SelectionRequest
from lean_selector.core.selection.scheduler import candidates, place, place_by_order, suits_order
from lean_selector.core.selection.selector import Selector
from lean_selector.core.selection.settings import RouterSettings
from lean_selector.core.selection.workers import Source, WorkerSpec
from tests.bookings import book


class NoSources:
    def subscribe(self, partition: Partition, worker_id: int, rank: int, source: Source) -> None:
        raise AssertionError("KV events are off")

    def unsubscribe(self, worker_id: int, dp_rank: int) -> None:
        raise AssertionError("KV events are off")


class Fixed(random.Random):
    """A random source that says what it is told."""

    value = 0.0

    def random(self) -> float:
        return self.value


def hashes(values: list[int]) -> bytes:
    return b"".join(value.to_bytes(8, "little") for value in values)


rank_states = st.tuples(
    st.integers(0, 3),  # requests of 0..3 blocks that are active on the rank
    st.sampled_from([0, 1, 3, 7, 48, 96, 1000]),  # their prefill tokens
    st.integers(0, 5),  # device blocks of the prompt
    st.integers(0, 2),  # host blocks beyond
    st.booleans(),  # does it share the prompt's active path
)


@settings(max_examples=300, deadline=None)
@given(
    ranks=st.lists(rank_states, min_size=1, max_size=12),
    per_worker=st.integers(1, 3),
    block_size=st.sampled_from([3, 7, 16, 48]),
    isl_tokens=st.integers(1, 400),
    scale=st.sampled_from([0.0, 0.1, 1.0, 2.7]),
    credit=st.sampled_from([0.0, 0.3, 1.0]),
)
def test_both_ways_of_choosing_agree(
    ranks: list[tuple[int, int, int, int, bool]],
    per_worker: int,
    block_size: int,
    isl_tokens: int,
    scale: float,
    credit: float,
) -> None:
    router = RouterSettings(
        use_kv_events=False, prefill_load_scale=scale, overlap_score_credit=credit
    )
    selector = Selector(router, NoSources(), random.Random(0))
    workers = -(-len(ranks) // per_worker)
    for worker_id in range(workers):
        size = min(per_worker, len(ranks) - worker_id * per_worker)
        spec = WorkerSpec(
            worker_id=worker_id, endpoint="w", block_size=block_size, data_parallel_size=size
        )
        selector.upsert_worker(spec, 0.0)
    partition = selector.ready_partition("default", "default")
    path = [1, 2, 3, 4, 5, 6, 7]
    for number, (active, tokens, device, host, shares) in enumerate(ranks):
        worker_id, dp_rank = divmod(number, per_worker)
        own = path[:active] if shares else [100 + number] * active
        book(partition.slots, f"r{number}", worker_id, dp_rank, hashes(own), tokens, 0.0)
        partition.index.store(
            worker_id, dp_rank, Tier.DEVICE, None, path[:device], hashes(path[:device])
        )
        parent = path[device - 1] if device else None
        below = path[device : device + host]
        partition.index.store(worker_id, dp_rank, Tier.HOST_PINNED, parent, below, hashes(below))
    packed = hashes(path)
    prompt = Prompt(isl_tokens, packed, len(path), packed[:8], lambda: packed)
    request = SelectionRequest(prompt, selector.terms)
    assert suits_order(partition, request, selector.terms)
    matches = partition.index.match(packed)
    everyone = candidates(partition, request)
    costs = rank_costs(partition, request, everyone, matches, 0.0)
    ties = {load.key for (_, load), cost in zip(everyone, costs, strict=True) if cost == min(costs)}
    rng = Fixed()
    drawn = []
    for turn in range(len(ties)):
        rng.value = (turn + 0.5) / len(ties)
        load, placement = place_by_order(partition, request, rng)
        drawn.append(load.key)
        slow_rng = random.Random(0)
        slow_load, slow = place(
            partition,
            request,
            [rank for rank in everyone if rank[1] is load],
            matches,
            0.0,
            slow_rng,
        )
        assert (slow_load, slow) == (load, placement)
    assert sorted(drawn) == sorted(ties)
