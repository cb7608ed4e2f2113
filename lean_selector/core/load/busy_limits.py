"""What busy means: the limits of a model and tenant, and of a rank (see `busy`)."""

import math

import msgspec

from lean_selector.core.errors import BadRequest


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
