"""Plays the recorded cases of the reference against this service, one test per scenario.

`tests/data/deviations.json` and `deviations_16.json` list the steps that are meant to differ, each
with the decision that says so.
"""

import json
import re
import sys

import pytest

from tests.support.recorded_cases import DATA, Steps, replay, scenarios

SELECTOR = "{python} -m lean_selector --port {{port}} --log-level error"
# Each recording: how the service is started, and the steps that are meant to differ.
RECORDINGS = {
    "selection": (SELECTOR, "deviations.json"),
    "slot_tracker": (SELECTOR.replace("selector ", "selector.slot_tracker "), "deviations.json"),
    "selection_16": (f"{SELECTOR} --api 1.6", "deviations_16.json"),
}
DEVIATIONS: dict[str, dict[str, str]] = {
    name: json.loads((DATA / name).read_text()) for _, name in RECORDINGS.values()
}
# Ties: the recording holds one draw of the reference, and we may draw the same.
DRAWN = {"cost_decode_blocks[10]"}

CASES = [
    pytest.param(recording, name, steps, id=f"{recording}-{name}")
    for recording in RECORDINGS
    for name, steps in scenarios(recording).items()
]


@pytest.mark.parametrize(("recording", "name", "steps"), CASES)
def test_answers_as_recorded_but_for_listed_deviations(
    recording: str, name: str, steps: Steps
) -> None:
    command, deviations = RECORDINGS[recording]
    run = replay.Scenario(command.format(python=sys.executable), steps[0])
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
    meant = {key for key in DEVIATIONS[deviations] if key.startswith(f"{name}[")}
    assert differing - DRAWN == meant - DRAWN


def test_every_deviation_cites_a_decision() -> None:
    for deviations in DEVIATIONS.values():
        for step, reason in deviations.items():
            assert re.match(r"D\d+\b", reason), f"{step}: {reason}"
