"""Every example of both slot tracker documents, sent as printed, and what is said beside it."""

import json
from collections.abc import Iterator

import pytest

from tests.support.running_service import RunningService, free_port

MODULE = "lean_selector.slot_tracker"
OK = {"status": "ok"}
REGISTER = """{
 "worker_id": 7,
 "model_name": "llama-3-8b",
 "tenant_id": "default",
 "block_size": 16,
 "dp_start": 0,
 "dp_size": 2
}"""
UNREGISTER = """{
 "worker_id": 7,
 "model_name": "llama-3-8b",
 "tenant_id": "default"
}"""
ADD = """{
 "model_name": "llama-3-8b",
 "tenant_id": "default",
 "request_id": "req-123",
 "worker_id": 7,
 "dp_rank": 0,
 "sequence_hashes": [101, -22, 303],
 "new_isl_tokens": 48
}"""
LIFECYCLE = """{
 "model_name": "llama-3-8b",
 "tenant_id": "default",
 "request_id": "req-123"
}"""
POTENTIAL_LOADS = """{
 "model_name": "llama-3-8b",
 "tenant_id": "default",
 "sequence_hashes": [101, -22, 303, 404],
 "new_isl_tokens": 48
}"""
PEER = '{"url":"tcp://slot-tracker-b:8092"}'
FILTER = "?model_name=llama-3-8b&tenant_id=default"


@pytest.fixture
def tracker() -> Iterator[RunningService]:
    with RunningService(module=MODULE) as running:
        assert send(running, "/register", REGISTER) == (201, OK)
        yield running


def send(tracker: RunningService, path: str, printed: str) -> tuple[int, object]:
    return tracker.request("POST", path, raw=printed.encode())


def loads_of_rank_0(tracker: RunningService) -> tuple[int, int]:
    status, rows = tracker.get(f"/loads{FILTER}")
    assert status == 200
    return rows[0]["active_prefill_tokens"], rows[0]["active_decode_blocks"]


def test_health_is_empty_as_soon_as_it_listens(tracker: RunningService) -> None:
    assert tracker.get("/health") == (200, None)


def test_the_registered_worker_is_listed_as_printed_and_can_be_removed(
    tracker: RunningService,
) -> None:
    assert tracker.get("/workers") == (200, [json.loads(REGISTER)])
    assert tracker.get(f"/workers{FILTER}") == (200, [json.loads(REGISTER)])
    assert tracker.get("/workers?tenant_id=other") == (200, [])
    assert send(tracker, "/unregister", UNREGISTER) == (200, OK)
    assert send(tracker, "/unregister", UNREGISTER)[0] == 404
    assert tracker.get("/workers") == (200, [])


def test_a_request_goes_through_its_life_as_printed(tracker: RunningService) -> None:
    assert send(tracker, "/add", ADD) == (201, OK)
    assert tracker.get("/loads")[1][0] == {
        "model_name": "llama-3-8b",
        "tenant_id": "default",
        "worker_id": 7,
        "dp_rank": 0,
        "active_prefill_tokens": 48,
        "active_decode_blocks": 3,
    }
    assert send(tracker, "/add", ADD)[0] == 409
    assert send(tracker, "/prefill_complete", LIFECYCLE) == (200, OK)
    assert send(tracker, "/prefill_complete", LIFECYCLE) == (200, OK)
    assert loads_of_rank_0(tracker) == (0, 3)
    assert send(tracker, "/free", LIFECYCLE) == (200, OK)
    assert send(tracker, "/free", LIFECYCLE) == (200, OK)
    assert loads_of_rank_0(tracker) == (0, 0)
    assert send(tracker, "/prefill_complete", LIFECYCLE) == (
        404,
        {"error": "Request req-123 not found"},
    )


def test_the_printed_projection_is_what_two_requests_make_of_it(tracker: RunningService) -> None:
    assert send(tracker, "/add", ADD) == (201, OK)
    second = ADD.replace("req-123", "req-124").replace("48", "0")
    assert send(tracker, "/add", second) == (201, OK)
    status, rows = send(tracker, "/potential_loads", POTENTIAL_LOADS)
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


def test_unregistering_drops_the_requests_and_with_the_last_worker_the_tracker(
    tracker: RunningService,
) -> None:
    assert send(tracker, "/add", ADD) == (201, OK)
    assert send(tracker, "/unregister", UNREGISTER) == (200, OK)
    missing = (404, {"error": "no slot tracker for model=llama-3-8b tenant=default"})
    for path, body in (
        ("/add", ADD),
        ("/prefill_complete", LIFECYCLE),
        ("/free", LIFECYCLE),
        ("/potential_loads", POTENTIAL_LOADS),
    ):
        assert send(tracker, path, body) == missing
    assert send(tracker, "/register", REGISTER.replace("16", "32")) == (201, OK)
    assert loads_of_rank_0(tracker) == (0, 0)


def test_both_names_of_the_group_are_read(tracker: RunningService) -> None:
    assert send(tracker, "/add", ADD.replace("tenant_id", "routing_group")) == (201, OK)
    assert tracker.get("/loads?routing_group=default") == tracker.get("/loads")
    both = ADD.replace('"request_id"', '"routing_group": "other", "request_id"')
    assert send(tracker, "/add", both)[0] == 400


def test_peers_come_and_go_under_both_families_of_routes_and_flags() -> None:
    bind, advertised = f"tcp://127.0.0.1:{free_port()}", "tcp://slot-tracker-a:8092"
    flags = ["--replica-sync-bind", bind, "--replica-sync-advertise", advertised]
    peers = ["--replica-sync-peers", " tcp://127.0.0.1:9 ,, tcp://127.0.0.1:8 "]
    more = ["--replica-sync-peers", "tcp://127.0.0.1:9"]
    initial = ["tcp://127.0.0.1:8", "tcp://127.0.0.1:9"]
    with RunningService(*flags, *peers, *more, module=MODULE) as tracker:
        assert tracker.get("/peers") == (200, initial)
        assert send(tracker, "/register_peer", PEER) == (201, OK)
        assert send(tracker, "/replica_sync/register_peer", PEER.replace("url", "endpoint")) == (
            200,
            OK,
        )
        listed = (200, [*initial, "tcp://slot-tracker-b:8092"])
        assert tracker.get("/peers") == tracker.get("/replica_sync/peers") == listed
        assert send(tracker, "/register_peer", PEER.replace("-b", "-a")) == (
            400,
            {"error": "peer endpoint matches this replica's advertised endpoint"},
        )
        assert send(tracker, "/deregister_peer", PEER) == (200, OK)
        assert send(tracker, "/deregister_peer", PEER) == (404, {"error": "peer not found"})
        status, answer = send(tracker, "/register_peer", PEER.replace("url", "endpoint"))
        assert status == 422
        assert "url" in str(answer)


def test_peers_are_refused_while_replica_sync_is_off(tracker: RunningService) -> None:
    disabled = (409, {"error": "replica sync is disabled"})
    assert send(tracker, "/register_peer", PEER) == disabled
    assert send(tracker, "/deregister_peer", PEER) == disabled
    assert tracker.get("/peers") == (200, [])
    assert tracker.get("/replica_sync/peers?detail=true") == (200, {})
    assert tracker.get("/replica_sync/snapshot") == disabled


def test_a_restart_forgets_everything(tracker: RunningService) -> None:
    assert send(tracker, "/add", ADD) == (201, OK)
    status, log = tracker.stop()
    assert status == 0, log
    with RunningService(module=MODULE) as again:
        assert again.get("/workers") == (200, [])
        assert again.get("/loads") == (200, [])
