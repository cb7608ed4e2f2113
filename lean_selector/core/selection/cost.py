"""The cost of a prompt on a rank, and the draw by cost (selection.md 3.2 and 3.3).

    cached   = round((device + Wh host + Wd disk) * block_size)        tokens, half away from 0
    uncached = isl - min(isl, cached)
    raw      = active_prefill + uncached + cached
    decay    = 1 / (1 + D * excess / prompt blocks)     excess: prefill blocks that wait on the rank
                                         beyond those on the least loaded rank
    credit   = C * decay * device + Wh host + Wd disk                   blocks
    blocks   = active_blocks + new_blocks
    prefill  = S * max(0, raw / block_size - credit)
    cost     = (prefill + blocks + Wr * active_requests) * taint factor
               - bonus, on the rank that a soft session is bound to

`device`, `host`, `disk`: matched blocks on each tier; `new_blocks`: the prompt's blocks that no
running request has there; `isl`: its tokens. Settings: overlap credit C, its decay D, prefill load
scale S, weights Wh (by default 0.75), Wd (0.25), Wr (0). Values are f64. If prefill is not tracked,
it is 0, decay is 1, and with `--api 1.6` blocks = max(0, active_blocks + new_blocks - credit).

With the policy `latency`, D is 0 and S is 30: a block of prefill costs as much as 30 active blocks.
A session's bonus counts 30-fold. The cost is multiplied by the rank's slowness
(`core/load/speeds.py`). If prefill is tracked, two terms are added to blocks:

    burden   = 30 * uncached / block_size
    evicted  = 30 * (uncached / 2 + 2 * min(owed, cached)) / block_size

`burden` is the delay of later requests by this prompt's prefill. `evicted` counts only if the
rank's cache is full; half of the evicted blocks are assumed to be requested again. `fullness.py`
explains `owed`.

The lowest cost wins; ties are broken uniformly at random. With a temperature, the draw is a softmax
over the costs scaled to 0..1."""

import math

from msgspec.structs import replace

from lean_selector.core.index.shapes import Matched
from lean_selector.core.selection.router_settings import (
    CostTerms,
    Policy,
    RouterOverride,
    RouterSettings,
)
from lean_selector.core.selection.shapes import SelectionRequest


def cached_tokens(terms: CostTerms, match: Matched, block_size: int) -> int:
    """Return the tokens that a rank need not prefill: a weighted sum over the tiers, rounded."""
    if not match.host and not match.disk:
        return match.device * block_size
    blocks = match.device + terms.host_weight * match.host + terms.disk_weight * match.disk
    tokens = blocks * block_size
    whole = math.floor(tokens)
    return whole + (tokens - whole >= 0.5)  # exact, unlike tokens + 0.5


def effective_prefill_tokens(
    terms: CostTerms, isl_tokens: int, match: Matched, block_size: int
) -> int:
    """Return how many tokens of the prompt a rank with these cached blocks has to prefill."""
    return max(0, isl_tokens - cached_tokens(terms, match, block_size))


def burden_blocks(terms: CostTerms, uncached_tokens: int, block_size: int) -> float:
    """Return how much a prompt's prefill delays later requests, as a cost in blocks."""
    return terms.eviction * uncached_tokens / block_size


def evicted_blocks(
    terms: CostTerms, isl_tokens: int, cached: int, owed_tokens: int, block_size: int
) -> float:
    """Return the cost, in blocks, of evictions on a rank with a full cache. A prompt's uncached
    tokens evict other blocks. Of its `cached` tokens, up to `owed_tokens` count as evicted too."""
    evicted = _MISSED * (isl_tokens - cached) + 2 * min(owed_tokens, cached)
    return terms.eviction * evicted / block_size


def credit_decay(terms: CostTerms, waiting_tokens: int, isl_tokens: int, block_size: int) -> float:
    """Return the factor on the credit for blocks in device memory. It is below 1 on a rank with
    more waiting prefill than the least loaded rank. If the decay setting is 0, the factor is 1."""
    if terms.decay <= 0.0 or not terms.track_prefill:
        return 1.0
    waiting = max(0, waiting_tokens) / block_size
    blocks = max(1, math.ceil(isl_tokens / block_size))  # an empty prompt counts as one block
    return 1.0 / (1.0 + terms.decay * waiting / blocks)


