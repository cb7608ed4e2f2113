"""Which rank: who is eligible, which of them is taken, and what the answer says of it.

Two roads lead to the same choice. The general one costs each candidate (`cost`). The one by order
of load, for requests where load and overlap alone decide, visits hardly any. Pure: the random
source and the time are arguments. Spec selection.md 3.1, 3.3 and 4.
"""

import math
import random
from collections.abc import Iterator

from lean_selector.core.errors import AllWorkersBusy, BadRequest, Unavailable
from lean_selector.core.index.kv_index import Matched
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.rank_bits import nth_bit
from lean_selector.core.selection.cost import (
    Candidate,
    Matches,
    cached_tokens,
    cost_of,
    credit_blocks,
    draw,
    rank_costs,
)
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.records import Overlap, Placement, SelectionRequest
from lean_selector.core.selection.schedulable import SchedulableWorker
from lean_selector.core.selection.settings import Terms

RankSets = list[tuple[int, int]]  # (blocks, the ranks that have so many), apart from each other

NO_ENDPOINTS = "no endpoints available to route work"


def check_pin(request: SelectionRequest) -> None:
    """Raises BadRequest when the pinned worker is not among the allowed ones."""
    pinned, allowed = request.pinned, request.allowed_worker_ids
    if pinned is not None and allowed is not None and pinned.worker_id not in allowed:
        raise BadRequest(f"pinned worker {pinned.worker_id} is not in allowed worker set")


def candidates(partition: Partition, request: SelectionRequest) -> list[Candidate]:
    """Every rank the request may go to, busy or not."""
    pinned = request.pinned
    return [
        (worker, load)
        for worker in _eligible_workers(partition, request)
        for load in worker.loads
        if pinned is None or load.dp_rank == pinned.dp_rank
    ]


def _eligible_workers(
    partition: Partition, request: SelectionRequest
) -> Iterator[SchedulableWorker]:
    pinned, allowed, required = (
        request.pinned,
        request.allowed_worker_ids,
        request.required_taints,
    )
    if pinned is not None:
        worker = partition.workers.get(pinned.worker_id)
        if worker is not None and required <= worker.taints:
            yield worker
        return
    for worker in partition.workers.values():
        if allowed is not None and worker.worker_id not in allowed:
            continue
        if required and not required <= worker.taints:
            continue
        yield worker


def all_busy(partition: Partition) -> bool:
    """True when every rank is known to be busy; with loads that wear off each has to be asked."""
    return (
        not partition.order.everyone
        and bool(partition.busy_ranks)
        and not partition.slots.decaying_ranks
    )


def not_busy(partition: Partition, ranks: list[Candidate], now: float) -> list[Candidate]:
    """Those of `ranks` to choose from: the free ones, or else, as for a request pinned to one rank,
    busy ones of a worker that has others free. Raises AllWorkersBusy when some were and none are.
    """
    if not partition.busy_ranks or not ranks:
        return ranks
    free = [rank for rank in ranks if not partition.is_rank_busy(rank[1], now)]
    if not free:
        free = [rank for rank in ranks if not partition.is_worker_busy(rank[0], now)]
    if not free:
        raise AllWorkersBusy
    return free


def place(
    partition: Partition,
    request: SelectionRequest,
    ranks: list[Candidate],
    matches: Matches,
    now: float,
    rng: random.Random,
) -> tuple[RankLoad, Placement]:
    """Chooses among `ranks`. Raises Unavailable when there is none."""
    if not ranks:
        raise Unavailable(NO_ENDPOINTS)
    if len(ranks) == 1:
        chosen = ranks[0]
    else:
        costs = rank_costs(partition, request, ranks, matches, now)
        chosen = ranks[draw(costs, request.terms.temperature, rng)]
    worker, load = chosen
    return load, placement(partition, worker, load, request.prompt.isl_tokens, matches)


