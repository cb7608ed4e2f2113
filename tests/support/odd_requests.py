"""Requests of the selection service that are refused, and workers that nobody can choose."""

from tests.support.side_by_side import BLOCK_SIZE

NOBODY = "tcp://127.0.0.1:9"
HASHES: dict[str, object] = {"block_hashes": [1], "sequence_hashes": [1]}
BAD: list[tuple[str, str, object]] = [
    ("POST", "/select", {"token_ids": "x"}),
    ("POST", "/select", {"token_ids": [-1]}),
    ("POST", "/select", {"token_ids": [2**32]}),
    ("POST", "/select", {"tenant_id": "nowhere", "token_ids": [1]}),
    ("POST", "/select", {"tenant_id": None, "token_ids": [1]}),
    ("POST", "/select", {}),
    ("POST", "/select", {"block_hashes": [1]}),
    ("POST", "/select", {**HASHES}),
    ("POST", "/select", {**HASHES, "isl_tokens": 0}),
    ("POST", "/select", {**HASHES, "isl_tokens": -1}),
    ("POST", "/select", {**HASHES, "sequence_hashes": [1, 2], "isl_tokens": 4}),
    ("POST", "/select", {**HASHES, "block_hashes": [2**63], "isl_tokens": 4}),
    ("POST", "/select", {"token_ids": [1], "pinned_worker": {"worker_id": 1}}),
    ("POST", "/select", {"token_ids": [1], "strict_priority": -1}),
    ("POST", "/overlap_scores", {"token_ids": [1], "router_config_override": {"x": 1}}),
    ("POST", "/select_and_reserve", {"reservation_id": 5, "token_ids": [1]}),
    ("POST", "/select_and_reserve", []),
    ("POST", "/reservations", {"worker_id": 1, "token_ids": [1]}),
    ("POST", "/reservations", {"reservation_id": "r1", "worker_id": -1}),
    ("POST", "/reservations", {"reservation_id": "r1", "worker_id": 2**64}),
    ("POST", "/reservations", {"reservation_id": "z", "worker_id": 1}),
    ("POST", "/potential_loads", {"token_ids": [1], "lora_name": 5}),
    ("POST", "/overlap_scores", {"router_config_override": {"router_temperature": -1.0}}),
    ("POST", "/workers", {}),
    ("POST", "/workers", {"worker_id": "1"}),
    ("DELETE", "/workers/77", None),
    ("PATCH", "/workers/x", {}),
    ("PATCH", "/workers/18446744073709551616", {}),
    ("GET", "/nowhere", None),
    ("GET", "/select", None),
    ("POST", "/loads", {}),
    ("GET", "/loads?model_name=a&model_name=b", None),
    ("POST", "/replica_sync/register_peer", {"endpoint": "tcp://127.0.0.1:1"}),
    ("POST", "/replica_sync/deregister_peer", {"endpoint": "tcp://127.0.0.1:1"}),
]

# Of a worker, but for its id.
INCOMPLETE: list[dict[str, object]] = [
    {},
    {"endpoint": "", "block_size": 0},
    {"endpoint": "http://o", "block_size": BLOCK_SIZE, "data_parallel_size": 0},
    {"endpoint": "http://o", "block_size": 2**32 - 1},
    {"model_name": "", "tenant_id": "", "is_eagle": True},
    {"tenant_id": "other", "data_parallel_size": 3, "kv_events_endpoint": NOBODY},
    {"block_size": -1},
    {"kv_transfer_enforcement": "never"},
    {"taints": None},
    {"kv_events_endpoints": {"0": 5}},
    {"total_kv_blocks": 2**64},
    {"max_num_batched_tokens": 1.0},
]
