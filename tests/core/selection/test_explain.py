"""The figures of an explanation against the cost formula and against the draw itself."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_selector.core.errors import AllWorkersBusy
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.index.shapes import Matched
from lean_selector.core.load.shapes import BusyThreshold
from lean_selector.core.rank_bits import bits_of
from lean_selector.core.selection.choice import choose
from lean_selector.core.selection.explain import explained
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.router_settings import CostTerms
from lean_selector.core.selection.scheduler import eligible, not_busy
from lean_selector.core.selection.shapes import SelectionRequest, WorkerSpec
from tests.support.reservations import book

BLOCK_SIZE = 4
HASHES = b"".join(number.to_bytes(8, "little") for number in (1, 2, 3))


def partition_of(draws: random.Random, workers: int, request_weight: float = 0.0) -> Partition:
    """Workers of two ranks, some taints, and random loads."""
    index = KvIndex(BLOCK_SIZE)
    partition = Partition("m", "t", BLOCK_SIZE, False, index, request_weight=request_weight)
    for worker_id in range(workers):
        taints = frozenset(name for name in "ab" if draws.random() < 0.5)
        spec = WorkerSpec(worker_id=worker_id, data_parallel_size=2, taints=taints)
        partition.put_worker(spec)
        for dp_rank in (0, 1):
            if draws.random() < 0.7:
                blocks = HASHES[: 8 * draws.randrange(4)]
                tokens = draws.randrange(30)
                name = f"{worker_id}/{dp_rank}"
                book(partition.slots, name, worker_id, dp_rank, blocks, tokens, 0.0)
    return partition


@given(
    st.integers(1, 4),
    st.randoms(use_true_random=False),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, 1.5]),
    st.sampled_from([0.0, 2.0]),
    st.sampled_from([0.0, 0.8]),
    st.sampled_from([(0.75, 0.25, 0.0), (0.5, 1.0, 2.0)]),
    st.booleans(),
    st.none() | st.integers(0, 20),
    st.sampled_from([0.0, 5.0]),
)
@settings(max_examples=150)
def test_the_figures_give_the_cost_and_the_chances_those_who_can_be_drawn(
    workers: int,
    draws: random.Random,
    credit: float,
    decay: float,
    scale: float,
    temperature: float,
    weights: tuple[float, float, float],
    tracks: bool,
    busy_above: int | None,
    eviction: float,
) -> None:
    host, disk, of_request = weights
    partition = partition_of(draws, workers, of_request)
    partition.set_threshold(BusyThreshold(active_prefill_tokens=busy_above))
    prompt = Prompt(10, HASHES, 3, HASHES[:8], lambda: HASHES)
    terms = CostTerms(
        credit, decay, scale, temperature, tracks, host, disk, of_request, False, eviction
    )
    request = SelectionRequest(prompt, terms)
    request.preferred_taints = {"a": 0.5}
    matches = {
        key: Matched(draws.randrange(4), draws.randrange(2), draws.randrange(2))
        for key in partition.slots.ranks
        if draws.random() < 0.5
    }
    now = 3.0
    try:
        ranks = not_busy(partition, request, eligible(partition, request))
    except AllWorkersBusy:
        return
    sets = [(match, partition.slots.ranks[key].mask) for key, match in matches.items()]
    why = explained(partition, request, ranks, sets, now)

    assert [(row.worker_id, row.dp_rank) for row in why.ranks] == sorted(partition.slots.ranks)
    candidates = {partition.order.ranks[bit].key for bit in bits_of(ranks)}
    least = min(row.cost for row in why.ranks if row.cost is not None)
    for row in why.ranks:
        key = (row.worker_id, row.dp_rank)
        assert (row.filtered is None) == (key in candidates) == (row.cost is not None)
        if row.cost is None:
            assert (row.filtered, row.probability) == ("busy", 0.0)
            continue
        cached = row.device_blocks + host * row.host_pinned_blocks + disk * row.disk_blocks
        cached_tokens = math.floor(cached * BLOCK_SIZE + 0.5)
        raw = row.active_prefill_tokens + max(10, cached_tokens) if tracks else 0
        prefill = scale * max(0.0, raw / BLOCK_SIZE - row.credit_blocks)
        decode = row.potential_decode_blocks + of_request * row.active_requests
        if eviction:
            burden = eviction * max(0, 10 - cached_tokens) / BLOCK_SIZE
            assert (row.burden_blocks, row.evicted_blocks) == (burden, burden / 2)  # all are full
            decode += burden + burden / 2
        cost = (prefill + decode) * row.taint_factor
        assert row.cost == pytest.approx(cost)
        assert 0.0 < row.credit_decay <= 1.0
        added = max(0, 10 - cached_tokens) if tracks else 0
        assert row.potential_prefill_tokens == row.active_prefill_tokens + added
        if temperature == 0.0:
            assert (row.probability > 0.0) == (row.cost == least)
    assert sum(row.probability for row in why.ranks) == pytest.approx(1.0)
    assert why.tied_ranks == sum(row.cost == least for row in why.ranks)

    chosen = choose(partition, request, ranks, sets, draws).key
    assert next(r for r in why.ranks if (r.worker_id, r.dp_rank) == chosen).probability > 0.0
