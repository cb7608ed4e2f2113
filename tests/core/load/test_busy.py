"""Thresholds by example, and the set of busy ranks against a look at every rank."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_selector.core.errors import AllWorkersBusy, BadRequest, NotFound
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.load.busy import MAX_REMEMBERED, BusyThresholds
from lean_selector.core.load.shapes import OFF, BusyThreshold
from lean_selector.core.rank_bits import bits_of
from lean_selector.core.selection.cost import terms
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.core.selection.scheduler import eligible, not_busy, place
from lean_selector.core.selection.shapes import SelectionRequest, WorkerSpec
from tests.support import naive_choice
from tests.support.bookings import book

LIMIT = BusyThreshold(active_prefill_tokens=10_000, active_decode_blocks=0.85)
SCOPE = ("model", "default")


@pytest.mark.parametrize(
    ("tokens", "blocks", "total", "busy"),
    [
        pytest.param(10_000, 0, 100, False, id="at the prefill limit"),
        pytest.param(10_001, 0, 100, True, id="above the prefill limit"),
        pytest.param(0, 87, 100, True, id="87 % of blocks against 85 %"),
        pytest.param(0, 85, 100, False, id="at the block limit"),
        pytest.param(0, 87, None, False, id="capacity unknown"),
        pytest.param(0, 87, 0, False, id="capacity 0"),
    ],
)
def test_a_rank_is_busy_only_above_a_limit(
    tokens: int, blocks: int, total: int | None, busy: bool
) -> None:
    assert LIMIT.limits(total, 10_000_000).exceeded_by(tokens, blocks) is busy


@pytest.mark.parametrize(
    ("frac", "batch", "limit"),
    [(0.35, 50, 17), (0.33, 50, 16), (0.0, 50, 0), (1e308, 2**64 - 1, float("inf"))],
)
def test_a_part_of_the_batch_is_rounded_down(frac: float, batch: int, limit: float) -> None:
    limits = BusyThreshold(active_prefill_tokens_frac=frac).limits(None, batch)
    assert limits.prefill_tokens == limit


def test_the_lower_of_two_token_limits_counts() -> None:
    threshold = BusyThreshold(active_prefill_tokens=10, active_prefill_tokens_frac=0.5)
    assert threshold.limits(None, 100).prefill_tokens == 10
    assert threshold.limits(None, 10).prefill_tokens == 5


def test_models_without_thresholds_of_their_own_have_the_defaults() -> None:
    thresholds = BusyThresholds(LIMIT)
    assert thresholds.of(SCOPE) is LIMIT
    changed = thresholds.change(SCOPE, BusyThreshold(active_prefill_tokens=5), [SCOPE])
    assert changed == thresholds.of(SCOPE) == BusyThreshold(0.85, 5)
    assert thresholds.switch_off(SCOPE, [SCOPE]) == OFF
    assert not thresholds.of(SCOPE).is_set


def test_a_refused_change_leaves_everything_as_it_was() -> None:
    thresholds = BusyThresholds(LIMIT)
    with pytest.raises(BadRequest):
        thresholds.change(SCOPE, BusyThreshold(active_prefill_tokens_frac=float("nan")), [SCOPE])
    with pytest.raises(NotFound):
        thresholds.change(SCOPE, BusyThreshold(active_prefill_tokens=1), [])
    with pytest.raises(NotFound):
        thresholds.switch_off(SCOPE, [])
    assert thresholds.of(SCOPE) is LIMIT


def test_thresholds_of_models_that_are_gone_are_remembered_up_to_a_bound() -> None:
    thresholds = BusyThresholds()
    for number in range(MAX_REMEMBERED + 2):
        scope = (f"model-{number}", "default")
        thresholds.change(scope, LIMIT, [scope])
    assert thresholds.of(("model-0", "default")) is OFF
    assert thresholds.of(("model-1", "default")) == LIMIT


# -- the ranks of a partition ---------------------------------------------------------------------


def spec(worker_id: int, ranks: int, total_kv_blocks: int | None) -> WorkerSpec:
    return WorkerSpec(
        worker_id=worker_id,
        data_parallel_size=ranks,
        total_kv_blocks=total_kv_blocks,
        max_num_batched_tokens=40,
    )


def request() -> SelectionRequest:
    prompt = Prompt(1, b"", 0, b"", lambda: b"")
    return SelectionRequest(prompt, terms(RouterSettings()))


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 3), st.integers(1, 3), st.integers(0, 9)),
        st.tuples(st.just("remove"), st.integers(0, 3)),
        st.tuples(
            st.just("threshold"),
            st.none() | st.sampled_from([0.0, 0.3, 1.0]),
            st.none() | st.integers(0, 30),
            st.none() | st.sampled_from([0.0, 0.5, 1.0]),
        ),
        st.tuples(
            st.just("book"),
            st.integers(0, 3),
            st.integers(0, 2),
            st.integers(0, 40),
            st.integers(0, 6),
            st.none() | st.just(10.0),
        ),
        st.tuples(st.just("end"), st.sampled_from(["free", "prefill_complete", "output_block"])),
        st.tuples(st.just("pass"), st.integers(1, 20)),
    ),
    max_size=40,
)


@given(OPERATIONS, st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_the_busy_ranks_are_those_that_a_look_at_each_finds(
    operations: list[tuple[Any, ...]], rng: random.Random
) -> None:
    partition = Partition("model", "default", 16, False, KvIndex(16))
    now, booked = 0.0, 0
    for name, *args in operations:
        if name == "put":
            worker_id, ranks, blocks = args
            partition.put_worker(spec(worker_id, ranks, blocks or None))
        elif name == "remove":
            if args[0] in partition.workers:
                partition.remove_worker(args[0])
        elif name == "threshold":
            partition.set_threshold(BusyThreshold(*args))
        elif name == "book":
            worker_id, dp_rank, tokens, count, duration_s = args
            if (worker_id, dp_rank) in partition.slots.ranks:
                booked += 1
                hashes = b"".join(rng.getrandbits(64).to_bytes(8, "little") for _ in range(count))
                book(
                    partition.slots,
                    str(booked),
                    worker_id,
                    dp_rank,
                    hashes,
                    tokens,
                    now,
                    prefill_duration_s=duration_s,
                )
        elif name == "end" and partition.slots.reservations:
            getattr(partition.slots, str(args[0]))(next(iter(partition.slots.reservations)), now)
        elif name == "pass":
            now += args[0]
        check(partition, now, rng)


def check(partition: Partition, now: float, rng: random.Random) -> None:
    ranks = naive_choice.candidates(partition, request())
    busy, busy_as_booked = set(), set()
    for worker, load in ranks:
        limits = partition.threshold.limits(worker.total_kv_blocks, worker.max_num_batched_tokens)
        if limits.exceeded_by(load.prefill_tokens_at(now), load.active_decode_blocks):
            busy.add(load.key)
        if limits.exceeded_by(load.active_prefill_tokens, load.active_decode_blocks):
            busy_as_booked.add(load.key)

    def keys(mask: int) -> set[tuple[int, int]]:
        return {partition.order.rank(bit).key for bit in bits_of(mask)}

    everyone = {load.key for _, load in ranks}
    assert keys(partition.candidates) == keys(partition.order.everyone) == everyone
    assert keys(partition.busy) == busy_as_booked
    assert keys(partition.busy_at(now)) == busy
    for worker, _ in ranks:
        all_busy = all(load.key in busy for load in worker.loads)
        assert partition.is_worker_busy(worker, now) is all_busy
    free = everyone - busy
    found = eligible(partition, request())
    if free or not ranks:
        assert keys(not_busy(partition, request(), found, now)) == free
    else:
        with pytest.raises(AllWorkersBusy):
            not_busy(partition, request(), found, now)
    if free:
        found = not_busy(partition, request(), found, now)
        assert place(partition, request(), found, [], now, rng)[0].key in free
