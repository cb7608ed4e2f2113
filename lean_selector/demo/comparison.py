"""What other policies would have made of the same requests.

Runs recorded requests, at their recorded times, through fresh engine models in virtual time: once
with the choices that were recorded and once for each other policy. The same model computes every
row, so the rows differ by the choices alone. Pure and deterministic.
"""

import heapq
from collections.abc import Callable, Sequence
from itertools import count

from lean_selector.demo.engine import EngineModel, hit_rate
from lean_selector.demo.player import percentile
from lean_selector.demo.records import EngineSpeed, Outcome, Recorded, Running

# Picks the index of an engine for the n-th request.
Policy = Callable[[int, Recorded, Sequence[EngineModel]], int]


def as_recorded(worker_ids: Sequence[int]) -> Policy:
    """The choices of the service; engines stand in the order of worker_ids."""
    index = {worker_id: i for i, worker_id in enumerate(worker_ids)}
    return lambda _, recorded, engines: index[recorded.worker_id]


def round_robin(turn: int, recorded: Recorded, engines: Sequence[EngineModel]) -> int:
    """One engine after the other."""
    return turn % len(engines)


def least_loaded(turn: int, recorded: Recorded, engines: Sequence[EngineModel]) -> int:
    """An engine with the fewest requests under way; among equals, the next in turn."""
    size = len(engines)
    return min(range(size), key=lambda i: (engines[i].active, (i - turn) % size))


def run_policy(
    name: str,
    policy: Policy,
    recorded: Sequence[Recorded],
    engines: Sequence[EngineModel],
) -> Outcome:
    """Play all requests through idle, empty engines. recorded is in order of arrival."""
    ttft: list[float] = []
    order = count()  # makes equal times fall in the order in which they were planned
    # (time, order, engine, running, next output block): when a running request has more to do
    plan: list[tuple[float, int, EngineModel, Running, int]] = []

    def advance(until: float) -> None:
        while plan and plan[0][0] <= until:
            at, _, engine, running, index = heapq.heappop(plan)
            if index:
                engine.decode_block(running, index - 1)
            if index == running.request.output_blocks:
                engine.finish(running)
                continue
            following = (at + engine.decode_block_s, next(order), engine, running, index + 1)
            heapq.heappush(plan, following)

    for turn, item in enumerate(recorded):
        advance(item.arrival_s)
        engine = engines[policy(turn, item, engines)]
        running, _ = engine.admit(item.request, item.arrival_s)
        ttft.append(running.prefill_done_at - item.arrival_s)
        heapq.heappush(plan, (running.prefill_done_at, next(order), engine, running, 0))
    ttft.sort()
    work = [engine.prefill_tokens for engine in engines]
    return Outcome(
        policy=name,
        hit_rate=hit_rate(engines),
        imbalance=max(work) * len(work) / max(1, sum(work)),
        ttft_p50_s=percentile(ttft, 0.50),
        ttft_p99_s=percentile(ttft, 0.99),
    )


def compare(
    recorded: Sequence[Recorded],
    worker_ids: Sequence[int],
    capacity_blocks: int,
    block_size: int,
    speed: EngineSpeed,
) -> list[Outcome]:
    """The rows for the recorded choices, round-robin and least-loaded."""
    policies: dict[str, Policy] = {
        "lean-selector": as_recorded(worker_ids),
        "round-robin": round_robin,
        "least-loaded": least_loaded,
    }
    in_order = sorted(recorded, key=lambda item: item.arrival_s)
    return [
        run_policy(
            name,
            policy,
            in_order,
            [EngineModel(capacity_blocks, block_size, speed) for _ in worker_ids],
        )
        for name, policy in policies.items()
    ]


def table(outcomes: Sequence[Outcome], requests: int, *, with_times: bool = True) -> list[str]:
    """The rows as text lines of at most 80 columns, with how they were obtained.

    Leave the times out when the choices were not made at the times that are recorded: they would
    tell of queues that the chooser never saw.
    """
    lines = ["policy          hit rate   imbalance"]
    lines += [f"{row.policy:<14} {row.hit_rate:>8.1%} {row.imbalance:>11.2f}" for row in outcomes]
    if with_times:
        lines[0] += "   time to first token p50 / p99"
        for number, row in enumerate(outcomes, 1):
            lines[number] += f" {row.ttft_p50_s * 1e3:>14.0f} ms / {row.ttft_p99_s * 1e3:.0f} ms"
    return [
        *lines,
        f"How: the same {requests} requests, at the same times, simulated afterwards through",
        "identical empty engines; the first row takes the choices made live, the others",
        "choose in turn or the engine with the fewest requests under way. Imbalance:",
        "prefill tokens computed by the busiest engine over the average (1.00 is even).",
    ]
