"""KvRouterConfig: the document's router settings, as far as a client of a service has them.

The service owns its settings. Those that a request may override become the defaults of this
router's requests; the rest are accepted, so that a program moves over unchanged, and do nothing.
"""

from collections.abc import Mapping

from lean_selector.core.numbers import number, optional, switch
from lean_selector.core.selection.settings import RouterOverride

# Settings of Dynamo's in-process router that belong to the service, or to parts that do not exist
# here (NATS snapshots, remote indexers). See `lean-selector --help` for the service's own.
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
    """What this router's requests ask for, unless their own router_config_override says else."""

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
        without_effect: the names in WITHOUT_EFFECT; what they are is not looked at. Raises
        TypeError for any other, and for a setting of a wrong type; ValueError for one out of range.
        """
        for name in without_effect:
            if name not in WITHOUT_EFFECT:
                raise TypeError(f"KvRouterConfig has no setting {name!r}")
        numbers = {
            "overlap_score_weight": overlap_score_weight,
            "overlap_score_credit": overlap_score_credit,
            "prefill_load_scale": prefill_load_scale,
            "router_temperature": router_temperature,
            "shared_cache_multiplier": shared_cache_multiplier,
        }
        switches = {
            "assume_kv_reuse": router_assume_kv_reuse,
            "track_prefill_tokens": router_track_prefill_tokens,
        }
        settings = {name: optional(number, name, value) for name, value in numbers.items()}
        for name, value in switches.items():
            settings[name] = optional(switch, f"router_{name}", value)
        tracks = optional(switch, "router_track_output_blocks", router_track_output_blocks)
        self.track_output_blocks = tracks is not False
        self._override = {name: value for name, value in settings.items() if value is not None}
        try:
            RouterOverride(**self._override)  # type: ignore[arg-type]  # looked at just now
        except ValueError as error:
            raise ValueError(str(error).removeprefix("__all__: ")) from None

    def override(self, of_request: Mapping[str, object] | None) -> dict[str, object] | None:
        """The router_config_override to send: ours with the request's on top; None for none."""
        return {**self._override, **(of_request or {})} or None
