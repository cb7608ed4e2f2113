"""Optional parts of the answer to a selection: the explanation, the rank's load, and a hint where
to fetch blocks. These parts do not affect the choice. Spec selection_16.md 4 and 8."""

import heapq

import msgspec
from msgspec import UNSET, UnsetType

from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.numbers import U64_MAX
from lean_selector.core.rank_bits import bits_of
from lean_selector.core.selection.choice import Pricing, active_prefix_sets, all_costs, cells
from lean_selector.core.selection.cost import (
    burden_blocks,
    cached_tokens,
    credit_blocks,
    credit_decay,
    evicted_blocks,
    preferences,
    probabilities,
    taint_factor,
)
from lean_selector.core.selection.overlap import (
    NOTHING,
    MatchSets,
    by_bit,
    match_of,
    match_sets,
)
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.schedulable_worker import SchedulableWorker
from lean_selector.core.selection.scheduler import explained_session, taint_weights
from lean_selector.core.selection.shapes import (
    BOTH,
    EXPLANATION,
    HINT,
    OUTLOOK,
    Explanation,
    FetchHint,
    Placement,
    RankExplanation,
    RankOutlook,
    SelectionRequest,
)

# -- the explanation -------------------------------------------------------------------------------
# The explanation: the figures behind one choice, for each rank of the partition.
#
# Computed only on request, before the reservation is booked. The costs come from the cells and the
# formula of the choice; a test compares the other figures with them.


def explained(
    partition: Partition,
    request: SelectionRequest,
    ranks: int,
    matches: MatchSets,
    now: float,
    is_steered: bool = False,
    shown: int | None = None,
    best: int = 0,
) -> Explanation:
    """Explain the choice among the candidates `ranks`, and why other ranks are no candidates.
    `is_steered`: `ranks` was limited to the session's rank or the preferred worker. If `shown`
    is given, include only the ranks in `shown` and the N cheapest candidates, with N = `best`."""
    prompt, terms, order = request.prompt, request.terms, partition.order
    block_size = partition.block_size
    pricing = Pricing(partition, request, ranks)
    found = cells(partition, request, pricing, ranks, matches)
    bits: list[int] = []
    costs: list[float] = []
    for each, alike in all_costs(order, pricing, found):
        for bit in bits_of(alike):
            bits.append(bit)
            costs.append(each)
    chance_of_each, drawn = probabilities(costs, terms.temperature)
    chances = dict(zip(bits, zip(costs, chance_of_each, strict=True), strict=True))
    least_tokens = order.least_tokens(ranks)
    if shown is None:
        shown = partition.everyone
    else:
        for _, bit in heapq.nsmallest(best, zip(costs, bits, strict=True)):
            shown |= 1 << bit
    held = by_bit(matches, shown)
    shares = by_bit(active_prefix_sets(partition, request), shown)
    weights = by_bit(taint_weights(partition, preferences(request), request.liked), shown)
    favoured, bonus = request.favoured, request.bonus_blocks
    unfavoured: float | UnsetType = 0.0 if favoured else UNSET
    owed = partition.fullness.owed_tokens(ranks, request.role)
    speed = partition.speeds.seconds_per_token
    rows = []
    for worker_id, worker in sorted(partition.workers.items()):
        for load in worker.loads:
            if not load.mask & shown:
                continue
            chance = chances.get(load.bit)
            match = held.get(load.bit, NOTHING)
            tokens = load.active_prefill_tokens
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
                    burden_blocks(terms, max(0, prompt.isl_tokens - cached), block_size)
                    if terms.eviction
                    else UNSET,
                    _evicted(partition, request, load, cached, owed),
                    partition.speeds.factor(load) if terms.knows_speeds else UNSET,
                    UNSET if (seconds := speed(load)) is None else seconds * (tokens + added),
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


def _evicted(
    partition: Partition, request: SelectionRequest, load: RankLoad, cached: int, owed: int
) -> float | UnsetType:
    terms, isl_tokens = request.terms, request.prompt.isl_tokens
    if not terms.eviction:
        return UNSET
    if cached >= isl_tokens or not partition.fullness.full() & load.mask:
        return 0.0
    return evicted_blocks(terms, isl_tokens, cached, owed, partition.block_size)


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
    mask, role, room = load.mask, request.role, partition.queue.room
    if not mask & partition.usable(role):
        if mask & partition.draining:
            return "draining"
        return "ejected" if mask & partition.ejected else "role"
    if is_steered:
        return "affinity"
    if not mask & partition.busy and room is not None and not room.below & mask:
        return "queue"
    return "busy" if mask & partition.busy or role == BOTH else "partner"


def with_more(
    partition: Partition,
    request: SelectionRequest,
    ranks: int,
    matches: MatchSets,
    chosen: tuple[RankLoad, Placement],
    now: float,
    is_steered: bool = False,
) -> Placement:
    """Return the answer for the chosen rank, with the optional parts in `request.adds`. `ranks` are
    the candidates among which the choice was made."""
    load, placement = chosen
    if request.adds & EXPLANATION:
        why = explained(partition, request, ranks, matches, now, is_steered)
        placement = msgspec.structs.replace(placement, explain=why)
    if request.adds & OUTLOOK:
        outlook = outlook_of(partition, request, matches, load)
        placement = msgspec.structs.replace(placement, outlook=outlook)
    return placement


def outlook_of(
    partition: Partition,
    request: SelectionRequest,
    matches: MatchSets,
    load: RankLoad,
) -> RankOutlook:
    worker = partition.workers[load.worker_id]
    shared = by_bit(active_prefix_sets(partition, request), load.mask).get(load.bit, 0)
    hint = None
    if request.adds & HINT and worker.hint_type and partition.routed is None:
        hint = _hint(partition, worker, load, request, matches)
    return RankOutlook(
        load.active_decode_blocks + request.prompt.blocks(partition.block_size) - shared,
        min(load.active_prefill_tokens, U64_MAX),
        worker.max_num_batched_tokens,
        worker.total_kv_blocks,
        hint,
    )


def _hint(
    partition: Partition,
    worker: SchedulableWorker,
    load: RankLoad,
    request: SelectionRequest,
    matches: MatchSets,
) -> FetchHint | None:
    """Return from which rank the chosen rank can fetch blocks: the rank with the most of the
    prompt's leading blocks in device memory. That rank must have a control endpoint, and the same
    `router_hint_worker_type`. Return None if the chosen rank has at least as many blocks."""
    local_hashes = request.prompt.local_hashes
    if request.matches:  # the request was queued, so its matches may be outdated
        matches = match_sets(partition, local_hashes)
    most, source, endpoint = match_of(matches, load.mask).device, load, ""
    for match, holding in matches:
        if match.device < max(most, 1):
            continue
        for bit in bits_of(holding & partition.everyone):
            other = partition.order.ranks[bit]
            its_worker = partition.workers[other.worker_id]
            where = its_worker.hint_sources.get(other.dp_rank)
            if where is None or its_worker.hint_type != worker.hint_type or other is load:
                continue
            if match.device > most or (source is not load and other.key < source.key):
                most, source, endpoint = match.device, other, where
    if source is load:
        return None
    hashes = partition.index.leading_hashes(source.key, local_hashes, most)
    return FetchHint(hashes, endpoint) if hashes else None  # else predicted, or of another source
