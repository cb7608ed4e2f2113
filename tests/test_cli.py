"""The command lines as a shell sees them: exit statuses, and what is printed where."""

import os
import subprocess
import sys

import pytest

from lean_selector import __version__
from lean_selector.build_info import form
from lean_selector.cli import main, slot_tracker_main

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


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["demoo"], "`demo`"),
        (["serve"], "gateway, demo"),
        (["check", "--seconds", "abc"], "`abc` is no number"),
        (["--que-threshold", "2"], "`--queue-threshold`"),
        (["gateway", "http://a", "--polcy=latency"], "`--policy`"),
        (["gateway", "127.0.0.1:8001/x"], "http://HOST:PORT"),
    ],
)
def test_a_slip_on_the_command_line_is_answered_with_what_is_meant(
    words: list[str], named: str
) -> None:
    status, out, err = ran(*words)
    assert (status, out) == (2, "")
    assert named in err
    assert "_seconds" not in err
