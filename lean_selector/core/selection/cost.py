"""What it would cost a rank to take a prompt, and the draw among costs (selection.md 3.2 and 3.3).

    cached   = round((device + 0.75 host + 0.25 disk) * block_size)    tokens, half away from 0
    uncached = isl - min(isl, cached)
    raw      = active_prefill + uncached + cached, 0 when prefill is not tracked
    decay    = 1 / (1 + D * waiting blocks / prompt blocks), of the rank above the least loaded one
    credit   = C * decay * device + 0.75 host + 0.25 disk               blocks
    cost     = (S * max(0, raw / block_size - credit) + active_blocks + new_blocks) * taint factor

All in f64. The lowest cost wins, equal ones are drawn uniformly over ranks; with a temperature the
draw is a softmax over the costs scaled to 0..1. Each line stands once below, for the choice and for
its explanation; only the choice by order of load (`scheduler.place_by_order`, `LoadOrder.least`)
spells the formula again, in its own shape, and a property test holds it to this one.
"""

import math
import random

from lean_selector.core.index.kv_index import Matched
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.records import SelectionRequest
from lean_selector.core.selection.schedulable import SchedulableWorker
from lean_selector.core.selection.settings import DISK_WEIGHT, HOST_WEIGHT, Terms

Matches = dict[tuple[int, int], Matched]
Candidate = tuple[SchedulableWorker, RankLoad]


# -- the terms ------------------------------------------------------------------------------------


def cached_tokens(match: Matched, block_size: int) -> int:
    """Tokens that a rank need not prefill, one rounding of the weighted sum."""
    blocks = match.device + HOST_WEIGHT * match.host + DISK_WEIGHT * match.disk
    return math.floor(blocks * block_size + 0.5)  # exact: multiples of 1/4 are below 2**51


def credit_decay(terms: Terms, waiting_tokens: int, isl_tokens: int, block_size: int) -> float:
    """What of the credit for device blocks is left on a rank that has so much more to prefill than
    the least loaded one; 1.0 where nothing decays."""
    if terms.decay <= 0.0 or not terms.track_prefill:
        return 1.0
    waiting = max(0, waiting_tokens) / block_size
    return 1.0 / (1.0 + terms.decay * waiting / math.ceil(isl_tokens / block_size))


def credit_blocks(terms: Terms, decay: float, match: Matched) -> float:
    """Blocks of prefill that what is cached saves."""
    return terms.credit * decay * match.device + HOST_WEIGHT * match.host + DISK_WEIGHT * match.disk


def taint_factor(preferred: dict[str, float], taints: frozenset[str]) -> float:
    """Below 1 for a worker with taints of positive weight in sum, above 1 for a negative one."""
    weight = sum(value for name, value in preferred.items() if name in taints)
    # Infinities of both signs are no preference.
    return 1.0 if math.isnan(weight) else math.exp(-math.tanh(weight))


def preferences(request: SelectionRequest) -> dict[str, float]:
    """The preferred taints that count: none where the rank is given."""
    return request.preferred_taints if request.pinned is None else {}


def cost_of(terms: Terms, block_size: int, raw_tokens: int, credit: float, blocks: int) -> float:
    """Of one rank, before its taints; `blocks` are active there with this prompt on top."""
    return terms.scale * max(0.0, raw_tokens / block_size - credit) + blocks


# -- the cost of ranks ----------------------------------------------------------------------------


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
    preferred = preferences(request)
    tokens = [load.prefill_tokens_at(now) for _, load in ranks]
    least = min(tokens) if terms.decay > 0.0 else 0
    tracked = terms.track_prefill
    costs = []
    for (worker, load), active in zip(ranks, tokens, strict=True):
        key = load.key
        match = matches.get(key)
        credit = 0.0
        raw = active + isl
        if match is not None:
            raw += max(0, cached_tokens(match, block_size) - isl)
            credit = credit_blocks(
                terms, credit_decay(terms, active - least, isl, block_size), match
            )
        blocks = load.active_decode_blocks + new_blocks - prefixes.get(key, 0)
        cost = cost_of(terms, block_size, raw if tracked else 0, credit, blocks)
        if preferred:
            cost *= taint_factor(preferred, worker.taints)
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


# -- the draw -------------------------------------------------------------------------------------


def draw(costs: list[float], temperature: float, rng: random.Random) -> int:
    """The index of the rank to take."""
    weights = _softmax(costs, temperature)
    if weights is not None:
        return rng.choices(range(len(costs)), weights)[0]
    least = min(costs)
    ties = [index for index, cost in enumerate(costs) if cost == least]
    return ties[0] if len(ties) == 1 else ties[int(rng.random() * len(ties))]


def probabilities(costs: list[float], temperature: float) -> tuple[list[float], str]:
    """The chance that `draw` gives each, and which way it goes: only_candidate, lowest_cost,
    uniform_tie or softmax."""
    if len(costs) == 1:
        return [1.0], "only_candidate"
    weights = _softmax(costs, temperature)
    if weights is not None:
        total = sum(weights)
        return [weight / total for weight in weights], "softmax"
    least = min(costs)
    ties = costs.count(least)
    return (
        [1.0 / ties if cost == least else 0.0 for cost in costs],
        "lowest_cost" if ties == 1 else "uniform_tie",
    )


def _softmax(costs: list[float], temperature: float) -> list[float] | None:
    """Weights of the draw; None where the lowest cost decides."""
    if temperature <= 0.0:
        return None
    least = min(costs)
    spread = max(costs) - least
    if not 0.0 < spread < math.inf:  # beyond f64 the finite costs are all equally good
        return None
    return [math.exp(-((cost - least) / spread) / temperature) for cost in costs]
