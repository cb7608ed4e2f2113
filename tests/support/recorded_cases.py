"""The cases that were recorded from the reference, and the program that plays them.

The cases in `data/` are copies, kept as they came; so is `conformance/replay.py`, but for its
command line.
"""

import importlib.util
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

HERE = Path(__file__).parents[1]
DATA = HERE / "data"

_spec = importlib.util.spec_from_file_location("replay", HERE / "conformance" / "replay.py")
assert _spec is not None
assert _spec.loader is not None
replay = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(replay)

Steps = list[dict[str, Any]]


def scenarios(recording: str) -> dict[str, Steps]:
    """The steps of each scenario of a recording, in order."""
    found: dict[str, Steps] = defaultdict(list)
    for line in (DATA / f"{recording}.jsonl").read_text(encoding="utf-8").splitlines():
        case = json.loads(line)
        found[case["scenario"]].append(case)
    return found
