"""The command lines as a shell sees them: exit statuses, and what is printed where."""

import os
import socket
import subprocess
import sys

import pytest

from lean_selector import __version__
from lean_selector.build_info import form
from lean_selector.cli import main, slot_tracker_main
from tests.support.running_service import RunningService, free_port

QUIET = {name: value for name, value in os.environ.items() if not name.startswith("DYN_")}


def ran(*flags: str, **environ: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a start that must end by itself."""
    done = subprocess.run(
        [sys.executable, "-m", "lean_selector", *flags],
        env={**QUIET, **environ},
        capture_output=True,
        text=True,
        timeout=20,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("run", "name"), [(main, "lean-selector"), (slot_tracker_main, "lean-slot-tracker")]
)
def test_version_and_help_are_printed_to_stdout(
    capsys: pytest.CaptureFixture[str], run: object, name: str
) -> None:
    assert callable(run)
    for flag, expected in (
        ("--version", f"{name} {__version__} ({form()})\n"),
        ("--help", "--port"),
    ):
        with pytest.raises(SystemExit) as caught:
            run([flag])
        assert caught.value.code == 0
        assert expected in capsys.readouterr().out


def test_help_says_that_threads_have_no_effect() -> None:
    status, out, _ = ran("--help-all")
    assert status == 0
    assert "--threads" in out
    assert "has no effect" in " ".join(out.split())


@pytest.mark.parametrize(
    ("flags", "environ", "named"),
    [
        (["--port", "70000"], {}, "--port"),
        ([], {"DYN_ROUTER_TEMPERATURE": "-1"}, "DYN_ROUTER_TEMPERATURE"),
        ([], {"DYN_ROUTER_POLICY_CONFIG": "/x.yaml"}, "DYN_ROUTER_POLICY_CONFIG"),
        (["--unknown"], {}, "--unknown"),
    ],
)
def test_a_bad_configuration_ends_with_status_2_and_one_line(
    flags: list[str], environ: dict[str, str], named: str
) -> None:
    status, out, err = ran(*flags, **environ)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert named in err


def last_line(err: str) -> str:
    lines = err.splitlines()
    assert not any("Traceback" in line for line in lines)
    return lines[-1]


@pytest.mark.parametrize("with_replica", [False, True])
def test_a_port_in_use_ends_with_status_1_and_one_clear_line(with_replica: bool) -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        replica = ["--replica-sync-port", str(free_port())] if with_replica else []
        status, _, err = ran("--port", str(port), "--log-level", "error", *replica)
    assert status == 1
    assert err == (f"lean-selector: error: Address already in use (os error 98): 0.0.0.0:{port}\n")


def test_a_replica_port_in_use_ends_with_status_1_and_one_clear_line() -> None:
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        status, _, err = ran(
            *("--port", str(free_port()), "--log-level", "error"),
            *("--replica-sync-port", str(port)),
        )
    assert status == 1
    assert err.count("\n") == 1
    assert str(port) in err


@pytest.mark.parametrize("host", ["256.1.1.1", "no.such.host.invalid", "203.0.113.7"])
def test_a_host_that_cannot_be_bound_ends_with_status_1_and_one_clear_line(host: str) -> None:
    status, _, err = ran("--port", "0", "--host", host, "--log-level", "error")
    assert status == 1
    assert err.count("\n") == 1
    assert host in err


def test_a_deprecated_setting_is_warned_of_and_works() -> None:
    env = {"DYN_OVERLAP_SCORE_WEIGHT": "0"}
    with RunningService(env=env) as service:
        assert service.get("/health")[0] == 200
        status, log = service.stop()
    assert status == 0
    assert "deprecated" in log
