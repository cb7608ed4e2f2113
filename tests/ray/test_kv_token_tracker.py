"""Ray Serve LLM's own tracker and router, unmodified, on both classes."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.ray.ray_programs import needs_ray, output_of
from tests.support.running_service import RunningService

pytestmark = [pytest.mark.ray, needs_ray]
REQUESTS = 500
APP = Path(__file__).with_name("tracker_app.py")


def test_five_hundred_requests_on_each_class_leave_no_load() -> None:
    # Ray's sockets need a short path.
    with RunningService() as selector, tempfile.TemporaryDirectory(prefix="ray") as folder:
        url = f"http://127.0.0.1:{selector.port}"
        output = output_of([str(APP), str(REQUESTS), url], Path(folder))
        told = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        assert [each["place"] for each in told] == ["in-process", "remote"]
        assert [each["class"][:-1] for each in told] == [
            ["SelectionService"],
            ["SelectionService", "RemoteSelectionService"],
        ]
        for each in told:
            check(each)
        # The engines have been stopped, and with them their workers.
        assert [row for each in selector.get("/loads")[1] for row in each["loads"]] == []


def check(told: dict[str, Any]) -> None:
    assert told["requests"] == REQUESTS
    assert told["tracked"] == 0
    figures = ("potential_prefill_tokens", "potential_decode_blocks", "active_requests")
    assert [[row[name] for name in figures] for row in told["loads"]] == [[0, 0, 0]] * 2
    assert 0 < told["most_active"] <= 32
    assert set(told["served"]) <= set(told["workers"])
    assert max(told["workers"]) > 2**32
    assert told["hits"] >= REQUESTS - 2 * 7  # an engine meets each kind of prompt once
