"""Prefill load that wears off while a worker is expected to compute it (spec: slot_tracker.md
section 2.2).

Exists only for a rank that holds a prefill with an expected duration, which arrives in a replica's
hint. Prefills are computed in arrival order: only the oldest, the anchor, wears off, from when it
became the oldest. Knows nothing of blocks or of requests beyond their ids.
"""

from collections import OrderedDict
from math import ceil, floor, inf

from lean_selector.core.load.records import Prefill


class PrefillDecay:
    """The outstanding prefills of one rank, oldest first."""

    __slots__ = ("_anchor_since", "_prefills", "_untimed")

    def __init__(self) -> None:
        self._prefills: OrderedDict[str, Prefill] = OrderedDict()
        self._untimed = 0
        self._anchor_since = 0.0

    @property
    def is_over(self) -> bool:
        """True when no prefill with a duration is left."""
        return self._untimed == len(self._prefills)

    def add(self, request_id: str, prefill: Prefill, now: float) -> None:
        if not self._prefills:
            self._anchor_since = now
        self._prefills[request_id] = prefill
        self._untimed += prefill.duration_s is None

    def remove(self, request_id: str, now: float) -> None:
        """Drop one that was added, with what is left of it. The clock of a new anchor starts
        now."""
        if request_id == next(iter(self._prefills)):
            self._anchor_since = now
        self._untimed -= self._prefills.pop(request_id).duration_s is None

    def tokens_at(self, total_tokens: int, now: float) -> int:
        """What is left of `total_tokens`, the sum of all outstanding prefills."""
        anchor = next(iter(self._prefills.values()))
        tokens, duration_s = anchor.tokens, anchor.duration_s
        if duration_s is None:
            return total_tokens
        elapsed_s = now - self._anchor_since
        if duration_s <= 0.0:
            return total_tokens - tokens
        if self._untimed:
            left = min(1.0, max(0.0, 1.0 - elapsed_s / duration_s))
            return total_tokens - tokens + ceil(tokens * left)
        # Not capped at the anchor's own tokens: a late anchor eats those of the others.
        return max(0, total_tokens - floor(tokens * max(0.0, elapsed_s) / duration_s))

    def reaches_at(self, total_tokens: int, at_most: float) -> float:
        """When `tokens_at` will be down to `at_most`, but for rounding; infinite when it takes more
        than time. `at_most` is below `total_tokens` and not negative."""
        anchor = next(iter(self._prefills.values()))
        tokens, duration_s = anchor.tokens, anchor.duration_s
        if duration_s is None:
            return inf
        wears_off = ceil(total_tokens - at_most)  # of the anchor, so that it is
        if duration_s <= 0.0:
            return self._anchor_since if wears_off <= tokens else inf
        if self._untimed and wears_off > tokens:
            return inf
        return self._anchor_since + wears_off / tokens * duration_s
