"""What is asked of the scheduler, and what it answers: the records between handlers and core."""

import msgspec
from msgspec import UNSET, UnsetType

from lean_selector.core.index.kv_index import Matched
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.settings import Terms


class PinnedWorker(msgspec.Struct, frozen=True):
    """The one rank that a request insists on."""

    worker_id: int
    dp_rank: int


class SelectionRequest(msgspec.Struct, gc=False):
    """One request for a worker, normalised. Without `books` nothing is reserved."""

    prompt: Prompt
    terms: Terms
    books: bool = False
    reservation_id: str = ""
    expected_output_tokens: int | None = None
    pinned: PinnedWorker | None = None
    allowed_worker_ids: frozenset[int] | None = None
    required_taints: frozenset[str] = frozenset()
    preferred_taints: dict[str, float] = {}  # single precision
    priority_jump: float = 0.0
    strict_priority: int = 0
    matches: dict[tuple[int, int], Matched] = {}  # kept while the request is parked
    explains: bool = False

    def explain(self) -> None:
        """Asks for the figures behind the choice.

        With terms of its own the request goes the way that looks at every rank; the other way has
        nothing to explain, and so need not ask whether it should.
        """
        self.explains = True
        self.terms = msgspec.structs.replace(self.terms)

    def takes_any_rank(self) -> bool:
        """True when nothing but load decides which ranks it may go to."""
        return self.pinned is None and self.allowed_worker_ids is None and not self.required_taints


class Overlap(msgspec.Struct, frozen=True, gc=False):
    """Cached tokens of the chosen worker; gpu <= cpu <= disk, each the most over its ranks."""

    longest_matched: int
    gpu: int
    dp: dict[str, int]  # dp_rank -> gpu tokens, every rank of the worker
    cpu: int
    disk: int


class RankExplanation(msgspec.Struct, frozen=True, gc=False):
    """One rank. Blocks per tier are those found there and on no faster one; credit in blocks."""

    worker_id: int
    dp_rank: int
    filtered: str | None  # busy, queue, taint, not_allowed, not_pinned; None: a candidate
    device_blocks: int
    host_pinned_blocks: int
    disk_blocks: int
    active_prefill_tokens: int
    potential_prefill_tokens: int
    active_decode_blocks: int
    potential_decode_blocks: int
    credit_blocks: float
    credit_decay: float
    taint_factor: float
    cost: float | None  # None when filtered
    probability: float  # of being drawn, among the candidates


class Explanation(msgspec.Struct, frozen=True, gc=False):
    """`drawn`: only_candidate, lowest_cost, uniform_tie or softmax."""

    drawn: str
    tied_ranks: int  # candidates at the lowest cost
    temperature: float
    isl_tokens: int
    new_blocks: int
    ranks: list[RankExplanation]  # sorted by worker and rank


class Placement(msgspec.Struct, frozen=True, gc=False):
    """A rank chosen for a prompt."""

    worker_id: int
    dp_rank: int
    endpoint: str
    block_size: int
    overlap: Overlap
    effective_prefill_tokens: int
    explain: Explanation | UnsetType = UNSET


class RankLoadRow(msgspec.Struct, frozen=True, gc=False):
    """One row of /loads and /potential_loads."""

    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int


class PartitionLoads(msgspec.Struct, frozen=True, gc=False):
    """One entry of /loads."""

    model_name: str
    tenant_id: str
    loads: list[RankLoadRow]
    pending_count: int
    pending_isl_tokens: int


class OverlapRow(msgspec.Struct, frozen=True, gc=False):
    """One row of /overlap_scores, in blocks; host_pinned_blocks and disk_blocks are cumulative."""

    worker_id: int
    dp_rank: int
    device_blocks: int
    host_pinned_blocks: int
    disk_blocks: int
    host_pinned_extension_blocks: int
    disk_extension_blocks: int
    shared_beyond_device_blocks: None
    router_credit_blocks: float


class SharedCache(msgspec.Struct, frozen=True):
    """Always the same: there is no shared cache here."""

    enabled: bool = False
    total_hit_blocks: int = 0
    ranges: list[int] = []
    error: None = None


class OverlapScores(msgspec.Struct, frozen=True, gc=False):
    block_size: int
    num_blocks: int
    workers: list[OverlapRow]
    shared_cache: SharedCache = SharedCache()


class Booked(msgspec.Struct, frozen=True, gc=False):
    """The answer to /reservations."""

    reservation_id: str
    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    endpoint: str


class Selection(msgspec.Struct, frozen=True, gc=False):
    """The answer to /select and /select_and_reserve, in this key order."""

    selection_id: str | UnsetType
    reservation_id: str | UnsetType
    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    endpoint: str
    block_size: int
    overlap: Overlap
    effective_prefill_tokens: int
    explain: Explanation | UnsetType = UNSET
