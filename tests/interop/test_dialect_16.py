"""The 1.6 dialect held against the real 1.6.1: random operations on both, side by side.

Run by itself for longer, with fresh seeds: `pytest tests/interop/test_dialect_16.py --long`.
"""

import functools
import random
import sys
from pathlib import Path

import pytest

from tests.conftest import Rounds
from tests.support.dialect_play import ENGINES, Play
from tests.support.side_by_side import SideBySide, play, side_by_side

pytestmark = pytest.mark.reference

OURS = [sys.executable, "-m", "lean_selector", "--log-level", "error", "--api", "1.6"]
FLAGS = {
    "few selections": ["--selection-cache-max-entries", "7", "--selection-cache-max-bytes", "700"],
    "plenty": [],
}
OPERATIONS = 500
BUSY = {
    "DYN_ROUTER_CONDITIONAL_DISAGG_DECODE_BUSY_THRESHOLD": "0.01",
    "DYN_ROUTER_CONDITIONAL_DISAGG_PREFILL_BUSY_THRESHOLD": "0.5",
}
# The temperature stays 0: each service draws for itself. The credit stays above 0: at 0 1.6.1 costs
# a prompt that says fewer tokens than are cached of it by those tokens, and ours by what is cached.
ROUTER = {
    "DYN_ROUTER_TRACK_PREFILL_TOKENS": ["true", "false"],
    "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT": ["1.0", "0.3", "0.6", "1.7"],
    "DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY": ["0.0", "0.3", "2.0"],
    "DYN_ROUTER_PREFILL_LOAD_SCALE": ["1.0", "0.0", "0.7", "3.0"],
    "DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT": ["0.0", "1.5", "0.1"],
    "DYN_ROUTER_HOST_CACHE_HIT_WEIGHT": ["0.75", "0.0", "1.0"],
    "DYN_ROUTER_DISK_CACHE_HIT_WEIGHT": ["0.25", "0.1", "1.0"],
}


def router_of(seed: int) -> dict[str, str]:
    """What a seed's routers weigh, and how; each setting is the default or left out at times."""
    draws = random.Random(seed)
    drawn = {name: draws.choice(values) for name, values in ROUTER.items()}
    return {name: value for name, value in drawn.items() if draws.random() < 0.8}


@pytest.mark.parametrize(
    ("seed", "events", "limits"),
    [
        (1, True, "plenty"),
        (2, False, "few selections"),
        (3, True, "few selections"),
        (5, False, "plenty"),  # prefill is not tracked
        (11, True, "plenty"),  # nor is it here
    ],
)
def test_random_operations_are_answered_as_1_6_1_answers_them(
    reference_161: Path, rounds: Rounds, seed: int, events: bool, limits: str
) -> None:
    for each in rounds(seed):
        opened = functools.partial(
            side_by_side,
            [str(reference_161), "-m", "dynamo.select_service"],
            OURS,
            {"DYN_USE_KV_EVENTS": str(events).lower(), **BUSY, **router_of(each)},
            *FLAGS[limits],
            *("--session-affinity-ttl-secs", "3600"),
            engines=ENGINES if events else (),
        )

        def run(pair: SideBySide, each: int = each) -> None:
            Play(each, pair, has_events=events).run(OPERATIONS)

        assert play(each, opened, run) > OPERATIONS
