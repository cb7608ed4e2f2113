#!/usr/bin/env -S .venv/bin/python
"""The way of a select through the modules: prints how often it turns back to one that it has left.

    .ci/walk.py     # on the sources: compiled functions are not seen

A turn back is a call of a function in a module that was entered before, with another in between.
"""

import json
import sys
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.gates import answered, request, selection_gate

_PACKAGE = "/lean_selector/"
_WORKERS = 4


def turns_back() -> list[str]:
    """The modules that one select by hashes comes back to, among four idle workers."""
    gate = selection_gate()
    for number in range(_WORKERS):
        worker = {"worker_id": number, "endpoint": "http://w", "model_name": "m", "block_size": 16}
        answered(gate, request("POST", "/workers", json.dumps(worker).encode()))
    hashes = {"block_hashes": [1, 2, 3, 4], "sequence_hashes": [5, 6, 7, 8]}
    body = json.dumps({"model_name": "m", "isl_tokens": 64, **hashes}).encode()
    answered(gate, request("POST", "/select", body))  # what happens once has happened
    walk: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        module = frame.f_code.co_filename.partition(_PACKAGE)[2]
        if event == "call" and module and (not walk or walk[-1] != module):
            walk.append(module)

    select = request("POST", "/select", body)
    sys.setprofile(note)
    try:
        answered(gate, select)
    finally:
        sys.setprofile(None)
    return [module for step, module in enumerate(walk) if module in walk[:step]]


if __name__ == "__main__":
    sys.stdout.write(f"{len(turns_back())}\n")
