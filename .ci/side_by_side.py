#!/usr/bin/env python3
"""Runs commands at the same time, and prints the output of one after the other.

    .ci/side_by_side.py COMMAND COMMAND...

The first one's output is printed as it comes, the next one's, from its beginning, when that has
ended. A command that fails ends no other: one run shows all that is wrong. The end of the output
is what each came to: how long it took, and those of its lines that say so of a part: pytest's last
one, its `FAILED` and `ERROR`, and what begins with `== `. Nothing that they started is left
running, also when this is ended by a signal, which prints what there was. Ends with 1 if a command
failed.
"""

import ctypes
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

LOOK_S = 0.2
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# What pytest says last, and what a script says of a step; not the titles of pytest's sections.
TOLD = re.compile(r"^(?:== .*|=+ .* in \d.*=|(?:FAILED|ERROR) tests/.*)$")
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None)


class Lane:
    """One command with its output."""

    def __init__(self, command: str) -> None:
        self.command = command
        self.took_s = 0.0
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - as long as this process
        self._printed = 0
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            shlex.split(command),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            preexec_fn=_die_with_parent,
        )

    @property
    def failed(self) -> bool:
        return self._process.returncode != 0

    def look(self) -> None:
        """Whether it has ended: then `took_s` is set."""
        if not self.took_s and self._process.poll() is not None:
            self.took_s = time.monotonic() - self._began

    def print_more(self, to: IO[bytes]) -> None:
        fd = self._output.fileno()
        to.write(os.pread(fd, os.fstat(fd).st_size - self._printed, self._printed))
        to.flush()
        self._printed = os.fstat(fd).st_size

    def told(self) -> list[str]:
        fd = self._output.fileno()
        text = os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")
        return [line for line in text.splitlines() if TOLD.match(line)]


def _die_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def children() -> dict[int, str]:
    """The processes that are ours by now, with their commands."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # it has ended
        if parent == os.getpid():
            found[int(entry.name)] = command.strip()
    return found


def end_all() -> list[str]:
    """End what is left; whoever loses its parent becomes a child of ours. Their commands."""
    ended = []
    while left := children():
        for pid, command in left.items():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            if command:  # not what had ended by itself
                ended.append(command)
    return ended


def interrupted(number: int, _frame: object) -> None:
    raise SystemExit(128 + number)


def print_all(lanes: list[Lane], out: IO[bytes]) -> None:
    for lane in lanes:
        out.write(f"\n== {lane.command}\n".encode())
        while True:
            for each in lanes:
                each.look()
            lane.print_more(out)
            if lane.took_s:
                break
            time.sleep(LOOK_S)


def print_ends(lanes: list[Lane], out: IO[bytes]) -> None:
    out.write(b"\n")
    for lane in lanes:
        verdict = "FAILED" if lane.failed else "passed"
        out.write(f"{verdict} in {lane.took_s:.0f} s: {lane.command}\n".encode())
        out.writelines(f"    {line}\n".encode() for line in lane.told())
    out.flush()


def main(commands: list[str]) -> int:
    out = sys.stdout.buffer
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in ENDING_SIGNALS:
        signal.signal(number, interrupted)
    lanes = [Lane(command) for command in commands]
    try:
        print_all(lanes, out)
    finally:
        for number in ENDING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        left = end_all()
        for lane in lanes:
            lane.print_more(out)
        for command in left:
            out.write(f"== was running yet, and is ended: {command}\n".encode())
        out.flush()
    print_ends(lanes, out)
    return int(any(lane.failed for lane in lanes))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
