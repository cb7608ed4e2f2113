"""The choice as its documents tell it: every rank looked at, one by one (selection.md 3.1 to 3.3).

What the service does with sets of ranks is held to this. It takes loads and matches from where they
are kept, and nothing else from the code that it judges but the terms of the formula.
"""

import math

from lean_selector.core.errors import AllWorkersBusy
from lean_selector.core.index.shapes import Matched, Tier
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.selection.cost import (
    cached_tokens,
    credit_blocks,
    credit_decay,
    favoured_blocks,
    preferences,
    softmax,
    taint_factor,
)
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.schedulable_worker import SchedulableWorker
from lean_selector.core.selection.shapes import SelectionRequest
from tests.support.blocks import matches

Matches = dict[tuple[int, int], Matched]
Candidate = tuple[SchedulableWorker, RankLoad]


def matches_of(partition: Partition, local_hashes: bytes) -> Matches:
    """What each rank holds, block by block on the first tier that has it: what is believed to be on
    its device counts as there."""
    found = matches(partition.index, local_hashes)
    believed = {} if partition.predicted is None else matches(partition.predicted, local_hashes)
    result = {}
    for key in found.keys() | believed.keys():
        match, device = found.get(key, Matched(0)), believed.get(key, Matched(0)).device
        tiers = "d" * match.device + "h" * match.host + "k" * match.disk
        tiers = "d" * device + tiers[device:]
        result[key] = Matched(tiers.count("d"), tiers.count("h"), tiers.count("k"))
    return result


def candidates(partition: Partition, request: SelectionRequest) -> list[Candidate]:
    """Every rank the request may go to, busy or not; ejected ones when there are no others."""
    pinned, allowed = request.pinned, request.allowed_worker_ids
    ranks = [
        (worker, load)
        for worker in partition.workers.values()
        for load in worker.loads
        if pinned is None or load.key == (pinned.worker_id, pinned.dp_rank)
        if pinned is not None or allowed is None or worker.worker_id in allowed
        if request.required_taints <= worker.taints
        if request.role == "both" or worker.role in ("both", request.role)
    ]
    return [rank for rank in ranks if rank[1].key not in partition.health.out] or ranks


def not_busy(
    partition: Partition, request: SelectionRequest, ranks: list[Candidate]
) -> list[Candidate]:
    """The free ones, or else, as for a pin, busy ones of a worker that has others free."""

    def is_busy(worker: SchedulableWorker, load: RankLoad) -> bool:
        capacity = worker.total_kv_blocks, worker.max_num_batched_tokens
        limits = partition.threshold.limits(*capacity)
        tokens = 0 if worker.role == "decode" else load.active_prefill_tokens
        return limits.exceeded_by(
            tokens, 0 if worker.role == "prefill" else load.active_decode_blocks
        )

    free = [rank for rank in ranks if not is_busy(*rank)]
    if not free and request.pinned is not None:
        free = [rank for rank in ranks if not all(is_busy(rank[0], load) for load in rank[0].loads)]
    if ranks and not free:
        raise AllWorkersBusy
    return free


def rank_costs(
    partition: Partition,
    request: SelectionRequest,
    ranks: list[Candidate],
    matches: Matches,
    owed_tokens: int = 0,
    liked: dict[int, float] = {},  # noqa: B006
) -> list[float]:
    """The cost of each rank, in their order; `owed_tokens` were given to full ones, `liked` are
    weights of workers besides those of their taints."""
    prompt, terms = request.prompt, request.terms
    block_size, isl = partition.block_size, prompt.isl_tokens
    prefixes = partition.slots.active_prefix(prompt.sequence_hashes())
    preferred = preferences(request)
    tokens = [load.active_prefill_tokens for _, load in ranks]
    costs = []
    for (worker, load), active in zip(ranks, tokens, strict=True):
        match = matches.get(load.key, Matched(0))
        cached = cached_tokens(terms, match, block_size)
        raw = active + isl - min(isl, cached) + cached if terms.track_prefill else 0
        decay = credit_decay(terms, active - min(tokens), isl, block_size)
        credit = credit_blocks(terms, decay, match)
        requests = terms.request_weight * load.active_requests
        standing = (load.active_decode_blocks + requests) * terms.counts_decode
        prefill = terms.scale * max(0.0, raw / block_size - credit)
        weight = 0.0
        for name, value in preferred.items():
            if name in worker.taints:
                weight += value
        weight += liked.get(worker.worker_id, 0.0)
        factor = taint_factor(weight)
        if terms.knows_speeds:
            factor *= partition.speeds.factor(load)
        new: float = prompt.sequence_count - prefixes.get(load.key, 0)
        new *= terms.counts_decode
        if terms.eviction and isl > cached:
            added = terms.eviction * (isl - cached) / block_size
            if is_full(partition, worker, load):
                others = any(not is_full(partition, *rank) for rank in ranks)
                again = min(owed_tokens, cached) if others else 0
                added += terms.eviction * (0.5 * (isl - cached) + 2 * again) / block_size
            new += added
        off, least = 0.0, -math.inf
        if terms.credits_untracked and not terms.track_prefill:
            off = credit
            if new < off:  # of the blocks none may be left
                least = requests
        if load.mask & request.favoured:
            new = favoured_blocks(new, request.bonus_blocks, factor)
            least = favoured_blocks(least, request.bonus_blocks, factor)
        costs.append((prefill + max(standing + new - off, least)) * factor)
    return costs


def is_full(partition: Partition, worker: SchedulableWorker, load: RankLoad) -> bool:
    """Whether less than an eighth of its blocks is left, if it said how many it has."""
    total = worker.total_kv_blocks
    held = partition.index.blocks(*load.key, Tier.DEVICE)
    waiting = load.active_prefill_tokens // partition.block_size
    return not total or (total - held - waiting) * 8 <= total


def chances(costs: list[float], temperature: float) -> list[float]:
    """How likely each is to be drawn."""
    weights = softmax(costs, temperature)
    if weights is None:
        weights = [float(cost == min(costs)) for cost in costs]
    return [weight / sum(weights) for weight in weights]
