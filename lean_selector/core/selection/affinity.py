"""Where a request would rather go: the rank that its session is bound to, or the one it names.

Neither enters the question whether a request has to wait or is shed; it decides among the ranks
that the request may go to. A target that it may go to is taken, busy or not, and so is the rank of
a hard session; the rank of a soft one is only made cheaper. What it may not go to is ignored, but
for a booking of a hard session, which is refused then, while the rank is one that others may go to.
Spec selection_16.md 3 and 6.
"""

from lean_selector.core.errors import BadRequest, Unavailable
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.records import (
    SelectionRequest,
    SessionExplanation,
)
from lean_selector.core.selection.scheduler import NO_ENDPOINTS, eligible


def steered(partition: Partition, request: SelectionRequest, ranks: int, now: float) -> int:
    """Those of `ranks` to choose from, or others in their place; for a soft session notes in the
    request whom to favour."""
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
        request.favoured = 0  # it may have been another while it waited
        return ranks
    named = ranks_named(partition, binding.worker_id, binding.dp_rank)
    if sessions.is_soft:
        request.favoured = named
        request.bonus_blocks = sessions.bonus_blocks
        return ranks
    return named & eligible(partition, request) or ranks


def ranks_named(partition: Partition, worker_id: int, dp_rank: int | None) -> int:
    """One rank, or all of a worker, as a set; empty where there is none that can be chosen."""
    if dp_rank is not None:
        load = partition.slots.ranks.get((worker_id, dp_rank))
        return 0 if load is None else load.mask
    worker = partition.workers.get(worker_id)
    return 0 if worker is None else worker.mask


def check_target(partition: Partition, request: SelectionRequest) -> None:
    """Of a request with a target and a pin. Raises BadRequest or Unavailable when a target that the
    request may go to, but for its pin, is elsewhere than that: nothing else is allowed then."""
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
    """Before a booking of a session on a rank: raises BadRequest where that is not its own, though
    its own could be chosen; then the session is bound no longer (D39)."""
    sessions = partition.sessions
    if sessions is None or sessions.is_soft:
        return
    binding = sessions.bound(session_id, now)
    if binding is None or binding.is_at(worker_id, dp_rank):
        return
    own = ranks_named(partition, binding.worker_id, binding.dp_rank)
    if not own & partition.candidates:
        return  # gone, or ejected: it is bound anew
    sessions.refuse(session_id)
    if binding.worker_id != worker_id:
        bound, chosen = f"worker {binding.worker_id}", f"{worker_id}"
    else:
        bound, chosen = f"DP rank {binding.dp_rank}", f"{dp_rank}"
    raise BadRequest(f"session {session_id} is bound to {bound}, not {chosen}")


def explained_session(
    partition: Partition, request: SelectionRequest, now: float
) -> SessionExplanation | None:
    """What the session of a request had to do with the choice; None where it has none."""
    sessions, session_id = partition.sessions, request.session_id
    if sessions is None or session_id is None:
        return None
    mode = "soft" if sessions.is_soft else "hard"
    binding = sessions.bound(session_id, now)
    if binding is None:
        return SessionExplanation(session_id, mode, False, None, None, 0)
    return SessionExplanation(
        session_id, mode, True, binding.worker_id, binding.dp_rank, binding.leases
    )
