"""Structs for workers, for selection requests, and for their results."""

from typing import Final, Literal

import msgspec
from msgspec import UNSET, UnsetType

from lean_selector.core.index.shapes import Matched
from lean_selector.core.numbers import U32, NonNegative, check_u64
from lean_selector.core.selection.prompt import Prompt
from lean_selector.core.selection.router_settings import CostTerms

PartitionKey = tuple[str, str]

# Routes that select a worker, as named in metrics.
SELECT, SELECT_AND_RESERVE = "/select", "/select_and_reserve"
ROUTE, GATEWAY, PICKER = "/route/{path*}", "gateway", "endpoint_picker"

# Fields of a record that map ranks to values.
BY_RANK = ("kv_events_endpoints", "replay_endpoints", "router_hint_source_control_endpoints")

# What a worker does of a request: all of it, or one part, and another worker the other part.
WorkerRole = Literal["both", "prefill", "decode"]
BOTH: Final = "both"
PREFILL: Final = "prefill"
DECODE: Final = "decode"

# Whether a request asks for a pair of workers: one for its prefill and one for its decode.
Disaggregate = Literal["never", "auto", "always"]
NEVER: Final = "never"
AUTO: Final = "auto"


class Disaggregation(msgspec.Struct, frozen=True):
    """How a worker exchanges KV blocks with the other worker of a pair."""

    protocol: Literal["nixl"]


class WorkerSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as registered. A field that was not given is None."""

    worker_id: int
    model_name: str = "default"
    tenant_id: str = "default"
    endpoint: str | None = None
    kv_events_endpoint: str | None = None
    kv_events_endpoints: dict[int, str] = {}
    replay_endpoint: str | None = None
    replay_endpoints: dict[int, str] = {}
    block_size: int | None = None
    data_parallel_start_rank: int | None = None
    data_parallel_size: int | None = None
    max_num_batched_tokens: int | None = None
    total_kv_blocks: int | None = None
    stable_routing_id: str | None = None
    is_eagle: bool | None = None
    taints: frozenset[str] = frozenset()
    topology_domains: dict[str, str] = {}
    kv_transfer_domain: str | None = None
    kv_transfer_enforcement: str | None = None
    kv_transfer_preferred_weight: float | None = None
    # For hints where to fetch a prompt's blocks; only in the 1.6 dialect.
    router_hint_worker_type: str | None = None
    router_hint_source_control_endpoints: dict[int, str] = {}
    kv_event_source_mode: str | None = None
    worker_role: WorkerRole = BOTH
    disaggregation: Disaggregation | None = None

    @property
    def key(self) -> PartitionKey:
        return self.model_name, self.tenant_id

    @property
    def ranks(self) -> range:
        start = self.data_parallel_start_rank or 0
        size = 1 if self.data_parallel_size is None else self.data_parallel_size
        return range(start, start + size)

    def kv_events_endpoint_of(self, dp_rank: int) -> str | None:
        """Return the endpoint at which this rank publishes its KV events, or None."""
        if self.kv_events_endpoints:
            return self.kv_events_endpoints.get(dp_rank)
        return self.kv_events_endpoint if self.ranks == range(dp_rank, dp_rank + 1) else None


class WorkerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A worker as the API shows it. The JSON keys have the order of the fields. `tenant_id` and
    `replay_endpoints` are only in `--api 1.3`; `routing_group`, the `router_hint_...` fields and
    `kv_event_source_mode` only in `--api 1.6`."""

    worker_id: int
    model_name: str
    tenant_id: str | UnsetType = UNSET
    routing_group: str | UnsetType = UNSET
    lifecycle: str
    endpoint: str | None
    kv_events_endpoint: str | None
    kv_events_endpoints: dict[str, str] | UnsetType
    replay_endpoint: str | None
    replay_endpoints: dict[str, str] | UnsetType = UNSET
    block_size: int | None
    data_parallel_start_rank: int | None
    data_parallel_size: int | None
    max_num_batched_tokens: int | None
    total_kv_blocks: int | None
    stable_routing_id: str | None
    is_eagle: bool | None
    taints: list[str]
    topology_domains: dict[str, str]
    kv_transfer_domain: str | None
    kv_transfer_enforcement: str | None
    kv_transfer_preferred_weight: float | None
    router_hint_worker_type: str | UnsetType = UNSET
    router_hint_source_control_endpoints: dict[str, str] | UnsetType = UNSET
    kv_event_source_mode: str | UnsetType = UNSET
    worker_role: str | UnsetType = UNSET  # absent: both
    disaggregation: Disaggregation | UnsetType = UNSET
    not_schedulable_reasons: list[str] | UnsetType


class Source(msgspec.Struct, frozen=True):
    """The endpoints from which the KV events of one rank come."""

    endpoint: str
    replay_endpoint: str | None


