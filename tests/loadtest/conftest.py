"""Traces for whole runs, and what a run leaves behind when it is ended."""

import gzip
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.running_service import wait_until

WriteTrace = Callable[[list[tuple[int, list[int], int]]], Path]


@pytest.fixture
def write_trace(tmp_path: Path) -> WriteTrace:
    """A packed trace of (timestamp in ms, hash_ids, input_length)."""

    def write(lines: list[tuple[int, list[int], int]]) -> Path:
        path = tmp_path / "trace.jsonl.gz"
        keys = ("timestamp", "hash_ids", "input_length", "output_length")
        with gzip.open(path, "wt") as file:
            for line in lines:
                file.write(json.dumps(dict(zip(keys, (*line, 40), strict=True))) + "\n")
        return path

    return write


def ended_by(sign: signal.Signals, children: int, *words: str) -> str:
    """What a run wrote to stderr that was ended once so many services ran; none of them is left."""
    with subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs have SIGINT ignored, and their children too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        listing = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        wait_until(lambda: len(listing.read_text().split()) == children, "the services run")
        pids = listing.read_text().split()
        process.send_signal(sign)
        assert process.wait(60.0) == 1
        errors = process.stderr.read()
    for pid in map(int, pids):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    return errors
