"""Everything that reads prompts does the same where simdjson is not installed."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
READERS = ("wire/test_prompt.py", "wire/test_long_prompts.py")


def run_without(*command: str) -> subprocess.CompletedProcess[str]:
    """A command of this Python, in which `import simdjson` fails, as in all that it starts."""
    paths = [str(TESTS / "without_simdjson"), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_prompts_are_read_by_msgspec_where_simdjson_is_not_installed() -> None:
    script = """
from lean_selector.wire.scalars import HAS_SIMDJSON, packed_signed
from tests.support.running_service import RunningService

assert not HAS_SIMDJSON
assert packed_signed(b"[1]") == (1).to_bytes(8, "little")
hashes = list(range(2**60, 2**60 + 500))
prompt = {"block_hashes": hashes, "sequence_hashes": hashes, "isl_tokens": 8000}
with RunningService("--use-kv-events", "false") as service:
    with open(f"/proc/{service.process.pid}/maps", encoding="ascii") as maps:
        assert "simdjson" not in maps.read()
    worker = {"worker_id": 1, "endpoint": "http://w", "block_size": 16}
    assert service.post("/workers", worker)[0] == 201
    assert service.post("/select", prompt)[0] == 200
"""
    run = run_without("-c", script)
    assert run.returncode == 0, run.stderr


def test_the_readers_of_prompts_pass_their_tests_without_simdjson() -> None:
    run = run_without(
        "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, map(TESTS.joinpath, READERS))
    )
    assert run.returncode == 0, run.stdout
