"""What is believed cached of what was booked, beside KV events.

The recordings `approximate_index`, `approximate_ttl` and `predicted_ttl` have the rest.
"""

from lean_selector.publisher import KvEventPublisher
from tests.support.running_service import RunningService, free_port, wait_until

TOKENS = list(range(12))


def blocks(service: RunningService) -> dict[int, int]:
    """Device blocks of each worker that has some."""
    rows = service.post("/overlap_scores", {"token_ids": TOKENS})[1]["workers"]
    return {row["worker_id"]: row["device_blocks"] for row in rows if row["device_blocks"]}


def test_what_was_predicted_of_an_engine_goes_with_what_it_says_that_it_had() -> None:
    with (
        KvEventPublisher(kv_block_size=4, endpoint="tcp://127.0.0.1:*") as engine,
        RunningService("--router-predicted-ttl-secs", "3600") as service,
    ):
        elsewhere = f"tcp://127.0.0.1:{free_port()}"
        for worker_id, endpoint in ((1, engine.endpoint), (2, elsewhere)):
            service.add_worker(worker_id, block_size=4, kv_events_endpoint=endpoint)

        def is_heard() -> bool:
            engine.publish_stored(token_ids=TOKENS[:4], block_hashes=[901])
            return blocks(service) == {1: 1}

        wait_until(is_heard, "the engine's event is heard")
        for worker_id, count in ((1, 8), (2, 12)):
            body = {"token_ids": TOKENS[:count], "allowed_worker_ids": [worker_id]}
            assert service.post("/select_and_reserve", body)[0] == 200
        assert blocks(service) == {1: 2, 2: 3}
        engine.publish_all_cleared()
        wait_until(lambda: blocks(service) == {2: 3}, "nothing is left of the first")
