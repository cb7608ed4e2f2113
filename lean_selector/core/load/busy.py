"""Busy thresholds: which ranks and workers may still be given new work.

Follows "Busy Detection Logic" of the load-shedding document and slot_tracker.md 4.3 and 4.6: a rank
is busy above any limit that is set, not at it; a worker only when all of its ranks are. What is not
known (a capacity that the worker did not report) exceeds nothing. Does not know how loads are
counted, nor who is asked for a worker.
"""

import math
from collections.abc import Iterable

import msgspec

from lean_selector.core.errors import BadRequest, NotFound

# Thresholds outlive their model's last worker, so that a worker that restarts finds them again. Of
# models that are gone this many are kept, the oldest go first.
MAX_REMEMBERED = 1024

Scope = tuple[str, str]


class RankLimits(msgspec.Struct, frozen=True, gc=False):
    """What one rank may hold; infinite where there is no limit."""

    prefill_tokens: float = math.inf
    decode_blocks: float = math.inf

    def exceeded_by(self, prefill_tokens: int, decode_blocks: int) -> bool:
        """True above a limit, not at it."""
        return prefill_tokens > self.prefill_tokens or decode_blocks > self.decode_blocks


class BusyThreshold(msgspec.Struct, frozen=True):
    """Limits for one model and tenant; None switches a limit off."""

    active_decode_blocks: float | None = None  # fraction of a rank's KV blocks, 0.0 to 1.0
    active_prefill_tokens: int | None = None  # tokens, >= 0
    active_prefill_tokens_frac: float | None = None  # of max_num_batched_tokens, >= 0.0

    @property
    def is_set(self) -> bool:
        return self != OFF

    def check(self) -> None:
        """Raises BadRequest for a limit out of its range."""
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
        """The limits of a rank of this capacity; its blocks may be unknown, or 0, which is too."""
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
        """These with what `given` sets in place of them; its None leaves a limit as it is."""
        return BusyThreshold(
            *(
                old if new is None else new
                for old, new in zip(
                    msgspec.structs.astuple(self), msgspec.structs.astuple(given), strict=True
                )
            )
        )


OFF = BusyThreshold()


class BusyThresholds:
    """The thresholds of every model and tenant: those of its own, or else the defaults."""

    def __init__(self, defaults: BusyThreshold = OFF) -> None:
        self._defaults = defaults
        self._own: dict[Scope, BusyThreshold] = {}

    def of(self, scope: Scope) -> BusyThreshold:
        return self._own.get(scope, self._defaults)

    def change(self, scope: Scope, given: BusyThreshold, known: Iterable[Scope]) -> BusyThreshold:
        """Puts what `given` sets in force. Raises BadRequest, then NotFound; nothing changed."""
        given.check()
        return self._put(scope, self.of(scope).changed_by(given), set(known))

    def switch_off(self, scope: Scope, known: Iterable[Scope]) -> BusyThreshold:
        """Nothing is busy there any more, whatever the defaults. Raises NotFound."""
        return self._put(scope, OFF, set(known))

    def _put(self, scope: Scope, new: BusyThreshold, known: set[Scope]) -> BusyThreshold:
        if scope not in known:
            raise NotFound(
                f"Model '{scope[0]}' not found. Thresholds can only be set for discovered models."
            )
        self._own[scope] = new
        gone = [each for each in self._own if each not in known]
        for each in gone[: max(0, len(gone) - MAX_REMEMBERED)]:
            del self._own[each]
        return new
