"""What a service cannot have ends its start with status 1, and a line that names it.

Flags that cannot be read, or do not go together, are in the tests of flags.
"""

import json
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from loadtest.child_service import plain_environment
from tests.app.kept_selector import Kept
from tests.support.running_service import RunningService

TRACKER = "lean_selector.slot_tracker"
FOUND = ("--discover", "kubernetes:a/b")
MISSING = "No such file or directory"


# Starts services in processes of their own that have imported everything; prints how each ended.
STARTER = """
import json, os, sys
from lean_selector import cli
from lean_selector.app import selector_process, slot_tracker_process
for line in sys.stdin:
    flags, is_tracker, log = json.loads(line)
    pid = os.fork()
    if not pid:
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os._exit((cli.slot_tracker_main if is_tracker else cli.main)(flags))
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""
FailedStart = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def failed_start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FailedStart]:
    """Exit status and log of a start that must fail."""
    log, env = tmp_path_factory.mktemp("log") / "log", plain_environment()
    env.pop("KUBERNETES_SERVICE_HOST", None)
    command = [sys.executable, "-c", STARTER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as starter:

        def start(*flags: str, module: str = "lean_selector") -> tuple[int, str]:
            assert starter.stdin is not None
            assert starter.stdout is not None
            words = ["--port", "0", "--log-level", "error", *flags]
            starter.stdin.write(json.dumps([words, module == TRACKER, str(log)]) + "\n")
            starter.stdin.flush()
            return int(starter.stdout.readline()), log.read_text()

        yield start


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--host", "a" * 70), f"not a host name: {'a' * 70}:0 (--port)"),
        (("--uds", "{}/no/s"), "{}/no/s"),
        (("--uds", "{}/file"), "{}/file"),
        (("--uds", "{}/" + "s" * 200), "{}/" + "s" * 200),
        (("--auth-token-file", "{}/none"), f"--auth-token-file: {MISSING}"),
        (("--auth-token-file", "{}/file"), "--auth-token-file: {}/file, line 1: "),
        (("--tls-cert", "{}/file", "--tls-key", "{}/file"), "--tls-cert: {}/file "),
        (("--state-dir", "{}/file/below"), "Not a directory (os error 20): {}/file/below"),
        (("--peer-token-file", "{}/none"), f"--peer-token-file: [Errno 2] {MISSING}"),
        (("--peer-ca-file", "{}/none"), f"--peer-ca-file: [Errno 2] {MISSING}"),
        (
            ("--worker-ca-file", "{}/none", "--worker-health-interval-secs", "5"),
            f"--worker-ca-file: [Errno 2] {MISSING}",
        ),
        (("--discover", "url:http://a", "--worker-token-file", "{}/none"), MISSING),
        (FOUND, "KUBERNETES_SERVICE_HOST is not set"),
        ((*FOUND, "--kubernetes-api", "https://a"), MISSING),
        (
            ("--replica-sync-port", "9", "--replica-sync-curve-secret-key-file", "{}/file"),
            "--replica-sync-curve-secret-key-file: {}/file ",
        ),
        (
            ("--lifecycle-from", "syslog:0.0.0.0:5140"),
            "syslog:0.0.0.0:5140: this is not a loopback",
        ),
        (("--lifecycle-from", "unixgram:{}/no/s"), "unixgram:{}/no/s"),
    ],
    ids=lambda given: " ".join(given)[:60] if isinstance(given, tuple) else "",
)
def test_it_is_one_line_that_names_it(
    flags: tuple[str, ...], said: str, tmp_path: Path, failed_start: FailedStart
) -> None:
    file = tmp_path / "file"
    file.write_text("very-secret precious")
    status, log = failed_start(*(each.replace("{}", str(tmp_path)) for each in flags))
    assert status == 1
    assert log.count("\n") == 1
    assert said.replace("{}", str(tmp_path)) in log
    assert "very-secret" not in log
    assert file.read_text() == "very-secret precious"


def test_what_another_process_has_taken_is_named(tmp_path: Path, failed_start: FailedStart) -> None:
    Kept(tmp_path / "selector").save(0.0)
    other = ("--state-dir", str(tmp_path / "selector"))
    path = str(tmp_path / "s")
    state = ("--state-dir", str(tmp_path / "state"))
    with (
        RunningService("--uds", path, *state, module=TRACKER) as running,
        closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as udp,
    ):
        udp.bind(("127.0.0.1", 0))
        port, lines = str(running.port), f"syslog:127.0.0.1:{udp.getsockname()[1]}"
        in_use = "Address already in use (os error 98)"
        for flags, said, module in (
            (("--port", port), f"{in_use}: 0.0.0.0:{port} (--port)", TRACKER),
            (("--uds", path), f"{in_use}: {path} (--uds)", TRACKER),
            (("--lifecycle-from", lines), f"{in_use}: {lines}", "lean_selector"),
            (
                ("--replica-sync-port", port),
                f"failed to bind replica publisher to `tcp://*:{port}`",
                TRACKER,
            ),
            (
                (*state, "--drain-secs", "0"),
                f"{tmp_path}/state is in use by process {running.process.pid}",
                TRACKER,
            ),
            (other, f"{tmp_path}/selector has the state of a selector", TRACKER),
        ):
            status, log = failed_start(*flags, module=module)
            assert (status, said in log) == (1, True), log
        assert running.get("/health")[0] == 200
