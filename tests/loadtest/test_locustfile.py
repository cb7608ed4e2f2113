"""The locust users, headless against running services."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable

from tests.loadtest.conftest import WriteTrace
from tests.support.prometheus_tools import parsed, scrape
from tests.support.running_service import RunningService, wait_until

LIMIT_S = 60.0
SELECTION_ROUTES = {
    "/select",
    "/select_and_reserve",
    "/reservations",
    "/reservations/{reservation_id}",
    "/reservations/{reservation_id}/prefill_complete",
    "/reservations/{reservation_id}/output_block",
}


def locust(
    *flags: str, until: Callable[[], bool] | None = None
) -> subprocess.CompletedProcess[str]:
    """A run, which is ended when `until()`."""
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless"]
    running = subprocess.Popen(
        [*command, "--json", "--stop-timeout", "10", *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if until is not None:
            wait_until(lambda: running.poll() is not None or until(), "all is played", LIMIT_S)
            running.terminate()
        stdout, stderr = running.communicate(timeout=LIMIT_S)
    finally:
        running.kill()
    return subprocess.CompletedProcess(running.args, running.returncode, stdout, stderr)


def answered(port: int) -> Counter[str]:
    """How often each route has answered with success."""
    counts: Counter[str] = Counter()
    for labels, count in parsed(scrape(port))["lean_selector_http_requests_total"].items():
        if dict(labels)["status"].startswith("2"):
            counts[dict(labels)["route"]] += int(count)
    return counts


def each_answers(service: RunningService, routes: set[str]) -> Callable[[], bool]:
    """Whether each of the routes has answered since this was called."""
    before = answered(service.port)
    return lambda: routes <= set(answered(service.port) - before)


def failures_by_route(run: subprocess.CompletedProcess[str]) -> dict[str, int]:
    assert run.returncode == 0, run.stdout + run.stderr
    rows = json.loads(run.stdout)
    assert all(row["num_requests"] > 0 for row in rows)
    return {row["name"]: row["num_failures"] for row in rows}


def add_workers(service: RunningService) -> object:
    """Workers of another model, with the ids of locust's own; what the service then shows."""
    for worker_id in range(1, 17):
        service.add_worker(worker_id, model_name="production", block_size=64)
    return service.get("/workers")


def test_routers_live_whole_requests_without_a_failure_and_leave_other_workers_alone(
    write_trace: WriteTrace,
) -> None:
    trace = write_trace([(at, [at % 3, 10 + at], 700) for at in range(5)])
    with RunningService("--use-kv-events", "false") as service:
        before = add_workers(service)
        host = f"http://127.0.0.1:{service.port}"
        flags = ["--host", host, "-u", "8", "-r", "8", "--trace", str(trace)]
        # Without a class: the selector's users.
        run = locust(*flags, until=each_answers(service, SELECTION_ROUTES))
        assert failures_by_route(run) == dict.fromkeys(SELECTION_ROUTES, 0)
        assert "already has 16 workers" not in run.stdout + run.stderr
        assert service.get("/workers") == before
