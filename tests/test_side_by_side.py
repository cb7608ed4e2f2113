"""The lanes of continuous integration: none is lost, whatever becomes of the others."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.running_service import DEADLINE_S, wait_until

SCRIPT = Path(__file__).parents[1] / ".ci" / "side_by_side.py"
PYTEST_ENDS = "==== 3 failed, 2 passed in 1.20s (0:00:01) ===="


def started(*scripts: str) -> subprocess.Popen[str]:
    commands = [f"sh -c '{script}'" for script in scripts]
    return subprocess.Popen(
        [sys.executable, SCRIPT, *commands],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ran(*scripts: str) -> tuple[int, str]:
    process = started(*scripts)
    output, _ = process.communicate(timeout=3 * DEADLINE_S)
    return process.returncode, output


def is_running(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def test_outputs_come_whole_and_one_after_the_other() -> None:
    status, output = ran("echo a1; echo a2 >&2; sleep 0.3; echo a3", "echo b1; echo b2")
    assert status == 0
    said = re.findall("^[ab][123]$", output, re.M)
    assert said == ["a1", "a2", "a3", "b1", "b2"]


def test_they_run_at_the_same_time(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    status, output = ran(f"cat {pipe}", f"echo from the other > {pipe}")
    assert status == 0
    assert "\nfrom the other\n" in output


@pytest.mark.parametrize("fails", [0, 1])
def test_one_that_fails_fails_the_run_and_the_other_is_seen_to_its_end(fails: int) -> None:
    scripts = ["sleep 0.5; echo to the end", "sleep 0.5; echo to the end"]
    scripts[fails] = "echo out of luck; exit 7"
    status, output = ran(*scripts)
    assert status == 1
    assert "\nout of luck\n" in output
    assert "\nto the end\n" in output
    assert re.findall("^(passed|FAILED) in", output, re.M)[fails] == "FAILED"
    assert len(re.findall("^passed in", output, re.M)) == 1


def test_the_last_lines_are_what_each_came_to() -> None:
    first = f'echo "{PYTEST_ENDS}"; echo FAILED tests/test_a.py; echo ==== FAILURES ====; exit 1'
    status, output = ran(first, "echo == 5 s: a step; echo anything")
    assert status == 1
    ends = output[output.rindex("\nFAILED in ") :].splitlines()[1:]
    assert [line for line in ends if line.startswith("    ")] == [
        f"    {PYTEST_ENDS}",
        "    FAILED tests/test_a.py",
        "    == 5 s: a step",
    ]
    assert len(ends) == 5


def test_nothing_that_they_started_is_left_running() -> None:
    status, output = ran("setsid sleep 1000 & echo pid $!", "true")
    assert status == 0
    assert "== was running yet, and is ended: sleep 1000\n" in output
    found = re.search(r"^pid (\d+)$", output, re.M)
    assert found is not None
    assert not is_running(int(found[1]))


def test_a_signal_ends_all_of_them_and_prints_what_there_was(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    sleeps = f"setsid sleep 1000 & echo said before; echo $! >> {pids}; wait"
    process = started(sleeps, f"echo said beside; {sleeps}")
    try:
        wait_until(lambda: pids.exists() and pids.read_text().count("\n") == 2, "both run")
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=3 * DEADLINE_S)
    finally:
        process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    said = re.findall("^said .*$", output, re.M)
    assert said == ["said before", "said beside", "said before"]
    assert not any(is_running(int(pid)) for pid in pids.read_text().split())
