"""The class, held against the one it stands in for: both play the same script."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.child_service import ROOT, plain_environment
from loadtest.reference import NotInstalled, interpreter
from tests.support.running_service import DEADLINE_S

PLAY = Path(__file__).with_name("play.py")
pytestmark = pytest.mark.reference


def played(python: str, module: str, seed: int, operations: int) -> list[Any]:
    """What came of each step."""
    done = subprocess.run(
        [python, str(PLAY), module, str(seed), str(operations)],
        env=plain_environment(),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=10 * DEADLINE_S,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


@pytest.mark.parametrize(("seed", "operations"), [(1, 1000), (2, 1000)])
def test_every_call_comes_to_the_same_as_with_the_reference(seed: int, operations: int) -> None:
    try:
        theirs = str(interpreter("1.6.1"))
    except NotInstalled as reason:
        pytest.skip(str(reason))
    expected = played(theirs, "dynamo.llm", seed, operations)
    came = played(sys.executable, "lean_selector", seed, operations)
    assert len(expected) > operations
    for step, (ours, reference) in enumerate(zip(came, expected, strict=True)):
        assert ours == reference, step
