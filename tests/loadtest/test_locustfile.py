"""The locust users, headless against running services."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.running_service import RunningService

LIMIT_S = 60.0
SELECTION_ROUTES = {
    "/select",
    "/select_and_reserve",
    "/reservations",
    "/reservations/{reservation_id}",
    "/reservations/{reservation_id}/prefill_complete",
    "/reservations/{reservation_id}/output_block",
}
SLOT_TRACKER_ROUTES = {"/add", "/prefill_complete", "/free", "/potential_loads"}


def locust(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless"]
    return subprocess.run(
        [*command, "--json", "--stop-timeout", "10", *flags],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def failures_by_route(run: subprocess.CompletedProcess[str]) -> dict[str, int]:
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(run.stdout)
    assert all(row["num_requests"] > 0 for row in rows)
    return {row["name"]: row["num_failures"] for row in rows}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": at, "input_length": 700, "output_length": 40, "hash_ids": [at % 3, 10 + at]}
        for at in range(5)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_routers_live_whole_requests_without_a_failure(trace: Path) -> None:
    with RunningService() as service:
        host = f"http://127.0.0.1:{service.port}"
        flags = ["--host", host, "-u", "8", "-r", "8", "-t", "3s", "--trace", str(trace)]
        found = failures_by_route(locust(*flags))  # without a class: the selector's users
        assert found == dict.fromkeys(SELECTION_ROUTES, 0)
        assert service.get("/workers") == (200, [])


def test_the_slot_tracker_s_users_live_without_a_failure() -> None:
    with RunningService(module="lean_selector.slot_tracker") as service:
        flags = ["--host", f"http://127.0.0.1:{service.port}", "-u", "4", "-r", "4", "-t", "3s"]
        found = failures_by_route(locust("SlotTrackerUser", *flags))
        assert found == dict.fromkeys(SLOT_TRACKER_ROUTES, 0)
        assert service.get("/workers") == (200, [])


def test_workers_that_the_service_has_are_used_and_left_alone() -> None:
    with RunningService("--use-kv-events", "false") as service:
        worker = {"worker_id": 7, "model_name": "locust", "endpoint": "http://e", "block_size": 16}
        assert service.post("/workers", worker)[0] == 201
        flags = ["--host", f"http://127.0.0.1:{service.port}", "-u", "2", "-t", "6s"]
        run = locust("SelectionUser", *flags)
        assert not any(failures_by_route(run).values())
        assert "warning: model locust already has 1 workers" in run.stdout + run.stderr
        _, workers = service.get("/workers")
        assert [record["worker_id"] for record in workers] == [7]


def test_workers_of_other_models_keep_their_records_whatever_their_ids() -> None:
    with RunningService("--use-kv-events", "false") as service:
        for worker_id in range(1, 17):
            worker = {
                "worker_id": worker_id,
                "model_name": "production",
                "endpoint": f"http://gpu-{worker_id}",
                "block_size": 64,
            }
            assert service.post("/workers", worker)[0] == 201
        before = service.get("/workers")
        flags = ["--host", f"http://127.0.0.1:{service.port}", "-u", "2", "-t", "6s"]
        run = locust("SelectionUser", *flags)
        assert not any(failures_by_route(run).values())
        assert "warning" not in run.stdout + run.stderr
        assert service.get("/workers") == before


def test_users_of_two_services_cannot_play_at_once() -> None:
    run = locust(
        "SelectionUser", "SlotTrackerUser", "--host", "http://127.0.0.1:9", "-u", "1", "-t", "1s"
    )
    assert run.returncode == 1
    assert "name one class of users: SelectionUser or SlotTrackerUser" in run.stdout


def test_a_service_that_is_not_there_is_told_in_one_line() -> None:
    run = locust("SelectionUser", "--host", "http://127.0.0.1:9", "-u", "1", "-t", "60s")
    assert run.returncode == 1
    assert "locustfile: http://127.0.0.1:9: " in run.stdout
