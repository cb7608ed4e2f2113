"""What watches the measured process from outside, a program of its own in two forms.

    python -m loadtest.soaking.watch probe PORT
    python -m loadtest.soaking.watch control PID

The probe asks for /health every PERIOD_S on a kept connection; it writes a line for each answer
that took NOTED_S or longer. The control, on the same CPU as the process, only sleeps: it writes a
line when it was woken late by that much, and one when the process wanted a CPU for that long and
got none (the kernel's own count of it). By those a stall of the service is told from one of the
machine.
"""

import argparse
import contextlib
import os
import sys
import time
from pathlib import Path

import msgspec

from loadtest.http_client import Connection, Malformed, http

PERIOD_S = 0.005
NOTED_S = 0.01
ANSWER_S = 60.0
_ASK = http("GET", "/health")


class Late(msgspec.Struct):
    """kind: `answer` (of the service), `woken` (the control was), `starved` (the process was), or
    `lost` (no answer: why). begin, end: monotonic seconds; waited: how long a CPU was wanted."""

    kind: str
    begin: float
    end: float
    waited: float = 0.0
    why: str = ""


def _write(late: Late) -> None:
    sys.stdout.write(msgspec.json.encode(late).decode() + "\n")
    sys.stdout.flush()


def starved_s(pid: int | str) -> float:
    """For how long the main thread of a process was ready to run and did not, since its start."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def probe(port: int) -> None:
    """Until the process is killed; after a connection that was lost, on a new one."""
    while True:
        began = time.monotonic()
        try:
            with contextlib.closing(Connection(port, ANSWER_S)) as connection:
                while True:
                    began = time.monotonic()
                    waited = starved_s("self")
                    if connection.ask(_ASK) != [200]:
                        raise Malformed("not 200")
                    now = time.monotonic()
                    if now - began >= NOTED_S:
                        _write(Late("answer", began, now, starved_s("self") - waited))
                    time.sleep(max(0.0, began + PERIOD_S - now))
        except (OSError, Malformed) as error:
            _write(Late("lost", began, time.monotonic(), why=str(error)))
            time.sleep(0.1)


def control(pid: int) -> None:
    """Until the process is gone."""
    with contextlib.suppress(OSError):
        last, starved = time.monotonic(), starved_s(pid)
        while True:
            time.sleep(PERIOD_S)
            now, wanted = time.monotonic(), starved_s(pid)
            if now - last - PERIOD_S >= NOTED_S:
                _write(Late("woken", last + PERIOD_S, now))
            if wanted - starved >= NOTED_S:
                _write(Late("starved", last, now, wanted - starved))
            last, starved = now, wanted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("form", choices=["probe", "control"])
    parser.add_argument("number", type=int, help="port, or process")
    args = parser.parse_args()
    if args.form == "control":
        control(args.number)
        return
    with contextlib.suppress(OSError):  # its own waiting is no stall; noted where it may not
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    probe(args.number)


if __name__ == "__main__":
    main()
