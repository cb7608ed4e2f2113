"""Every request example of the source documents, sent as printed: the selection service's, and both
of the slot tracker's. The recordings of the reference have the rest (`tests/conformance/`)."""

from typing import Any

import pytest

from tests.support.gates import InProcess, selector, slot_tracker_gate
from tests.support.running_service import RunningService, free_port

OK = {"status": "ok"}
SLOT_TRACKER = "lean_selector.slot_tracker"

# -- the selection service ------------------------------------------------------------------------

WORKER: dict[str, Any] = {
    **{"worker_id": 1, "model_name": "model", "tenant_id": "default"},
    **{"endpoint": "http://worker:8000", "block_size": 16},
    **{"data_parallel_start_rank": 0, "data_parallel_size": 2},
    "kv_events_endpoints": {"0": "tcp://worker:5557", "1": "tcp://worker:5558"},
    "replay_endpoint": "tcp://worker:5560",
}
SELECT: dict[str, Any] = {
    **{"selection_id": "select-123", "model_name": "model", "tenant_id": "default"},
    "block_hashes": [11, 12, 13, 14, 15, 16, 17, 18],
    "sequence_hashes": [21, 22, 23, 24, 25, 26, 27, 28],
    "isl_tokens": 512,
}
SELECT_AND_RESERVE = {**SELECT, "reservation_id": "request-123"}
RESERVATION: dict[str, Any] = {
    **{"reservation_id": "request-123", "model_name": "model", "tenant_id": "default"},
    **{"worker_id": 1, "dp_rank": 0, "sequence_hashes": SELECT["sequence_hashes"]},
    **{"isl_tokens": 512, "effective_prefill_tokens": 384},
}


@pytest.fixture
def service() -> InProcess:
    service = selector()
    assert service.get("/ready") == (
        503,
        {"ready": False, "schedulable_workers": 0, "workers": []},
    )
    status, record = service.post("/workers", WORKER)
    assert (status, record["lifecycle"]) == (201, "schedulable")
    return service


def loads(service: InProcess) -> list[tuple[int, int, int]]:
    status, body = service.get("/loads?model_name=model&tenant_id=default")
    assert status == 200
    names = "potential_prefill_tokens", "potential_decode_blocks", "active_requests"
    return [tuple(row[name] for name in names) for row in body[0]["loads"]]


def test_the_registered_worker_is_listed_ready_and_can_be_changed(service: InProcess) -> None:
    assert service.get("/health") == (200, {"status": "ok"})
    status, ready = service.get("/ready")
    assert (status, ready["ready"], ready["schedulable_workers"]) == (200, True, 1)
    status, workers = service.get("/workers")
    assert (status, [worker["worker_id"] for worker in workers]) == (200, [1])
    status, record = service.request("PATCH", "/workers/1", {"endpoint": "http://other:8000"})
    assert (status, record["endpoint"]) == (200, "http://other:8000")
    status, record = service.request("DELETE", "/workers/1")
    assert (status, record["lifecycle"]) == (200, "unschedulable")
    assert service.get("/workers") == (200, [])


PLACE = {
    **{"model_name": "model", "tenant_id": "default", "worker_id": 1, "dp_rank": 0},
    "endpoint": "http://worker:8000",
}


def test_select_answers_in_the_documented_shape_and_books_nothing(service: InProcess) -> None:
    pinned = {**SELECT, "pinned_worker": {"worker_id": 1, "dp_rank": 0}}
    status, selection = service.post("/select", pinned)
    assert status == 200
    overlap = {"longest_matched": 0, "gpu": 0, "dp": {"0": 0, "1": 0}, "cpu": 0, "disk": 0}
    documented = {
        **{"selection_id": "select-123", **PLACE, "block_size": 16, "overlap": overlap},
        "effective_prefill_tokens": 512,
    }
    assert list(selection.items()) == list(documented.items())
    assert service.post("/select", SELECT)[0] == 200
    assert loads(service) == [(0, 0, 0), (0, 0, 0)]


def test_select_and_reserve_books_and_the_lifecycle_releases(service: InProcess) -> None:
    status, selection = service.post("/select_and_reserve", SELECT_AND_RESERVE)
    assert status == 200
    assert list(selection)[:2] == ["selection_id", "reservation_id"]
    chosen = selection["dp_rank"]
    assert loads(service)[chosen] == (512, 8, 1)
    path = "/reservations/request-123"
    assert service.request("POST", f"{path}/prefill_complete") == (200, OK)
    assert loads(service)[chosen] == (0, 8, 1)
    assert service.post(f"{path}/output_block", {"decay_fraction": 0.5}) == (200, OK)
    assert loads(service)[chosen] == (0, 5, 1)  # nine blocks at a half, rounded away from zero
    assert service.request("DELETE", path) == (200, OK)
    assert loads(service) == [(0, 0, 0), (0, 0, 0)]


def test_select_then_reserve_books_what_the_selection_said(service: InProcess) -> None:
    booked = {"reservation_id": "request-123", **PLACE}
    assert service.post("/reservations", RESERVATION) == (201, booked)
    assert loads(service) == [(384, 8, 1), (0, 0, 0)]
    assert service.post("/reservations", RESERVATION)[0] == 409
    too_much = {**RESERVATION, "reservation_id": "other", "effective_prefill_tokens": 513}
    assert service.post("/reservations", too_much)[0] == 400


