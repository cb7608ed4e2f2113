"""Recent choices and their reasons, collected only while the web page (`api/ui.py`) asks.

To explain a choice, the cost of every candidate is computed, so only a sample of the choices is
explained. `ChoiceWatch.hits` includes all choices. For each `Run` of the index (a sequence of
consecutive blocks), `hits` has the number of prompts that matched the run."""

from collections import deque
from typing import Final

from lean_selector.core.index.runs import Run
from lean_selector.core.load.rank_load import RankLoad
from lean_selector.core.selection.explain import explained
from lean_selector.core.selection.overlap import MatchSets
from lean_selector.core.selection.partition import Partition
from lean_selector.core.selection.router_settings import CostTerms
from lean_selector.core.selection.shapes import (
    Candidate,
    Decision,
    Placement,
    RankExplanation,
    SelectionRequest,
)

MOST_KEPT: Final = 100
BEST: Final = 5
EVERY_S: Final = 0.5  # seconds between two explained choices
_MOST_RUNS: Final = 4096  # how many runs have their hits counted


class ChoiceWatch:
    """Keeps the most recent explained choices. Times are on the selector's clock."""

    def __init__(self) -> None:
        self.kept: deque[Decision] = deque(maxlen=MOST_KEPT)
        self.hits: dict[Run, int] = {}
        self.seen = 0
        self._next_at = 0.0

    def sample(
        self,
        partition: Partition,
        request: SelectionRequest,
        ranks: int,
        matches: MatchSets,
        load: RankLoad,
        placement: Placement,
        now: float,
    ) -> None:
        """Count a choice, before it is booked, and keep its explanation if it is time."""
        self.seen += 1
        if not request.after_prefill:  # else its prefill counted it
            self._count(partition, request.prompt.local_hashes)
        if now < self._next_at:
            return
        self._next_at = now + EVERY_S
        why = explained(partition, request, ranks, matches, now, shown=load.mask, best=BEST)
        size = partition.block_size
        rows = sorted(why.ranks, key=_cost)
        decision = Decision(
            now,
            self.seen,
            partition.model_name,
            partition.tenant_id,
            placement.worker_id,
            placement.dp_rank,
            request.prompt.blocks(size),
            request.prompt.isl_tokens,
            request.prompt.isl_tokens - placement.effective_prefill_tokens,
            why.drawn,
            why.tied_ranks,
            ranks.bit_count(),
            [Candidate(cost_shares(request.terms, row, size), row) for row in rows],
        )
        self.kept.append(decision)

    def _count(self, partition: Partition, local_hashes: bytes) -> None:
        hits = self.hits
        for run in partition.index.path(local_hashes):
            if run not in hits and len(hits) >= _MOST_RUNS:
                return
            hits[run] = hits.get(run, 0) + 1


def _cost(row: RankExplanation) -> tuple[float, int, int]:
    return row.cost or 0.0, row.worker_id, row.dp_rank


def cost_shares(terms: CostTerms, row: RankExplanation, block_size: int) -> dict[str, float]:
    """Return the parts of a candidate's cost, in blocks. Parts that are 0 are left out.

    `rest` is the difference between the cost and the sum of the other parts."""
    cost = row.cost or 0.0
    scale = terms.scale / block_size if terms.track_prefill else 0.0
    slowness = row.slowness
    factor = row.taint_factor * (slowness if isinstance(slowness, float) else 1.0)
    added = row.potential_prefill_tokens - row.active_prefill_tokens
    bonus, evicted = row.session_bonus_blocks, row.evicted_blocks
    shares = {
        "prefill ahead": factor * scale * row.active_prefill_tokens,
        "prefill of the prompt": factor * scale * added,
        "active blocks": factor * row.active_decode_blocks,
        "new blocks": factor * (row.potential_decode_blocks - row.active_decode_blocks),
        "requests": factor * terms.request_weight * row.active_requests,
        "eviction": factor * evicted if isinstance(evicted, float) else 0.0,
        "session": -bonus if isinstance(bonus, float) else 0.0,
    }
    rest = cost - sum(shares.values())
    if abs(rest) > 1e-6 * max(1.0, abs(cost)):
        shares["rest"] = rest
    return {name: share for name, share in shares.items() if share}