def place_by_order(
    partition: Partition,
    request: SelectionRequest,
    rng: random.Random,
    among: int | None = None,
) -> tuple[RankLoad, Placement]:
    """What `place` does for a request that `suits_order`, without visiting every rank.

    Ranks fall into sets that hold equally many blocks, cached and active; within a set only load
    decides, and the partition keeps its ranks in that order. Ranks with blocks on lower tiers are
    costed one by one. `among` are the ranks to choose from, all that are not busy by default; there
    is one.
    """
    prompt, terms, order = request.prompt, request.terms, partition.order
    block_size, isl, new_blocks = partition.block_size, prompt.isl_tokens, prompt.sequence_count
    matched, extended = partition.index.match_sets(prompt.local_hashes)
    active = active_prefix_sets(partition, request)
    rest = order.everyone if among is None else among
    if not (matched or active or extended):
        load = order.rank(_drawn(order.least(rest, isl, 0.0, new_blocks)[1], rng))
        worker = partition.workers[load.worker_id]
        return load, Placement(
            load.worker_id, load.dp_rank, worker.endpoint, block_size, worker.no_overlap, isl
        )
    least, tied = math.inf, list[int]()
    for key, match in extended.items():
        rank = partition.slots.ranks.get(key)
        if rank is None or not rank.mask & rest:
            continue
        rest ^= rank.mask
        cost = _plain_cost(partition, request, rank, match, active)
        if cost < least:
            least, tied = cost, [rank.mask]
        elif cost == least:
            tied.append(rank.mask)
    matched.reverse()
    matched.append((0, rest))
    # No rank is less loaded than the first, so a set may be too dear to be looked at.
    idle = order.least_key() + new_blocks
    for device, ranks in matched:
        alike = ranks & rest
        if not alike:
            continue
        rest ^= alike
        cached = device * block_size
        tokens = cached if cached > isl else isl
        credit = terms.credit * device
        floor = terms.scale * (tokens / block_size - credit) + idle
        for shared, sharing in active:
            if floor - shared > least + 1e-9 * (1.0 + least):
                break  # and those that follow share less
            cell = alike & sharing
            if cell:
                alike ^= cell
                cost, ties = order.least(cell, tokens, credit, new_blocks - shared)
                if cost < least:
                    least, tied = cost, ties
                elif cost == least:
                    tied += ties
        if alike and floor <= least + 1e-9 * (1.0 + least):
            cost, ties = order.least(alike, tokens, credit, new_blocks)
            if cost < least:
                least, tied = cost, ties
            elif cost == least:
                tied += ties
    load = order.rank(_drawn(tied, rng))
    worker = partition.workers[load.worker_id]
    if len(worker.loads) > 1 or extended:
        matches = extended
        for device, ranks in matched:
            for rank in worker.loads:
                if device and rank.mask & ranks:
                    matches[rank.key] = Matched(device)
        return load, placement(partition, worker, load, isl, matches)
    cached = 0
    for device, ranks in matched:
        if ranks & load.mask:
            cached = device * block_size
            break
    if not cached:
        overlap = worker.no_overlap
    else:
        overlap = Overlap(cached, cached, {worker.rank_name: cached}, cached, cached)
        isl = max(0, isl - cached)
    return load, Placement(load.worker_id, load.dp_rank, worker.endpoint, block_size, overlap, isl)


def _drawn(tied: list[int], rng: random.Random) -> int:
    """The bit of one rank of these sets, each as likely as any other."""
    if len(tied) == 1:
        ranks = tied[0]
        count = ranks.bit_count()
        return nth_bit(ranks, int(rng.random() * count)) if count > 1 else ranks.bit_length() - 1
    counts = [ranks.bit_count() for ranks in tied]
    total = sum(counts)
    at = int(rng.random() * total)
    for ranks, count in zip(tied, counts, strict=True):
        if at < count:
            return nth_bit(ranks, at)
        at -= count
    raise AssertionError("at is below the sum of the counts")


def suits_order(partition: Partition, request: SelectionRequest, terms: Terms) -> bool:
    """True when load and overlap alone decide, on the router's own `terms`, and a rank is free."""
    return (
        request.terms is terms
        and not terms.temperature
        and not terms.decay
        and terms.track_prefill
        and request.takes_any_rank()
        and not request.preferred_taints
        and not partition.slots.decaying_ranks
        and partition.order.everyone > 0
    )


def _plain_cost(
    partition: Partition,
    request: SelectionRequest,
    load: RankLoad,
    match: Matched,
    active: RankSets,
) -> float:
    """The cost of one rank when nothing decays and no taint is preferred."""
    prompt, terms, block_size = request.prompt, request.terms, partition.block_size
    shared = next((blocks for blocks, ranks in active if ranks & load.mask), 0)
    raw = load.active_prefill_tokens + max(prompt.isl_tokens, cached_tokens(match, block_size))
    blocks = load.active_decode_blocks + prompt.sequence_count - shared
    return cost_of(terms, block_size, raw, credit_blocks(terms, 1.0, match), blocks)


def active_prefix_sets(partition: Partition, request: SelectionRequest) -> RankSets:
    """The same as sets of ranks, longest prefix first."""
    prompt, slots = request.prompt, partition.slots
    if not prompt.sequence_count or slots.starts_no_prompt(prompt.first_sequence_hash):
        return []
    return slots.active_prefix_sets(prompt.sequence_hashes())


def effective_prefill_tokens(isl_tokens: int, match: Matched | None, block_size: int) -> int:
    """What the rank still has to prefill. Neither the credit nor its decay enters (section 4)."""
    if match is None:
        return isl_tokens
    return max(0, isl_tokens - cached_tokens(match, block_size))


def placement(
    partition: Partition,
    worker: SchedulableWorker,
    load: RankLoad,
    isl_tokens: int,
    matches: Matches,
) -> Placement:
    """What the answer says of a chosen rank: the overlap is about its whole worker."""
    block_size, worker_id = partition.block_size, worker.worker_id
    dp: dict[str, int] = {}
    gpu = cpu = disk = 0
    for rank in worker.loads:
        match = matches.get((worker_id, rank.dp_rank)) if matches else None
        if match is None:
            dp[str(rank.dp_rank)] = 0
            continue
        device = match.device
        dp[str(rank.dp_rank)] = device * block_size
        gpu = max(gpu, device)
        cpu = max(cpu, device + match.host)
        disk = max(disk, device + match.host + match.disk)
    gpu, cpu, disk = gpu * block_size, cpu * block_size, disk * block_size
    return Placement(
        worker_id,
        load.dp_rank,
        worker.endpoint,
        block_size,
        Overlap(max(gpu, cpu, disk), gpu, dp, cpu, disk),
        effective_prefill_tokens(
            isl_tokens, matches.get((worker_id, load.dp_rank)) if matches else None, block_size
        ),
    )