class PinnedWorker(msgspec.Struct, frozen=True):
    """The rank to which a request is pinned."""

    worker_id: NonNegative
    dp_rank: U32

    def __post_init__(self) -> None:
        check_u64("pinned_worker.worker_id", self.worker_id)


class AffinityTarget(msgspec.Struct, frozen=True):
    """The worker or rank that a request prefers."""

    worker_id: NonNegative
    dp_rank: U32 | None = None

    def __post_init__(self) -> None:
        check_u64("affinity_target.worker_id", self.worker_id)


MOST_FAIRNESS_ID = 256  # characters

EXPLANATION, OUTLOOK, HINT, LOAD = 1, 2, 4, 8


class SelectionRequest(msgspec.Struct, gc=False):
    """A request to choose a rank, from any route. A rank is reserved only if `books` is true."""

    prompt: Prompt
    terms: CostTerms
    books: bool = False
    reservation_id: str = ""
    expected_output_tokens: int | None = None
    pinned: PinnedWorker | None = None
    allowed_worker_ids: frozenset[int] | None = None
    required_taints: frozenset[str] = frozenset()
    preferred_taints: dict[str, float] = {}  # single precision
    liked: tuple[tuple[float, int], ...] = ()  # further preferences: (weight, ranks), disjoint
    priority_jump: float = 0.0
    strict_priority: int = 0
    deadline: float | None = None  # monotonic; after it, the first token is too late
    fairness_id: str = ""  # who shares the queue with others; of use only with fair shares
    # Stored while the request is queued: what ranks hold of the prompt, as disjoint sets of ranks.
    matches: list[tuple[Matched, int]] = []
    waited_s: float = 0.0  # seconds in the queue, set when the request is placed
    adds: int = 0  # parts of the answer: EXPLANATION, OUTLOOK, HINT, LOAD
    target: AffinityTarget | None = None
    session_id: str | None = None  # None also if without effect: sessions off, pin, target
    favoured: int = 0  # the set of ranks that cost `bonus_blocks` less
    bonus_blocks: float = 0.0
    asked_at: str = SELECT  # route by which the request came
    role: str = BOTH  # the part of the request for which a rank is chosen
    disaggregate: Disaggregate = NEVER
    prefill_allowed_worker_ids: frozenset[int] | None = None
    # Why the caller wants no pair, although it asks for one; empty: it does.
    bars_pair: str = ""
    # Only a rank for the decode is chosen, because a worker that did the prefill was chosen before.
    after_prefill: bool = False

    @property
    def asks_pair(self) -> bool:
        return self.disaggregate != NEVER and not self.bars_pair


class Overlap(msgspec.Struct, frozen=True, gc=False):
    """A prompt's cached tokens: maxima over a worker's ranks. Counts include faster tiers."""

    longest_matched: int
    gpu: int
    dp: dict[str, int]  # dp_rank -> gpu tokens, for every rank of the worker
    cpu: int
    disk: int


class RankExplanation(msgspec.Struct, frozen=True, gc=False):
    """The figures behind one rank's cost. A block counts on the fastest tier that has it."""

    worker_id: int
    dp_rank: int
    filtered: str | None
    device_blocks: int
    host_pinned_blocks: int
    disk_blocks: int
    active_prefill_tokens: int
    potential_prefill_tokens: int
    active_decode_blocks: int
    potential_decode_blocks: int
    active_requests: int
    credit_blocks: float
    credit_decay: float
    taint_factor: float
    cost: float | None
    probability: float
    session_bonus_blocks: float | UnsetType = UNSET
    burden_blocks: float | UnsetType = UNSET
    evicted_blocks: float | UnsetType = UNSET
    slowness: float | UnsetType = UNSET
    ttft_estimate_s: float | UnsetType = UNSET


class SessionExplanation(msgspec.Struct, frozen=True, gc=False):
    """The binding of the request's session, as it was before the request."""

    session_id: str
    mode: str
    bound: bool
    worker_id: int | None
    dp_rank: int | None
    reservations: int


class Explanation(msgspec.Struct, frozen=True, gc=False):
    """Why a rank was chosen. `drawn` is only_candidate, lowest_cost, uniform_tie or softmax."""

    drawn: str
    tied_ranks: int
    temperature: float
    isl_tokens: int
    new_blocks: int
    ranks: list[RankExplanation]
    session: SessionExplanation | UnsetType = UNSET


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A rank that could have been chosen. The values of `terms` add up to the rank's cost."""

    terms: dict[str, float]
    rank: RankExplanation


class Decision(msgspec.Struct, frozen=True, gc=False):
    """A choice as the web page shows it, with the chosen rank and the cheapest candidates."""

    at: float  # monotonic seconds
    number: int  # counts all choices since they are collected; only a sample of them is sent
    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    prompt_blocks: int
    isl_tokens: int
    overlap_tokens: int
    drawn: str
    tied_ranks: int
    candidates: int
    best: list[Candidate]  # cheapest first; includes the chosen one


