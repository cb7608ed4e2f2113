"""Traces in virtual time: engines worked out by hand, the core before them, and the command."""

import json
from pathlib import Path
from typing import Literal

import pytest

from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.tools.batching_engine import BatchingEngine, IterationTimes, SimulatedRequest
from lean_selector.tools.simulate import main
from lean_selector.tools.simulation import (
    Policy,
    SimulatedFleet,
    Simulation,
    deal,
    requests_of,
    round_robin,
)
from lean_selector.tools.trace import trace_lines
from lean_selector.wire.decision_lines import DecisionLine

# An iteration takes a second, and a second more for each of the ten prompt tokens at most.
TIMES = IterationTimes(1.0, 1.0, 0.0, 0.0, most_prompt_tokens=10)


def request(arrived_at: float, tokens: int, output: int, chain: list[int]) -> SimulatedRequest:
    return SimulatedRequest(arrived_at, tokens, output, b"", chain)


def play(engine: BatchingEngine, until: float) -> None:
    while engine.due is not None and engine.due <= until:
        now = engine.due
        engine.finish(now)
        engine.start(now)


def test_prompts_are_computed_in_chunks_beside_what_decodes() -> None:
    engine = BatchingEngine(1, 100, 4, TIMES)
    long, short = request(0.0, 15, 3, [1, 2, 3]), request(11.5, 9, 1, [1, 4])
    engine.submit(long, 0.0)
    engine.start(0.0)
    play(engine, 11.5)  # ten tokens of it
    engine.submit(short, 11.5)
    play(engine, 100.0)
    # The five that are left; then what is new of `short` beside the second token of `long`.
    assert (long.first_token_at, long.ended_at) == (17.0, 24.0)
    assert (short.first_token_at, short.ended_at) == (23.0, 23.0)
    assert (short.hit, short.hit_tokens, engine.computed_tokens) == (1, 4, 20)


def test_a_prompt_joins_at_the_next_token() -> None:
    engine = BatchingEngine(1, 100, 4, TIMES)
    engine.submit(request(0.0, 1, 100, []), 0.0)
    engine.start(0.0)
    play(engine, 2.0)
    late = request(4.5, 3, 1, [])
    engine.submit(late, 4.5)
    play(engine, 100.0)
    assert (
        late.first_token_at == 9.0
    )  # the token of 5.0, then an iteration with three prompt tokens


def test_a_prompt_waits_until_the_cache_has_room() -> None:
    engine = BatchingEngine(1, 2, 4, TIMES)
    first, second = request(0.0, 8, 2, [1, 2]), request(0.0, 8, 1, [3, 4])
    engine.submit(first, 0.0)
    engine.submit(second, 0.0)
    engine.start(0.0)
    play(engine, 100.0)
    assert second.first_token_at == first.ended_at + 9.0


LINES = [
    DecisionLine(1_000.0 * turn, 512 * (turn + 1) + 100, 5, [100 * user, *range(1, turn + 2)])
    for turn in range(4)
    for user in range(6)
]


FLEET = SimulatedFleet(3, 50, (1.0, 2.0))


def played(policy: Policy, fleet: SimulatedFleet = FLEET) -> list[SimulatedRequest]:
    requests = requests_of(LINES, 1.0)
    simulation = Simulation(policy, fleet, 7)
    simulation.run(requests)
    assert all(each.ended_at >= each.first_token_at > each.arrived_at for each in requests)
    return requests


def test_the_core_follows_what_is_cached_and_a_rule_does_not() -> None:
    core = played(Policy("dynamo", RouterSettings()))
    placed = [each.worker_id for each in core]
    assert placed == [each.worker_id for each in played(Policy("dynamo", RouterSettings()))]
    assert all(each.hit == len(each.chain) - 1 for each in core[6:])
    turns = played(Policy("in turn", rule=round_robin))
    assert [each.worker_id for each in turns] == [1, 2, 3] * 8


def test_cold_prompts_that_come_together_go_where_their_prefix_is_being_computed() -> None:
    """Engines publish what they have computed, so events alone come too late."""
    lines = [
        DecisionLine(
            300.0 * burst + 6.0 * each, 17 * 512, 100, [*range(first, first + 16), -1 - each]
        )
        for burst, first in enumerate(range(100, 3_100, 100))
        for each in range(8)
    ]
    hits, ttft_s = [], []
    for predicted_ttl_s in (0.0, 10.0):
        requests = requests_of(lines, 1.0)
        settings = RouterSettings(predicted_ttl_s=predicted_ttl_s)
        Simulation(Policy("dynamo", settings), SimulatedFleet(), 7).run(requests)
        hits.append(sum(each.hit for each in requests))
        ttft_s.append(sum(each.ttft_s for each in requests))
    assert hits[0] == 0
    assert hits[1] > 16 * len(requests) // 3
    assert ttft_s[1] < ttft_s[0] / 2


