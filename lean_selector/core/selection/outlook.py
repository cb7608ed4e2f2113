"""What a placement says beside the choice, for a request that asks: its figures, the rank's load
before the booking, and who else could give the prompt's blocks.

Never part of the choice itself. Spec selection_16.md 4 and 8.
"""

import msgspec

from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.numbers import U64_MAX
from lean_selector.core.rank_bits import bits_of
from lean_selector.core.selection.cells import (
    MatchSets,
    active_prefix_sets,
    match_of,
    match_sets,
)
from lean_selector.core.selection.explain import explained
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.records import (
    EXPLANATION,
    HINT,
    OUTLOOK,
    FetchHint,
    Placement,
    RankOutlook,
    SelectionRequest,
)
from lean_selector.core.selection.schedulable import SchedulableWorker


def with_more(
    partition: Partition,
    request: SelectionRequest,
    ranks: int,
    matches: MatchSets,
    chosen: tuple[RankLoad, Placement],
    now: float,
    is_steered: bool = False,
) -> Placement:
    """The placement with what the request `adds`; `ranks` are those that it was chosen among."""
    load, placement = chosen
    if request.adds & EXPLANATION:
        why = explained(partition, request, ranks, matches, now, is_steered)
        placement = msgspec.structs.replace(placement, explain=why)
    if request.adds & OUTLOOK:
        outlook = _outlook(partition, request, matches, load, now)
        placement = msgspec.structs.replace(placement, outlook=outlook)
    return placement


def _outlook(
    partition: Partition,
    request: SelectionRequest,
    matches: MatchSets,
    load: RankLoad,
    now: float,
) -> RankOutlook:
    worker = partition.workers[load.worker_id]
    shared = 0
    for blocks, sharing in active_prefix_sets(partition, request):
        if sharing & load.mask:
            shared = blocks
            break
    hint = None
    if request.adds & HINT and worker.hint_type and partition.routed is None:
        hint = _hint(partition, worker, load, request, matches)
    return RankOutlook(
        load.active_decode_blocks + request.prompt.blocks(partition.block_size) - shared,
        min(load.prefill_tokens_at(now), U64_MAX),
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
    """The rank of a worker of the same type that holds most of the prompt on its device, if that is
    more than the chosen one does: of equals the first by worker and rank.

    Only what engines told can be named: never what is believed of bookings.
    """
    local_hashes = request.prompt.local_hashes
    if request.matches:  # it waited, and may have been chosen for by what is gone by now
        matches = match_sets(partition, local_hashes)
    most, source, endpoint = match_of(matches, load.mask).device, load, ""
    for match, holding in matches:
        if match.device < max(most, 1):
            continue
        for bit in bits_of(holding & partition.everyone):
            other = partition.order.rank(bit)
            its_worker = partition.workers[other.worker_id]
            where = its_worker.hint_sources.get(other.dp_rank)
            if where is None or its_worker.hint_type != worker.hint_type or other is load:
                continue
            if match.device > most or (source is not load and other.key < source.key):
                most, source, endpoint = match.device, other, where
    if source is load:
        return None
    names = partition.index.leading_names(source.key, local_hashes, most)
    return FetchHint(names, endpoint)