class FetchHint(msgspec.Struct, frozen=True, gc=False):
    """Another rank, from which the chosen rank can fetch blocks of the prompt."""

    block_hashes: tuple[int, ...]  # hashes of that rank's engine, from the prompt's first block on
    source_control_endpoint: str


class RankOutlook(msgspec.Struct, frozen=True, gc=False):
    """The load and the limits of the chosen rank, before the prompt is booked."""

    potential_decode_blocks: int  # including the prompt
    active_prefill_tokens: int
    prefill_token_capacity: int
    total_kv_blocks: int | None
    hint: FetchHint | None


class PrefillPlacement(msgspec.Struct, frozen=True, gc=False):
    """The rank that is to prefill a prompt, and then to pass the blocks on."""

    worker_id: int
    dp_rank: int
    endpoint: str
    overlap: Overlap
    effective_prefill_tokens: int
    disaggregation: Disaggregation | UnsetType = UNSET
    explain: Explanation | UnsetType = UNSET


class Disaggregated(msgspec.Struct, frozen=True, gc=False):
    """Whether a request that asked for a pair of workers got one, and why."""

    used: bool
    reason: str


class Placement(msgspec.Struct, frozen=True, gc=False):
    """A rank chosen for a prompt. With `prefill`, it only decodes."""

    worker_id: int
    dp_rank: int
    endpoint: str
    block_size: int
    overlap: Overlap
    effective_prefill_tokens: int
    explain: Explanation | UnsetType = UNSET
    outlook: RankOutlook | UnsetType = UNSET  # only if requested
    prefill: PrefillPlacement | UnsetType = UNSET
    disaggregation: Disaggregated | UnsetType = UNSET  # only if the request asks


class PrefillChoice(PinnedWorker, frozen=True):
    """The rank of a pair that does the prefill, to be booked, and the tokens it has to compute."""

    effective_prefill_tokens: NonNegative = 0

    def __post_init__(self) -> None:
        check_u64("prefill.worker_id", self.worker_id)
        check_u64("prefill.effective_prefill_tokens", self.effective_prefill_tokens)


class CachedSelection(msgspec.Struct, frozen=True, gc=False):
    """The result of a `/select`, kept so that a later request can book it by its selection id."""

    worker_id: int
    dp_rank: int
    prompt: Prompt  # block hashes are included only if predictions need them
    effective_prefill_tokens: int
    expected_output_tokens: int | None
    track_prefill: bool
    session_id: str | None = None
    prefill: PrefillChoice | None = None  # of a pair


class RankLoadRow(msgspec.Struct, frozen=True, gc=False):
    """One row of /loads and /potential_loads."""

    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int
    prefill_tokens_per_s: float | UnsetType = UNSET
    ttft_error: float | UnsetType = UNSET


class PartitionLoads(msgspec.Struct, frozen=True, gc=False):
    """The loads of one partition, in the answer of /loads."""

    model_name: str
    tenant_id: str
    loads: list[RankLoadRow]
    pending_count: int
    pending_isl_tokens: int


class OverlapRow(msgspec.Struct, frozen=True, gc=False):
    """A row of /overlap_scores. host_pinned_blocks and disk_blocks include the faster tiers."""

    worker_id: int
    dp_rank: int
    device_blocks: int
    host_pinned_blocks: int
    disk_blocks: int
    host_pinned_extension_blocks: int
    disk_extension_blocks: int
    shared_beyond_device_blocks: None
    router_credit_blocks: float | UnsetType


class SharedCache(msgspec.Struct, frozen=True):
    """The `shared_cache` of /overlap_scores: always empty. Shared caches are not supported."""

    enabled: bool = False
    total_hit_blocks: int = 0
    ranges: list[int] = []
    error: None = None


class OverlapScores(msgspec.Struct, frozen=True, gc=False):
    """The answer of POST /overlap_scores."""

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


class WorkerLoad(msgspec.Struct, frozen=True, gc=False):
    """The `worker_load` of an answer: the chosen rank's load before this request is added."""

    active_prefill_tokens: int
    prefill_token_capacity: int
    total_kv_blocks: int | UnsetType
    prefill_busy: bool | UnsetType


class Selection(msgspec.Struct, frozen=True, gc=False):
    """The answer to /select and /select_and_reserve. The JSON keys have the order of the fields."""

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
    worker_load: WorkerLoad | UnsetType = UNSET
    explain: Explanation | UnsetType = UNSET
    prefill: PrefillPlacement | UnsetType = UNSET
    disaggregation: Disaggregated | UnsetType = UNSET
