"""What a worker's record must say for the worker to be scheduled, and where its events come from.

What is missing in a record, or does not agree with its partition, is a reason not to schedule the
worker, in the documented words and order, and no error of the request (spec selection.md section 2;
D3, D6, D10). Decides, never changes anything.
"""

from collections.abc import Iterable

from lean_selector.core.endpoints import check_endpoint, replay_endpoint_for
from lean_selector.core.errors import BadRequest
from lean_selector.core.numbers import MAX_RANKS, RANK_LIMIT
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.settings import RouterSettings
from lean_selector.core.selection.workers import BY_RANK, Source, WorkerSpec

MAX_ENTRIES = MAX_RANKS  # D28; of each list and map of a record


def check_limits(spec: WorkerSpec) -> None:
    """Raises BadRequest for a record of more ranks or entries than there may be."""
    size = spec.data_parallel_size
    if size is not None and size > MAX_RANKS:
        raise BadRequest(f"data_parallel_size {size} exceeds the maximum {MAX_RANKS}")
    for field in (*BY_RANK, "taints", "topology_domains"):
        count = len(getattr(spec, field))
        if count > MAX_ENTRIES:
            raise BadRequest(f"{field}: {count} entries exceed the maximum {MAX_ENTRIES}")


def judged(
    spec: WorkerSpec, partition: Partition | None, settings: RouterSettings
) -> tuple[list[str], dict[int, Source]]:
    """Why the worker cannot be scheduled in its partition (None: there is none yet), and by rank
    the sources to subscribe to; one of them is empty."""
    reasons = _missing(spec, settings)
    if reasons:
        return reasons, {}
    refusal = _mismatch(spec, partition, settings)
    if refusal is None:
        try:
            return [], _sources_of(spec, settings)
        except ValueError as error:
            refusal = str(error)
    return [f"reconciliation failed: {refusal}"], {}


def _missing(spec: WorkerSpec, settings: RouterSettings) -> list[str]:
    """What the record lacks, in the documented order."""
    reasons = []
    if not spec.endpoint:
        reasons.append("endpoint is required")
    if not spec.block_size:
        reasons.append("block_size must be greater than 0")
    if spec.data_parallel_size == 0:
        reasons.append("data_parallel_size must be greater than 0")
    if spec.max_num_batched_tokens is None and settings.queue_threshold is not None:
        reasons.append("max_num_batched_tokens is required while queueing is enabled")
    if spec.ranks.stop > RANK_LIMIT:
        reasons.append("data parallel range overflows u32")
    elif _listens_to(spec, settings):
        reasons += [
            f"kv_events endpoint is required for dp_rank {dp_rank}"
            for dp_rank in spec.ranks
            if not spec.kv_events_endpoint_of(dp_rank)
        ]
        one_rank_only = settings.dialect.replays_one_rank_only
        if one_rank_only and spec.replay_endpoint is not None and len(spec.ranks) > 1:
            reasons.append("replay_endpoint is supported only for data_parallel_size 1")
    return reasons


def _listens_to(spec: WorkerSpec, settings: RouterSettings) -> bool:
    """Whether the worker's events are to be heard, and so their sources to be known."""
    named = spec.kv_events_endpoint or spec.kv_events_endpoints
    return settings.use_kv_events and (settings.needs_kv_events or bool(named))


def _mismatch(
    spec: WorkerSpec, partition: Partition | None, settings: RouterSettings
) -> str | None:
    if partition is None or not partition.established:
        return None
    where = f"for {settings.dialect.scope(*spec.key)}"
    if partition.block_size != spec.block_size:
        return (
            f"block_size mismatch {where}: "
            f"existing={partition.block_size} requested={spec.block_size}"
        )
    if partition.is_eagle != bool(spec.is_eagle):
        existing, requested = str(partition.is_eagle).lower(), str(bool(spec.is_eagle)).lower()
        return f"is_eagle mismatch {where}: existing={existing} requested={requested}"
    return None


def _sources_of(spec: WorkerSpec, settings: RouterSettings) -> dict[int, Source]:
    """The sources to subscribe to. Raises ValueError: why one of them cannot be.

    An endpoint of a rank that the worker does not have must be one, and is not listened to (D28).
    """
    sources: dict[int, Source] = {}
    if not _listens_to(spec, settings):
        return sources
    is_of_worker = settings.dialect.replays_one_rank_only
    replay_fault: ValueError | None = None
    ranks: Iterable[int] = sorted(spec.kv_events_endpoints) or spec.ranks
    for dp_rank in ranks:
        endpoint = spec.kv_events_endpoint_of(dp_rank)
        assert endpoint is not None
        where = f"worker {spec.worker_id} dp_rank {dp_rank}"
        try:
            check_endpoint(endpoint)
        except ValueError as error:
            raise ValueError(f"invalid kv_events endpoint for {where}: {error}") from None
        try:
            source = Source(endpoint, _replay_endpoint_of(spec, dp_rank))
        except ValueError as error:
            if not is_of_worker:
                raise ValueError(f"invalid replay endpoint for {where}: {error}") from None
            where = f"worker {spec.worker_id}"
            replay_fault = ValueError(f"invalid replay endpoint for {where}: {error}")
            continue
        if dp_rank in spec.ranks:
            sources[dp_rank] = source
    if replay_fault is not None:
        raise replay_fault
    return sources


def _replay_endpoint_of(spec: WorkerSpec, dp_rank: int) -> str | None:
    """Where a rank's history is asked for: its own endpoint, or the port of its offset (vLLM).

    None where that port cannot exist, for the reference takes such a worker, too. Raises ValueError
    for an endpoint that is none.
    """
    own = spec.replay_endpoints.get(dp_rank)
    endpoint = spec.replay_endpoint if own is None else own
    if endpoint is None:
        return None
    check_endpoint(endpoint)
    offset = dp_rank - spec.ranks.start
    if own is not None or offset < 0:
        return own
    try:
        return replay_endpoint_for(endpoint, offset)
    except ValueError:
        return None