# -- the slot tracker -----------------------------------------------------------------------------

SCOPE = {"model_name": "llama-3-8b", "tenant_id": "default"}
WORKER_7: dict[str, Any] = {**SCOPE, "worker_id": 7}
REGISTER = {**WORKER_7, "block_size": 16, "dp_start": 0, "dp_size": 2}
LIFECYCLE: dict[str, Any] = {**SCOPE, "request_id": "req-123"}
HASHES = [101, -22, 303]
ADD = {**LIFECYCLE, "worker_id": 7, "dp_rank": 0, "sequence_hashes": HASHES, "new_isl_tokens": 48}
POTENTIAL_LOADS = {**SCOPE, "sequence_hashes": [*HASHES, 404], "new_isl_tokens": 48}
PEER = "tcp://slot-tracker-b:8092"
FILTER = "?model_name=llama-3-8b&tenant_id=default"


@pytest.fixture
def tracker() -> InProcess:
    tracker = InProcess(slot_tracker_gate())
    assert tracker.post("/register", REGISTER) == (201, OK)
    return tracker


def loads_of_rank_0(tracker: InProcess) -> tuple[int, int]:
    status, rows = tracker.get(f"/loads{FILTER}")
    assert status == 200
    return rows[0]["active_prefill_tokens"], rows[0]["active_decode_blocks"]


def test_the_registered_worker_is_listed_as_printed_and_can_be_removed(tracker: InProcess) -> None:
    assert tracker.get("/health") == (200, None)
    assert tracker.get("/workers") == (200, [REGISTER])
    assert tracker.get(f"/workers{FILTER}") == (200, [REGISTER])
    assert tracker.get("/workers?tenant_id=other") == (200, [])
    assert tracker.post("/unregister", WORKER_7) == (200, OK)
    assert tracker.post("/unregister", WORKER_7)[0] == 404
    missing = (404, {"error": "no slot tracker for model=llama-3-8b tenant=default"})
    for path, body in (("/add", ADD), ("/free", LIFECYCLE), ("/potential_loads", POTENTIAL_LOADS)):
        assert tracker.post(path, body) == missing


def test_a_request_goes_through_its_life_as_printed(tracker: InProcess) -> None:
    assert tracker.post("/add", ADD) == (201, OK)
    assert tracker.get("/loads")[1][0] == {
        "model_name": "llama-3-8b",
        "tenant_id": "default",
        "worker_id": 7,
        "dp_rank": 0,
        "active_prefill_tokens": 48,
        "active_decode_blocks": 3,
    }
    assert tracker.post("/add", ADD)[0] == 409
    for _ in range(2):
        assert tracker.post("/prefill_complete", LIFECYCLE) == (200, OK)
    assert loads_of_rank_0(tracker) == (0, 3)
    for _ in range(2):
        assert tracker.post("/free", LIFECYCLE) == (200, OK)
    assert loads_of_rank_0(tracker) == (0, 0)


def test_the_printed_projection_is_what_two_requests_make_of_it(tracker: InProcess) -> None:
    renamed = {key.replace("tenant_id", "routing_group"): value for key, value in ADD.items()}
    assert tracker.post("/add", renamed) == (201, OK)
    second = {**ADD, "request_id": "req-124", "new_isl_tokens": 0}
    assert tracker.post("/add", second) == (201, OK)
    status, rows = tracker.post("/potential_loads", POTENTIAL_LOADS)
    assert status == 200
    assert isinstance(rows, list)
    assert rows[0] == {
        "worker_id": 7,
        "dp_rank": 0,
        "potential_prefill_tokens": 96,
        "potential_decode_blocks": 4,
        "active_requests": 2,
    }
    assert loads_of_rank_0(tracker) == (48, 3)


def test_peers_come_and_go_under_both_families_of_routes_and_flags() -> None:
    bind, advertised = f"tcp://127.0.0.1:{free_port()}", "tcp://slot-tracker-a:8092"
    flags = ["--replica-sync-bind", bind, "--replica-sync-advertise", advertised]
    peers = ["--replica-sync-peers", " tcp://127.0.0.1:9 ,, tcp://127.0.0.1:8 "]
    more = ["--replica-sync-peers", "tcp://127.0.0.1:9"]
    initial = ["tcp://127.0.0.1:8", "tcp://127.0.0.1:9"]
    with RunningService(*flags, *peers, *more, module=SLOT_TRACKER) as tracker:
        assert tracker.get("/peers") == (200, initial)
        assert tracker.post("/register_peer", {"url": PEER}) == (201, OK)
        assert tracker.post("/replica_sync/register_peer", {"endpoint": PEER}) == (200, OK)
        listed = (200, [*initial, PEER])
        assert tracker.get("/peers") == tracker.get("/replica_sync/peers") == listed
        assert tracker.post("/register_peer", {"url": advertised}) == (
            400,
            {"error": "peer endpoint matches this replica's advertised endpoint"},
        )
        assert tracker.post("/deregister_peer", {"url": PEER}) == (200, OK)
        assert tracker.post("/deregister_peer", {"url": PEER}) == (404, {"error": "peer not found"})
        status, answer = tracker.post("/register_peer", {"endpoint": PEER})
        assert status == 422
        assert "url" in str(answer)
