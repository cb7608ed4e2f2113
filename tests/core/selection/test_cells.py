"""What making cells costs, in steps of the interpreter: ranks that differ in all there is to differ
in are looked at a few times each, not each against each."""

from collections.abc import Callable
from typing import Any

import pytest

from lean_selector.core.index.shapes import Tier
from lean_selector.core.selection.scheduler import taint_weights
from lean_selector.core.selection.shapes import EXPLANATION
from tests.support.blocks import store_blocks
from tests.support.driven_selector import DrivenSelector, pack
from tests.support.operations import lines_run

FEW, MANY = 40, 200
BELIEVED = {"ttl_s": 600.0}  # that the blocks of a booking are cached


def staircase(ranks: int, **settings: Any) -> DrivenSelector:
    """Rank after rank with one more block of one prompt active, each a worker with taints."""
    driven = DrivenSelector(**settings)
    for worker_id in range(ranks):
        host = {f"host-{worker_id % 50}"}
        bits = {f"t{bit}" for bit in range(9) if worker_id >> bit & 1}
        driven.register(worker_id, taints=frozenset(host | bits))
        hashes = list(range(1, worker_id + 2))
        driven.reserve(f"r{worker_id}", (worker_id, 0), hashes=hashes)
    return driven


def the_other_way_round(ranks: int, **settings: Any) -> DrivenSelector:
    """The rank that runs least of the prompt holds most of it."""
    driven = staircase(ranks, **settings)
    for worker_id in range(ranks):
        held = list(range(1, ranks - worker_id + 1))
        store_blocks(driven.partition.index, (worker_id, 0), Tier.DEVICE, None, held, pack(held))
    return driven


def beside_what_is_believed(ranks: int) -> DrivenSelector:
    predicts = {"use_kv_events": True, "needs_kv_events": False, "predicted_ttl_s": 600.0}
    driven = the_other_way_round(ranks, **predicts)
    assert driven.partition.predicted is not None
    return driven


def of_one_worker(ranks: int) -> DrivenSelector:
    driven = DrivenSelector(**BELIEVED)
    driven.register(1, data_parallel_size=ranks)
    for rank in range(ranks):
        driven.reserve(f"r{rank}", (1, rank), hashes=list(range(1, rank + 2)))
    return driven


@pytest.mark.parametrize(
    ("fleet", "changes"),
    [
        (lambda ranks: staircase(ranks, **BELIEVED), {}),
        (the_other_way_round, {}),
        (beside_what_is_believed, {}),
        (of_one_worker, {}),
        # Nine taints, so that there are dozens of groups by the sum of their weights.
        (
            lambda ranks: staircase(ranks, **BELIEVED),
            {"preferred_taints": {f"t{bit}": 0.01 * 2**bit for bit in range(9)}},
        ),
        (lambda ranks: staircase(ranks, **BELIEVED), {"adds": EXPLANATION}),
    ],
    ids=["holds", "holds the rest", "believed", "one worker", "preferred taints", "explanation"],
)
def test_a_selection_costs_a_few_steps_for_each_rank(
    fleet: Callable[[int], DrivenSelector], changes: dict[str, Any]
) -> None:
    def steps(ranks: int) -> int:
        driven = fleet(ranks)
        request = driven.request(list(range(1, ranks + 1)), 4 * ranks, **changes)
        partition, select = driven.partition, driven.selector.select
        return lines_run(lambda: select(partition, request, 0.0))

    assert steps(MANY) <= 1.2 * MANY / FEW * steps(FEW)


def test_taints_of_their_own_cost_a_few_steps_for_each_worker() -> None:
    def cost(workers: int) -> int:
        driven = DrivenSelector()
        for worker_id in range(workers):
            own = {f"t{worker_id}.{number}" for number in range(4)}
            driven.register(worker_id, taints=frozenset(own | {"all"}))
        partition = driven.partition
        weights = {taint: 0.1 * len(taint) for taint in partition.tainted}
        found = taint_weights(partition, weights)
        for worker in partition.workers.values():
            expected = 0.0
            for taint, weight in weights.items():
                if taint in worker.taints:
                    expected += weight
            assert [sum_ for sum_, ranks in found if ranks & worker.mask] == [expected]
        return lines_run(taint_weights, partition, weights)

    assert cost(800) <= 2.2 * cost(400)
