"""Make the answer for a chosen rank (spec selection.md 3.3)."""

from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.selection.cost import effective_prefill_tokens
from lean_selector.core.selection.overlap import NOTHING, MatchSets, by_bit
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.shapes import Overlap, Placement, SelectionRequest


def placed(
    partition: Partition, load: RankLoad, request: SelectionRequest, matches: MatchSets
) -> Placement:
    """Return the answer for a chosen rank. The overlap in the answer describes the whole worker."""
    worker, isl_tokens = partition.workers[load.worker_id], request.prompt.isl_tokens
    block_size, worker_id, endpoint = partition.block_size, worker.worker_id, worker.endpoint
    if len(worker.loads) == 1:
        own = NOTHING
        for match, ranks in matches:
            if ranks & load.mask:
                own = match
                break
        if own is NOTHING:
            return Placement(
                worker_id, load.dp_rank, endpoint, block_size, worker.no_overlap, isl_tokens
            )
        gpu = own.device * block_size
        cpu = gpu + own.host * block_size
        disk = cpu + own.disk * block_size
        overlap = Overlap(disk, gpu, {worker.rank_name: gpu}, cpu, disk)
    else:
        dp: dict[str, int] = {}
        gpu = cpu = disk = 0
        held = by_bit(matches, worker.mask)
        own = held.get(load.bit, NOTHING)
        for rank in worker.loads:
            match = held.get(rank.bit, NOTHING)
            device = match.device
            dp[str(rank.dp_rank)] = device * block_size
            gpu = max(gpu, device)
            cpu = max(cpu, device + match.host)
            disk = max(disk, device + match.host + match.disk)
        gpu, cpu, disk = gpu * block_size, cpu * block_size, disk * block_size
        overlap = Overlap(max(gpu, cpu, disk), gpu, dp, cpu, disk)
    left = effective_prefill_tokens(request.terms, isl_tokens, own, block_size)
    return Placement(worker_id, load.dp_rank, endpoint, block_size, overlap, left)
