"""Settings of the Python client: timeouts, backoff, routing options."""

import random
from collections.abc import Mapping

import msgspec


class Backoff(msgspec.Struct, frozen=True):
    """Exponential backoff. The wait before retry n (from 0) is first_s * 2^n seconds plus a random
    jitter of up to first_s, but at most longest_s.

    The formula is that of "Client Retry Strategy" in Dynamo's load-shedding document."""

    max_retries: int = 5
    first_s: float = 0.25
    longest_s: float = 60.0

    def wait_s(self, attempt: int, retry_after_s: float | None = None) -> float | None:
        """Return the seconds to wait before retry number `attempt` (from 0); None: do not retry.

        A longer `retry_after_s` (which the service sent) takes precedence, up to longest_s."""
        if attempt >= self.max_retries:
            return None
        wait = self.first_s * 2.0**attempt + random.uniform(0.0, self.first_s)
        return min(self.longest_s, max(wait, retry_after_s or 0.0))


class Timeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Timeouts in seconds; None means no limit."""

    connect_s: float = 5.0
    service_s: float = 10.0  # for the selector's ordinary responses
    queue_s: float | None = 60.0  # for a selection, which may wait in the selector's queue
    worker_s: float | None = 300.0  # for the next bytes of a worker's response


# Settings of Dynamo's in-process router that belong to the service here, or to parts that this
# project lacks (NATS snapshots, remote indexers). `lean-selector --help` lists the service's
# settings.
WITHOUT_EFFECT = frozenset(
    {
        "host_cache_hit_weight",
        "disk_cache_hit_weight",
        "use_kv_events",
        "durable_kv_events",
        "router_replica_sync",
        "router_track_active_blocks",
        "router_prefill_load_model",
        "router_snapshot_threshold",
        "router_reset_states",
        "router_ttl_secs",
        "router_max_tree_size",
        "router_prune_target_ratio",
        "router_queue_threshold",
        "router_event_threads",
        "router_queue_policy",
        "use_remote_indexer",
        "serve_indexer",
        "shared_cache_type",
        "router_predicted_ttl_secs",
        "overlap_score_credit_decay",
        "router_policy_config",
    }
)


class KvRouterConfig:
    """Default routing settings of a KvRouter. The router_config_override of a request takes
    precedence.

    Settings that the service accepts in a request are sent with each request. Dynamo's other
    settings have no effect, but are accepted, so that programs written for Dynamo run unchanged."""

    def __init__(
        self,
        overlap_score_weight: float | None = None,
        *,
        router_temperature: float | None = None,
        overlap_score_credit: float | None = None,
        prefill_load_scale: float | None = None,
        shared_cache_multiplier: float | None = None,
        router_assume_kv_reuse: bool | None = None,
        router_track_prefill_tokens: bool | None = None,
        router_track_output_blocks: bool | None = None,
        **without_effect: object,
    ) -> None:
        """None leaves a setting to the service.

        router_track_output_blocks: False keeps generate() from reporting output blocks.
        without_effect: settings of Dynamo that are accepted and ignored. Raises TypeError for
        unknown names. The service checks the values.
        """
        if unknown := without_effect.keys() - WITHOUT_EFFECT:
            raise TypeError(f"KvRouterConfig has no setting {min(unknown)!r}")
        self.track_output_blocks = router_track_output_blocks is not False
        settings = {
            "overlap_score_weight": overlap_score_weight,
            "overlap_score_credit": overlap_score_credit,
            "prefill_load_scale": prefill_load_scale,
            "router_temperature": router_temperature,
            "shared_cache_multiplier": shared_cache_multiplier,
            "assume_kv_reuse": router_assume_kv_reuse,
            "track_prefill_tokens": router_track_prefill_tokens,
        }
        self._override = {name: value for name, value in settings.items() if value is not None}

    def override(self, of_request: Mapping[str, object] | None) -> dict[str, object] | None:
        """Return the router_config_override to send: these defaults, updated with the settings of
        the request. None if both are empty."""
        return {**self._override, **(of_request or {})} or None
