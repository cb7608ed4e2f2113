"""`/busy_threshold` and the answer to a request that is shed: their bodies.

Keys and texts are those of the request-rejection document; `tenant_id` and the fraction, which it
does not have, are left out where they say nothing.
"""

from typing import Self

import msgspec
from msgspec import UNSET, UnsetType

from lean_selector.core.load.shapes import BusyThreshold
from lean_selector.wire.scalars import DEFAULT_GROUP, NonNegative, check_u64, group_of


class ThresholdRequest(msgspec.Struct, kw_only=True):
    """POST /busy_threshold: absent or null fields stay unchanged."""

    model: str
    tenant_id: str | UnsetType = UNSET
    routing_group: str | UnsetType = UNSET
    active_decode_blocks_threshold: float | None = None
    active_prefill_tokens_threshold: NonNegative | None = None
    active_prefill_tokens_threshold_frac: float | None = None

    def __post_init__(self) -> None:
        if self.active_prefill_tokens_threshold is not None:
            check_u64("active_prefill_tokens_threshold", self.active_prefill_tokens_threshold)

    def scope(self) -> tuple[str, str]:
        return self.model, group_of(self.tenant_id, self.routing_group)

    def given(self) -> BusyThreshold:
        return BusyThreshold(
            self.active_decode_blocks_threshold,
            self.active_prefill_tokens_threshold,
            self.active_prefill_tokens_threshold_frac,
        )


class ThresholdRow(msgspec.Struct, frozen=True, kw_only=True):
    """The thresholds in force for a model; null is off."""

    model: str
    tenant_id: str | UnsetType
    active_decode_blocks_threshold: float | None
    active_prefill_tokens_threshold: int | None
    active_prefill_tokens_threshold_frac: float | UnsetType

    @classmethod
    def of(cls, scope: tuple[str, str], threshold: BusyThreshold) -> Self:
        model_name, tenant_id = scope
        frac = threshold.active_prefill_tokens_frac
        return cls(
            model=model_name,
            tenant_id=UNSET if tenant_id == DEFAULT_GROUP else tenant_id,
            active_decode_blocks_threshold=threshold.active_decode_blocks,
            active_prefill_tokens_threshold=threshold.active_prefill_tokens,
            active_prefill_tokens_threshold_frac=UNSET if frac is None else frac,
        )


class Thresholds(msgspec.Struct, frozen=True):
    """GET /busy_threshold."""

    thresholds: list[ThresholdRow]


class OverloadBody(msgspec.Struct, frozen=True):
    """The answer to a request that is shed; `error` is what every other error has."""

    error: str
    message: str
    type: str
    code: int

    @classmethod
    def of(cls, error: str, status: int) -> Self:
        message = f"Service temporarily unavailable: {error}"
        return cls(error, message, "service_unavailable", status)
