"""Descriptions of the fields in the OpenAPI schemas, with their units.

GLOSSARY describes a field by its name on the wire, wherever it is used; OWN, by `Struct.field`,
where it means something else. Structs of the 1.6 dialect, whose names end in 16, have the
descriptions of those without 16, unless they have their own.
"""

from typing import Final

_NEEDED: Final = "where to send requests; without it the worker is `incomplete`"
_RANK_OR_ALL: Final = "the rank; null: any rank of the worker"
GLOSSARY: Final = {
    "active_decode_blocks": "KV blocks held by the rank's live requests; a shared block counts "
    "once",
    "active_decode_blocks_threshold": "a rank is busy above this fraction of its "
    "`total_kv_blocks`; applies to workers that report it",
    "active_prefill_tokens": "prompt tokens that wait to be prefilled on the rank",
    "active_prefill_tokens_threshold": "a rank is busy above this many tokens that wait to be "
    "prefilled",
    "active_prefill_tokens_threshold_frac": "a rank is busy when the tokens that wait to be "
    "prefilled exceed this multiple of the worker's `max_num_batched_tokens`",
    "active_requests": "live requests of the rank, without this prompt",
    "advisory": "choose without waiting in the queue; the answer has the rank's load",
    "affinity_target": "prefer this worker or rank, busy or not; ignored if the request may not"
    " go there",
    "agent_headers": "accepted without effect",
    "allowed_worker_ids": "only these workers; an empty list allows none",
    "assume_kv_reuse": "`false`: no block counts as active already (`--api 1.6`; no effect in 1.3)",
    "block_hashes": "XXH3-64 of the tokens of each full block; with `sequence_hashes`, in place of"
    " tokens",
    "block_mm_infos": "for each block the multimodal objects in it, or null",
    "block_size": "tokens of a KV block",
    "cache_salt": "a secret of the tenant that is hashed into its prompts' blocks",
    "cached_tokens": "prompt tokens that the engine reports as cached; only used in metrics",
    "cpu": "cached tokens on the device or in host memory",
    "data_parallel_size": "how many data-parallel ranks the worker has, at most 4096; null: 1",
    "data_parallel_start_rank": "the first of its data-parallel ranks; null: 0",
    "decay_fraction": "weight in the load, from now on, of each block that only this request "
    "holds; null: unchanged",
    "decode_busy": "`potential_decode_blocks` is above `--router-decode-busy-threshold` of the "
    "worker's `total_kv_blocks`; absent if either is not set",
    "device_blocks": "leading blocks of the prompt that are cached on the device",
    "disk": "cached tokens on the device, in host memory or on disk",
    "disk_extension_blocks": "blocks cached on disk that follow the ones in host memory",
    "dp": "tokens cached on the device, by rank",
    "dp_rank": "the worker's data-parallel rank",
    "dp_size": "number of ranks of the worker",
    "dp_start": "first rank of the worker",
    "effective_prefill_tokens": "prompt tokens that the rank still has to prefill",
    "endpoint": "where to send requests for the worker, as registered",
    "expected_output_tokens": "expected length of the answer; sent to replicas, no effect on "
    "the choice",
    "explain": "`true` adds the figures behind the choice to the answer",
    "gpu": "cached tokens on the device",
    "host_pinned_extension_blocks": "blocks cached in host memory that follow those on the device",
    "input_trigger": "accepted without effect",
    "is_eagle": "blocks are hashed as EAGLE engines do, over one more token",
    "isl_tokens": "tokens of the prompt",
    "kv_event_source_mode": "how KV events are produced; `state_agent_v2` excludes the worker "
    "from hints",
    "kv_events_endpoint": "ZMQ endpoint of the KV events of a worker with one rank",
    "kv_events_endpoints": "ZMQ endpoints of the KV events of each rank",
    "kv_sources": "the worker's KV event sources, by rank; empty if it has none",
    "kv_transfer_domain": "stored and returned; no effect on the choice",
    "kv_transfer_enforcement": "stored and returned; no effect on the choice",
    "kv_transfer_preferred_weight": "stored and returned; no effect on the choice",
    "last_error": "the last error, or null",
    "lifecycle": "`schedulable`; `draining`: gets no new requests; `incomplete`: something is "
    "missing; `unschedulable`: just removed",
    "longest_matched": "maximum of `gpu`, `cpu` and `disk`",
    "lora_name": "the LoRA adapter, which is hashed into the prompt's blocks",
    "load_endpoint": "ZMQ endpoint where the engine publishes its load (SGLang); with several "
    "ranks, that of the first",
    "max_num_batched_tokens": "the engine's batch size in tokens; required with `--queue-"
    "threshold`",
    "mm_hash": "the engine's hash of the object",
    "mm_objects": "the objects in the block",
    "mm_routing_info": "the prompt as it is hashed, if it has multimodal objects",
    "model_name": "the model; with the tenant it names the partition",
    "new_isl_tokens": "prompt tokens that have to be prefilled",
    "not_schedulable_reasons": "what is missing; absent if nothing is",
    "num_blocks": "full blocks of the prompt",
    "offsets": "position of the object, as pairs of numbers; not hashed",
    "outcome": "`refused`: connection refused; `failed`: accepted and not completed; `ok`",
    "overlap": "cached tokens of the prompt on the chosen worker",
    "overlap_score_credit": "blocks of prefill that a cached device block saves",
    "overlap_score_weight": "old name of `prefill_load_scale`; 0 also sets "
    "`overlap_score_credit` to 0",
    "parent_session_id": "accepted without effect",
    "pending_count": "requests in the queue",
    "pending_isl_tokens": "prompt tokens of the requests in the queue, cached or not",
    "pinned_worker": "use this rank, or answer 503",
    "potential_decode_blocks": "KV blocks of the rank with this prompt",
    "potential_prefill_tokens": "tokens that would wait to be prefilled on the rank with this "
    "prompt",
    "preferred_taints": "weight by taint: positive makes workers with it cheaper, negative more"
    " expensive",
    "prefill_busy": "`active_prefill_tokens` is above `--router-prefill-busy-threshold` of the "
    "capacity; absent without that flag",
    "policy": "what the cost weighs: `dynamo`: blocks, as the reference; `latency`: the prefill"
    " before the first token",
    "prefill_load_scale": "cost of a block of prefill, relative to an active block",
    "prefill_token_capacity": "the worker's `max_num_batched_tokens`; 10000000 if it has none",
    "priority_jump": "in the queue, count the request as this many seconds earlier; below 0 "
    "counts as 0",
    "replay_endpoint": "ZMQ endpoint that replays missed batches; with several ranks, that of "
    "the first",
    "replay_endpoints": "ZMQ endpoints that replay missed batches, by rank",
    "request_id": "the request's id, unique while it is live",
    "required_taints": "only workers with all of these taints",
    "reservation_id": "the reservation's id",
    "router_config_override": "cost settings for this request alone",
    "router_hint_source_control_endpoints": "by rank, where other workers can fetch its blocks",
    "router_hint_worker_type": "workers of one type can fetch blocks from each other",
    "router_temperature": "temperature of the choice; 0: the lowest cost",
    "routing_constraints": "taints that workers must or should have",
    "routing_group": "alias of `tenant_id`; if both are given they must be equal",
    "selection_id": "the caller's id of the selection, returned in the answer",
    "sequence_hashes": "for each full block, the hash of the prompt up to its end",
    "session_context": "the session in the form that agents send; takes precedence over "
    "`session_id`",
    "session_final": "accepted without effect",
    "session_id": "the request's session; used with `--session-affinity-ttl-secs`",
    "shared_beyond_device_blocks": "always null: there is no shared cache",
    "shared_cache": "always the same: there is no shared cache",
    "shared_cache_multiplier": "accepted without effect",
    "stable_routing_id": "stored and returned; no effect on the choice",
    "strict_priority": "in the queue, higher values go first, before arrival time; null: 0",
    "taints": "labels that `routing_constraints` refer to",
    "tenant_id": "the tenant; `default` if none is given",
    "token_ids": "the prompt's tokens, instead of hashes",
    "topology_domains": "stored and returned; no effect on the choice",
    "total_kv_blocks": "device blocks of a rank; bounds its index",
    "track_prefill_tokens": "whether tokens to be prefilled count as load",
    "ttft_ms": "milliseconds to the first token; only used in metrics",
    "url": "ZMQ endpoint of the replica's events",
    "worker_id": "the worker's id",
    "worker_load": "load of the chosen rank without this request; only for an advisory select",
}
OWN: Final = {
    "Booked16.selection_id": "the reservation's id",
    "CurveState.public_key": "this replica's public key",
    "CurveState.peer_keys": "number of admitted peer keys",
    "CurveState.refused": "total handshakes refused for another key",
    "CurveState.last_refused": "public key of the last refused handshake",
    "DiscoveredPeer.endpoint": "ZMQ endpoint of its events",
    "DiscoveredPeer.state": "`registered`, `known` (by flag or over HTTP), `removed` (over HTTP),"
    " `refused` or `itself`",
    "DiscoveredPeer.leaves_in_s": "seconds until it is removed; null while a discovery lists it",
    "DiscoveredPeer.last_error": "why it was refused, or why catch-up from it fails",
    "DiscoveredWorker.endpoint": "URL of the engine",
    "DiscoveredWorker.worker_id": "the id that it got",
    "DiscoveredWorker.discoveries": "the discoveries that list it",
    "DiscoveredWorker.state": "`asking`, `registered`, `by_http`, `removed` or `refused`",
    "DiscoveredWorker.leaves_in_s": "seconds until it is removed; null while a discovery lists it",
    "DiscoveredWorker.last_error": "why it could not be queried or registered",
    "DiscoveryReport.discoveries": "one per flag",
    "DiscoveryReport.workers": "discovered workers",
    "DiscoveryReport.peers": "discovered replicas",
    "DiscoveryState.discovery": "as given in the flag",
    "DiscoveryState.finds": "`workers` or `peers`",
    "DiscoveryState.state": "`starting`, `watching` or `failing`",
    "DiscoveryState.since_s": "seconds in this state",
    "DiscoveryState.found": "number found last, which stays in force; null before",
    "DiscoveryState.failures": "total failures",
    "Finding.level": "`error`, `warning` or `note`",
    "Finding.subject": "`selector`, `discovery`, `model NAME`, `worker ID` or `worker ID rank"
    " RANK`",
    "Finding.what": "what is wrong, in words",
    "Finding.mend": "what mends it; null: nothing is to be done",
    "Fleet.version": "of lean-selector",
    "Fleet.now": "when it was so, in seconds since 1970",
    "Fleet.workers": "the registered workers",
    "Fleet.ranks": "of each worker its ranks",
    "Fleet.models": "models and tenants that have had a worker",
    "Fleet.findings": "what is wrong, as `lean-selector check` tells it without asking an engine",
    "FleetModel.shed": "requests that were shed because all workers were busy, ever",
    "FleetRank.state": "`in_service`, `probation` or `ejected`; the worker's lifecycle while it is"
    " not schedulable",
    "FleetRank.since": "since when it is ejected or on probation, in seconds since 1970",
    "FleetRank.source": "the state of its source of KV events, as in `GET /kv_sources`; null: it"
    " has none",
    "FleetRank.source_since": "since when, in seconds since 1970",
    "FleetRank.prefill_tokens": "prompt tokens that wait to be prefilled",
    "FleetRank.decode_blocks": "KV blocks that its live requests hold",
    "FleetRank.requests": "live requests",
    "FleetRank.cached_blocks": "KV blocks that the index has of its device",
    "FleetRank.selections": "requests that were given it, as all that follows since it registered",
    "FleetRank.prompt_tokens": "tokens of their prompts",
    "FleetRank.overlap_tokens": "of these, found cached",
    "FleetRank.ok": "requests reported as answered",
    "FleetRank.failed": "requests reported as failed",
    "FleetRank.refused": "requests whose connection it refused",
    "FleetRank.ttft_s": "seconds to the first token, as reported, in sum",
    "FleetRank.ttft_count": "how many of these were reported",
    "FleetRank.predicted_s": "seconds to the first token, as predicted, in sum",
    "FleetRank.predictions": "how many of these were predicted, and came",
    "PrefixTree.held_blocks": "blocks of the index, on all ranks and tiers",
    "PrefixTree.runs": "parents before what follows them",
    "UpperRun.parent": "the place in this list of the run before it; -1: a prompt begins with it",
    "UpperRun.depth": "blocks of a prompt before it",
    "UpperRun.blocks": "blocks of the run",
    "UpperRun.holders": "ranks that hold some of them on the device",
    "UpperRun.held_blocks": "how many blocks of it they hold together",
    "UpperRun.branches": "runs that follow it, in this list or not",
    "UpperRun.first_hash": "XXH3-64 of its first block, in hexadecimal",
    "UpperRun.hits": "prompts that met it while somebody listens to `GET /events`; else null",
    "EjectedWorker.dp_ranks": "its ejected ranks",
    "EjectedWorker.reason": "why the first of them was ejected",
    "ErrorBody.error": "what was wrong, with the name of the field if there is one",
    "Explanation.drawn": "how the rank was chosen: `only_candidate`, `lowest_cost`, "
    "`uniform_tie` or `softmax`",
    "Explanation.tied_ranks": "candidates at the lowest cost",
    "Explanation.temperature": "temperature of the choice; 0: the lowest cost",
    "Explanation.new_blocks": "blocks that the prompt adds",
    "Explanation.ranks": "every rank of the partition, by worker and rank",
    "Explanation.session": "binding of the request's session; only with sessions on, if it has one",
    "FetchAction.action_id": "always `a1`",
    "FetchAction.action_type": "always `kv.fetch`",
    "FetchAction.action_version": "always `1.0`",
    "FetchAction.payload": "what to fetch, and where",
    "FetchPayload.block_hashes": "the engine's own hashes, from the first block of the prompt",
    "FetchPayload.source_control_endpoint": "control endpoint of the rank that holds them",
    "KvHint.protocol_version": "always `0.1`",
    "KvHint.message_id": "the `selection_id`",
    "KvHint.actions": "one: what to fetch",
    "KvSource.endpoint": "ZMQ endpoint of its events",
    "KvSource.connection": "`resolving`, `connecting`, `connected` or `retrying`",
    "KvSource.last_seq": "sequence number of the last live batch; null before",
    "KvSource.lag_batches": "batches known of and not fully applied",
    "KvSource.lost_batches": "batches that no replay had, since the index last matched the engine",
    "KvSource.gaps": "total gaps",
    "KvSource.replayed_batches": "total batches from replays",
    "KvSource.restarts": "total restarts of the engine",
    "KvSource.backlog_bytes": "bytes received and not applied, replays included",
    "KvSource.dropped_batches": "batches dropped because too much waited; a replay may bring them",
    "KvSource.messages": "total live messages",
    "KvSource.skipped": "skipped events by `TYPE:REASON`; `message:REASON` if there was no batch",
    "KvSource.index_accuracy": "over recent prompts, 1 if the index found what the engine "
    "counted as cached; null before the first comparison",
    "KvSource.last_message_age_s": "seconds since the last live message; null before",
    "MmRoutingInfo.routing_token_ids": "the prompt's tokens, as they are hashed",
    "OpenAiError.message": "what was wrong",
    "OpenAiError.type": "OpenAI's kind of error, such as `invalid_request_error`",
    "OpenAiError.param": "always null: the message names the field",
    "OpenAiError.code": "OpenAI's error code, or null",
    "OpenAiErrorBody.error": "the error, in OpenAI's shape",
    "Ok.status": "always `ok`",
    "OverlapRow.host_pinned_blocks": "leading blocks cached on the device or in host memory",
    "OverlapRow.disk_blocks": "leading blocks cached on the device, in host memory or on disk",
    "OverlapRow.router_credit_blocks": "blocks of prefill that the cached blocks save in the cost",
    "OverlapScores.workers": "a row for each rank",
    "OverloadBody.error": "as in every other error",
    "OverloadBody.message": "the same, for clients",
    "OverloadBody.type": "always `service_unavailable`",
    "OverloadBody.code": "the status",
    "PartitionLoads.loads": "a row for each rank",
    "PeerRequest.endpoint": "ZMQ endpoint of the replica's events",
    "PeerState.endpoint": "ZMQ endpoint of its events",
    "PeerState.state": "`resolving`, `connecting`, `connected` or `disconnected`",
    "PeerState.since_s": "seconds in this state",
    "PeerState.retries": "connection attempts since",
    "PeerState.last_error": "why there is no connection now",
    "SyncState.router_id": "id of this replica",
    "SyncState.peers": "its peers, by endpoint",
    "SyncState.published": "total events published",
    "SyncState.refused": "total events not published: too many were waiting, or too big",
    "SyncState.queue_overflows": "times that a peer's queue started to drop events",
    "SyncState.sequence": "number of the last event published or refused",
    "SyncState.received": "total events received from peers",
    "SyncState.missed": "total events published by replicas and never received, by their numbers",
    "SyncState.publishers": "replicas that number their events",
    "SyncState.applied": "events applied, by kind",
    "SyncState.dropped": "events dropped, by reason",
    "SyncState.catch_up": "reservations from peers' snapshots, by outcome; absent without catch-up",
    "SyncState.curve": "state of the encryption; absent without keys",
    "PublisherState.router_id": "id of the replica",
    "PublisherState.sequence": "number of its last known event",
    "PublisherState.heard_s": "seconds since its last message",
    "PublisherState.missed": "its events that were never received",
    "PublisherState.is_behind": "events were missed and not repaired yet",
    "RankExplanation.engine_load": "load reported by the rank's engine in the last 5 s; absent "
    "without a report; not part of the cost",
    "RankExplanation.filtered": "why the rank was no candidate: `busy`, `queue`, `ejected`, "
    "`draining`, `taint`, `not_allowed`, `not_pinned` or `affinity`; null for a candidate",
    "RankExplanation.host_pinned_blocks": "cached blocks that follow in host memory",
    "RankExplanation.disk_blocks": "cached blocks that follow on disk",
    "RankExplanation.credit_blocks": "blocks of prefill saved by cached blocks",
    "RankExplanation.credit_decay": "remaining credit for device blocks, given the rank's "
    "waiting prefill, 0 to 1",
    "RankExplanation.taint_factor": "factor of the cost for preferred taints",
    "RankExplanation.cost": "in blocks; the lowest wins; null if filtered",
    "RankExplanation.probability": "chance of being chosen",
    "RankExplanation.session_bonus_blocks": "blocks subtracted from the cost for the session; "
    "absent without a soft session",
    "RankExplanation.burden_blocks": "added to the cost for those that come after the prompt and"
    " wait for what it computes; only with the policy `latency`",
    "RankExplanation.evicted_blocks": "added to the cost for blocks that the prompt would "
    "evict; only with the policy `latency`, where `potential_prefill_tokens` is the work "
    "before the first token",
    "RankExplanation.slowness": "what multiplies the cost, by how long the rank takes for a token:"
    " 0.25 to 4, 1 until that is known; only with the policy `latency`",
    "RankExplanation.ttft_estimate_s": "seconds to the first token, by what waits, the prompt and"
    " the rank's speed; absent until that is known",
    "RankHealthRow.state": "`in_service`, `probation` or `ejected`",
    "RankHealthRow.reason": "why it was ejected, or null",
    "RankHealthRow.since_s": "seconds since it was ejected or put on probation",
    "RankHealthRow.returns_in_s": "seconds until it is tried again; null: after a successful "
    "poll, or not ejected",
    "RankHealthRow.failures": "consecutive failed requests",
    "RankHealthRow.failed_polls": "consecutive failed polls",
    "RankHealthRow.ejections": "recent ejections, which lengthen the next one",
    "RankLoadRow.active_requests": "live requests of the rank, without this prompt",
    "RankLoadRow.potential_prefill_tokens": "tokens that wait to be prefilled on the rank, "
    "including this prompt's",
    "RankLoadRow.potential_decode_blocks": "KV blocks held by the rank's requests, including "
    "this prompt's",
    "Readiness.ready": "at least one worker can be chosen",
    "Readiness.schedulable_workers": "workers that can be chosen",
    "Readiness.workers": "all workers; absent for clients without a token if tokens are enabled",
    "Readiness.recovering": "`true` while the index is being recovered at start; else absent",
    "Readiness.ejected": "workers with ejected ranks; absent if there are none",
    "Readiness.state_fault": "why the state directory cannot be written; else absent",
    "RegisterRequest.block_size": "tokens of a KV block; equal for all workers of a model and "
    "tenant",
    "ReservationRequest.reservation_id": "the reservation's id; default: `selection_id`",
    "ReservationRequest.selection_id": "book the `/select` with this id, unless `worker_id` is "
    "given",
    "ReservationRequest.worker_id": "the worker; absent or null: that of `selection_id`",
    "ReservationRequest.dp_rank": "the rank; null: 0",
    "ReservationRequest.effective_prefill_tokens": "prompt tokens to prefill; null: 0",
    "ReservationRequest16.selection_id": "the reservation's id; books the `/select` with this "
    "id, unless `worker_id` is given",
    "SelectAndReserveRequest.reservation_id": "the reservation's id; generated if absent",
    "SelectAndReserveRequest16.selection_id": "the reservation's id; generated if absent",
    "Selection.selection_id": "the caller's id of the selection; absent if none was given",
    "Selection.reservation_id": "the reservation's id; absent if nothing was booked",
    "Selection.explain": "the figures behind the choice; only if requested",
    "Selection16.selection_id": "the caller's id of the selection, absent if none was given; if"
    " booked, the reservation's id",
    "Selection16.sequence_hashes": "for each full block, the hash of the prompt up to its end; "
    "only if booked",
    "Selection16.isl_tokens": "tokens of the prompt; only if booked",
    "Selection16.track_prefill_tokens": "whether its prefill counts as load; only if booked",
    "Selection16.kv_hint": "where the chosen worker can fetch blocks of the prompt; only if "
    "booked, and another rank has more of it",
    "SessionExplanation.session_id": "the session of the request",
    "SessionExplanation.mode": "`hard` or `soft`",
    "SessionExplanation.bound": "whether it is bound to a rank",
    "SessionExplanation.worker_id": "the worker it is bound to; null if unbound",
    "SessionExplanation.dp_rank": "the rank it is bound to; null if unbound",
    "SessionExplanation.reservations": "its live reservations on this replica",
    "SelectionSessionContext.session_id": "the session; the only field with an effect",
    "SharedCache.enabled": "always false",
    "SharedCache.total_hit_blocks": "always 0",
    "SharedCache.ranges": "always empty",
    "SharedCache.error": "always null",
    "SourceCondition.state": "`resolving`, `connecting`, `replaying`, `live`; or a fault: "
    "`unreachable`, `mismatch`, `degraded`, `no_replay`, `partial`, `silent`",
    "SourceCondition.state_age_s": "seconds in this state",
    "SourceCondition.problem": "description of the fault; null: none",
    "EngineLoad.running_requests": "running requests",
    "EngineLoad.waiting_requests": "requests waiting in the engine",
    "EngineLoad.kv_tokens": "tokens of KV cache in use",
    "EngineLoad.kv_token_capacity": "tokens that its KV cache holds; null if unknown",
    "EngineLoad.waiting_uncached_tokens": "tokens that the waiting requests have to prefill; "
    "null if not reported",
    "EngineLoad.total_tokens": "tokens in use and of waiting requests; null if not reported",
    "EngineLoad.max_running_requests": "maximum of running requests; null if not reported",
    "EngineLoad.prefilled_tokens": "uncached prompt tokens since the engine started; null if "
    "not reported",
    "EngineLoad.prefill_busy_s": "seconds spent on those; null if not reported",
    "EngineLoad.age_s": "seconds since the report",
    "RankLoadRow.engine_load": "load reported by the rank's engine in the last 5 s; null "
    "without a report; only in `/loads?detail=true`",
    "RankLoadRow.prefill_tokens_per_s": "how fast first tokens come, by the prefill ahead of them;"
    " only in `/loads?detail=true`, absent until 20 requests have told",
    "RankLoadRow.ttft_error": "how far first tokens came from when they were predicted: the mean of"
    " the differences, as a part of the time that it took; likewise",
    "WorkerRecord.load_endpoint": "ZMQ endpoint where the engine publishes its load; absent if "
    "not given",
    "ThresholdRequest.model": "the model",
    "ThresholdRow.model": "the model",
    "ThresholdRow.tenant_id": "the tenant; absent for `default`",
    "ThresholdRow.active_prefill_tokens_threshold_frac": "the same as a multiple of the "
    "worker's `max_num_batched_tokens`; absent if off",
    "Thresholds.thresholds": "a row for each model and tenant that has a worker",
    "WorkerAffinityTarget.dp_rank": _RANK_OR_ALL,
    "WorkerDetail.health": "the worker's health",
    "WorkerHealthDetail.state": "of the worst rank: `in_service`, `probation` or `ejected`",
    "WorkerHealthDetail.ranks": "ranks with failures or ejections",
    "WorkerPatch.endpoint": _NEEDED,
    "WorkerPatch.lifecycle": "`draining`: finish current requests and get no new ones; "
    "`schedulable`: end draining; anything else is ignored",
    "WorkerLoad.total_kv_blocks": "device blocks of a rank; absent if not reported",
    "WorkerRecord.kv_events_endpoints": "ZMQ endpoints of the KV events of each rank; absent if"
    " not given",
    "WorkerRecord.replay_endpoints": "ZMQ endpoints that replay missed batches, by rank; absent"
    " if not given",
    "WorkerRecord.router_hint_worker_type": "workers of one type can fetch blocks from each "
    "other; absent if not given",
    "WorkerRecord.router_hint_source_control_endpoints": "by rank, where other workers can "
    "fetch its blocks; absent if not given",
    "WorkerRecord.kv_event_source_mode": "how KV events are produced; absent if not given",
    "WorkerReport.dp_rank": "the rank; null: the whole worker",
    "WorkerRequest.worker_id": "the worker's id, chosen by the caller",
    "WorkerRequest.endpoint": _NEEDED,
}
# These structs also have the fields of another.
_SAME: Final = {"KvSource": "SourceCondition", "WorkerDetail": "WorkerRecord"}
_DIALECT: Final = "16"


def meaning_of(schema: str, field: str) -> str | None:
    """The description of a field of a schema, by its name on the wire; None if it has none."""
    name = schema.removesuffix(_DIALECT)
    for struct in (schema, name, _SAME.get(name, "")):
        own = OWN.get(f"{struct}.{field}")
        if own is not None:
            return own
    return GLOSSARY.get(field)
