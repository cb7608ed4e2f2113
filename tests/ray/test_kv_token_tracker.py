"""Ray Serve LLM's own tracker and router, unmodified, on the class of this project."""

import json
import tempfile
from pathlib import Path

import pytest

from tests.ray.ray_programs import needs_ray, output_of

pytestmark = [pytest.mark.ray, needs_ray]
REQUESTS = 500
APP = Path(__file__).with_name("tracker_app.py")


def test_five_hundred_requests_leave_no_load() -> None:
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray") as folder:
        output = output_of([str(APP), str(REQUESTS)], Path(folder))
    [told] = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert told["class"][:-1] == ["SelectionService"]
    assert told["requests"] == REQUESTS
    assert told["tracked"] == 0
    figures = ("potential_prefill_tokens", "potential_decode_blocks", "active_requests")
    assert [[row[name] for name in figures] for row in told["loads"]] == [[0, 0, 0]] * 2
    assert 0 < told["most_active"] <= 32
    assert set(told["served"]) <= set(told["workers"])
    assert max(told["workers"]) > 2**32
    assert told["hits"] >= REQUESTS - 2 * 7  # an engine meets each kind of prompt once
