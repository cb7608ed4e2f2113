"""The load of one rank: the total weight of its blocks, and its counts."""

from math import floor
from typing import Final

from lean_selector.core.rank_bits import RankKey


class BlockWeights:
    """How many blocks of a rank have each weight other than 1: weight -> number of blocks."""

    def __init__(self) -> None:
        self.counts: dict[float, int] = {}  # 0 <= weight < 1, count >= 1
        self._missing: float | None = None  # sum of (1 - weight) over these blocks; None: outdated

    def move(self, old: float, new: float, blocks: int) -> None:
        """Change the weight of `blocks` blocks from `old` to `new`. Weight 1.0 is not stored."""
        if old == new or not blocks:
            return
        self._missing = None
        counts = self.counts
        if old != 1.0:
            left = counts[old] - blocks
            if left:
                counts[old] = left
            else:
                del counts[old]
        if new != 1.0:
            counts[new] = counts.get(new, 0) + blocks

    def rounded_total(self, distinct_blocks: int) -> int:
        """Return the total weight of a rank's blocks, rounded half away from zero (spec:
        selection.md section 6). `distinct_blocks` is their number, whatever their weight."""
        if self._missing is None:
            missing = 0.0
            for weight, blocks in self.counts.items():
                missing += blocks * (1.0 - weight)
            self._missing = missing
        return floor(distinct_blocks - self._missing + 0.5)


class LoadBucket:
    """A set of ranks with equal load. Only `LoadOrder` changes this set. The `RankLoad` of a rank
    refers to the rank's bucket, so no look-up is needed to remove the rank."""

    __slots__ = ("key", "ranks", "standing", "tokens")

    def __init__(self, tokens: int, standing: float, key: float) -> None:
        self.tokens = tokens  # active_prefill_tokens of each of its ranks
        self.standing = standing
        self.key = key  # sort key: the part of the cost that the load causes
        self.ranks = 0  # bits of `RankBits`; not 0 while the bucket is in the order


_FADES: Final = 1 - 1 / 64  # each new comparison multiplies the earlier ones by this


class RankCounts:
    """Sums over the requests of a rank. In `recent_...`, old requests count less than new ones."""

    def __init__(self) -> None:
        self.selections = 0  # requests placed on the rank
        self.prompt_tokens = 0  # prompt tokens of these requests
        self.overlap_tokens = 0  # prompt tokens of these requests that were predicted as cached
        self.ok = self.failed = self.refused = 0  # outcomes reported
        self.ttft_s = 0.0  # sum of the reported times to first token, and their number
        self.ttft_count = 0
        # Predicted times to first token: number, sums of predicted and observed seconds, and sum of
        # the relative errors.
        self.predictions = 0
        self.predicted_s = self.observed_s = self.prediction_errors = 0.0
        self.cached_tokens = 0  # prompt tokens that the engine found cached, in any report
        # Cached tokens by the engine's count and by the index's prediction, of reservations that
        # ended with a report of the former.
        self.compared_tokens = self.compared_overlap_tokens = 0
        # Recent comparisons, fading: the larger of both counts; cached but not predicted; predicted
        # but not cached.
        self.recent_tokens = self.recent_missed = self.recent_wrong = 0.0

    def report_cached(
        self,
        cached: int,
        block_count: int,
        prefill_tokens: int | None,
        block_size: int,
        known_tokens: int | None,
    ) -> None:
        """Record an engine's count of cached tokens of a prompt with `block_count` blocks. It was
        booked with these `prefill_tokens`; None: the prediction is unknown. `known_tokens`: how
        many tokens are in blocks whose hashes were known (None: all)."""
        self.cached_tokens += cached
        if prefill_tokens is None:
            return
        blocks = block_count - prefill_tokens // block_size
        found = max(0, blocks * block_size)
        self.compared_tokens += cached
        self.compared_overlap_tokens += found
        if known_tokens is not None:
            cached = min(cached, known_tokens)
        # An engine recomputes the last token of a fully cached prompt, and therefore its last
        # block.
        is_whole = blocks == block_count and cached + block_size == found
        if known_tokens != 0:
            self.compare(cached if is_whole else found, cached)

    def compare(self, found: int, cached: int) -> None:
        """Record one prompt's cached tokens. `found` is the number that the index predicted;
        `cached` is the number that the engine reported."""
        self.recent_tokens = _FADES * self.recent_tokens + max(found, cached)
        self.recent_missed = _FADES * self.recent_missed + max(0, cached - found)
        self.recent_wrong = _FADES * self.recent_wrong + max(0, found - cached)

    def predict(self, predicted_s: float, observed_s: float) -> None:
        """For one prompt, record the predicted and the observed time to first token, in seconds."""
        self.predictions += 1
        self.predicted_s += predicted_s
        self.observed_s += observed_s
        self.prediction_errors += abs(predicted_s - observed_s) / observed_s

    @property
    def prediction_error(self) -> float | None:
        """Mean absolute error of predicted times to first token, relative to the observed times."""
        return self.prediction_errors / self.predictions if self.predictions else None

    @property
    def index_accuracy(self) -> float | None:
        """Return how well the index predicted cached tokens: 1.0 if exactly, None if unknown."""
        if not self.recent_tokens:
            return None
        return 1 - (self.recent_missed + self.recent_wrong) / self.recent_tokens

    def add(self, other: "RankCounts") -> None:
        """Add the totals of another rank to these totals."""
        self.selections += other.selections
        self.prompt_tokens += other.prompt_tokens
        self.overlap_tokens += other.overlap_tokens
        self.ok += other.ok
        self.failed += other.failed
        self.refused += other.refused
        self.ttft_s += other.ttft_s
        self.ttft_count += other.ttft_count
        self.predictions += other.predictions
        self.predicted_s += other.predicted_s
        self.observed_s += other.observed_s
        self.prediction_errors += other.prediction_errors
        self.cached_tokens += other.cached_tokens
        self.compared_tokens += other.compared_tokens
        self.compared_overlap_tokens += other.compared_overlap_tokens
        self.recent_tokens += other.recent_tokens
        self.recent_missed += other.recent_missed
        self.recent_wrong += other.recent_wrong


class RankLoad:
    """The load of one rank.

    Slots changes it; other code only reads it. Exceptions: LoadOrder changes `bucket` and
    `standing`, and `counts` has several writers. Sums have no upper limit; printed sums saturate at
    2^64-1 (D6)."""

    def __init__(self, worker_id: int, dp_rank: int, bit: int) -> None:
        self.bit = bit
        self.mask = 1 << bit
        self.worker_id = worker_id
        self.dp_rank = dp_rank
        self.key: RankKey = (worker_id, dp_rank)
        self.active_prefill_tokens = 0  # outstanding
        self.active_decode_blocks = 0  # `distinct_blocks` by weight, rounded half away from zero
        self.distinct_blocks = 0  # distinct blocks of active prompts, and output blocks
        self.block_weights = BlockWeights()
        self.reservations: dict[str, None] = {}  # ids, first booked first
        self.bucket: LoadBucket | None = None
        # in blocks: decode blocks, plus the weight of the requests
        self.standing = 0.0
        self.counts = RankCounts()

    @property
    def active_requests(self) -> int:
        return len(self.reservations)
