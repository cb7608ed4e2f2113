"""Which rank: eligibility, the cost of each rank, and the draw (spec selection.md section 3).

    cached   = round((device + 0.75 host + 0.25 disk) * block_size)    tokens, half away from 0
    uncached = isl - min(isl, cached)
    raw      = active_prefill + uncached + cached, 0 when prefill is not tracked
    credit   = C * decay * device + 0.75 host + 0.25 disk               blocks
    cost     = (S * max(0, raw / block_size - credit) + active_blocks + new_blocks) * taint factor

All in f64. The lowest cost wins, equal ones are drawn uniformly over ranks; with a temperature the
draw is a softmax over the costs scaled to 0..1. Pure: the random source and the time are arguments.
"""

import math
import random
from collections.abc import Iterator

from lean_selector.core.errors import AllWorkersBusy, BadRequest, Unavailable
from lean_selector.core.kv_index import Matched
from lean_selector.core.partition import Partition, SchedulableWorker
from lean_selector.core.selection import Overlap, Placement, SelectionRequest
from lean_selector.core.settings import DISK_WEIGHT, HOST_WEIGHT, Terms
from lean_selector.core.slots import RankLoad

Matches = dict[tuple[int, int], Matched]
Candidate = tuple[SchedulableWorker, RankLoad]

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


def over_threshold(candidate: Candidate, threshold: float, now: float) -> bool:
    """True above `threshold` of what the worker batches at once, not at it."""
    worker, load = candidate
    return load.prefill_tokens_at(now) > threshold * worker.max_num_batched_tokens


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
    matches: Matches,
    rng: random.Random,
) -> tuple[RankLoad, Placement]:
    """What `place` does with those `not_busy`, for a request that `suits_order`, without visiting
    every rank. The partition must have a worker; raises AllWorkersBusy when all of them are.

    Ranks that hold something of the prompt are costed one by one; of all others only the least
    loaded can win, and the partition keeps its ranks in that order.
    """
    prompt = request.prompt
    isl, new_blocks = prompt.isl_tokens, prompt.sequence_count
    prefixes = active_prefixes(partition, request)
    ranks = partition.slots.ranks
    apart = []
    if matches or prefixes:
        apart = [ranks[key] for key in matches.keys() | prefixes.keys() if key in ranks]
        if partition.busy_ranks:
            apart = [load for load in apart if load.key not in partition.busy_ranks]
    order = partition.order
    if not order.buckets:
        raise AllWorkersBusy
    least = order.least(isl, new_blocks, apart)
    cost, ties = least.cost, least.count
    tied_apart: list[RankLoad] = []
    for load in apart:
        this = _plain_cost(partition, request, load, matches.get(load.key), prefixes)
        if not ties or this < cost:
            cost, ties, tied_apart = this, 1, [load]
            least.count = 0
        elif this == cost:
            ties += 1
            tied_apart.append(load)
    at = int(rng.random() * ties) if ties > 1 else 0
    if at < len(tied_apart):
        load = tied_apart[at]
    else:
        load = order.pick(least, at - len(tied_apart), apart)
    worker = partition.workers[load.worker_id]
    return load, placement(partition, worker, load, isl, matches)


def suits_order(partition: Partition, request: SelectionRequest, terms: Terms) -> bool:
    """True when load and overlap alone decide, on the router's own `terms`."""
    return (
        request.terms is terms
        and not terms.temperature
        and not terms.decay
        and terms.track_prefill
        and request.takes_any_rank()
        and not request.preferred_taints
        and not partition.slots.decaying_ranks
    )


def _plain_cost(
    partition: Partition,
    request: SelectionRequest,
    load: RankLoad,
    match: Matched | None,
    prefixes: dict[tuple[int, int], int],
) -> float:
    """The cost of one rank when nothing decays and no taint is preferred."""
    prompt, terms, block_size = request.prompt, request.terms, partition.block_size
    raw, credit = load.active_prefill_tokens + prompt.isl_tokens, 0.0
    if match is not None:
        raw += max(0, cached_tokens(match, block_size) - prompt.isl_tokens)
        credit = terms.credit * match.device + HOST_WEIGHT * match.host + DISK_WEIGHT * match.disk
    blocks = load.active_decode_blocks + prompt.sequence_count - prefixes.get(load.key, 0)
    return terms.scale * max(0.0, raw / block_size - credit) + blocks


def rank_costs(
    partition: Partition,
    request: SelectionRequest,
    ranks: list[Candidate],
    matches: Matches,
    now: float,
) -> list[float]:
    """The cost of each rank, in their order."""
    prompt, terms = request.prompt, request.terms
    block_size, isl = partition.block_size, prompt.isl_tokens
    new_blocks = prompt.sequence_count
    prefixes = active_prefixes(partition, request)
    taints = request.preferred_taints if request.pinned is None else {}
    tokens = [load.prefill_tokens_at(now) for _, load in ranks]
    least = min(tokens) if terms.decay > 0.0 else 0
    costs = []
    for (worker, load), active in zip(ranks, tokens, strict=True):
        key = (load.worker_id, load.dp_rank)
        match = matches.get(key)
        credit, decay = 0.0, 1.0
        raw = active + isl
        if match is not None:
            cached = cached_tokens(match, block_size)
            raw += max(0, cached - isl)
            if terms.track_prefill and terms.decay > 0.0:
                waiting = (active - least) / block_size
                decay = 1.0 / (1.0 + terms.decay * waiting / math.ceil(isl / block_size))
            credit = (
                terms.credit * decay * match.device
                + HOST_WEIGHT * match.host
                + DISK_WEIGHT * match.disk
            )
        if not terms.track_prefill:
            raw = 0
        prefill = terms.scale * max(0.0, raw / block_size - credit)
        cost = prefill + (load.active_decode_blocks + new_blocks - prefixes.get(key, 0))
        if taints:
            weight = sum(value for name, value in taints.items() if name in worker.taints)
            cost *= math.exp(-math.tanh(weight))
        costs.append(cost)
    return costs


def active_prefixes(partition: Partition, request: SelectionRequest) -> dict[tuple[int, int], int]:
    """Leading blocks of the prompt that are active already, per rank; absent means none.

    The hashes are decoded only when some active prompt starts with the first of them (D21); a
    booking decodes them in any case, before it gets here.
    """
    prompt, slots = request.prompt, partition.slots
    if not prompt.sequence_count or slots.starts_no_prompt(prompt.first_sequence_hash):
        return {}
    return slots.active_prefix(prompt.sequence_hashes())


def draw(costs: list[float], temperature: float, rng: random.Random) -> int:
    """The index of the rank to take."""
    least = min(costs)
    if temperature > 0.0:
        spread = max(costs) - least
        if spread > 0.0:
            weights = [math.exp(-((cost - least) / spread) / temperature) for cost in costs]
            return rng.choices(range(len(costs)), weights)[0]
    ties = [index for index, cost in enumerate(costs) if cost == least]
    return ties[0] if len(ties) == 1 else ties[int(rng.random() * len(ties))]


def cached_tokens(match: Matched, block_size: int) -> int:
    """Tokens that a rank need not prefill, one rounding of the weighted sum."""
    blocks = match.device + HOST_WEIGHT * match.host + DISK_WEIGHT * match.disk
    return math.floor(blocks * block_size + 0.5)  # exact: multiples of 1/4 are below 2**51


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
