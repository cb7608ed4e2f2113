"""A service where simdjson is not installed.

That the reader by msgspec makes the same of every text is proved in `wire/test_integer_text.py`.
"""

import os
from pathlib import Path

from tests.support.asked import prompt
from tests.support.running_service import RunningService

MISSING = str(Path(__file__).parents[1] / "without_simdjson")  # where `import simdjson` fails


def test_prompts_are_read_by_msgspec_where_simdjson_is_not_installed() -> None:
    paths = [MISSING, os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    with RunningService("--use-kv-events", "false", env=env) as service:
        service.add_worker()
        assert service.post("/select", prompt(*range(2**60, 2**60 + 500)))[0] == 200
        assert service.post("/select", {"token_ids": list(range(500))})[0] == 200
        assert "simdjson" not in Path(f"/proc/{service.process.pid}/maps").read_text()
