"""Programs that need Ray, each in a process and before a cluster of its own on this machine."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.child_service import ROOT, plain_environment

DEADLINE_S = 600.0  # a cluster starts some ten processes; on a busy machine that takes minutes

needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None,
    reason="Ray is not installed; in an environment of its own: pip install 'lean-selector[ray]'",
)


def output_of(command: list[str], folder: Path) -> str:
    """What a program prints. Its cluster keeps its files in `folder`, and ends with it."""
    environment = {
        "PYTHONPATH": str(ROOT),
        "RAY_TMPDIR": str(folder),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(
        [sys.executable, *command],
        env=plain_environment(**environment),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return done.stdout
