"""The suite draws the same examples each time; an exploring run draws others, and more."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import EXPLORE_TIMES

ROOT = Path(__file__).parent.parent
DRAWS = """
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule


@settings(max_examples=30)
@given(st.integers(0, 2**64))
def test_given(drawn):
    print("given", drawn)


class Machine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        print("machine")

    @rule(drawn=st.integers(0, 2**64))
    def draw(self, drawn):
        print("step", drawn)


TestMachine = Machine.TestCase
TestMachine.settings = settings(max_examples=15, stateful_step_count=3)
"""


@pytest.fixture
def draws(tmp_path: Path) -> Path:
    """A test file that says what it draws; its directory uses the suite's own conftest."""
    (tmp_path / "conftest.py").write_text("from tests.conftest import *\n")
    test = tmp_path / "test_draws.py"
    test.write_text(DRAWS)
    return test


def drawn_in(test: Path, *options: str) -> list[str]:
    """What one run of the test draws, in a process of its own, line by line."""
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-q", "-s"]
    run = subprocess.run(
        [*command, "-p", "no:cacheprovider", *options, str(test)],
        cwd=test.parent,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [line.lstrip(".") for line in run.stdout.splitlines()]
    return [line for line in lines if line.startswith(("given", "machine", "step"))]


def test_two_runs_draw_the_same_examples(draws: Path) -> None:
    first = drawn_in(draws)
    assert len(first) > 60
    assert drawn_in(draws) == first


def test_an_exploring_run_draws_fresh_examples_and_many_more(draws: Path) -> None:
    usual = drawn_in(draws)
    first, second = drawn_in(draws, "--explore"), drawn_in(draws, "--explore")
    for kind in ("given", "machine"):
        few = sum(line.startswith(kind) for line in usual)
        for run in (first, second):
            many = sum(line.startswith(kind) for line in run)
            assert many > few * EXPLORE_TIMES / 2  # some are tried again, some are refused
    assert set(first) - set(second)
