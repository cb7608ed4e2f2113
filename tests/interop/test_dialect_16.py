"""The 1.6 dialect held against the real 1.6.1: random operations on both, side by side.

Run by itself for longer, with fresh seeds: `pytest tests/interop/test_dialect_16.py --long`.
"""

import functools
import sys
from pathlib import Path

import pytest

from tests.conftest import Rounds
from tests.dialect_play import ENGINES, Play
from tests.side_by_side import SideBySide, play, side_by_side

pytestmark = pytest.mark.reference

OURS = [sys.executable, "-m", "lean_selector", "--log-level", "error", "--api", "1.6"]
FLAGS = {
    "few selections": ["--selection-cache-max-entries", "7", "--selection-cache-max-bytes", "700"],
    "plenty": [],
}
OPERATIONS = 1000


@pytest.mark.parametrize(
    ("seed", "events", "limits"),
    [(1, True, "plenty"), (2, False, "few selections"), (3, True, "few selections")],
)
def test_a_thousand_operations_are_answered_as_1_6_1_answers_them(
    reference_161: Path, rounds: Rounds, seed: int, events: bool, limits: str
) -> None:
    env = {
        "DYN_USE_KV_EVENTS": str(events).lower(),
        "DYN_ROUTER_CONDITIONAL_DISAGG_DECODE_BUSY_THRESHOLD": "0.01",
        "DYN_ROUTER_CONDITIONAL_DISAGG_PREFILL_BUSY_THRESHOLD": "0.5",
    }
    opened = functools.partial(
        side_by_side,
        [str(reference_161), "-m", "dynamo.select_service"],
        OURS,
        env,
        *FLAGS[limits],
        *("--session-affinity-ttl-secs", "3600"),
        engines=ENGINES if events else (),
    )
    for each in rounds(seed):

        def run(pair: SideBySide, each: int = each) -> None:
            Play(each, pair, has_events=events).run(OPERATIONS)

        assert play(each, opened, run) > OPERATIONS
