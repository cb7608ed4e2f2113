"""Structs for load: reservations, runs of active prompts, limits of ranks, loads of ranks."""

import math

import msgspec

from lean_selector.core.errors import BadRequest
from lean_selector.core.load.rank_load import RankLoad


class ReservationSpec(msgspec.Struct, frozen=True, gc=False):
    """The data of a reservation that are given when a rank is reserved for a request.

    Other replicas receive these data, the prompt's block hashes, and the id of the replica that
    admitted the request. The prompt's blocks are stored in a trie (`PromptTrie`)."""

    request_id: str
    worker_id: int
    dp_rank: int
    lora_name: str | None = None
    track_prefill_tokens: bool = True  # False: `prefill_tokens` does not count
    prefill_tokens: int | None = None  # None: not given, counts as 0
    prefill_duration_s: float | None = None  # as reported by a peer; has no effect
    expected_output_tokens: int | None = None


class ActiveRun(msgspec.Struct, eq=False, gc=False):
    """Consecutive prompt blocks that the same active requests have.

    The garbage collector tracks neither runs nor dicts that hold only runs, so a collection does
    not visit a live trie. Parent and child refer to each other; this cycle is cut when the run is
    removed, after its last request has ended."""

    label: (
        bytes  # sequence hashes of the blocks, 8 bytes little-endian each; empty only for the root
    )
    parent: "ActiveRun | None"  # None only at the root
    children: "dict[bytes, ActiveRun]"  # first hash of the child -> child
    # How many requests of each rank cross the run, each >= 1; empty only at the root. The key is
    # the set of only that rank (`RankBits`).
    refs: dict[int, int]
    mask: int = 0  # the set of all ranks in `refs`
    ends: int = 0  # requests whose prompt ends with this run
    weights: dict[int, float] | None = None  # rank -> weight of each block, unless 1.0


class Reservation(msgspec.Struct, eq=False, gc=False):
    """One active request. Read only: Slots changes it (except `published_at`).

    The garbage collector does not track reservations, because visiting a hundred thousand of them
    would be slow. So Slots breaks the cycles of dropped reservations. Times: monotonic seconds."""

    request_id: str  # equal to that of `spec`
    spec: ReservationSpec
    rank_load: RankLoad
    run: ActiveRun  # the prompt's last run in the trie; the root for an empty prompt
    block_count: int  # how many blocks the prompt has, including shared ones
    prefill_tokens: int  # not computed yet: 0 from prefill_complete on
    touched_at: (
        float  # time of the last time it was booked, prefill_complete, output_block or touch
    )
    published_at: float  # when peers were last told of the request; set by the publisher
    router_id: int | None  # the peer that admitted the request; None: this replica
    prefill_done: bool = False
    output_blocks: int = 0
    weighted_output_blocks: int = 0  # output blocks to which the last `decay_fraction` applies
    output_weight: float = 1.0  # weight of these blocks
    booked_at: float = 0.0
    # Prefill tokens waiting on the rank at booking, including this request's. 0: unknown, for
    # example in a copy.
    ahead_tokens: int = 0
    # Of a request with a leg: its rank, the prefill tokens booked there, and the expected time
    # to first token (0: unknown).
    prefills_on: RankLoad | None = None
    leg_tokens: int = 0
    expected_s: float = 0.0

    @property
    def is_replica(self) -> bool:
        return self.router_id is not None


class RankLimits(msgspec.Struct, frozen=True, gc=False):
    """Limits of the load of one rank; infinity means no limit."""

    prefill_tokens: float = math.inf
    decode_blocks: float = math.inf

    def exceeded_by(self, prefill_tokens: int, decode_blocks: int) -> bool:
        """Whether one of the values is greater than its limit."""
        return prefill_tokens > self.prefill_tokens or decode_blocks > self.decode_blocks


class BusyThreshold(msgspec.Struct, frozen=True):
    """Loads above which the ranks of a model and tenant are busy. None disables a limit."""

    active_decode_blocks: float | None = None  # as a fraction of a rank's KV blocks, 0.0 to 1.0
    active_prefill_tokens: int | None = None  # tokens, >= 0
    active_prefill_tokens_frac: float | None = None  # of max_num_batched_tokens, >= 0.0

    @property
    def is_set(self) -> bool:
        return self != OFF

    def check(self) -> None:
        """Raise BadRequest if a limit is out of range."""
        blocks, frac = self.active_decode_blocks, self.active_prefill_tokens_frac
        if blocks is not None and not 0.0 <= blocks <= 1.0:
            raise BadRequest(
                f"active_decode_blocks_threshold must be between 0.0 and 1.0, got {blocks}"
            )
        if frac is not None and not 0.0 <= frac < math.inf:
            raise BadRequest(
                "active_prefill_tokens_threshold_frac must be a finite value "
                f"greater than or equal to 0.0, got {frac}"
            )

    def limits(self, total_kv_blocks: int | None, max_num_batched_tokens: int) -> RankLimits:
        """Return the limits of a rank. If `total_kv_blocks` is unknown, blocks are not limited."""
        tokens = blocks = math.inf
        if self.active_prefill_tokens is not None:
            tokens = self.active_prefill_tokens
        if self.active_prefill_tokens_frac is not None:
            part = self.active_prefill_tokens_frac * max_num_batched_tokens
            tokens = min(tokens, part if math.isinf(part) else math.floor(part))
        if self.active_decode_blocks is not None and total_kv_blocks:
            blocks = self.active_decode_blocks * total_kv_blocks
        return RankLimits(tokens, blocks)

    def changed_by(self, given: "BusyThreshold") -> "BusyThreshold":
        """Return a copy in which the fields of `given` that are not None replace the old ones."""
        fields = msgspec.structs.asdict(given).items()
        return msgspec.structs.replace(
            self, **{name: new for name, new in fields if new is not None}
        )


OFF = BusyThreshold()


class WorkerRow(msgspec.Struct, frozen=True, gc=False):
    """A registered worker with its contiguous range of ranks."""

    worker_id: int
    model_name: str
    tenant_id: str
    block_size: int
    dp_start: int
    dp_size: int

    @property
    def ranks(self) -> range:
        return range(self.dp_start, self.dp_start + self.dp_size)


class LoadRow(msgspec.Struct, frozen=True, gc=False):
    """The load of one rank."""

    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    active_prefill_tokens: int
    active_decode_blocks: int


class PotentialLoadRow(msgspec.Struct, frozen=True, gc=False):
    """The load that one rank would have with one more request."""

    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int  # without the additional request
