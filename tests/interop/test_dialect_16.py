"""The 1.6 dialect held against the real 1.6.1: random operations on both, side by side.

Run by itself for longer: `pytest tests/interop/test_dialect_16.py --explore`.
"""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from loadtest.child_service import ChildService, free_port, plain_environment
from tests.dialect_play import Play
from tests.running_service import wait_until

pytestmark = pytest.mark.reference

OURS = [sys.executable, "-m", "lean_selector", "--log-level", "error"]
FLAGS = {
    "few selections": ["--selection-cache-max-entries", "7", "--selection-cache-max-bytes", "700"],
    "plenty": [],
}
OPERATIONS = 1000


@contextlib.contextmanager
def service(command: list[str], *flags: str, **env: str) -> Iterator[ChildService]:
    port = free_port()
    child = ChildService(
        [*command, "--port", str(port), *flags],
        port,
        env=plain_environment(DYN_LOG="error", **env),
        keep_alive=True,
    )
    try:
        wait_until(child.is_healthy, "the service is up", 60.0)
        yield child
    finally:
        child.stop()


@pytest.mark.parametrize(
    ("seed", "events", "limits"),
    [(1, True, "plenty"), (2, False, "few selections"), (3, True, "few selections")],
)
def test_a_thousand_operations_are_answered_as_1_6_1_answers_them(
    reference_161: Path, seed: int, events: bool, limits: str
) -> None:
    flags = [*FLAGS[limits], "--session-affinity-ttl-secs", "3600"]
    theirs = [str(reference_161), "-m", "dynamo.select_service"]
    env = {
        "DYN_USE_KV_EVENTS": str(events).lower(),
        "DYN_ROUTER_CONDITIONAL_DISAGG_DECODE_BUSY_THRESHOLD": "0.01",
        "DYN_ROUTER_CONDITIONAL_DISAGG_PREFILL_BUSY_THRESHOLD": "0.5",
    }
    with (
        service(theirs, *flags, **env) as reference,
        service([*OURS, "--api", "1.6"], *flags, **env) as ours,
    ):
        play = Play(seed, reference, ours, has_events=events)
        play.run(OPERATIONS)
        assert not play.differences, "\n".join(play.differences[:5])
        assert play.compared > OPERATIONS
