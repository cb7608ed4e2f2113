"""What is booked is believed cached: instead of KV events, and beside them.

How long, how much of it, and when it goes: `core/index/test_routed.py`, `server/`.
"""

from typing import Any

import pytest

from lean_selector.publisher import KvEventPublisher
from tests.support.gates import InProcess, selector
from tests.support.running_service import RunningService, free_port, wait_until

Service = InProcess | RunningService
BLOCK_SIZE = 4
TOKENS = list(range(12))


def register(service: Service, worker_id: int, **fields: object) -> None:
    body = {"worker_id": worker_id, "endpoint": "http://w", "block_size": BLOCK_SIZE, **fields}
    assert service.post("/workers", body)[1]["lifecycle"] == "schedulable"


def blocks(service: Service, **prompt: object) -> dict[tuple[int, int], int]:
    """Device blocks by rank, of those that have some."""
    status, answer = service.post("/overlap_scores", prompt or {"token_ids": TOKENS})
    assert status == 200, answer
    found = {(row["worker_id"], row["dp_rank"]): row["device_blocks"] for row in answer["workers"]}
    return {key: count for key, count in found.items() if count}


def booked(service: Service, reservation_id: str, **fields: object) -> dict[str, Any]:
    body = {"reservation_id": reservation_id, "token_ids": TOKENS, **fields}
    status, answer = service.post("/select_and_reserve", body)
    assert status == 200, answer
    return dict(answer)


@pytest.fixture
def service() -> InProcess:
    service = selector(ttl_s=3600.0)
    register(service, 1, data_parallel_size=2)
    register(service, 2)
    return service


def test_a_second_prompt_goes_where_the_first_went_and_is_booked_for_what_is_left(
    service: Service,
) -> None:
    first = booked(service, "a", pinned_worker={"worker_id": 1, "dp_rank": 1})
    assert (first["overlap"]["gpu"], first["effective_prefill_tokens"]) == (0, 12)
    assert blocks(service) == {(1, 1): 3}
    service.request("DELETE", "/reservations/a")
    second = booked(service, "b", token_ids=[*TOKENS, 77])
    assert (second["worker_id"], second["dp_rank"]) == (1, 1)
    assert second["overlap"] == {
        "longest_matched": 12,
        "gpu": 12,
        "dp": {"0": 0, "1": 12},
        "cpu": 12,
        "disk": 12,
    }
    assert second["effective_prefill_tokens"] == 1


def test_only_a_booking_teaches_and_only_of_complete_blocks(service: Service) -> None:
    assert service.post("/select", {"token_ids": TOKENS})[0] == 200
    assert blocks(service) == {}
    taken = {"reservation_id": "a", "token_ids": TOKENS[:10], "worker_id": 2}
    assert service.post("/reservations", taken)[0] == 201
    assert blocks(service) == {(2, 0): 2}
    again = {**taken, "token_ids": list(range(100, 108))}
    assert service.post("/reservations", again)[0] == 409
    assert blocks(service, token_ids=list(range(100, 108))) == {}


def test_a_reservation_by_hashes_teaches_if_it_has_block_hashes(service: Service) -> None:
    def reserve(name: str, **fields: object) -> tuple[int, Any]:
        body = {"reservation_id": name, "worker_id": 2, "isl_tokens": 8, **fields}
        return service.post("/reservations", body)

    asked = {"block_hashes": [77, 88], "sequence_hashes": [0, 0], "isl_tokens": 8}
    assert reserve("h", sequence_hashes=[7, 8])[0] == 201
    assert blocks(service, **asked) == {}
    assert reserve("hb", sequence_hashes=[7, 8], block_hashes=[77, 88])[0] == 201
    assert blocks(service, **asked) == {(2, 0): 2}
    status, answer = reserve("bad", sequence_hashes=[7], block_hashes=[77, 88])
    assert status == 400
    assert answer["error"] == "block_hashes length 2 must match sequence_hashes length 1"
    assert reserve("bad", sequence_hashes=[7], block_hashes=[77], isl_tokens=0)[0] == 400


def test_beside_events_the_larger_of_both_counts_and_a_dump_tells_the_events_alone() -> None:
    port = free_port()
    with (
        KvEventPublisher(kv_block_size=BLOCK_SIZE, endpoint=f"tcp://127.0.0.1:{port}") as engine,
        RunningService("--router-predicted-ttl-secs", "3600") as service,
    ):
        register(service, 1, kv_events_endpoint=f"tcp://127.0.0.1:{port}")
        register(service, 2, kv_events_endpoint=f"tcp://127.0.0.1:{free_port()}")

        def is_heard() -> bool:
            engine.publish_stored(token_ids=TOKENS[:4], block_hashes=[901])
            return blocks(service) == {(1, 0): 1}

        wait_until(is_heard, "the engine's event is heard")
        booked(service, "a", token_ids=TOKENS[:8], pinned_worker={"worker_id": 1, "dp_rank": 0})
        booked(service, "b", pinned_worker={"worker_id": 2, "dp_rank": 0})
        assert blocks(service) == {(1, 0): 2, (2, 0): 3}
        asked = {"token_ids": TOKENS, "pinned_worker": {"worker_id": 1, "dp_rank": 0}}
        assert service.post("/select", asked)[1]["effective_prefill_tokens"] == 4
        (partition,) = service.get("/dump")[1].values()
        (event,) = partition["events"]
        assert [b["block_hash"] for b in event["event"]["data"]["stored"]["blocks"]] == [901]
        engine.publish_all_cleared()
        # What was predicted of an engine goes with what it says that it had.
        wait_until(lambda: blocks(service) == {(2, 0): 3}, "nothing is left of the first")
