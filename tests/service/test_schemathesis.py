"""schemathesis makes requests of what /openapi.json says, right and wrong ones, for both services.

With tokens, once more as each role. The same in every run. What it need not check, and why, stands
in schemathesis.toml.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.running_service import RunningService

HERE = Path(__file__).parent
FEW = 12  # for each route and phase: the whole takes a minute on a machine that does nothing else
EVENTLESS = ("--use-kv-events", "false")
WORKER = {
    **{"worker_id": 1, "model_name": "llama", "endpoint": "http://worker-1:8000"},
    **{"block_size": 16, "total_kv_blocks": 20000, "max_num_batched_tokens": 8192},
}
ROW = {"worker_id": 7, "model_name": "llama", "block_size": 16, "dp_start": 0, "dp_size": 1}


def judged(folder: Path, document: str, *flags: str, examples: int = FEW, role: str = "") -> str:
    """Its report on the service that the document, a path or URL, describes; fails the test when it
    finds fault. `role` is that of the token among the flags, or `open`, where tokens are asked
    for."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli"),
            *("--config-file", str(HERE / "schemathesis.toml"), "run", document, *flags),
            *("--max-examples", str(examples), "--generation-deterministic"),
            *("--suppress-health-check", "all", "--no-color"),  # health checks ask the clock
        ],
        cwd=folder,
        env={
            **os.environ,
            **{"SCHEMATHESIS_HOOKS": str(HERE / "schemathesis_hooks.py"), "ROLE": role},
        },
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
        pytest.param(
            "lean_selector", (*EVENTLESS, "--api", "1.6"), "/workers", WORKER, id="selector 1.6"
        ),
        pytest.param("lean_selector.slot_tracker", (), "/register", ROW, id="slot tracker"),
    ],
)
def test_a_service_does_what_its_document_says(
    module: str, flags: tuple[str, ...], path: str, worker: dict[str, object], tmp_path: Path
) -> None:
    with RunningService(*flags, module=module) as service:
        assert service.post(path, worker)[0] == 201
        report = judged(tmp_path, f"http://127.0.0.1:{service.port}/openapi.json")
        assert service.get("/openapi.json")[0] == 200
        status, log = service.stop()
    assert status == 0
    assert "Traceback" not in log
    assert_all_was_tested(report)


def assert_all_was_tested(report: str) -> None:
    operations = re.search(r"Selected: (\d+)/(\d+)\n\s+Tested: (\d+)", report)
    assert operations is not None, report
    assert len(set(operations.groups())) == 1, report
    assert "Serialization not possible" not in report


TOKENS = {"read": "r-0123456789", "write": "w-0123456789", "admin": "a-0123456789"}
# Which bodies are right is judged above, for all of them.
OF_ROLES = (
    *("--phases", "examples,fuzzing", "--checks"),
    "not_a_server_error,status_code_conformance,content_type_conformance,"
    "response_schema_conformance,response_headers_conformance,asks_for_its_role",
)


@pytest.fixture(scope="module")
def guarded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningService, Path]]:
    """A service that asks for tokens, and where its document lies."""
    folder = tmp_path_factory.mktemp("guarded")
    (folder / "tokens").write_text("".join(f"{role} {one}\n" for role, one in TOKENS.items()))
    flags: tuple[str, ...] = ("--auth-token-file", str(folder / "tokens"))
    module, path, worker = "lean_selector.slot_tracker", "/register", ROW
    if request.param == "selector":
        module, path, worker = "lean_selector", "/workers", WORKER
        flags = (*flags, *EVENTLESS, "--prompts", "off")
    with RunningService(*flags, module=module) as service:
        service.token = TOKENS["admin"]
        assert service.post(path, worker)[0] == 201
        document = folder / "openapi.json"
        document.write_text(json.dumps(service.get("/openapi.json")[1]))
        yield service, document
        assert service.get("/openapi.json")[0] == 200
        status, log = service.stop()
    assert status == 0
    assert "Traceback" not in log


# Each run takes seconds to begin, so of the slot tracker's there are those that meet both refusals.
@pytest.mark.parametrize(
    ("guarded", "role"),
    [
        *(("selector", role) for role in ("open", *TOKENS)),
        *(("slot tracker", role) for role in ("open", "write")),
    ],
    indirect=["guarded"],
)
def test_who_has_a_token_is_answered_as_its_role_and_who_has_none_what_is_open(
    guarded: tuple[RunningService, Path], role: str, tmp_path: Path
) -> None:
    service, document = guarded
    token = ("-H", f"Authorization: Bearer {TOKENS[role]}") if role in TOKENS else ()
    flags = ("--url", f"http://127.0.0.1:{service.port}", *token, *OF_ROLES)
    assert_all_was_tested(judged(tmp_path, str(document), *flags, examples=3, role=role))
