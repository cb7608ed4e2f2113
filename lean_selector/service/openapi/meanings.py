"""What each field of the structs that travel means, with its unit: the descriptions of the schemas.

GLOSSARY has what a field means wherever it stands, by the name that it travels under; OWN what it
means in one struct alone, by `Struct.field`. The structs of the 1.6 dialect, whose names end in 16,
have the meanings of those without, unless they have their own.
"""

from typing import Final

_NEEDED: Final = "where requests go; without it the worker is `incomplete`"
_RANK_OR_ALL: Final = "the rank; null: any of the worker's"
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
    "lifecycle": "`schedulable`; `draining`, which is given nothing new; `incomplete`, which lacks"
    " something; `unschedulable`, of one that was just removed",
    "longest_matched": "the most of `gpu`, `cpu` and `disk`",
    "lora_name": "the adapter; gives the prompt hashes of its own",
    "load_endpoint": "ZMQ endpoint where the engine publishes its own load (SGLang); of several"
    " ranks, that of the first",
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
    "policy": "what the cost weighs: `dynamo`, blocks as the reference does, or `latency`, the"
    " prefill ahead of the first token",
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
OWN: Final = {
    "Booked16.selection_id": "the name of the booking",
    "Block.block_hash": "the engine's hash of the block",
    "Block.tokens_hash": "XXH3-64 of its tokens",
    "Block.mm_extra_info": "always null",
    "CurveState.public_key": "ours",
    "CurveState.peer_keys": "how many keys of peers are admitted",
    "CurveState.refused": "handshakes of clients with another key, ever",
    "CurveState.last_refused": "public key of the last of them",
    "DiscoveredPeer.endpoint": "ZMQ endpoint of its events",
    "DiscoveredPeer.state": "`registered`, `known` (by flag or over HTTP), `removed` (over HTTP),"
    " `refused` or `itself`",
    "DiscoveredPeer.leaves_in_s": "seconds until it is let go; null while a discovery names it",
    "DiscoveredPeer.last_error": "why it was refused, or is not caught up from",
    "DiscoveredWorker.endpoint": "URL of the engine",
    "DiscoveredWorker.worker_id": "the id that it was given",
    "DiscoveredWorker.discoveries": "those that name it",
    "DiscoveredWorker.state": "`asking`, `registered`, `by_http`, `removed` or `refused`",
    "DiscoveredWorker.leaves_in_s": "seconds until it is let go; null while a discovery names it",
    "DiscoveredWorker.last_error": "why it could not be asked or registered",
    "DiscoveryReport.discoveries": "what is looked for, by the flags",
    "DiscoveryReport.workers": "workers that were found",
    "DiscoveryReport.peers": "replicas that were found",
    "DiscoveryState.discovery": "as the flag says it",
    "DiscoveryState.finds": "`workers` or `peers`",
    "DiscoveryState.state": "`starting`, `watching` or `failing`",
    "DiscoveryState.since_s": "seconds that it has been so",
    "DiscoveryState.found": "how many it found last, which holds; null before",
    "DiscoveryState.failures": "how often it failed, ever",
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
    "DumpEntry.model_name": "the model; absent of an entry that is empty, and in 1.6 without"
    " `detail=true`",
    "DumpEntry.tenant_id": "the tenant; absent where `model_name` is",
    "DumpEntry.events": "what would bring an empty index there, in order",
    "DumpEntry.watermarks": "by `WORKER:RANK`, the last batch of the engine that is in it; absent"
    " where `model_name` is",
    "EjectedWorker.dp_ranks": "those of its ranks that are ejected",
    "EjectedWorker.reason": "why the first of them is",
    "ErrorBody.error": "what was wrong, with the name of the field where there is one",
    "Event.event_id": "counts from 0 within each tier",
    "Event.data": "what happened",
    "Explanation.drawn": "how the choice fell: `only_candidate`, `lowest_cost`, `uniform_tie` or"
    " `softmax`",
    "Explanation.tied_ranks": "candidates at the lowest cost",
    "Explanation.temperature": "of the draw; 0: the lowest cost",
    "Explanation.new_blocks": "blocks that the prompt is charged for",
    "Explanation.ranks": "every rank of the partition, by worker and rank",
    "Explanation.session": "what its session was bound to; only where sessions are on and it has"
    " one",
    "FetchAction.action_id": "always `a1`",
    "FetchAction.action_type": "always `kv.fetch`",
    "FetchAction.action_version": "always `1.0`",
    "FetchAction.payload": "what to fetch, and where",
    "FetchPayload.block_hashes": "the engine's own hashes, from the prompt's first block on",
    "FetchPayload.source_control_endpoint": "the control endpoint of the rank that holds them",
    "KvHint.protocol_version": "always `0.1`",
    "KvHint.message_id": "the `selection_id`",
    "KvHint.actions": "one: what to fetch",
    "KvSource.endpoint": "ZMQ endpoint of its events",
    "KvSource.connection": "`resolving`, `connecting`, `connected` or `retrying`",
    "KvSource.last_seq": "number of the last live batch; null before",
    "KvSource.lag_batches": "batches that are known of and not applied to the end",
    "KvSource.lost_batches": "batches that are in no replay, since the index last was what the"
    " engine held",
    "KvSource.gaps": "times that batches were missing, ever",
    "KvSource.replayed_batches": "batches that came out of replays, ever",
    "KvSource.restarts": "times that the engine began anew, ever",
    "KvSource.backlog_bytes": "bytes received and waiting, also for a replay",
    "KvSource.dropped_batches": "batches given up because too much waited; a replay may bring them",
    "KvSource.messages": "live messages received, ever",
    "KvSource.skipped": "events that do not count, by `TYPE:REASON`; `message:REASON` where it held"
    " no batch",
    "KvSource.index_accuracy": "of prompts lately, 1 where the index found what the engine counted"
    " as cached; null before one was compared",
    "KvSource.last_message_age_s": "seconds since the last live message; null before",
    "MmRoutingInfo.routing_token_ids": "the prompt's tokens, as they are hashed",
    "OpenAiError.message": "what was wrong",
    "OpenAiError.type": "OpenAI's kind of error, such as `invalid_request_error`",
    "OpenAiError.param": "always null: no field is named apart from the message",
    "OpenAiError.code": "OpenAI's word for it, or null",
    "OpenAiErrorBody.error": "the error, in OpenAI's shape",
    "Ok.status": "always `ok`",
    "OverlapRow.host_pinned_blocks": "leading blocks cached on the device or in host memory",
    "OverlapRow.disk_blocks": "leading blocks cached on the device, in host memory or on disk",
    "OverlapRow.router_credit_blocks": "blocks of prefill that they save in the cost",
    "OverlapScores.workers": "a row for each rank",
    "OverloadBody.error": "as in every other error",
    "OverloadBody.message": "the same, as a text for clients",
    "OverloadBody.type": "always `service_unavailable`",
    "OverloadBody.code": "the status",
    "PartitionLoads.loads": "a row for each rank",
    "PeerRequest.endpoint": "ZMQ endpoint of the replica's events",
    "PeerState.endpoint": "ZMQ endpoint of its events",
    "PeerState.state": "`resolving`, `connecting`, `connected` or `disconnected`",
    "PeerState.since_s": "seconds that it has been so",
    "PeerState.retries": "attempts to connect since",
    "PeerState.last_error": "why there is no connection now",
    "PlaneState.router_id": "this replica's",
    "PlaneState.peers": "those that it speaks to, by endpoint",
    "PlaneState.published": "events that it published, ever",
    "PlaneState.refused": "events not published because too many waited, or too big, ever",
    "PlaneState.queue_overflows": "times that the queue of a peer began to drop what is published",
    "PlaneState.sequence": "number of the last event published or refused",
    "PlaneState.received": "events received from peers, ever",
    "PlaneState.missed": "events that replicas published and that never arrived, by their numbers",
    "PlaneState.publishers": "replicas that number their events",
    "PlaneState.applied": "events applied, by kind",
    "PlaneState.dropped": "events dropped, by reason",
    "PlaneState.catch_up": "reservations of peers' snapshots, by what became of them; absent where"
    " none is asked for one",
    "PlaneState.curve": "how it encrypts; absent without keys",
    "PublisherState.router_id": "the replica's",
    "PublisherState.sequence": "number of the last event heard of",
    "PublisherState.heard_s": "seconds since it was heard",
    "PublisherState.missed": "events of it that never arrived",
    "PublisherState.is_behind": "something was missed, and not mended since",
    "RankExplanation.engine_load": "what the engine of the rank reported of its load in the last"
    " 5 s; absent where it did not; it is no part of the cost",
    "RankExplanation.filtered": "why it was no candidate: `busy`, `queue`, `ejected`, `draining`,"
    " `taint`, `not_allowed`, `not_pinned` or `affinity`; null of a candidate",
    "RankExplanation.host_pinned_blocks": "blocks that follow them in host memory",
    "RankExplanation.disk_blocks": "blocks that follow these on disk",
    "RankExplanation.credit_blocks": "blocks of prefill that what is cached saves",
    "RankExplanation.credit_decay": "what is left of the credit for device blocks on a rank that"
    " has so much to prefill, 0 to 1",
    "RankExplanation.taint_factor": "by which preferred taints multiply the cost",
    "RankExplanation.cost": "in blocks, the lowest wins; null where filtered",
    "RankExplanation.probability": "of being drawn among the candidates",
    "RankExplanation.session_bonus_blocks": "blocks that the cost is less by for the session;"
    " absent without a soft one",
    "RankExplanation.evicted_blocks": "added to the cost for what the prompt would evict, 0 where"
    " the cache has room; only with the policy `latency`, where `potential_prefill_tokens` is the"
    " work before the first token",
    "RankExplanation.slowness": "what multiplies the cost, by how long the rank takes for a token:"
    " 0.25 to 4, 1 until that is known; only with the policy `latency`",
    "RankExplanation.ttft_estimate_s": "seconds to the first token, by what waits, the prompt and"
    " the rank's speed; absent until that is known",
    "RankHealthRow.state": "`in_service`, `probation` or `ejected`",
    "RankHealthRow.reason": "why it was ejected, or null",
    "RankHealthRow.since_s": "seconds that it has been ejected or on probation",
    "RankHealthRow.returns_in_s": "seconds until it is tried again; null: when a poll succeeds, or"
    " it is not ejected",
    "RankHealthRow.failures": "requests that failed, in a row",
    "RankHealthRow.failed_polls": "polls that failed, in a row",
    "RankHealthRow.ejections": "what the next ejection grows with",
    "RankLoadRow.active_requests": "live requests of the rank; with a prompt, without it",
    "RankLoadRow.potential_prefill_tokens": "tokens that wait to be prefilled on the rank; with a"
    " prompt, with it",
    "RankLoadRow.potential_decode_blocks": "KV blocks that the rank's requests hold; with a prompt,"
    " with it",
    "Readiness.ready": "at least one worker can be chosen",
    "Readiness.schedulable_workers": "workers that can be chosen",
    "Readiness.workers": "all workers; absent for whoever has no token where tokens are asked for",
    "Readiness.recovering": "`true` while the index is being recovered at the start; else absent",
    "Readiness.ejected": "workers that fail and are given nothing for now; absent while there are"
    " none",
    "Readiness.state_fault": "why the state directory cannot be written; else absent",
    "RegisterRequest.block_size": "tokens of a KV block; the same for all of a model and tenant",
    "ReservationRequest.reservation_id": "the name of the booking; may be absent beside"
    " `selection_id`, which it then is",
    "ReservationRequest.selection_id": "books what `/select` chose under it, unless `worker_id` is"
    " given",
    "ReservationRequest.worker_id": "the worker; absent or null: that of `selection_id`",
    "ReservationRequest.dp_rank": "the rank; null: 0",
    "ReservationRequest.effective_prefill_tokens": "tokens that it has to prefill; null: 0",
    "ReservationRequest16.selection_id": "the name of the booking; what `/select` chose under it is"
    " booked, unless `worker_id` is given",
    "SelectAndReserveRequest.reservation_id": "the name of the booking; one is made up where there"
    " is none",
    "SelectAndReserveRequest16.selection_id": "the name of the booking; one is made up where there"
    " is none",
    "Selection.selection_id": "the caller's name of the selection; absent where none was given",
    "Selection.reservation_id": "the name of the booking; absent where nothing was booked",
    "Selection.explain": "the figures behind the choice; only where they were asked for",
    "Selection16.selection_id": "the caller's name of the selection, absent where none was given;"
    " of a booked one, the name of the booking",
    "Selection16.sequence_hashes": "for each full block the hash of the prompt up to its end; only"
    " where it was booked",
    "Selection16.isl_tokens": "tokens of the prompt; only where it was booked",
    "Selection16.track_prefill_tokens": "whether its prefill counts for the load; only where it was"
    " booked",
    "Selection16.kv_hint": "where the chosen worker can fetch blocks of the prompt; only where it"
    " was booked and another has more of it",
    "SessionExplanation.session_id": "the session of the request",
    "SessionExplanation.mode": "`hard` or `soft`",
    "SessionExplanation.bound": "whether it is bound to a rank",
    "SessionExplanation.worker_id": "to whose; null where it is not",
    "SessionExplanation.dp_rank": "to which; null where it is not",
    "SessionExplanation.reservations": "of it that are live here",
    "SelectionSessionContext.session_id": "the session; the only one of these with an effect",
    "SessionLine.session_id": "the session",
    "SessionLine.dp_rank": "the rank that it is bound to; null: any of the worker's",
    "SessionLine.sequence": "number of the binding: of two, the one with the higher counts",
    "SessionLine.writer_id": "`router_id` of the replica that made the binding",
    "SessionLine.idle_s": "seconds since the session had a reservation there",
    "SessionList.version": "of this form: 1",
    "SessionList.sessions": "those that are bound",
    "SharedCache.enabled": "always false",
    "SharedCache.total_hit_blocks": "always 0",
    "SharedCache.ranges": "always empty",
    "SharedCache.error": "always null",
    "Snapshot.version": "of this form: 1",
    "Snapshot.router_id": "of the replica that answers",
    "Snapshot.sequence": "number of the last event that it had published",
    "Snapshot.reservations": "all that are live there",
    "SnapshotLine.request_id": "the name of the booking",
    "SnapshotLine.router_id": "of the replica that admitted it",
    "SnapshotLine.age_s": "seconds since it was last heard of",
    "SnapshotLine.prefill_tokens": "tokens that it has still to prefill",
    "SnapshotLine.prefill_done": "whether its first token came",
    "SnapshotLine.prefill_duration_s": "seconds that the prefill was expected to take; null:"
    " unknown",
    "SnapshotLine.lora_name": "the adapter of the request",
    "SourceCondition.state": "`resolving`, `connecting`, `replaying`, `live`; or what is wrong:"
    " `unreachable`, `mismatch`, `degraded`, `no_replay`, `partial`, `silent`",
    "SourceCondition.state_age_s": "seconds that it has been so",
    "SourceCondition.problem": "what is wrong, in words; null: nothing",
    "EngineLoad.running_requests": "that run, as the engine counts",
    "EngineLoad.waiting_requests": "that wait in the engine",
    "EngineLoad.kv_tokens": "tokens of KV cache in use",
    "EngineLoad.kv_token_capacity": "tokens that its KV cache holds; null where it is unknown",
    "EngineLoad.waiting_uncached_tokens": "tokens that the waiting requests have to prefill; null"
    " of an engine that does not report it",
    "EngineLoad.total_tokens": "tokens in use, and of the waiting requests; null likewise",
    "EngineLoad.max_running_requests": "that can run at once; null likewise",
    "EngineLoad.prefilled_tokens": "uncached prompt tokens since the engine started; null likewise",
    "EngineLoad.prefill_busy_s": "seconds spent on those; null likewise",
    "EngineLoad.age_s": "seconds since it was received",
    "RankLoadRow.engine_load": "what the engine of the rank reported of its load in the last 5 s;"
    " null where it did not; only in `/loads?detail=true`",
    "RankLoadRow.prefill_tokens_per_s": "how fast first tokens come, by the prefill ahead of them;"
    " only in `/loads?detail=true`, absent until 20 requests have told",
    "RankLoadRow.ttft_error": "how far first tokens came from when they were predicted: the mean of"
    " the differences, as a part of the time that it took; likewise",
    "WorkerRecord.load_endpoint": "ZMQ endpoint where the engine publishes its own load; absent"
    " where none is given",
    "Stored.parent_hash": "the engine's hash of the block before; null: they begin a prompt",
    "Stored.start_position": "always null",
    "Stored.blocks": "consecutive blocks",
    "StoredData.stored": "blocks that the rank holds",
    "ThresholdRequest.model": "the model",
    "ThresholdRow.model": "the model",
    "ThresholdRow.tenant_id": "the tenant; absent of `default`",
    "ThresholdRow.active_prefill_tokens_threshold_frac": "the same as a multiple of the worker's"
    " `max_num_batched_tokens`; absent where it is off",
    "Thresholds.thresholds": "a row for each model and tenant that has a worker",
    "TierEvent.storage_tier": "`device`, `host_pinned`, `disk` or `external`",
    "TierEvent.residency_domain": "always `worker`; absent with `detail=true`",
    "TierEvent.event": "what the rank holds there",
    "WorkerAffinityTarget.dp_rank": _RANK_OR_ALL,
    "WorkerDetail.health": "whether it is given work",
    "WorkerHealthDetail.state": "of its worst rank: `in_service`, `probation` or `ejected`",
    "WorkerHealthDetail.ranks": "its ranks that something is held against",
    "WorkerPatch.endpoint": _NEEDED,
    "WorkerPatch.lifecycle": "`draining`: it finishes what it has, and is given nothing new;"
    " `schedulable`: it is again; anything else changes nothing",
    "WorkerLoad.total_kv_blocks": "device blocks of a rank; absent where the worker has not told",
    "WorkerRecord.kv_events_endpoints": "ZMQ endpoints of the KV events of each rank; absent where"
    " none are given",
    "WorkerRecord.replay_endpoints": "ZMQ endpoints where missed batches are asked for, of each"
    " rank; absent where none are given",
    "WorkerRecord.router_hint_worker_type": "workers of one type can fetch blocks from each other;"
    " absent where none is given",
    "WorkerRecord.router_hint_source_control_endpoints": "by rank, where other workers can fetch"
    " its blocks; absent where none are given",
    "WorkerRecord.kv_event_source_mode": "how its events come; absent where nothing is said",
    "WorkerReport.dp_rank": "the rank; null: the whole worker",
    "WorkerRequest.worker_id": "its name, which the caller gives",
    "WorkerRequest.endpoint": _NEEDED,
}
# Have the fields of another, too.
_SAME: Final = {"KvSource": "SourceCondition", "WorkerDetail": "WorkerRecord"}
_DIALECT: Final = "16"


def meaning_of(schema: str, field: str) -> str | None:
    """What a field of a schema means, by the name that it travels under; None: it is not said."""
    name = schema.removesuffix(_DIALECT)
    for struct in (schema, name, _SAME.get(name, "")):
        own = OWN.get(f"{struct}.{field}")
        if own is not None:
            return own
    return GLOSSARY.get(field)
