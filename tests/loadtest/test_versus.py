"""What ends the comparison. Each of its cases is run by `.ci/compiled`, with the references."""

import os
import shlex
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.support.running_service import wait_until

LIMIT_S = 240.0
OURSELVES = shlex.join([sys.executable, "-m", "lean_selector", "--port", "{port}"])
SELECT = "select, 8 blocks, 16 workers"
COMMAND = [sys.executable, "loadtest/versus.py", "--quick"]
ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "LEAN_SELECTOR_TRACE"}


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
