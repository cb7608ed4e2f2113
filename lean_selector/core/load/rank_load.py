"""The load of one rank."""

from lean_selector.core.load.block_weights import BlockWeights
from lean_selector.core.load.bucket import Bucket
from lean_selector.core.load.prefill_decay import PrefillDecay
from lean_selector.core.load.rank_counts import RankCounts
from lean_selector.core.rank_bits import RankKey


class RankLoad:
    """Load of one rank. Read it anywhere; only Slots changes it (but `bucket` and `standing`, which
    are LoadOrder's, and `counts`, which are those of whoever counts).

    Sums have no upper bound; what prints them saturates at 2^64-1 (D6).
    """

    __slots__ = (
        "active_decode_blocks",
        "active_prefill_tokens",
        "bit",
        "block_weights",
        "bucket",
        "counts",
        "decay",
        "distinct_blocks",
        "dp_rank",
        "key",
        "mask",
        "reservations",
        "standing",
        "worker_id",
    )

    def __init__(self, worker_id: int, dp_rank: int, bit: int) -> None:
        self.bit = bit
        self.mask = 1 << bit
        self.worker_id = worker_id
        self.dp_rank = dp_rank
        self.key: RankKey = (worker_id, dp_rank)
        self.active_prefill_tokens = 0  # all that is outstanding, as booked: before decay
        self.active_decode_blocks = 0  # distinct_blocks by weight, rounded half away from zero
        self.distinct_blocks = 0  # path positions of active prompts, and output blocks
        self.block_weights = BlockWeights()
        self.decay: PrefillDecay | None = None  # while a prefill with a duration is outstanding
        self.reservations: dict[str, None] = {}  # ids, in order of booking
        self.bucket: Bucket | None = None
        # What of it does not wear off, in blocks: those to decode, and requests by their weight.
        self.standing = 0.0
        self.counts = RankCounts()

    @property
    def active_requests(self) -> int:
        return len(self.reservations)

    def prefill_tokens_at(self, now: float) -> int:
        """Outstanding prefill tokens, less what the worker should have computed by now."""
        if self.decay is None:
            return self.active_prefill_tokens
        return self.decay.tokens_at(self.active_prefill_tokens, now)
