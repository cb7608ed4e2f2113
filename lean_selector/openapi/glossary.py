"""What a field means wherever it stands, with its unit, by the name that it travels under.

What one struct alone says, or says otherwise, is in `meanings`.
"""

from typing import Final

GLOSSARY: Final = {
    "active_decode_blocks": "KV blocks that the rank's live requests hold, a shared one once",
    "active_decode_blocks_threshold": "a rank is busy above this part of its `total_kv_blocks`;"
    " applies to workers that report it",
    "active_prefill_tokens": "prompt tokens that wait to be prefilled on the rank",
    "active_prefill_tokens_threshold": "a rank is busy above so many tokens that wait to be"
    " prefilled",
    "active_prefill_tokens_threshold_frac": "a rank is busy above so many times the worker's"
    " `max_num_batched_tokens`, of tokens that wait to be prefilled",
    "active_requests": "live requests of the rank, without the one that is asked about",
    "advisory": "asks without waiting in the queue, and is told the load of the rank",
    "affinity_target": "there if it may go there, busy or not; else anywhere",
    "agent_headers": "accepted without effect",
    "allowed_worker_ids": "only these workers; an empty list allows none",
    "assume_kv_reuse": "`false`: no block counts as active already, with `--api 1.6`; in 1.3"
    " without effect",
    "block_hashes": "XXH3-64 of the tokens of each full block; with `sequence_hashes`, in place of"
    " tokens",
    "block_mm_infos": "for each block the multimodal objects in it, or null",
    "block_size": "tokens of a KV block",
    "cache_salt": "a secret of the tenant; gives its prompts hashes of their own",
    "cached_tokens": "tokens of the prompt that the engine had cached, by its own count; only"
    " summed up",
    "cpu": "cached tokens on the device or in host memory",
    "data_parallel_size": "how many data-parallel ranks the worker has, at most 4096; null: 1",
    "data_parallel_start_rank": "the first of its data-parallel ranks; null: 0",
    "decay_fraction": "what each block that only this request holds counts for in the load from now"
    " on; null: as before",
    "decode_busy": "`potential_decode_blocks` is above `--router-decode-busy-threshold` of the"
    " worker's `total_kv_blocks`; absent where either is not set",
    "device_blocks": "leading blocks of the prompt that are cached on the device",
    "disk": "cached tokens on the device, in host memory or on disk",
    "disk_extension_blocks": "blocks cached on disk that follow the ones in host memory",
    "dp": "by rank, the tokens that are cached on its device",
    "dp_rank": "the worker's data-parallel rank",
    "dp_size": "how many ranks it has",
    "dp_start": "the first of its ranks",
    "effective_prefill_tokens": "tokens of the prompt that the rank has still to prefill",
    "endpoint": "where requests to the worker go, as it was registered",
    "expected_output_tokens": "tokens that the answer is expected to have; told to replicas,"
    " changes no choice",
    "explain": "`true` adds the figures behind the choice to the answer",
    "gpu": "cached tokens on the device",
    "host_pinned_extension_blocks": "blocks cached in host memory that follow those on the device",
    "input_trigger": "accepted without effect",
    "is_eagle": "whether blocks are hashed as EAGLE engines do: over one token more",
    "isl_tokens": "tokens of the prompt",
    "kv_event_source_mode": "how its events come; `state_agent_v2` keeps it out of hints",
    "kv_events_endpoint": "ZMQ endpoint of the KV events of a worker with one rank",
    "kv_events_endpoints": "ZMQ endpoints of the KV events of each rank",
    "kv_sources": "its sources of KV events, by rank; empty where it is not listened to",
    "kv_transfer_domain": "kept and shown; changes no choice",
    "kv_transfer_enforcement": "kept and shown; changes no choice",
    "kv_transfer_preferred_weight": "kept and shown; changes no choice",
    "last_error": "the last fault that was told, or null",
    "lifecycle": "`schedulable`; `incomplete`, which lacks something; `unschedulable`, of one that"
    " was just removed",
    "longest_matched": "the most of `gpu`, `cpu` and `disk`",
    "lora_name": "the adapter; gives the prompt hashes of its own",
    "max_num_batched_tokens": "tokens that the engine batches; required with `--queue-threshold`",
    "mm_hash": "the hash of the object, by its engine",
    "mm_objects": "the objects in the block",
    "mm_routing_info": "the prompt as it is routed, where it holds multimodal objects",
    "model_name": "the model; with the tenant it names the partition",
    "new_isl_tokens": "tokens of the prompt that have to be prefilled",
    "not_schedulable_reasons": "what it lacks; absent of one that lacks nothing",
    "num_blocks": "full blocks of the prompt that was asked about",
    "offsets": "where the object stands, as pairs of numbers; not hashed",
    "outcome": "`refused`: nobody listened; `failed`: taken and not finished; `ok`",
    "overlap": "what the chosen worker has cached of the prompt",
    "overlap_score_credit": "what a cached block on the device saves, in blocks of prefill",
    "overlap_score_weight": "old name of `prefill_load_scale`; 0 sets `overlap_score_credit` to 0,"
    " too",
    "parent_session_id": "accepted without effect",
    "pending_count": "requests that wait in the queue",
    "pending_isl_tokens": "tokens of their prompts, cached or not",
    "pinned_worker": "this rank, or 503",
    "potential_decode_blocks": "KV blocks of the rank with this prompt",
    "potential_prefill_tokens": "tokens that would wait to be prefilled on the rank with this"
    " prompt",
    "preferred_taints": "by taint: a positive weight makes workers with it cheaper, a negative one"
    " dearer",
    "prefill_busy": "more waits than `--router-prefill-busy-threshold` of the capacity; absent"
    " without that flag",
    "prefill_load_scale": "what a block of prefill costs beside a block that is held",
    "prefill_token_capacity": "the worker's `max_num_batched_tokens`; 10000000 where it has none",
    "priority_jump": "in the queue: seconds that it stands as if it had come earlier; below 0"
    " counts as 0",
    "replay_endpoint": "ZMQ endpoint where missed batches are asked for; of several ranks, that of"
    " the first",
    "replay_endpoints": "ZMQ endpoints where missed batches are asked for, of each rank",
    "request_id": "the request's name, unique while it is live",
    "required_taints": "only workers with all of these",
    "reservation_id": "the name of the booking",
    "router_config_override": "terms of the cost, for this request alone",
    "router_hint_source_control_endpoints": "by rank, where other workers can fetch its blocks",
    "router_hint_worker_type": "workers of one type can fetch blocks from each other",
    "router_temperature": "of the draw by cost; 0: the lowest cost",
    "routing_constraints": "taints that workers must have or should have",
    "routing_group": "the tenant, by the other name of `tenant_id`; where both are given they are"
    " the same",
    "selection_id": "the caller's name of the selection, given back in the answer",
    "sequence_hashes": "for each full block the hash of the prompt up to its end",
    "session_context": "the session as agents tell it; goes before `session_id`",
    "session_final": "accepted without effect",
    "session_id": "the session that it belongs to; counts with `--session-affinity-ttl-secs`",
    "shared_beyond_device_blocks": "always null: there is no shared cache",
    "shared_cache": "always the same: there is no shared cache",
    "shared_cache_multiplier": "accepted without effect",
    "stable_routing_id": "kept and shown; changes no choice",
    "strict_priority": "in the queue: the higher goes first, whoever came before; null: 0",
    "taints": "words that `routing_constraints` speak of",
    "tenant_id": "the tenant; `default` where nothing is said",
    "token_ids": "the prompt's tokens; in place of hashes",
    "topology_domains": "kept and shown; changes no choice",
    "total_kv_blocks": "device blocks of a rank; bounds its index",
    "track_prefill_tokens": "whether tokens to be prefilled count for the load",
    "ttft_ms": "milliseconds to the first token; only summed up",
    "url": "ZMQ endpoint of the replica's events",
    "worker_id": "the worker's id",
    "worker_load": "load of the chosen rank before this request; only of an advisory select",
}
