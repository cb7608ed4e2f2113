"""Read-only views: loads, projected loads, and overlap by rank.

Shapes and orders follow spec selection.md section 1.5 and indexer.md section 3.5. Lists are sorted
(D13), and sums above u64 saturate (D6)."""

import math
from collections.abc import Iterable

from msgspec import UNSET

from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.numbers import U64_MAX
from lean_selector.core.selection.catalog import Catalog
from lean_selector.core.selection.cost import cached_tokens, credit_blocks
from lean_selector.core.selection.overlap import NOTHING, match_by_rank
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.router_settings import CostTerms
from lean_selector.core.selection.shapes import (
    BOTH,
    DECODE,
    OverlapRow,
    OverlapScores,
    PartitionLoads,
    RankLoadRow,
)


def loads(
    catalog: Catalog,
    model_name: str | None,
    tenant_id: str | None,
    *,
    detail: bool = False,
) -> list[PartitionLoads]:
    """Return the active load of every rank, sorted by partition and rank. Names must match exactly;
    None matches all. `detail` adds the learned speeds."""
    return [
        PartitionLoads(
            partition.model_name,
            partition.tenant_id,
            [
                _load_row(partition, load, detail)
                for _, load in sorted(partition.slots.ranks.items())
            ],
            len(partition.queue),
            min(partition.queue.isl_tokens, U64_MAX),
        )
        for partition in established(catalog, model_name, tenant_id)
    ]


def saturation(partition: Partition, target_ttft_s: float = math.inf, role: str = BOTH) -> float:
    """Return how full the ranks are that may get new requests: 0 idle, 1 full, above 1 too few. A
    rank is as full as its waiting prefill or its active blocks, relative to the threshold at which
    it is busy, or else to the queue's threshold and to all its blocks. Prompts in the queue count
    as waiting prefill, in equal parts. With `target_ttft_s`, a rank is at least as full as the time
    of its waiting prefill, estimated if its speed is known, is to this. Return 2 if requests wait
    and there is no rank for them. `role`: only of the ranks for this part of requests."""
    queue, candidates = partition.queue, partition.usable(role)
    ranks = candidates.bit_count()
    if not ranks:
        return 2.0 if len(queue) else 0.0
    batches = queue.rules.threshold
    if not batches or math.isinf(batches):
        batches = 1.0
    queued, total = 0.0 if role == DECODE else queue.isl_tokens / ranks, 0.0
    for worker in partition.workers.values():
        if not worker.mask & candidates:
            continue
        batch, blocks = worker.max_num_batched_tokens, worker.total_kv_blocks
        limits = partition.threshold.limits(blocks, batch)
        most_tokens, most_blocks = limits.prefill_tokens, limits.decode_blocks
        if math.isinf(most_tokens):
            most_tokens = batches * batch
        if math.isinf(most_blocks) and blocks:
            most_blocks = float(blocks)
        for load in worker.loads:
            if load.mask & candidates:
                tokens = load.active_prefill_tokens + queued
                ttft_s = tokens * (partition.speeds.seconds_per_token(load) or 0.0)
                by_blocks = load.active_decode_blocks / max(1.0, most_blocks)
                total += max(tokens / max(1.0, most_tokens), by_blocks, ttft_s / target_ttft_s)
    return total / ranks


def _load_row(partition: Partition, load: RankLoad, detail: bool) -> RankLoadRow:
    seconds = partition.speeds.seconds_per_token(load) if detail else None
    error = load.counts.prediction_error if detail else None
    return RankLoadRow(
        *load.key,
        min(load.active_prefill_tokens, U64_MAX),
        load.active_decode_blocks,
        load.active_requests,
        1 / seconds if seconds else UNSET,
        UNSET if error is None else error,
    )


def established(
    catalog: Catalog, model_name: str | None, tenant_id: str | None
) -> Iterable[Partition]:
    """Return partitions that have had a schedulable worker, sorted by (model_name, tenant_id)."""
    return (
        partition
        for (model, tenant), partition in sorted(catalog.partitions.items())
        if partition.established
        and (model_name is None or model == model_name)
        and (tenant_id is None or tenant == tenant_id)
    )


def potential_loads(
    partition: Partition, prompt: Prompt, terms: CostTerms, *, in_pairs: bool = False
) -> list[RankLoadRow]:
    """Return the load that each rank would have with this prompt. `in_pairs`: ranks that only
    decode would not prefill it."""
    spared = partition.decode_only if in_pairs else 0
    matches = match_by_rank(partition, prompt.local_hashes)
    slots = partition.slots
    prefixes = slots.active_prefix(prompt.sequence_hashes()) if prompt.sequence_count else {}
    rows = []
    for rank, load in sorted(slots.ranks.items()):
        tokens = load.active_prefill_tokens
        if terms.track_prefill and not load.mask & spared:
            match = matches.get(rank)
            cached = 0 if match is None else cached_tokens(terms, match, partition.block_size)
            tokens += max(0, prompt.isl_tokens - cached)
        rows.append(
            RankLoadRow(
                *rank,
                min(tokens, U64_MAX),
                load.active_decode_blocks + prompt.sequence_count - prefixes.get(rank, 0),
                load.active_requests,
            )
        )
    return rows


def overlap_scores(partition: Partition, local_hashes: bytes, terms: CostTerms) -> OverlapScores:
    """Return how many of the prompt's blocks each rank of a schedulable worker has, by rank."""
    matches = match_by_rank(partition, local_hashes)
    ranks = {key for key in matches if key[0] in partition.workers} | set(partition.slots.ranks)
    rows = []
    for rank in sorted(ranks):
        match = matches.get(rank)
        device, host, disk = (0, 0, 0) if match is None else (match.device, match.host, match.disk)
        rows.append(
            OverlapRow(
                rank[0],
                rank[1],
                device,
                device + host,
                device + host + disk,
                host,
                disk,
                None,
                credit_blocks(terms, 1.0, match or NOTHING),
            )
        )
    return OverlapScores(partition.block_size, len(local_hashes) // 8, rows)
