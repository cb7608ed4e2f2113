"""The class, held against the one it stands in for, and in front of a service against itself in a
program: each pair plays the same script."""

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lean_selector import RemoteSelectionService, SelectionService
from loadtest.child_service import ROOT, plain_environment
from loadtest.reference import NotInstalled, interpreter
from tests.inprocess.play import Step, call, drawn, fixed, outcome
from tests.support.on_loop import on_loop
from tests.support.running_service import DEADLINE_S, RunningService

PLAY = Path(__file__).with_name("play.py")


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


@pytest.mark.reference
@pytest.mark.parametrize(("seed", "operations"), [(0, 0), (1, 1000), (2, 1000), (3, 1000)])
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


async def came_of(
    service: SelectionService | RemoteSelectionService, steps: list[Step]
) -> list[Any]:
    """What came of each step, as JSON has it."""
    found = [json.loads(json.dumps(await outcome(service, step))) for step in steps]
    await service.shutdown_async()
    return found


@on_loop
async def test_every_call_comes_to_the_same_in_front_of_a_service() -> None:
    steps = fixed()
    steps = steps[: steps.index(call("shutdown"))] + drawn(random.Random(1), 200)
    # In the background, so that nobody hears that its id is unknown; and what is not offered there.
    apart = ("add_output_block", "recover_indexer_from_peers")
    steps = [step for step in steps if step[0] not in apart]
    with RunningService("--api", "1.6") as service:
        remote = RemoteSelectionService(f"http://127.0.0.1:{service.port}")
        came = await came_of(remote, steps)
    expected = await came_of(SelectionService(), steps)
    for step, theirs, ours in zip(steps, came, expected, strict=True):
        assert theirs == ours, step