def test_requests_that_wait_in_the_queue_are_served() -> None:
    waited = played(Policy("queue", RouterSettings(queue_threshold=0.0)))
    at_once = played(Policy("none", RouterSettings()))
    assert max(each.ttft_s for each in waited) >= max(each.ttft_s for each in at_once)


def test_fair_shares_keep_a_quiet_client_from_waiting_for_one_that_floods() -> None:
    lines = list(trace_lines(None, 800))
    late = []
    fairnesses: tuple[Literal["off", "on"], ...] = ("off", "on")
    for fairness in fairnesses:
        requests = requests_of(lines, 3.0)
        deal(requests, [10, 1])
        policy = Policy("p", RouterSettings(queue_threshold=2.0, queue_fairness=fairness))
        Simulation(policy, SimulatedFleet(engines=4)).run(requests)
        assert {each.fairness_id for each in requests[:11]} == {"1", "2"}
        quiet = sorted(each.ttft_s for each in requests if each.fairness_id == "2")
        late.append((quiet[-1], max(each.ended_at for each in requests)))
    (worst_off, ended_off), (worst_on, ended_on) = late
    assert worst_on < 0.5 * worst_off
    assert ended_on < 1.03 * ended_off


def test_selectors_know_of_each_other_as_soon_as_they_are_synced() -> None:
    """Each of three in turn sees idle engines, unless it hears of the others at once."""
    seen = {}
    for sync_s in (0.0, None):
        fleet = SimulatedFleet(6, 50, selectors=3, sync_s=sync_s)
        first = played(Policy("dynamo"), fleet)[:6]
        seen[sync_s] = len({each.worker_id for each in first})
    assert seen[0.0] == 6 > seen[None]


def test_requests_of_one_moment_can_be_spread_until_the_next() -> None:
    lines = [DecisionLine(1e3 * at, 1, 1, [1]) for at in (3, 3, 0, 0, 3, 6, 6)]
    spread = [each.arrived_at for each in requests_of(lines, 1.0, spread=True)]
    assert spread == [0.0, 1.5, 3.0, 4.0, 5.0, 6.0, 6.0]


def test_the_command_writes_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, figures = tmp_path / "t.jsonl", tmp_path / "f.json"
    keys = ("timestamp", "input_length", "output_length", "hash_ids")
    lines = [{key: getattr(line, key) for key in keys} for line in LINES]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = ["round-robin", "dynamo", "dynamo:prefill_load_scale=10,queue_threshold=2"]
    chosen = [word for row in rows for word in ("--policy", row)]
    assert main([str(trace), *chosen, "--json", str(figures)]) == 0
    assert [row["policy"] for row in json.loads(figures.read_bytes())] == rows
    assert sum(line.startswith("| ") for line in capsys.readouterr().out.splitlines()) == 4
    assert main([str(tmp_path / "none")]) == 1


@pytest.mark.parametrize(
    "policy", ["fastest", "lmetric:x=1", "dynamo:speed=1", "dynamo:temperature=hot"]
)
def test_a_policy_that_there_is_not_is_refused(policy: str) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["--policy", policy])
    assert exited.value.code == 2


def test_pairs_prefill_here_and_decode_there() -> None:
    """The second token comes as on an idle engine, however much is prefilled meanwhile."""
    fleet = SimulatedFleet(2, prefill=1, decode=1, times=TIMES, transfer_s=1_000.0)
    simulation = Simulation(Policy("dynamo"), fleet)
    first, second = request(0.0, 10, 3, []), request(1.0, 20, 1, [])
    simulation.run([first, second])
    # 11 s for ten tokens, 10 s for their transfer, and one token that the receiver computes
    assert (first.first_token_at, first.ended_at) == (23.0, 25.0)
    assert second.first_token_at == 11.0 + 22.0 + 20.0 + 2.0
    assert [engine.computed_tokens for engine in simulation.engines.values()] == [30, 2]
    (router,) = simulation._routers
    assert not router.partition.slots.reservations
    assert router.partition.pairs == 2


def test_a_rule_chooses_no_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    for flags in (("--prefill", "1"), ("--prefill", "1", "--decode", "1", "--policy", "lmetric")):
        assert main([*flags, "--requests", "2"]) == 1
    assert "need each other" in (told := capsys.readouterr().err)
    assert "lmetric chooses no pairs" in told
    assert main(["--prefill", "1", "--decode", "1", "--requests", "5"]) == 0
    assert "1 prefill and 1 decode engines" in capsys.readouterr().out
