"""`deploy/`: what it holds, that every installation has it, and that its flags are real."""

import re
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path

import pytest

import lean_selector
from lean_selector.server.flags import FILE, fields_of
from lean_selector.server.gateway_flags import GatewayConfig
from lean_selector.server.service_flags import TrackerConfig
from lean_selector.tools.check import add_arguments as add_check_arguments
from lean_selector.tools.recipes import add_arguments, recipes
from tests.deploy.recipe_commands import (
    DEPLOY,
    IN_CHECKOUT,
    TEXTS,
    configured,
    flags_of,
    unit_command,
)


def deploy(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lean_selector", "deploy", *words],
        capture_output=True,
        text=True,
        timeout=60,
    )


# -- the command ----------------------------------------------------------------------------------


def test_the_command_lists_and_prints_every_file_of_the_checkout() -> None:
    said = deploy("--list")
    assert (said.returncode, said.stderr) == (0, "")
    assert said.stdout.splitlines() == IN_CHECKOUT
    name = "systemd/lean-selector.service"
    said = deploy("--print", name)
    assert (said.returncode, said.stderr, said.stdout) == (0, "", TEXTS[name])
    assert {name: (DEPLOY / name).read_text("utf-8") for name in IN_CHECKOUT} == TEXTS


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--print", "systemd"], "systemd/lean-selector.service"),
        (["--print", "dockerfile"], "docker/Dockerfile"),
        (["--print", "kubernetes/replica.yaml"], "kubernetes/replicas.yaml"),
        (["--print", "../setup.py"], "see --list"),
        (["--print", ""], "see --list"),
        ([], "--list"),
    ],
)
def test_a_name_that_there_is_not_is_told_what_is_near(words: list[str], hint: str) -> None:
    said = deploy(*words)
    assert (said.returncode, said.stdout) == (2, "")
    assert hint in said.stderr


# -- what travels ---------------------------------------------------------------------------------


def test_an_installation_that_is_no_checkout_has_them_inside_the_package() -> None:
    """A wheel's list of files; that of the pure form is looked at in `test_image`."""
    if (Path(lean_selector.__file__).parents[1] / "setup.py").exists():
        assert {str(path) for path in recipes().values()} == {str(DEPLOY / n) for n in IN_CHECKOUT}
        return
    installed = {str(path) for path in files("lean-selector") or []}
    assert {f"lean_selector/deploy/{name}" for name in IN_CHECKOUT} <= installed


# -- flags ----------------------------------------------------------------------------------------

OURS = {each.flag.name for config in (TrackerConfig, GatewayConfig) for each in fields_of(config)}
OURS.add(FILE)
OURS |= (
    flags_of(add_arguments) | flags_of(add_check_arguments) | {"--help", "--help-all", "--version"}
)
# Of docker, pip, apt-get and systemctl, and of engines.
OTHERS = {
    *("--rm", "--read-only", "--cap-drop", "--security-opt", "--entrypoint", "--from"),
    *("--no-install-recommends", "--no-cache-dir", "--no-deps", "--wheel-dir", "--now"),
    *("--kv-events-config", "--build-arg"),
    # of Envoy, and of logger
    *("--file-flush-interval-msec", "--udp", "--server", "--rfc3164", "--tag", "--socket"),
}


def test_every_flag_that_a_file_names_exists() -> None:
    """Also those in comments."""
    for name, text in TEXTS.items():
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*[a-z](?![\w-])", text))
        assert named - OURS - OTHERS == set(), name


def test_the_unit_runs_with_the_flags_that_it_has_and_with_those_of_the_example() -> None:
    bare = configured(unit_command("")[1:])
    assert bare.listen.uds == "/run/lean-selector/selector.sock"
    assert bare.listen.host == "127.0.0.1"
    more = configured(unit_command()[1:])
    assert more.discover is not None
