"""Why this worker? The figures behind one choice, for every rank of the partition.

Made only for a request that asks, before it is booked, and never part of the choice itself: the
costs are those that `scheduler.rank_costs` gave the choice, and a test holds the other figures
against them.
"""

import math

from lean_selector.core.partition import Partition, SchedulableWorker
from lean_selector.core.scheduler import (
    Candidate,
    Matches,
    active_prefixes,
    cached_tokens,
    rank_costs,
)
from lean_selector.core.selection import Explanation, RankExplanation, SelectionRequest
from lean_selector.core.settings import DISK_WEIGHT, HOST_WEIGHT
from lean_selector.core.slots import RankLoad

U64_MAX = 2**64 - 1


def explained(
    partition: Partition,
    request: SelectionRequest,
    ranks: list[Candidate],
    matches: Matches,
    now: float,
) -> Explanation:
    """What decides between `ranks`, the candidates, and why the others are none."""
    costs = rank_costs(partition, request, ranks, matches, now)
    probabilities, drawn = _probabilities(costs, request.terms.temperature)
    chances = {
        load.key: (cost, probability)
        for (_, load), cost, probability in zip(ranks, costs, probabilities, strict=True)
    }
    least_tokens = min(load.prefill_tokens_at(now) for _, load in ranks)
    prefixes = active_prefixes(partition, request)
    rows = []
    for worker_id, worker in sorted(partition.workers.items()):
        for load in worker.loads:
            cost, probability = chances.get(load.key, (None, 0.0))
            filtered = None if cost is not None else _why_not(partition, request, worker, load, now)
            match = matches.get(load.key)
            device, host, disk = (
                (0, 0, 0) if match is None else (match.device, match.host, match.disk)
            )
            cached = 0 if match is None else cached_tokens(match, partition.block_size)
            tokens = load.prefill_tokens_at(now)
            decay = _decay(partition, request, tokens - least_tokens)
            added = max(0, request.prompt.isl_tokens - cached) if request.terms.track_prefill else 0
            new_blocks = request.prompt.sequence_count - prefixes.get(load.key, 0)
            rows.append(
                RankExplanation(
                    worker_id,
                    load.dp_rank,
                    filtered,
                    device,
                    host,
                    disk,
                    min(tokens, U64_MAX),
                    min(tokens + added, U64_MAX),
                    load.active_decode_blocks,
                    load.active_decode_blocks + new_blocks,
                    request.terms.credit * decay * device + HOST_WEIGHT * host + DISK_WEIGHT * disk,
                    decay,
                    _taint_factor(request, worker),
                    cost,
                    probability,
                )
            )
    return Explanation(
        drawn,
        costs.count(min(costs)),
        request.terms.temperature,
        request.prompt.isl_tokens,
        request.prompt.sequence_count,
        rows,
    )


def _why_not(
    partition: Partition,
    request: SelectionRequest,
    worker: SchedulableWorker,
    load: RankLoad,
    now: float,
) -> str:
    pinned, allowed = request.pinned, request.allowed_worker_ids
    if pinned is not None and load.key != (pinned.worker_id, pinned.dp_rank):
        return "not_pinned"
    if allowed is not None and worker.worker_id not in allowed:
        return "not_allowed"
    if not request.required_taints <= worker.taints:
        return "taint"
    return "busy"


def _decay(partition: Partition, request: SelectionRequest, waiting_tokens: int) -> float:
    terms = request.terms
    if not terms.track_prefill or terms.decay <= 0.0:
        return 1.0
    prompt_blocks = math.ceil(request.prompt.isl_tokens / partition.block_size)
    waiting = max(0, waiting_tokens) / partition.block_size
    return 1.0 / (1.0 + terms.decay * waiting / prompt_blocks)


def _taint_factor(request: SelectionRequest, worker: SchedulableWorker) -> float:
    if request.pinned is not None or not request.preferred_taints:
        return 1.0
    preferred = request.preferred_taints
    weight = sum(value for name, value in preferred.items() if name in worker.taints)
    return 1.0 if math.isnan(weight) else math.exp(-math.tanh(weight))


def _probabilities(costs: list[float], temperature: float) -> tuple[list[float], str]:
    """The chance of each rank, and the way of `scheduler.draw` that gives it."""
    least = min(costs)
    spread = max(costs) - least
    if len(costs) == 1:
        return [1.0], "only_candidate"
    if temperature > 0.0 and 0.0 < spread < math.inf:
        weights = [math.exp(-((cost - least) / spread) / temperature) for cost in costs]
        total = sum(weights)
        return [weight / total for weight in weights], "softmax"
    ties = costs.count(least)
    chance = 1.0 / ties
    return (
        [chance if cost == least else 0.0 for cost in costs],
        "lowest_cost" if ties == 1 else "uniform_tie",
    )
