"""Find the ranks that a request may use. A request can prefer a worker (its target) or the rank of
its session. `choice.py` chooses among the ranks. Spec selection.md 3.1 and 4."""

import math
from collections.abc import Iterable

from lean_selector.core.errors import NO_ENDPOINTS, AllWorkersBusy, BadRequest, Unavailable
from lean_selector.core.load.speeds import ONE_SPEED
from lean_selector.core.rank_bits import bits_of
from lean_selector.core.selection.cost import (
    effective_prefill_tokens,
    preferences,
    taint_factor,
)
from lean_selector.core.selection.overlap import EVERYONE, NOTHING, Groups, by_bit
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.shapes import (
    BOTH,
    DECODE,
    NEVER,
    SelectionRequest,
    SessionExplanation,
)


def free_ranks(partition: Partition, request: SelectionRequest) -> int:
    """Return the ranks that may serve a request now. Raises BadRequest (the pin contradicts the
    allowed workers or the target), Unavailable, or AllWorkersBusy, which is counted."""
    pinned, allowed = request.pinned, request.allowed_worker_ids
    if pinned is not None:
        if allowed is not None and pinned.worker_id not in allowed:
            raise BadRequest(f"pinned worker {pinned.worker_id} is not in allowed worker set")
        if request.target is not None:
            check_target(partition, request)
    try:
        return not_busy(partition, request, eligible(partition, request))
    except AllWorkersBusy:
        partition.count_shed(request.asked_at)
        raise


def eligible(partition: Partition, request: SelectionRequest) -> int:
    """Return the ranks that may do `request.role`, also busy ranks (see `not_busy`). Ejected ranks
    are included only if there are no others, for example for a pinned request."""
    pinned, allowed, role = request.pinned, request.allowed_worker_ids, request.role
    if pinned is None and allowed is None and not request.required_taints and role == BOTH:
        return partition.candidates
    ranks = -1
    if pinned is not None:
        load = partition.slots.ranks.get((pinned.worker_id, pinned.dp_rank))
        ranks &= 0 if load is None else load.mask
    elif allowed is not None:
        ranks &= partition.ranks_of(allowed)
    for taint in request.required_taints:
        ranks &= partition.tainted.get(taint, 0)
    return partition.usable(role, ranks)


def not_busy(partition: Partition, request: SelectionRequest, ranks: int) -> int:
    """Return those of `ranks` that are not busy (load not above the busy threshold). If all are
    busy, raise AllWorkersBusy. Exception: if the request is pinned, and another rank of the pinned
    worker is not busy, return all `ranks`."""
    busy = partition.busy
    if not busy or not ranks:
        return ranks
    free = ranks & ~busy
    if free:
        return free
    pinned = request.pinned
    if pinned is not None and partition.workers[pinned.worker_id].mask & ~busy:
        return ranks
    raise AllWorkersBusy


def least_left_to_prefill(partition: Partition, request: SelectionRequest) -> int:
    """Return the fewest tokens left to prefill on any rank that a queued request may use."""
    terms, isl_tokens = request.terms, request.prompt.isl_tokens
    ranks, least = eligible(partition, request), isl_tokens
    for match, holding in request.matches:
        if holding & ranks:
            size = partition.block_size
            least = min(least, effective_prefill_tokens(terms, isl_tokens, match, size))
    return least


def least_ttft_s(partition: Partition, request: SelectionRequest) -> tuple[float, float] | None:
    """Return the shortest time to first token on any rank that a queued request may use: behind
    what its rank has to prefill now, and alone. None if the speed of a rank is not known, and for
    requests that a certain rank or a pair serves."""
    sessions, size = partition.sessions, partition.block_size
    is_bound = sessions is not None and not sessions.is_soft and request.session_id is not None
    if request.pinned is not None or is_bound or request.disaggregate != NEVER:
        return None
    ranks, least = eligible(partition, request), (math.inf, math.inf)
    held = by_bit(request.matches, ranks)
    for bit in bits_of(ranks):
        load, match = partition.order.ranks[bit], held.get(bit, NOTHING)
        speed = partition.speeds.seconds_per_token(load)
        if speed is None:
            return None
        left = effective_prefill_tokens(request.terms, request.prompt.isl_tokens, match, size)
        behind = (load.active_prefill_tokens + left) * speed
        least = min(least[0], behind), min(least[1], left * speed)
    return least if ranks else None


# -- preferences -----------------------------------------------------------------------------------

NO_PREFERENCE: Groups = [(1.0, EVERYONE)]
_MANY_GROUPS = 64  # sets of ranks with different weights of their taints


def cost_factors(partition: Partition, request: SelectionRequest, ranks: int) -> Groups:
    """Group the ranks by the factor on their cost, which their taints and speeds give."""
    groups = NO_PREFERENCE
    if (preferred := preferences(request)) or request.liked:
        weighed = taint_weights(partition, preferred, request.liked)
        groups = [(taint_factor(weight), having) for weight, having in weighed]
    if request.terms.knows_speeds and (speeds := partition.speeds.sets) is not ONE_SPEED:
        groups = speeds if groups is NO_PREFERENCE else _both(groups, speeds, ranks)
    return groups


def _both(groups: Groups, others: Groups, ranks: int) -> Groups:
    """Intersect each set of `groups` with each set of `others`, and multiply their two factors."""
    return [
        (factor * other, both)
        for other, alike in others
        for factor, having in groups
        if (both := alike & having & ranks)
    ]


