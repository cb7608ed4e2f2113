"""Every request example of the selection service's source document, sent as printed."""

import json
from collections.abc import Iterator

import pytest

from tests.support.running_service import RunningService, free_port

WORKER = json.loads("""{
 "worker_id": 1,
 "model_name": "model",
 "tenant_id": "default",
 "endpoint": "http://worker:8000",
 "block_size": 16,
 "data_parallel_start_rank": 0,
 "data_parallel_size": 2,
 "kv_events_endpoints": {
 "0": "tcp://worker:5557",
 "1": "tcp://worker:5558"
 },
 "replay_endpoint": "tcp://worker:5560"
}""")
SELECT = json.loads("""{
 "selection_id": "select-123",
 "model_name": "model",
 "tenant_id": "default",
 "block_hashes": [11, 12, 13, 14, 15, 16, 17, 18],
 "sequence_hashes": [21, 22, 23, 24, 25, 26, 27, 28],
 "isl_tokens": 512
}""")
SELECT_AND_RESERVE = json.loads("""{
 "selection_id": "select-123",
 "reservation_id": "request-123",
 "model_name": "model",
 "tenant_id": "default",
 "block_hashes": [11, 12, 13, 14, 15, 16, 17, 18],
 "sequence_hashes": [21, 22, 23, 24, 25, 26, 27, 28],
 "isl_tokens": 512
}""")
RESERVATION = json.loads("""{
 "reservation_id": "request-123",
 "model_name": "model",
 "tenant_id": "default",
 "worker_id": 1,
 "dp_rank": 0,
 "sequence_hashes": [21, 22, 23, 24, 25, 26, 27, 28],
 "isl_tokens": 512,
 "effective_prefill_tokens": 384
}""")


@pytest.fixture
def service() -> Iterator[RunningService]:
    with RunningService() as running:
        assert running.get("/ready") == (
            503,
            {"ready": False, "schedulable_workers": 0, "workers": []},
        )
        status, record = running.post("/workers", WORKER)
        assert status == 201
        assert record["lifecycle"] == "schedulable"
        yield running


def loads(service: RunningService) -> list[tuple[int, int, int]]:
    status, body = service.get("/loads?model_name=model&tenant_id=default")
    assert status == 200
    return [
        (
            row["potential_prefill_tokens"],
            row["potential_decode_blocks"],
            row["active_requests"],
        )
        for row in body[0]["loads"]
    ]


def test_the_registered_worker_is_listed_ready_and_can_be_changed(service: RunningService) -> None:
    assert service.get("/health") == (200, {"status": "ok"})
    status, ready = service.get("/ready")
    assert (status, ready["ready"], ready["schedulable_workers"]) == (200, True, 1)
    status, workers = service.get("/workers")
    assert status == 200
    assert [worker["worker_id"] for worker in workers] == [1]
    status, record = service.request("PATCH", "/workers/1", {"endpoint": "http://other:8000"})
    assert (status, record["endpoint"], record["lifecycle"]) == (
        200,
        "http://other:8000",
        "schedulable",
    )
    status, record = service.request("DELETE", "/workers/1")
    assert (status, record["lifecycle"]) == (200, "unschedulable")
    assert service.get("/workers") == (200, [])


def test_select_answers_in_the_documented_shape_and_books_nothing(service: RunningService) -> None:
    status, selection = service.post("/select", SELECT)
    assert status == 200
    assert list(selection) == [
        "selection_id",
        "model_name",
        "tenant_id",
        "worker_id",
        "dp_rank",
        "endpoint",
        "block_size",
        "overlap",
        "effective_prefill_tokens",
    ]
    assert selection["overlap"] == {
        "longest_matched": 0,
        "gpu": 0,
        "dp": {"0": 0, "1": 0},
        "cpu": 0,
        "disk": 0,
    }
    assert selection["selection_id"] == "select-123"
    assert selection["effective_prefill_tokens"] == 512
    assert loads(service) == [(0, 0, 0), (0, 0, 0)]


def test_select_and_reserve_books_and_the_lifecycle_releases(service: RunningService) -> None:
    status, selection = service.post("/select_and_reserve", SELECT_AND_RESERVE)
    assert status == 200
    assert list(selection)[:2] == ["selection_id", "reservation_id"]
    chosen = selection["dp_rank"]
    assert loads(service)[chosen] == (512, 8, 1)
    path = "/reservations/request-123"
    assert service.request("POST", f"{path}/prefill_complete") == (200, {"status": "ok"})
    assert loads(service)[chosen] == (0, 8, 1)
    assert service.post(f"{path}/output_block", {"decay_fraction": 0.5}) == (200, {"status": "ok"})
    assert loads(service)[chosen] == (0, 5, 1)  # nine blocks at a half, rounded away from zero
    assert service.request("DELETE", path) == (200, {"status": "ok"})
    assert loads(service) == [(0, 0, 0), (0, 0, 0)]


def test_select_then_reserve_books_what_the_selection_said(service: RunningService) -> None:
    status, booking = service.post("/reservations", RESERVATION)
    assert (status, booking) == (
        201,
        {
            "reservation_id": "request-123",
            "model_name": "model",
            "tenant_id": "default",
            "worker_id": 1,
            "dp_rank": 0,
            "endpoint": "http://worker:8000",
        },
    )
    assert loads(service) == [(384, 8, 1), (0, 0, 0)]
    assert service.post("/reservations", RESERVATION)[0] == 409
    too_much = {**RESERVATION, "reservation_id": "other", "effective_prefill_tokens": 513}
    assert service.post("/reservations", too_much)[0] == 400


def test_inspection_answers_without_booking(service: RunningService) -> None:
    status, rows = service.post("/potential_loads", SELECT)
    assert (status, rows) == (
        200,
        [
            {
                "worker_id": 1,
                "dp_rank": dp_rank,
                "potential_prefill_tokens": 512,
                "potential_decode_blocks": 8,
                "active_requests": 0,
            }
            for dp_rank in (0, 1)
        ],
    )
    status, scores = service.post("/overlap_scores", SELECT)
    assert (status, scores["block_size"], scores["num_blocks"]) == (200, 16, 8)
    assert [(row["worker_id"], row["dp_rank"]) for row in scores["workers"]] == [(1, 0), (1, 1)]
    status, dump = service.get("/dump")
    assert (status, dump) == (200, {"model:default": {"block_size": 16, "events": []}})


def test_peers_are_refused_while_replica_sync_is_off(service: RunningService) -> None:
    peer = {"endpoint": "tcp://selector-b:9092"}
    disabled = (409, {"error": "replica sync is disabled"})
    assert service.post("/replica_sync/register_peer", peer) == disabled
    assert service.post("/replica_sync/deregister_peer", peer) == disabled
    assert service.get("/replica_sync/peers") == (200, [])


def test_peers_come_and_go_while_replica_sync_is_on() -> None:
    port = str(free_port())
    initial = "tcp://127.0.0.1:1"
    with RunningService("--replica-sync-port", port, "--replica-sync-peers", initial) as service:
        peer = {"endpoint": "tcp://127.0.0.1:9"}
        assert service.post("/replica_sync/register_peer", peer) == (201, {"status": "ok"})
        assert service.post("/replica_sync/register_peer", peer) == (200, {"status": "ok"})
        assert service.get("/replica_sync/peers") == (200, [initial, peer["endpoint"]])
        assert service.post("/replica_sync/deregister_peer", peer) == (200, {"status": "ok"})
        assert service.post("/replica_sync/deregister_peer", peer) == (
            404,
            {"error": "peer not found"},
        )
        assert service.get("/replica_sync/peers") == (200, [initial])
