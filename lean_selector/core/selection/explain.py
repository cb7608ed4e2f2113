"""Why this worker? The figures behind one choice, for every rank of the partition.

Made only for a request that asks, before it is booked, and never part of the choice itself: the
costs come of the same cells and the same formula, and a test holds the other figures against them.
"""

from msgspec import UNSET, UnsetType

from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.numbers import U64_MAX
from lean_selector.core.rank_bits import bits_of
from lean_selector.core.selection.affinity import explained_session
from lean_selector.core.selection.cells import (
    NOTHING,
    MatchSets,
    Pricing,
    active_prefix_sets,
    by_bit,
    cells,
    taint_weights,
)
from lean_selector.core.selection.choice import all_costs
from lean_selector.core.selection.cost import (
    cached_tokens,
    credit_blocks,
    credit_decay,
    preferences,
    probabilities,
    taint_factor,
)
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.records import Explanation, RankExplanation, SelectionRequest
from lean_selector.core.selection.schedulable import SchedulableWorker


def explained(
    partition: Partition,
    request: SelectionRequest,
    ranks: int,
    matches: MatchSets,
    now: float,
    is_steered: bool = False,
) -> Explanation:
    """What decides between `ranks`, the candidates, and why the others are none; `is_steered`: for
    the request goes where its session is bound, or to its target."""
    prompt, terms, order = request.prompt, request.terms, partition.order
    block_size = partition.block_size
    pricing = Pricing(partition, request, ranks, now)
    found = cells(partition, request, pricing, ranks, matches)
    bits: list[int] = []
    costs: list[float] = []
    for each, alike in all_costs(order, pricing, found, now):
        for bit in bits_of(alike):
            bits.append(bit)
            costs.append(each)
    chance_of_each, drawn = probabilities(costs, terms.temperature)
    chances = dict(zip(bits, zip(costs, chance_of_each, strict=True), strict=True))
    least_tokens = order.least_tokens(ranks, now)
    everyone = partition.everyone
    held = by_bit(matches, everyone)
    shares = by_bit(active_prefix_sets(partition, request), everyone)
    weights = by_bit(taint_weights(partition, preferences(request)), everyone)
    favoured, bonus = request.favoured, request.bonus_blocks
    unfavoured: float | UnsetType = 0.0 if favoured else UNSET
    rows = []
    for worker_id, worker in sorted(partition.workers.items()):
        for load in worker.loads:
            chance = chances.get(load.bit)
            match = held.get(load.bit, NOTHING)
            tokens = load.prefill_tokens_at(now)
            decay = credit_decay(terms, tokens - least_tokens, prompt.isl_tokens, block_size)
            cached = cached_tokens(terms, match, block_size)
            added = max(0, prompt.isl_tokens - cached) if terms.track_prefill else 0
            rows.append(
                RankExplanation(
                    worker_id,
                    load.dp_rank,
                    _why_not(partition, request, worker, load, is_steered)
                    if chance is None
                    else None,
                    match.device,
                    match.host,
                    match.disk,
                    min(tokens, U64_MAX),
                    min(tokens + added, U64_MAX),
                    load.active_decode_blocks,
                    load.active_decode_blocks + prompt.sequence_count - shares.get(load.bit, 0),
                    load.active_requests,
                    credit_blocks(terms, decay, match),
                    decay,
                    taint_factor(weights[load.bit]),
                    None if chance is None else chance[0],
                    0.0 if chance is None else chance[1],
                    bonus if load.mask & favoured else unfavoured,
                )
            )
    return Explanation(
        drawn,
        costs.count(min(costs)),
        terms.temperature,
        prompt.isl_tokens,
        prompt.sequence_count,
        rows,
        explained_session(partition, request, now) or UNSET,
    )


def _why_not(
    partition: Partition,
    request: SelectionRequest,
    worker: SchedulableWorker,
    load: RankLoad,
    is_steered: bool,
) -> str:
    pinned, allowed = request.pinned, request.allowed_worker_ids
    if pinned is not None and load.key != (pinned.worker_id, pinned.dp_rank):
        return "not_pinned"
    if allowed is not None and worker.worker_id not in allowed:
        return "not_allowed"
    if not request.required_taints <= worker.taints:
        return "taint"
    if not load.mask & partition.candidates:
        return "ejected"
    if is_steered:
        return "affinity"
    if load.mask & partition.busy or partition.room is None:
        return "busy"
    return "queue" if not partition.room.below & load.mask else "busy"
