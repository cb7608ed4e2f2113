"""The figures of an explanation against the cost formula and against the draw itself."""

import math
import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_selector.core.errors import AllWorkersBusy
from lean_selector.core.index.kv_index import KvIndex, Matched
from lean_selector.core.load.busy_limits import BusyThreshold
from lean_selector.core.selection.explain import explained
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.records import SelectionRequest
from lean_selector.core.selection.scheduler import candidates, not_busy, place
from lean_selector.core.selection.settings import Terms
from lean_selector.core.selection.workers import WorkerSpec
from tests.bookings import book

BLOCK_SIZE = 4
HASHES = b"".join(number.to_bytes(8, "little") for number in (1, 2, 3))


def partition_of(draws: random.Random, workers: int) -> Partition:
    """Workers of two ranks, some taints, and random loads, some of which wear off."""
    partition = Partition("m", "t", BLOCK_SIZE, False, KvIndex(BLOCK_SIZE))
    for worker_id in range(workers):
        taints = frozenset(name for name in "ab" if draws.random() < 0.5)
        spec = WorkerSpec(worker_id=worker_id, data_parallel_size=2, taints=taints)
        partition.put_worker(spec)
        for dp_rank in (0, 1):
            if draws.random() < 0.7:
                blocks = HASHES[: 8 * draws.randrange(4)]
                duration_s = draws.choice([None, 10.0])
                tokens = draws.randrange(30)
                book(
                    partition.slots,
                    f"{worker_id}/{dp_rank}",
                    worker_id,
                    dp_rank,
                    blocks,
                    tokens,
                    0.0,
                    prefill_duration_s=duration_s,
                )
    return partition


@given(
    st.integers(1, 4),
    st.randoms(use_true_random=False),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.sampled_from([0.0, 1.5]),
    st.sampled_from([0.0, 2.0]),
    st.sampled_from([0.0, 0.8]),
    st.booleans(),
    st.none() | st.integers(0, 20),
)
@settings(max_examples=150, deadline=None)
def test_the_figures_give_the_cost_and_the_chances_those_who_can_be_drawn(
    workers: int,
    draws: random.Random,
    credit: float,
    decay: float,
    scale: float,
    temperature: float,
    tracks: bool,
    busy_above: int | None,
) -> None:
    partition = partition_of(draws, workers)
    partition.set_threshold(BusyThreshold(active_prefill_tokens=busy_above))
    prompt = Prompt(10, HASHES, 3, HASHES[:8], lambda: HASHES)
    request = SelectionRequest(prompt, Terms(credit, decay, scale, temperature, tracks))
    request.preferred_taints = {"a": 0.5}
    matches = {
        key: Matched(draws.randrange(4), draws.randrange(2), draws.randrange(2))
        for key in partition.slots.ranks
        if draws.random() < 0.5
    }
    now = 3.0
    try:
        ranks = not_busy(partition, candidates(partition, request), now)
    except AllWorkersBusy:
        return
    why = explained(partition, request, ranks, matches, now)

    assert [(row.worker_id, row.dp_rank) for row in why.ranks] == sorted(partition.slots.ranks)
    eligible = {load.key for _, load in ranks}
    least = min(row.cost for row in why.ranks if row.cost is not None)
    for row in why.ranks:
        key = (row.worker_id, row.dp_rank)
        assert (row.filtered is None) == (key in eligible) == (row.cost is not None)
        if row.cost is None:
            assert (row.filtered, row.probability) == ("busy", 0.0)
            continue
        cached = row.device_blocks + 0.75 * row.host_pinned_blocks + 0.25 * row.disk_blocks
        cached_tokens = math.floor(cached * BLOCK_SIZE + 0.5)
        raw = row.active_prefill_tokens + max(10, cached_tokens) if tracks else 0
        prefill = scale * max(0.0, raw / BLOCK_SIZE - row.credit_blocks)
        cost = (prefill + row.potential_decode_blocks) * row.taint_factor
        assert row.cost == pytest.approx(cost)
        assert 0.0 < row.credit_decay <= 1.0
        added = max(0, 10 - cached_tokens) if tracks else 0
        assert row.potential_prefill_tokens == row.active_prefill_tokens + added
        if temperature == 0.0:
            assert (row.probability > 0.0) == (row.cost == least)
    assert sum(row.probability for row in why.ranks) == pytest.approx(1.0)
    assert why.tied_ranks == sum(row.cost == least for row in why.ranks)

    chosen = place(partition, request, ranks, matches, now, draws)[0].key
    assert next(r for r in why.ranks if (r.worker_id, r.dp_rank) == chosen).probability > 0.0


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_the_chances_are_those_with_which_ranks_are_drawn(temperature: float) -> None:
    draws = random.Random(7)
    partition = partition_of(draws, 3)
    prompt = Prompt(10, HASHES, 3, HASHES[:8], lambda: HASHES)
    request = SelectionRequest(prompt, Terms(1.0, 0.0, 1.0, temperature, True))
    ranks = candidates(partition, request)
    why = explained(partition, request, ranks, {}, 3.0)
    count = 20_000
    drawn = Counter(place(partition, request, ranks, {}, 3.0, draws)[0].key for _ in range(count))
    for row in why.ranks:
        share = drawn[row.worker_id, row.dp_rank] / count
        error = math.sqrt(row.probability * (1 - row.probability) / count)
        assert abs(share - row.probability) <= 6 * error
