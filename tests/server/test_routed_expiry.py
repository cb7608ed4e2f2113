"""What is assumed of a routed prompt is forgotten when its time is over."""

import pytest

from tests.support.running_service import RunningService, wait_until

PROMPT = {"model_name": "m", "token_ids": list(range(64))}


def cached(service: RunningService) -> int:
    rows = service.post("/overlap_scores", PROMPT)[1]["workers"]
    return sum(row["device_blocks"] for row in rows)


@pytest.mark.parametrize(("ttl_s", "left"), [("3600", 4), ("0.1", 0)])
def test_a_routed_prompt_is_assumed_cached_for_so_long(ttl_s: str, left: int) -> None:
    with RunningService("--use-kv-events", "false", "--router-ttl-secs", ttl_s) as service:
        worker = {"worker_id": 1, "model_name": "m", "endpoint": "http://w", "block_size": 16}
        assert service.post("/workers", worker)[0] == 201
        assert service.post("/select_and_reserve", PROMPT)[0] == 200
        wait_until(lambda: cached(service) == left, "as many blocks are left")
