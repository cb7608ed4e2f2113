"""The command lines as a shell sees them: exit statuses, and what is printed where."""

import os
import socket
import subprocess
import sys

import pytest

from lean_selector import __version__
from lean_selector.build_info import form
from lean_selector.cli import main, slot_tracker_main
from tests.support.running_service import free_port

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


@pytest.mark.parametrize("taken", ["--port", "--replica-sync-port"])
def test_a_port_in_use_ends_with_status_1_and_one_clear_line(taken: str) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        ports = {"--port": free_port(), "--replica-sync-port": free_port()}
        ports[taken] = other.getsockname()[1]
        flags = [str(word) for pair in ports.items() for word in pair]
        status, _, err = ran(*flags, "--log-level", "error")
    assert (status, err.count("\n")) == (1, 1)
    assert str(ports[taken]) in err
    if taken == "--port":  # as the reference says it
        address = f"0.0.0.0:{ports[taken]}"
        assert (
            err
            == f"lean-selector: error: Address already in use (os error 98): {address} (--port)\n"
        )


@pytest.mark.parametrize("host", ["256.1.1.1", "no.such.host.invalid", "203.0.113.7"])
def test_a_host_that_cannot_be_bound_ends_with_status_1_and_one_clear_line(host: str) -> None:
    status, _, err = ran("--port", "0", "--host", host, "--log-level", "error")
    assert (status, err.count("\n")) == (1, 1)
    assert host in err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["demoo"], "`demo`"),
        (["serve"], "gateway, demo"),
        (["demo", "--seconds", "abc"], "`abc` is no number"),
        (["check", "--seconds", "abc"], "must be a number"),
    ],
)
def test_a_slip_on_the_command_line_is_answered_with_what_is_meant(
    words: list[str], named: str
) -> None:
    status, out, err = ran(*words)
    assert (status, out) == (2, "")
    assert named in err
    assert "_seconds" not in err
