"""`lean-selector demo` as users run it: on a pipe, on a terminal, stopped by signals, failing."""

import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from lean_selector.tools.demo import main

DEADLINE_S = 60.0
COMMAND = [sys.executable, "-m", "lean_selector", "demo"]


@contextmanager
def running_demo(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()  # only when the test failed; else it has ended


def children(pid: int | None = None) -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(pid).children()
    return found


def test_a_short_run_prints_progress_and_a_summary_without_errors(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = children()
    assert main(["--seconds", "2", "--workers", "3"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^ *1\.\d s +\d+ calls/s", output, re.M)
    assert " 0 errors" in output
    assert re.search(r"^cache hits [\d.]+% of \d+ prompt blocks", output, re.M)
    ours = re.search(r"time to first token +([\d.]+) s on average$", output, re.M)
    other = re.search(r"round-robin, same arrivals +([\d.]+) s, cache hits [\d.]+%\n\Z", output)
    assert ours is not None
    assert other is not None
    assert "\x1b" not in output
    assert max(map(len, output.splitlines())) <= 100
    assert children() == before


def test_ctrl_c_on_a_terminal_reaches_the_demo_alone_and_restores_the_cursor() -> None:
    pid, terminal = pty.fork()
    if pid == 0:  # pragma: no cover -- becomes the demo
        os.execv(sys.executable, [*COMMAND, "--seconds", "600"])
    screen = b""
    deadline = time.monotonic() + DEADLINE_S
    asked = False
    services: list[psutil.Process] = []
    while time.monotonic() < deadline:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                screen += os.read(terminal, 65_536)
            except OSError:  # the other side has closed it
                break
        if not asked and screen.count(b"worker  endpoint") >= 3:
            services = children(pid)
            os.write(terminal, b"\x03")
            asked = True
    os.close(terminal)
    if not asked:  # pragma: no cover -- only when the test fails
        os.kill(pid, signal.SIGKILL)
    assert os.waitpid(pid, 0)[1] == 0
    assert services
    assert not any(service.is_running() for service in services)
    text = screen.decode()
    assert text.count("\x1b[?25l") >= 3
    assert " 0 errors" in text[text.rindex("\x1b[?25h") :]


def test_a_service_that_does_not_start_is_one_clear_line_and_exit_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["--port", str(port)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.fullmatch(rf"lean-selector demo: cannot use port {port}: .*\n", captured.err)


def test_a_service_killed_on_the_way_is_one_clear_line_and_exit_1() -> None:
    with running_demo("--seconds", "600", "--workers", "2") as process:
        assert process.stdout is not None
        assert process.stdout.readline().endswith("/ui#decisions\n")
        assert "calls/s" in process.stdout.readline()
        (service,) = children(process.pid)
        service.kill()
        _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert re.fullmatch(r"lean-selector demo: the service ended with exit code -9.*\n", errors)


def test_a_reader_that_goes_away_ends_it_without_a_traceback() -> None:
    with running_demo("--seconds", "600") as process:
        assert process.stdout is not None
        process.stdout.readline()
        services = children(process.pid)
        process.stdout.close()
        assert process.stderr is not None
        assert process.stderr.read() == ""
        assert process.wait(DEADLINE_S) == 1
    assert not any(service.is_running() for service in services)
