"""`deploy/`: what it holds, that every installation has it, and that its flags are real."""

from importlib.metadata import files
from pathlib import Path

import pytest

import lean_selector
from lean_selector.cli import main
from lean_selector.tools.recipes import recipes
from tests.deploy.recipe_commands import DEPLOY, IN_CHECKOUT, TEXTS, configured, unit_command


def test_the_command_lists_and_prints_every_file_of_the_checkout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["deploy", "--list"]) == 0
    out, err = capsys.readouterr()
    assert (err, out.splitlines()) == ("", IN_CHECKOUT)
    name = "systemd/lean-selector.service"
    assert main(["deploy", "--print", name]) == 0
    assert capsys.readouterr() == (TEXTS[name], "")
    assert {name: (DEPLOY / name).read_text("utf-8") for name in IN_CHECKOUT} == TEXTS


def test_an_installation_that_is_no_checkout_has_them_inside_the_package() -> None:
    """A wheel's list of files; that of the pure form is looked at in `test_image`."""
    if (Path(lean_selector.__file__).parents[1] / "setup.py").exists():
        assert {str(path) for path in recipes().values()} == {str(DEPLOY / n) for n in IN_CHECKOUT}
        return
    installed = {str(path) for path in files("lean-selector") or []}
    assert {f"lean_selector/deploy/{name}" for name in IN_CHECKOUT} <= installed


def test_the_unit_runs_with_the_flags_that_it_has_and_with_those_of_the_example() -> None:
    bare = configured(unit_command("")[1:])
    assert bare.listen.uds == "/run/lean-selector/selector.sock"
    assert bare.listen.host == "127.0.0.1"
    more = configured(unit_command()[1:])
    assert more.discover is not None
