"""Ours held against the real 1.3.1: random operations on both, side by side.

Run by itself for longer, with fresh seeds: `pytest tests/interop/test_reference_131.py --long`.
"""

import functools
import sys
from pathlib import Path

import pytest

from tests.conftest import Rounds
from tests.support.reference_play import ENGINES, Play, amended
from tests.support.side_by_side import SideBySide, play, side_by_side

pytestmark = pytest.mark.reference

OURS = [sys.executable, "-m", "lean_selector", "--log-level", "error"]
OPERATIONS = 500


@pytest.mark.parametrize(
    ("seed", "events", "threshold"), [(1, True, "16.0"), (2, False, "inf"), (3, True, "inf")]
)
def test_random_operations_are_answered_as_1_3_1_answers_them(
    reference_131: Path, rounds: Rounds, seed: int, events: bool, threshold: str
) -> None:
    opened = functools.partial(
        side_by_side,
        [str(reference_131), "-m", "dynamo.select_service"],
        OURS,
        # Ours queues when it is told to (D1), theirs always.
        {"DYN_USE_KV_EVENTS": str(events).lower(), "DYN_ROUTER_QUEUE_THRESHOLD": threshold},
        *("--threads", "1"),  # with more theirs counts blocks twice (docs/spec/indexer.md)
        engines=ENGINES if events else (),
        amend=amended,
    )
    for each in rounds(seed):

        def run(pair: SideBySide, each: int = each) -> None:
            Play(each, pair, has_events=events).run(OPERATIONS)

        assert play(each, opened, run) > OPERATIONS
