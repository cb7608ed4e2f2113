"""No worker is taken by all, while others idle, because it holds what they share.

In virtual time: the core chooses, and engines with bounded caches compute, evict and say so.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import groupby

import pytest

from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.tools.batching_engine import SimulatedRequest
from lean_selector.tools.simulation import Policy, SimulatedFleet, Simulation, requests_of
from lean_selector.tools.trace import TRACE_BLOCK_TOKENS
from lean_selector.wire.decision_lines import DecisionLine

LATENCY = RouterSettings(policy="latency")
IDLE_MS = 60_000.0  # between requests: each finds all workers idle
SYSTEM = range(1_000_000)


def served(
    lines: Iterable[tuple[float, list[int], int]],
    engines: int,
    capacity: int,
    settings: RouterSettings = LATENCY,
) -> list[SimulatedRequest]:
    """Requests as (ms, blocks, output tokens), in order of arrival, and where they went."""
    trace = [
        DecisionLine(at, TRACE_BLOCK_TOKENS * len(blocks) + 1, output, blocks)
        for at, blocks, output in lines
    ]
    requests = requests_of(trace, 1.0)
    Simulation(Policy("latency", settings), SimulatedFleet(engines, capacity)).run(requests)
    return requests


def own(session: int, blocks: int) -> list[int]:
    """Blocks that no other session has."""
    first = 1_000_000 * (session + 1)
    return [*range(first, first + blocks)]


def longest_run(requests: list[SimulatedRequest]) -> int:
    return max(len(list(same)) for _, same in groupby(each.worker_id for each in requests))


@pytest.mark.parametrize(
    ("system_blocks", "own_blocks", "capacity"), [(4, 16, 400), (20, 8, 200), (40, 4, 150)]
)
def test_sessions_that_share_a_system_prompt_spread_before_they_evict(
    system_blocks: int, own_blocks: int, capacity: int
) -> None:
    system = [*SYSTEM[:system_blocks]]
    requests = served(
        ((IDLE_MS * n, [*system, *own(n, own_blocks)], 8) for n in range(60)), 2, capacity
    )
    shares = Counter(each.worker_id for each in requests)
    assert min(shares.values()) >= 20
    # As many as one has room for, and those for which as much is evicted as a system prompt has.
    most = (capacity - system_blocks) // own_blocks + system_blocks // own_blocks + 1
    assert longest_run(requests) <= most


def test_turns_one_at_a_time_use_both_of_two_equal_workers() -> None:
    """28 agents of 16 turns, never two requests at once; AMD-AGI/Infera#103 saw 448 to 0."""

    def turns() -> Iterator[tuple[float, list[int], int]]:
        for turn in range(16):
            for agent in range(28):
                blocks = [*SYSTEM[:8], *own(agent, 4 * (turn + 1))]
                yield IDLE_MS * (28 * turn + agent), blocks, 8

    requests = served(turns(), 2, 500)
    shares = Counter(each.worker_id for each in requests)
    assert sum(shares.values()) == 448
    assert min(shares.values()) >= 140
    assert longest_run(requests) <= 4 * 28 + 8  # as many turns as one worker has room for


def test_single_turns_at_once_leave_no_worker_idle() -> None:
    """Some workers hold the chat template and others do not; ai-dynamo/dynamo#7836 saw three of
    five take everything."""
    known = [(0.0, [*SYSTEM[:1], *own(n, 1)], 1) for n in range(3)]
    burst = [(IDLE_MS + n, [*SYSTEM[:1], *own(10 + n, 4)], 200) for n in range(256)]
    requests = served([*known, *burst], 5, 3_000)
    shares = Counter(each.worker_id for each in requests[3:])
    assert min(shares.values()) >= 40
    assert max(shares.values()) <= 64


def test_a_burst_over_a_long_cached_prefix_overflows_to_others() -> None:
    """Whoever holds the prefix, all come to have about as much to do; as in sglang#34513."""
    prefix = [*SYSTEM[:16]]
    first = [(0.0, prefix, 1)]
    burst = [(IDLE_MS + n, [*prefix, *own(n, 4)], 50) for n in range(120)]
    soon_cached = RouterSettings(policy="latency", predicted_ttl_s=10.0)
    requests = served([*first, *burst], 4, 3_000, soon_cached)
    shares = Counter(each.worker_id for each in requests[1:])
    assert min(shares.values()) >= 25
    assert max(shares.values()) <= 36