def credit_blocks(terms: CostTerms, decay: float, match: Matched) -> float:
    """Return the credit for cached blocks: how many blocks of prefill they save."""
    lower = terms.host_weight * match.host + terms.disk_weight * match.disk
    return terms.credit * decay * match.device + lower


def favoured_blocks(new_blocks: float, bonus: float, factor: float) -> float:
    """Return `new_blocks` minus the bonus for the rank of a soft session. The bonus is divided by
    `factor`, because the whole cost is multiplied by `factor` later."""
    return new_blocks - bonus / factor


def taint_factor(weight: float) -> float:
    """Return the cost factor for a worker whose preferred taints have this total weight: below 1 if
    the weight is positive, above 1 if it is negative."""
    # Weights of both infinities add up to NaN: no preference.
    return 1.0 if math.isnan(weight) else math.exp(-math.tanh(weight))


def preferences(request: SelectionRequest) -> dict[str, float]:
    """Return the request's weights for taints (worker labels); empty if the request is pinned."""
    return request.preferred_taints if request.pinned is None else {}


def softmax(costs: list[float], temperature: float) -> list[float] | None:
    """Return each cost's weight in a draw; None without temperature, or if all costs are equal."""
    if temperature <= 0.0:
        return None
    least = min(costs)
    spread = max(costs) - least
    if not 0.0 < spread < math.inf:  # costs beyond f64: all finite costs count as equal
        return None
    return [math.exp(-((cost - least) / spread) / temperature) for cost in costs]


def probabilities(costs: list[float], temperature: float) -> tuple[list[float], str]:
    """Return each rank's probability, given the ranks' costs, and how a rank is chosen:
    only_candidate, lowest_cost, uniform_tie or softmax."""
    if len(costs) == 1:
        return [1.0], "only_candidate"
    weights = softmax(costs, temperature)
    if weights is not None:
        total = sum(weights)
        return [weight / total for weight in weights], "softmax"
    least = min(costs)
    ties = costs.count(least)
    return (
        [1.0 / ties if cost == least else 0.0 for cost in costs],
        "lowest_cost" if ties == 1 else "uniform_tie",
    )


# Under `latency`, a block of prefill weighs this many active blocks: active blocks slow prefill
# only slightly.
_LATENCY_SCALE = 30.0
_MISSED = 0.5  # assumed share of evicted blocks that are requested again


def terms(settings: RouterSettings) -> CostTerms:
    """Return the weights of the cost formula under the router's own settings and policy."""
    return under(base_terms(settings), settings.policy)


def under(base: CostTerms, policy: Policy) -> CostTerms:
    """Return the weights of the cost formula under `policy`, derived from `base`."""
    if policy == "dynamo":
        return base
    eviction = _LATENCY_SCALE if base.track_prefill else 0.0
    return replace(base, decay=0.0, scale=_LATENCY_SCALE, eviction=eviction, knows_speeds=True)


def base_terms(settings: RouterSettings) -> CostTerms:
    """Return the weights of the cost formula under the router's settings, before any policy."""
    return CostTerms(
        settings.overlap_score_credit,
        settings.overlap_score_credit_decay,
        settings.prefill_load_scale,
        settings.temperature,
        settings.track_prefill_tokens,
        settings.host_weight,
        settings.disk_weight,
        settings.active_request_weight,
        settings.dialect.credits_untracked,
    )


def overridden(base: CostTerms, override: RouterOverride, policy: Policy = "dynamo") -> CostTerms:
    """Return `base` with a request's overrides. `policy` applies if `override` names no policy."""
    credit, scale = override.overlap_score_credit, override.scale
    if override.overlap_score_weight == 0.0:
        credit = 0.0
    temperature, track = override.router_temperature, override.track_prefill_tokens
    found = replace(
        base,
        credit=base.credit if credit is None else credit,
        scale=base.scale if scale is None else scale,
        temperature=base.temperature if temperature is None else temperature,
        track_prefill=base.track_prefill if track is None else track,
    )
    return under(found, override.policy or policy)
