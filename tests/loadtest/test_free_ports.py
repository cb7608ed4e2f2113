"""Runs at the same time, as two lanes of continuous integration, share the ports of a machine."""

import subprocess
import sys

from loadtest.child_service import KEPT, PORTS, ROOT, free_port

TAKES = f"""
from loadtest.child_service import free_port
print(*(free_port() for _ in range({KEPT})), flush=True)
input()  # and keeps them
"""


def test_no_two_runs_get_the_same_port_though_neither_has_bound_it() -> None:
    """Of 500 each out of 10 000 some 25 would be the same."""
    with subprocess.Popen(
        [sys.executable, "-c", TAKES],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout is not None
        theirs = {int(port) for port in other.stdout.readline().split()}
        ours = {free_port() for _ in range(KEPT)}
        other.communicate("\n")
    assert len(theirs) == len(ours) == KEPT
    assert theirs & ours == set()


def test_a_run_lets_go_of_its_oldest_so_it_never_runs_out() -> None:
    count = PORTS[1] - PORTS[0] + KEPT
    # Runs beside this one hold ports of their own.
    assert len({free_port() for _ in range(count)}) > 0.5 * (count - KEPT)
