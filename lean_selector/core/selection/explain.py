"""Why this worker? The figures behind one choice, for every rank of the partition.

Made only for a request that asks, before it is booked, and never part of the choice itself: the
costs are those that `cost.rank_costs` gave the choice, and a test holds the other figures
against them.
"""

from lean_selector.core.index.kv_index import Matched
from lean_selector.core.limits import U64_MAX
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.selection.cost import (
    Candidate,
    Matches,
    active_prefixes,
    cached_tokens,
    credit_blocks,
    credit_decay,
    preferences,
    probabilities,
    rank_costs,
    taint_factor,
)
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.records import Explanation, RankExplanation, SelectionRequest
from lean_selector.core.selection.schedulable import SchedulableWorker

_NOTHING = Matched(0)


def explained(
    partition: Partition,
    request: SelectionRequest,
    ranks: list[Candidate],
    matches: Matches,
    now: float,
) -> Explanation:
    """What decides between `ranks`, the candidates, and why the others are none."""
    prompt, terms = request.prompt, request.terms
    preferred = preferences(request)
    costs = rank_costs(partition, request, ranks, matches, now)
    chance_of_each, drawn = probabilities(costs, terms.temperature)
    chances = {
        load.key: (cost, probability)
        for (_, load), cost, probability in zip(ranks, costs, chance_of_each, strict=True)
    }
    least_tokens = min(load.prefill_tokens_at(now) for _, load in ranks)
    prefixes = active_prefixes(partition, request)
    rows = []
    for worker_id, worker in sorted(partition.workers.items()):
        for load in worker.loads:
            cost, probability = chances.get(load.key, (None, 0.0))
            filtered = None if cost is not None else _why_not(partition, request, worker, load)
            match = matches.get(load.key, _NOTHING)
            cached = cached_tokens(match, partition.block_size)
            tokens = load.prefill_tokens_at(now)
            decay = credit_decay(
                terms, tokens - least_tokens, prompt.isl_tokens, partition.block_size
            )
            added = max(0, prompt.isl_tokens - cached) if terms.track_prefill else 0
            new_blocks = prompt.sequence_count - prefixes.get(load.key, 0)
            rows.append(
                RankExplanation(
                    worker_id,
                    load.dp_rank,
                    filtered,
                    match.device,
                    match.host,
                    match.disk,
                    min(tokens, U64_MAX),
                    min(tokens + added, U64_MAX),
                    load.active_decode_blocks,
                    load.active_decode_blocks + new_blocks,
                    credit_blocks(terms, decay, match),
                    decay,
                    taint_factor(preferred, worker.taints) if preferred else 1.0,
                    cost,
                    probability,
                )
            )
    return Explanation(
        drawn,
        costs.count(min(costs)),
        terms.temperature,
        prompt.isl_tokens,
        prompt.sequence_count,
        rows,
    )


def _why_not(
    partition: Partition, request: SelectionRequest, worker: SchedulableWorker, load: RankLoad
) -> str:
    pinned, allowed = request.pinned, request.allowed_worker_ids
    if pinned is not None and load.key != (pinned.worker_id, pinned.dp_rank):
        return "not_pinned"
    if allowed is not None and worker.worker_id not in allowed:
        return "not_allowed"
    if not request.required_taints <= worker.taints:
        return "taint"
    if load.key in partition.busy_ranks or partition.room is None:
        return "busy"
    return "queue" if not partition.room.below & load.mask else "busy"
