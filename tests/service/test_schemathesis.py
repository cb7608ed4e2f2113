"""schemathesis makes requests of what /openapi.json says, right and wrong ones, for both services.

The same in every run. What it need not check, and why, stands in schemathesis.toml. Boundary values
are the most of its requests, so each body meets them under one route of one dialect.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.running_service import RunningService

HERE = Path(__file__).parent
ENDLESS = "/events"  # an answer that goes on until its client leaves
FEW = 4  # random ones for each route
EVENTLESS = ("--use-kv-events", "false")
API_16 = (*EVENTLESS, "--api", "1.6")
PHASES_16 = "examples,fuzzing"
# Bodies with fields that 1.3 has not; boundary values of the others are tried there.
BOUNDARIES_16 = ("--include-path-regex", "^/workers")
WORKER = {
    **{"worker_id": 1, "model_name": "llama", "endpoint": "http://worker-1:8000"},
    **{"block_size": 16, "total_kv_blocks": 20000, "max_num_batched_tokens": 8192},
}
ROW = {"worker_id": 7, "model_name": "llama", "block_size": 16, "dp_start": 0, "dp_size": 1}


def judged(folder: Path, document: str, *only: str) -> str:
    """Its report on the service that the document describes; fails the test when it finds fault."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli"),
            *("--config-file", str(HERE / "schemathesis.toml"), "run", document, *only),
            *("--max-examples", str(FEW), "--generation-deterministic"),
            *("--suppress-health-check", "all", "--no-color"),  # health checks ask the clock
            *("--exclude-path", ENDLESS),
        ],
        cwd=folder,
        env={**os.environ, "SCHEMATHESIS_HOOKS": str(HERE / "schemathesis_hooks.py")},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("module", "flags", "path", "worker"),
    [
        pytest.param("lean_selector", EVENTLESS, "/workers", WORKER, id="selector"),
        pytest.param("lean_selector", API_16, "/workers", WORKER, id="selector 1.6"),
        pytest.param("lean_selector.slot_tracker", (), "/register", ROW, id="slot tracker"),
    ],
)
def test_a_service_does_what_its_document_says(
    module: str, flags: tuple[str, ...], path: str, worker: dict[str, object], tmp_path: Path
) -> None:
    with RunningService(*flags, module=module) as service:
        assert service.post(path, worker)[0] == 201
        document = f"http://127.0.0.1:{service.port}/openapi.json"
        if flags is API_16:
            report = judged(tmp_path, document, "--phases", PHASES_16)
            judged(tmp_path, document, "--phases", "coverage", *BOUNDARIES_16)
        else:
            report = judged(tmp_path, document)
        assert service.get("/openapi.json")[0] == 200
        status, log = service.stop()
    assert status == 0
    assert "Traceback" not in log
    assert_all_was_tested(report)


def assert_all_was_tested(report: str) -> None:
    operations = re.search(r"Selected: (\d+)/(\d+)\n\s+Tested: (\d+)", report)
    assert operations is not None, report
    selected, offered, tested = map(int, operations.groups())
    assert selected == tested, report
    assert offered - selected in (0, 1), report
    assert "Serialization not possible" not in report
