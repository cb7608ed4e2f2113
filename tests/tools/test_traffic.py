"""The demo's traffic and the comparison in virtual time: small cases worked out by hand."""

from itertools import islice, pairwise

import pytest

from lean_selector.tools.simulated_engines import EngineModel, EngineSpeed, make_request
from lean_selector.tools.traffic import (
    Outcome,
    Recorded,
    as_recorded,
    compare,
    conversations,
    least_loaded,
    percentile,
    round_robin,
    run_policy,
    table,
)

BLOCK = 4
SPEED = EngineSpeed(prefill_tokens_per_s=8.0, decode_tokens_per_s=4.0)


def item(arrival_s: float, kind: int, worker_id: int, output_blocks: int = 0) -> Recorded:
    tokens = [kind] * 8
    return Recorded(arrival_s, make_request("r", tokens, 8, output_blocks, BLOCK), worker_id)


def fleet(size: int) -> list[EngineModel]:
    return [EngineModel(100, BLOCK, SPEED) for _ in range(size)]


def test_recorded_choices_are_played_as_they_were_made() -> None:
    engines = fleet(2)
    items = [item(0, 1, 20), item(10, 1, 20), item(20, 2, 10)]
    outcome = run_policy("ours", as_recorded([10, 20]), items, engines)
    assert [engine.requests for engine in engines] == [1, 2]
    assert outcome == Outcome(
        policy="ours", hit_rate=2 / 6, imbalance=1.0, ttft_p50_s=1.0, ttft_p99_s=1.0
    )


def test_round_robin_takes_turns_and_misses_what_the_other_holds() -> None:
    outcome = run_policy("rr", round_robin, [item(0, 1, 1), item(10, 1, 1)], fleet(2))
    assert outcome.hit_rate == 0


def test_least_loaded_counts_requests_until_their_last_output_block() -> None:
    engines = fleet(2)
    # The first holds engine 0 until 1 s of prefill + 2 blocks of 1 s; the second is gone at 1 s.
    items = [item(0, 1, 1, output_blocks=2), item(0, 2, 1), item(2, 3, 1), item(3.5, 4, 1)]
    run_policy("least", least_loaded, items, engines)
    assert [engine.requests for engine in engines] == [1, 3]


def test_queueing_for_an_engine_counts_as_time_to_first_token() -> None:
    items = [item(0, 1, 1), item(0, 2, 1), item(0, 3, 1)]
    outcome = run_policy("one", round_robin, items, fleet(1))
    assert (outcome.ttft_p50_s, outcome.ttft_p99_s) == (2.0, 3.0)


def test_imbalance_is_the_busiest_engine_over_the_average() -> None:
    items = [item(0, 1, 1), item(10, 2, 1), item(20, 3, 2), item(30, 1, 1)]
    outcome = run_policy("ours", as_recorded([1, 2]), items, fleet(2))
    assert outcome.imbalance == pytest.approx(16 / 12)


def test_all_policies_see_the_requests_in_order_of_arrival() -> None:
    items = [item(10, 1, 1), item(0, 1, 1)]
    rows = compare(items, [1, 2], 100, BLOCK, SPEED)
    assert [row.policy for row in rows] == ["lean-selector", "round-robin", "least-loaded"]
    assert rows == compare(items[::-1], [1, 2], 100, BLOCK, SPEED)
    lines = table(rows, 2)
    assert max(map(len, lines)) <= 80
    assert "same 2 requests" in "\n".join(lines)


def test_percentile_takes_the_nearest_rank() -> None:
    assert percentile([], 0.5) == 0.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 3.0
    assert percentile([1.0, 2.0], 0.99) == 2.0


def test_the_same_seed_gives_the_same_turns_and_another_seed_does_not() -> None:
    first = list(islice(conversations(1, 0), 12))
    assert first == list(islice(conversations(1, 0), 12))
    assert first != list(islice(conversations(2, 0), 12))
    assert first != list(islice(conversations(1, 1), 12))


def test_a_turn_begins_with_all_of_the_turn_before() -> None:
    turns = [turn.request for turn in islice(conversations(0, 0), 30)]
    goes_on = [
        list(later.tokens)[: len(earlier.tokens)] == earlier.tokens
        for earlier, later in pairwise(turns)
    ]
    assert 0 < goes_on.count(False) < 10  # where a new conversation begins
    assert len({turn.request_id for turn in turns}) == 30
