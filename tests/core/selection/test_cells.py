"""What making cells costs, in steps of the interpreter: ranks that differ in all there is to differ
in are looked at a few times each, not each against each."""

from typing import Any

from lean_selector.core.index.shapes import Tier
from lean_selector.core.selection.shapes import EXPLANATION
from tests.support.driven_selector import DrivenSelector, pack
from tests.support.operations import lines_run

FEW, MANY = 40, 400


def staircase(ranks: int, **settings: Any) -> DrivenSelector:
    """Rank after rank with one more block of one prompt active, each a worker with its own taint.

    With a `ttl_s` the same blocks are believed cached.
    """
    driven = DrivenSelector(**settings)
    for worker_id in range(ranks):
        driven.register(worker_id, taints=frozenset({f"host-{worker_id % 50}"}))
    for worker_id in range(ranks):
        hashes = list(range(1, worker_id + 2))
        driven.reserve(f"r{worker_id}", (worker_id, 0), hashes=hashes)
    return driven


def steps_of_a_select(driven: DrivenSelector, blocks: int, **changes: Any) -> int:
    request = driven.request(list(range(1, blocks + 1)), 4 * blocks, **changes)
    partition, select = driven.partition, driven.selector.select
    return lines_run(lambda: select(partition, request, 0.0, lambda *_: None))


def is_linear(few: int, many: int) -> bool:
    return many <= 1.2 * MANY / FEW * few


def test_ranks_of_which_each_holds_and_runs_more_of_a_prompt_cost_a_few_steps_each() -> None:
    def cost(ranks: int) -> int:
        return steps_of_a_select(staircase(ranks, ttl_s=600.0), ranks)

    assert is_linear(cost(FEW), cost(MANY))


def test_so_they_do_the_other_way_round() -> None:
    """Who holds most of the prompt runs least of it."""

    def cost(ranks: int) -> int:
        driven = staircase(ranks)
        for worker_id in range(ranks):
            held = list(range(1, ranks - worker_id + 1))
            driven.partition.index.store(worker_id, 0, Tier.DEVICE, None, held, pack(held))
        return steps_of_a_select(driven, ranks)

    assert is_linear(cost(FEW), cost(MANY))


def test_what_is_believed_beside_what_events_say_costs_a_few_steps_for_each_rank() -> None:
    def cost(ranks: int) -> int:
        driven = staircase(ranks, use_kv_events=True, needs_kv_events=False, predicted_ttl_s=600.0)
        assert driven.partition.predicted is not None
        for worker_id in range(ranks):
            held = list(range(1, ranks - worker_id + 1))
            driven.partition.index.store(worker_id, 0, Tier.DEVICE, None, held, pack(held))
        return steps_of_a_select(driven, ranks)

    assert is_linear(cost(FEW), cost(MANY))


def test_preferences_cost_a_few_steps_for_each_rank() -> None:
    """Of nine taints, so that there are dozens of groups by the sum of their weights."""

    def cost(ranks: int) -> int:
        driven = DrivenSelector(ttl_s=600.0)
        for worker_id in range(ranks):
            taints = frozenset(f"t{bit}" for bit in range(9) if worker_id >> bit & 1)
            driven.register(worker_id, taints=taints)
            driven.reserve(f"r{worker_id}", (worker_id, 0), hashes=list(range(1, worker_id + 2)))
        preferred = {f"t{bit}": 0.01 * 2**bit for bit in range(9)}
        return steps_of_a_select(driven, ranks, preferred_taints=preferred)

    assert is_linear(cost(FEW), cost(MANY))


def test_an_explanation_costs_a_few_steps_for_each_rank() -> None:
    def cost(ranks: int) -> int:
        return steps_of_a_select(staircase(ranks, ttl_s=600.0), ranks, adds=EXPLANATION)

    assert is_linear(cost(FEW), cost(MANY))


def test_the_overlap_of_a_worker_of_many_ranks_costs_a_few_steps_for_each() -> None:
    def cost(ranks: int) -> int:
        driven = DrivenSelector(ttl_s=600.0)
        driven.register(1, data_parallel_size=ranks)
        for rank in range(ranks):
            driven.reserve(f"r{rank}", (1, rank), hashes=list(range(1, rank + 2)))
        return steps_of_a_select(driven, ranks)

    assert is_linear(cost(FEW), cost(MANY))