def taint_weights(
    partition: Partition, preferred: dict[str, float], liked: Iterable[tuple[float, int]] = ()
) -> Groups:
    """Group the ranks by the total weight of their worker's preferred taints, and of the sets
    `liked` that they are in: (weight, ranks)."""
    groups = [(0.0, EVERYONE)]
    for name, weight in preferred.items():
        if len(groups) > _MANY_GROUPS:
            groups = _weights_by_worker(partition, preferred)
            break
        groups = _with_weight(groups, weight, partition.tainted.get(name, 0))
    for weight, having in liked:
        groups = _with_weight(groups, weight, having)
    return groups


def _with_weight(groups: Groups, weight: float, having: int) -> Groups:
    with_it = [(total + weight, both) for total, ranks in groups if (both := ranks & having)]
    return [(total, rest) for total, ranks in groups if (rest := ranks & ~having)] + with_it


def _weights_by_worker(
    partition: Partition, preferred: dict[str, float]
) -> list[tuple[float, int]]:
    """Group the ranks by their taints worker by worker: faster if taints vary much."""
    positions = {name: position for position, name in enumerate(preferred)}
    sums: dict[float, int] = {}
    for worker in partition.workers.values():
        weight = 0.0
        for name in sorted([n for n in worker.taints if n in positions], key=positions.__getitem__):
            weight += preferred[name]
        sums[weight] = sums.get(weight, 0) | worker.mask
    return list(sums.items())


# -- steering --------------------------------------------------------------------------------------
# Steering: the rank that a session is bound to, or the target that a request names.
#
# Steering does not affect whether a request is queued or shed. It selects among the ranks that the
# request may use. A usable target is chosen even if it is busy, and so is the rank of a hard
# session. The rank of a soft session only costs less. An unusable rank is ignored, with one
# exception: a reservation with a hard session is refused if other requests could use the session's
# rank. Spec selection_16.md 3 and 6.


def steered(partition: Partition, request: SelectionRequest, ranks: int, now: float) -> int:
    """Return the eligible ranks of the request's target (a preferred worker or rank) or hard
    session. Return `ranks` if none is eligible. A soft session only makes its ranks cost less."""
    target, sessions = request.target, partition.sessions
    if target is not None:
        return (
            ranks_named(partition, target.worker_id, target.dp_rank) & eligible(partition, request)
            or ranks
        )
    binding = None
    if sessions is not None and request.session_id is not None:
        binding = sessions.bound(request.session_id, now)
    if sessions is None or binding is None:
        request.favoured = 0  # the binding may have changed while the request was queued
        return ranks
    named = ranks_named(partition, binding.worker_id, binding.dp_rank)
    if sessions.is_soft:
        request.favoured = named
        request.bonus_blocks = sessions.bonus_blocks * (request.terms.eviction or 1.0)
        return ranks
    return named & eligible(partition, request) or ranks


def ranks_named(partition: Partition, worker_id: int, dp_rank: int | None) -> int:
    """Return the set with this rank, or (`dp_rank` is None) with all ranks of the worker."""
    if dp_rank is not None:
        load = partition.slots.ranks.get((worker_id, dp_rank))
        return 0 if load is None else load.mask
    worker = partition.workers.get(worker_id)
    return 0 if worker is None else worker.mask


def check_target(partition: Partition, request: SelectionRequest) -> None:
    """Refuse a request that is pinned to a rank outside its target (a preferred worker or rank).
    Raises BadRequest if the pinned worker is not the target's, and Unavailable if only the rank
    differs. Does nothing if the request could not use its target even without the pin."""
    target, pinned = request.target, request.pinned
    assert target is not None, "it has one"
    assert pinned is not None, "it has one"
    if target.worker_id == pinned.worker_id and target.dp_rank in (None, pinned.dp_rank):
        return
    request.pinned = None
    open_to_it = eligible(partition, request)
    request.pinned = pinned
    if not ranks_named(partition, target.worker_id, target.dp_rank) & open_to_it:
        return
    if target.worker_id == pinned.worker_id:
        raise Unavailable(NO_ENDPOINTS)
    raise BadRequest(f"pinned worker {pinned.worker_id} is not in allowed worker set")


def check_session(
    partition: Partition, session_id: str, worker_id: int, dp_rank: int, now: float
) -> None:
    """If sessions are hard, and this session is bound to another rank that is still eligible,
    raise BadRequest (D39). Drop the binding, so that a retry is not refused."""
    sessions = partition.sessions
    if sessions is None or sessions.is_soft:
        return
    binding = sessions.bound(session_id, now)
    if binding is None or binding.is_at(worker_id, dp_rank):
        return
    own = ranks_named(partition, binding.worker_id, binding.dp_rank)
    if not own & partition.usable(DECODE):
        return  # the rank was removed or ejected: bind the session anew
    sessions.refuse(session_id)
    if binding.worker_id != worker_id:
        bound, chosen = f"worker {binding.worker_id}", f"{worker_id}"
    else:
        bound, chosen = f"DP rank {binding.dp_rank}", f"{dp_rank}"
    raise BadRequest(f"session {session_id} is bound to {bound}, not {chosen}")


def explained_session(
    partition: Partition, request: SelectionRequest, now: float
) -> SessionExplanation | None:
    """Return to which rank the request's session is bound; None if the request has no session."""
    sessions, session_id = partition.sessions, request.session_id
    if sessions is None or session_id is None:
        return None
    mode = "soft" if sessions.is_soft else "hard"
    binding = sessions.bound(session_id, now)
    if binding is None:
        return SessionExplanation(session_id, mode, False, None, None, 0)
    return SessionExplanation(
        session_id, mode, True, binding.worker_id, binding.dp_rank, binding.reservations
    )
