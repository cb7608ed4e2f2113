"""The systemd unit: what systemd says of it, and that the service lives within what it allows."""

import ctypes.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.child_service import ChildService, free_port, plain_environment
from tests.deploy.recipe_commands import UNIT
from tests.support.fake_engine import FakeEngine
from tests.support.programs import program
from tests.support.running_service import DEADLINE_S, wait_until

MOST_EXPOSURE = 1.5  # of 10, as systemd counts; without any of the unit's limits it is 9.6


def settings() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in UNIT.read_text(encoding="utf-8").replace("\\\n", " ").splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def analyze(*words: str) -> str:
    done = subprocess.run(
        [program("systemd-analyze", "systemd"), *words],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "LC_ALL": "C"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The unit with a program that is there."""
    path = tmp_path / UNIT.name
    text = UNIT.read_text(encoding="utf-8")
    true = shutil.which("true")
    path.write_text(
        text.replace("ExecStart=/opt/lean-selector/bin/lean-selector", f"ExecStart={true}")
    )
    return path


def test_systemd_finds_nothing_wrong(installed: Path) -> None:
    assert str(shutil.which("true")) in installed.read_text()
    assert installed.name not in analyze("verify", "--recursive-errors=no", str(installed))


def test_it_is_as_closed_as_the_document_says(installed: Path) -> None:
    threshold = f"--threshold={round(10 * MOST_EXPOSURE)}"
    analyze("security", "--offline=yes", threshold, "--no-pager", str(installed))


# What goes before the service: nothing that was written is executed (MemoryDenyWriteExecute, where
# the kernel has it as a call: PR_SET_MDWE), and of the kernel's calls only those of the unit's
# filter. The others fail as the unit says.
CONFINED = """
import ctypes, ctypes.util, errno, os, sys
libc = ctypes.CDLL(None, use_errno=True)
library = ctypes.CDLL(sys.argv[1])
library.seccomp_init.restype = ctypes.c_void_p
library.seccomp_rule_add.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int, ctypes.c_uint]
library.seccomp_load.argtypes = [ctypes.c_void_p]
libc.prctl(65, 1, 0, 0, 0)  # PR_SET_MDWE
assert libc.prctl(38, 1, 0, 0, 0) == 0  # PR_SET_NO_NEW_PRIVS
context = library.seccomp_init(0x00050000 | errno.EPERM)
for name in sys.argv[2].split(","):
    number = library.seccomp_syscall_resolve_name(name.encode())
    if number >= 0:
        assert library.seccomp_rule_add(context, 0x7fff0000, number, 0) == 0, name
assert library.seccomp_load(context) == 0
os.execv(sys.argv[3], sys.argv[3:])
"""


def members(group: str) -> set[str]:
    """The calls of a group of systemd's, those of the groups in it as well; or the one call."""
    if not group.startswith("@"):
        return {group}
    found = set()
    for line in analyze("syscall-filter", "--no-pager", group).splitlines()[1:]:
        name = line.strip()
        if name and not name.startswith("#"):
            found |= members(name)
    return found


def allowed_calls() -> set[str]:
    calls = members("@default")
    for text in settings()["SystemCallFilter"]:
        for group in text.removeprefix("~").split():
            if text.startswith("~"):
                calls -= members(group) - members("@default")
            else:
                calls |= members(group)
    return calls


def test_the_service_lives_within_the_calls_and_the_memory_that_it_is_allowed() -> None:
    library = ctypes.util.find_library("seccomp")
    if library is None:
        pytest.skip("libseccomp is missing, which comes with systemd")
    calls = allowed_calls()
    assert {"epoll_wait", "clone3", "prctl"} <= calls
    assert not {"mount", "ptrace", "bpf", "setpriority", "chown"} & calls
    port = free_port()
    with FakeEngine() as engine:
        selector = [sys.executable, "-m", "lean_selector", "--host", "127.0.0.1"]
        selector += ["--port", str(port), "--discover", f"dns:localhost:{engine.port}"]
        confined = [sys.executable, "-c", CONFINED, library, ",".join(sorted(calls))]
        service = ChildService([*confined, *selector], port, env=plain_environment())
        try:
            service.wait()
            wait_until(lambda: service.request("GET", "/ready")[0] == 200, "the engine is found")
            headers = {"content-type": "application/json"}
            body = b'{"model_name": "m", "token_ids": [1, 2, 3, 4]}'
            assert service.request("POST", "/select", body, headers)[0] == 200
            assert service.request("GET", "/metrics")[0] == 200
            status = Path(f"/proc/{service.process.pid}/status").read_text()
            assert re.search(r"^Seccomp:\s+2$", status, re.M)
            assert "Operation not permitted" not in service.log()
            assert service.stop(15, DEADLINE_S) == 0
        finally:
            service.stop()
