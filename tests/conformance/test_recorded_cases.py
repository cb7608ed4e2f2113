"""Plays the recorded cases of the reference against this service, one test per scenario.

`replay.py` and the cases are copies of the recording; `tests/data/deviations.json` lists the steps
that are meant to differ, each with the decision that says so.
"""

import importlib.util
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
DATA = HERE.parent / "data"
DEVIATIONS: dict[str, str] = json.loads((DATA / "deviations.json").read_text())
# Ties: the recording holds one draw of the reference, and we may draw the same.
DRAWN = {"cost_decode_blocks[10]"}
COMMANDS = {
    "selection": "{python} -m lean_selector --port {{port}} --log-level error",
    "slot_tracker": "{python} -m lean_selector.slot_tracker --port {{port}} --log-level error",
}

_spec = importlib.util.spec_from_file_location("replay", HERE / "replay.py")
assert _spec is not None
assert _spec.loader is not None
replay = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(replay)

Steps = list[dict[str, Any]]


def scenarios(service: str) -> dict[str, Steps]:
    found: dict[str, Steps] = defaultdict(list)
    for line in (DATA / f"{service}.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        found[case["scenario"]].append(case)
    return found


CASES = [
    pytest.param(service, name, steps, id=f"{service}-{name}")
    for service in COMMANDS
    for name, steps in scenarios(service).items()
]


@pytest.mark.parametrize(("service", "name", "steps"), CASES)
def test_answers_as_recorded_but_for_listed_deviations(
    service: str, name: str, steps: Steps
) -> None:
    run = replay.Scenario(COMMANDS[service].format(python=sys.executable), steps[0])
    differing = set()
    try:
        for step in steps:
            status, body = run.play(step)
            recorded_nothing = step["status"] is None and step["response_body"] is None
            if recorded_nothing or step.get("varies") == "value":
                continue
            if replay.differs(step, status, body):
                differing.add(f"{name}[{step['step']}]")
    finally:
        run.close()
    meant = {key for key in DEVIATIONS if key.startswith(f"{name}[")}
    assert differing - DRAWN == meant - DRAWN


def test_every_deviation_cites_a_decision() -> None:
    for step, reason in DEVIATIONS.items():
        assert re.match(r"D\d+\b", reason), f"{step}: {reason}"
