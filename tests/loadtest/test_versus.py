"""Runs of the comparison, with tiny rounds; we ourselves play the reference.

Each of its cases is run by `.ci/compiled`, with the references themselves.
"""

import json
import os
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lean_selector import __version__
from lean_selector.build_info import PURE, form
from tests.support.running_service import wait_until

LIMIT_S = 240.0
OURSELVES = shlex.join([sys.executable, "-m", "lean_selector", "--port", "{port}"])
WITHOUT_REPLICAS = """
import os, sys
if "--replica-sync-port" in sys.argv:
    sys.exit("no replicas here")
os.execv(sys.executable, [sys.executable, "-m", "lean_selector", *sys.argv[1:]])
"""
SELECT = "select, 8 blocks, 16 workers"
REPLICAS = "lifecycle with a replica, trace prompts at 16, 16 workers"
COMMAND = [sys.executable, "loadtest/versus.py", "--quick"]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "LEAN_SELECTOR_TRACE"}


def versus(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *flags],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def figures(tmp_path: Path, status: int, *flags: str) -> tuple[dict[str, Any], str, str]:
    """Of a run, and what it printed to stdout and stderr."""
    path = tmp_path / "f.json"
    run = versus("--json", str(path), *flags)
    assert run.returncode == status, run.stderr
    return json.loads(path.read_text()), run.stdout, run.stderr


def test_what_a_reference_cannot_do_is_skipped_and_the_others_figures_stay(tmp_path: Path) -> None:
    program = tmp_path / "other.py"
    program.write_text(WITHOUT_REPLICAS)
    reference = shlex.join([sys.executable, str(program), "--port", "{port}"])
    flags = ["--reference", reference, "--cases", f"^({SELECT}|{REPLICAS})$"]
    found, out, errors = figures(tmp_path, 1, *flags)
    *told, last = errors.splitlines()
    assert [line.split("s  ", 1)[1] for line in told] == [f"{SELECT}: round 1"]
    reason = last.removeprefix("versus: ")
    assert reason.endswith(" ended with 1: no replicas here")
    assert set(found["results"]["rounds"]) == {SELECT}
    assert found["results"]["skipped"] == {REPLICAS: f"skipped: {reason}"}
    assert f"{REPLICAS}: skipped: {reason}" in out
    assert f"| {SELECT} " in out


def has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"  # its new parent has not looked yet


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_it_however_it_ends(sign: signal.Signals, tmp_path: Path) -> None:
    flags = ["--reference", OURSELVES, "--cases", f"^{SELECT}$", "--rounds", "1000"]
    with subprocess.Popen(
        [*COMMAND, *flags],
        env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},  # SIGKILL leaves files behind
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert "round 1" in process.stderr.readline()
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) >= 2
        process.send_signal(sign)
        words = process.stderr.read()
        status = process.wait(LIMIT_S)
    for pid in map(int, children):
        wait_until(partial(has_ended, pid), f"process {pid} has ended")
    if sign != signal.SIGKILL:
        assert status == 1
        assert words.endswith("versus: interrupted\n")


OTHER_FORM = f"{sys.executable} has lean-selector {__version__} {PURE}, where it should"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--reference", "/no/such {port}"], "such: cannot start /no/such: "),
        (["--compiled", "/no/such"], "cannot start /no/such: "),
        (["--compiled", "/bin/false"], "/bin/false has no lean-selector: "),
        (["--compiled", sys.executable], OTHER_FORM),
        (["--trace", "/no/such"], "cannot read the trace: "),
    ],
)
def test_what_cannot_be_measured_at_all_is_one_line_and_exit_1(
    flags: list[str], words: str
) -> None:
    if words == OTHER_FORM and form() != PURE:
        pytest.skip("this one has it")
    run = versus("--reference", OURSELVES, "--cases", SELECT, *flags)
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1].startswith(f"versus: {words}")
    assert "Traceback" not in run.stderr
