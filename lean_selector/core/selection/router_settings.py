"""The router's settings: weights of the cost formula, other settings, and overrides by a request.

Names and defaults follow spec selection.md section 7. The command line and the request decoder
check the ranges of values, so other code does not check them."""

from typing import Annotated, Literal

import msgspec

from lean_selector.core.numbers import Weight
from lean_selector.core.replication.ledger import RESERVATION_EXPIRY_S
from lean_selector.core.settings import API_1_3, Dialect, EjectionSettings, SessionSettings

# Default value of a block on a lower tier, as a fraction of a device block.
HOST_WEIGHT = 0.75
DISK_WEIGHT = 0.25


# Which queued request leaves first: the one that arrived first, or last; the one with least work to
# prefill; or the latter, with aging.
QueuePolicy = Literal["fcfs", "lcfs", "wspt", "least-work"]
# What the cost measures: blocks, as in the reference; or the prefill before the first token.
Policy = Literal["dynamo", "latency"]


class SelectionCacheSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the cache of `/select` results. With 0 entries or 0 bytes, the cache is off."""

    ttl_s: float = 120.0
    max_entries: int = 4096
    max_bytes: int = 256 * 1024 * 1024


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The router's own settings. None disables a feature."""

    policy: Policy = "dynamo"
    model_policies: dict[str, Policy] = {}  # model -> its policy, if not `policy`
    use_kv_events: bool = True
    # False: a worker without an event source is scheduled by load alone
    needs_kv_events: bool = True
    overlap_score_credit: float = 1.0  # >= 0; blocks of prefill that a matched device block saves
    overlap_score_credit_decay: float = 0.0  # >= 0
    prefill_load_scale: float = 1.0  # >= 0
    active_request_weight: float = 0.0  # >= 0; blocks as which each active request counts
    host_weight: float = HOST_WEIGHT  # 0..1; value of a block in host memory, in device blocks
    disk_weight: float = DISK_WEIGHT  # 0..1; value of a block on disk or beyond
    ttl_s: float = 0.0  # if KV events are off: seconds that a booked prompt is assumed cached
    predicted_ttl_s: float = 0.0  # if KV events are on: the same, until events arrive
    temperature: float = 0.0  # >= 0; 0 chooses the cheapest rank
    track_prefill_tokens: bool = True
    assume_kv_reuse: bool = True  # only the 1.6 dialect uses it
    # A request that asks for a pair needs none if fewer tokens than this are uncached.
    pd_local_max_tokens: int = 2048
    pd_fallback: Literal["refuse", "local"] = "refuse"  # while no prefill worker is usable
    asks_pairs: bool = False  # the gateway asks for pairs, whatever workers are registered
    queue_threshold: float | None = (
        None  # fraction of max_num_batched_tokens; None: requests are never queued
    )
    queue_policy: QueuePolicy | None = None  # None: the default for the policy
    queue_max_wait_s: float | None = None
    target_ttft_s: float | None = None  # at which a rank counts as full
    queue_fairness: Literal["off", "on"] = "off"
    queue_weights: dict[str, float] = {}  # fairness id -> its weight, if not 1; > 0
    # if a request is queued for longer, its overlap is looked up again
    overlap_refresh_after_s: float | None = 10.0
    reservation_expiry_s: float = RESERVATION_EXPIRY_S
    # Fractions of a worker's total_kv_blocks and max_num_batched_tokens. Above these, answers say
    # that the chosen rank is busy. They do not affect the choice.
    decode_busy_threshold: float | None = None
    prefill_busy_threshold: float | None = None
    ejection: EjectionSettings = EjectionSettings()
    selection_cache: SelectionCacheSettings = SelectionCacheSettings()
    dialect: Dialect = API_1_3
    sessions: SessionSettings | None = None

    def policy_of(self, model_name: str) -> Policy:
        return self.model_policies.get(model_name, self.policy)

    def queue_of(self, policy: Policy) -> QueuePolicy:
        """Return the order of the queue: the configured order, or the default under `policy`."""
        return self.queue_policy or ("least-work" if policy == "latency" else "fcfs")

    @property
    def routed_ttl_s(self) -> float:
        """Return how many seconds a routed prompt is assumed to stay cached; 0: not at all."""
        return self.predicted_ttl_s if self.use_kv_events else self.ttl_s


class RouterOverride(msgspec.Struct, frozen=True, kw_only=True):
    """A request's `router_config_override`. null keeps the router's value.

    `overlap_score_weight` is an old name for two fields. It sets `prefill_load_scale`;
    if it is 0, it also sets `overlap_score_credit` to 0. `assume_kv_reuse` has an effect only with
    `--api 1.6`. `shared_cache_multiplier` is accepted and has no effect, as in Dynamo."""

    overlap_score_credit: Weight | None = None
    prefill_load_scale: Weight | None = None
    overlap_score_weight: Weight | None = None
    router_temperature: Weight | None = None
    shared_cache_multiplier: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] | None = None
    assume_kv_reuse: bool | None = None
    track_prefill_tokens: bool | None = None
    policy: Policy | None = None

    @property
    def scale(self) -> float | None:
        weight = self.overlap_score_weight
        return self.prefill_load_scale if weight is None else weight


class CostTerms(msgspec.Struct, frozen=True, gc=False):
    """The cost formula's weights for one choice. A request can override the router's weights."""

    credit: float
    decay: float
    scale: float
    temperature: float
    track_prefill: bool
    host_weight: float = HOST_WEIGHT
    disk_weight: float = DISK_WEIGHT
    request_weight: float = 0.0
    # If prefill is not tracked, cached blocks are subtracted from the rank's future blocks.
    credits_untracked: bool = False
    eviction: float = 0.0  # cost of evictions, per block that the prompt must compute
    knows_speeds: bool = False  # whether the cost is higher on slower ranks
    counts_decode: bool = True  # False: the cost is that of the prefill alone
