"""Decision logs played again: made-up ones of engines that are known, and a service's own."""

import json
import random
from collections.abc import Iterable
from pathlib import Path

import msgspec
import pytest

from lean_selector.core.selection.router_settings import RouterSettings
from lean_selector.tools.batching_engine import IterationTimes
from lean_selector.tools.calibration import calibrated
from lean_selector.tools.recording import read_log
from lean_selector.tools.replay import change_of, tune
from lean_selector.tools.replay import main as replay
from lean_selector.tools.simulate import policy_of
from lean_selector.tools.simulation import (
    Policy,
    SimulatedFleet,
    Simulation,
    requests_of,
    round_robin,
)
from lean_selector.tools.trace import made_up_lines
from lean_selector.wire.decision_lines import DecisionLine
from tests.support.running_service import RunningService

HEADER = b'{"decision_log":1,"share":1.0,"settings":%b}\n'
LINE = {"timestamp": 0.0, "input_length": 600, "output_length": 0, "hash_ids": [1, 2], "worker": 1}


def write(path: Path, lines: Iterable[DecisionLine], settings: object = None) -> Path:
    encoder = msgspec.json.Encoder()
    header = HEADER % encoder.encode(settings or {})
    path.write_bytes(header + encoder.encode_lines(list(lines)))
    return path


def talks(number: int) -> list[DecisionLine]:
    return [line for line, _ in zip(made_up_lines(), range(number), strict=False)]


def logged(lines: list[DecisionLine], policy: Policy, fleet: SimulatedFleet) -> list[DecisionLine]:
    """As a service that chose by this policy would have logged them."""
    requests = requests_of(lines, 1.0)
    simulation = Simulation(policy, fleet, 3)
    simulation.run(requests)
    return [
        msgspec.structs.replace(
            line,
            model="m",
            worker=10 + request.worker_id,
            prefill_ms=request.ttft_s * 1e3,
            ended_ms=(request.ended_at - request.arrived_at) * 1e3,
            cached=request.found_tokens,
        )
        for line, request in zip(lines, requests, strict=True)
    ]


FLEET = SimulatedFleet(4, 700, times=IterationTimes(prompt_token_s=1 / 20_000))


def test_engines_are_found_from_what_they_did(tmp_path: Path) -> None:
    path = write(tmp_path / "log", logged(talks(600), policy_of("dynamo"), FLEET))
    recording = read_log([path], None)
    fleet = calibrated(recording).fleet
    assert fleet.engines == 4
    assert recording.workers == [(11, 0), (12, 0), (13, 0), (14, 0)]
    assert 600 < fleet.capacity_blocks < 800
    assert fleet.times.prompt_token_s == pytest.approx(1 / 20_000, rel=0.15)
    assert set(fleet.slowness) == {1.0}


def test_a_slow_engine_is_seen(tmp_path: Path) -> None:
    slow = SimulatedFleet(4, 700, (1.0, 1.0, 1.0, 3.0))
    lines = logged(talks(400), Policy("in turn", rule=round_robin), slow)
    factors = calibrated(read_log([write(tmp_path / "log", lines)], None)).fleet.slowness
    assert factors[3] > 2 * max(factors[:3])


def test_a_log_of_one_policy_tells_what_another_would_have_brought(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "log", logged(talks(600), policy_of("dynamo"), FLEET))
    wanted = logged(talks(600), policy_of("latency"), FLEET)
    figures = tmp_path / "figures"
    assert replay([str(path), "--set", "policy=latency", "--json", str(figures)]) == 0
    found = json.loads(figures.read_bytes())
    assert [row["name"] for row in found["rows"]][2:] == ["recorded settings", "policy=latency"]
    observed, modelled, _, latency = found["rows"]
    assert sum(modelled["ttft_s"]) == pytest.approx(sum(observed["ttft_s"]), rel=0.03)
    ttft_ms = sum(line.prefill_ms or 0.0 for line in wanted)
    assert sum(latency["ttft_s"]) * 1e3 == pytest.approx(ttft_ms, rel=0.1)
    assert latency["hit_tokens"] == pytest.approx(sum(line.cached or 0 for line in wanted), rel=0.1)
    assert found["ttft_change"]["high"] < 0.0
    assert 0.0 < found["diverges_after"] < 0.2
    assert found["infinite_cache_tokens"] < latency["computed_tokens"]
    assert "policy=latency" in capsys.readouterr().out


def test_beside_another_balancer_its_choices_are_compared_with_ours(tmp_path: Path) -> None:
    lines = logged(talks(400), Policy("in turn", rule=round_robin), FLEET)
    for line in lines:
        line.ttft_ms, line.prefill_ms = line.prefill_ms, None
        line.selected = 11 if line.worker != 11 else None
    path, figures = write(tmp_path / "log", lines, {"policy": "latency"}), tmp_path / "figures"
    assert replay([str(path), "--json", str(figures)]) == 0
    found = json.loads(figures.read_bytes())
    _, modelled, ours = found["rows"]
    wanted = logged(talks(400), policy_of("latency"), FLEET)
    assert sum(ours["ttft_s"]) == pytest.approx(
        sum(line.prefill_ms or 0.0 for line in wanted) / 1e3, rel=0.1
    )
    assert ours["computed_tokens"] < modelled["computed_tokens"]
    assert found["ttft_change"]["high"] < 0.0


def test_tune_finds_what_is_better_and_says_where_nothing_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = policy_of("dynamo:overlap_score_credit=0")
    path = write(tmp_path / "log", logged(talks(240), bad, FLEET), {"overlap_score_credit": 0.0})
    figures = tmp_path / "figures"
    assert tune([str(path), "--json", str(figures)]) == 0
    found = json.loads(figures.read_bytes())
    assert found["ttft_change"]["high"] < 0.0
    assert found["settings"].get("policy") == "latency" or found["settings"]["prefill_load_scale"]
    # One engine: wherever requests go, they go there.
    one = SimulatedFleet(1, 700, times=IterationTimes(prompt_token_s=1 / 50_000))
    path = write(tmp_path / "one", logged(talks(100), policy_of("dynamo"), one))
    assert tune([str(path), "--json", str(figures)]) == 0
    assert json.loads(figures.read_bytes())["settings"] == {}
    assert "no significant difference" in capsys.readouterr().out


def test_an_interval_holds_the_change_and_is_not_sure_of_noise() -> None:
    rng = random.Random(5)
    base = [rng.uniform(1.0, 2.0) for _ in range(800)]
    better = change_of([each - rng.uniform(0.2, 0.4) for each in base], base)
    assert -0.23 < better.low < better.mean < better.high < -0.17
    assert better.is_sure
    noise = change_of([rng.uniform(1.0, 2.0) for _ in base], base)
    assert noise.low < 0.0 < noise.high
    assert not noise.is_sure


def test_constraints_of_requests_hold_when_they_are_played_again(tmp_path: Path) -> None:
    lines = logged(talks(60), policy_of("dynamo"), FLEET)
    for line in lines[:20]:
        line.pinned = True
    for line in lines[20:40]:
        assert line.worker is not None
        line.allowed = [line.worker, 99]
    recording = read_log([write(tmp_path / "log", lines)], None)
    requests = recording.requests([1] * 60)
    Simulation(Policy("latency", RouterSettings(policy="latency")), FLEET).run(requests)
    placed = [request.worker_id + 10 for request in requests]
    assert placed[:40] == [line.worker for line in lines[:40]]
    assert placed[40:] != [line.worker for line in lines[40:]]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_length": 1_025}, ["log:2", "input_length 1025 for 2 hash_ids"]),
        ({"input_length": 0}, ["log:2", "input_length 0"]),
        ({"worker": "a"}, ["log:2", "$.worker"]),
        ({"worker": None}, ["log:2", "worker"]),
        ({"allowed": [2]}, ["log:2", "allowed"]),
        ({"prefill_ms": "soon"}, ["log:2", "$.prefill_ms"]),
    ],
)
def test_a_bad_line_is_refused_by_its_number_and_field(
    changes: dict[str, object], words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    path.write_bytes(HEADER % b"{}" + json.dumps({**LINE, **changes}).encode() + b"\n")
    assert replay([str(path)]) == 1
    error = capsys.readouterr().err
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b'{"decision_log":2,"share":1.0,"settings":{}}', ["log:1", "decision_log"]),
        (b'{"decision_log":1,"share":1.0,"settings":{"policy":"x"}}', ["log:1", "policy"]),
        (b'{"decision_log":1,"share":1.0,"settings":{"nothing":1}}', ["log:1", "nothing"]),
        (b'{"decision_log":1}', ["log:1", "share"]),
    ],
)
def test_a_bad_header_is_refused(
    header: bytes, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    path.write_bytes(header + b"\n")
    assert replay([str(path)]) == 1
    error = capsys.readouterr().err
    assert all(word in error for word in words), error


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        *(("nothing=1", "nothing"), ("policy=fast", "policy")),
        ("prefill_load_scale=-1", "prefill_load_scale"),
        *(("prefill_load_scale=nan", "prefill_load_scale"), ("policy", "SETTING=VALUE")),
    ],
)
def test_a_bad_setting_is_refused_by_its_name(
    setting: str, word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "log", logged(talks(20), policy_of("dynamo"), FLEET))
    assert replay([str(path), "--set", setting]) == 1
    assert word in capsys.readouterr().err


def test_a_log_must_be_of_one_model_and_have_observations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = logged(talks(40), policy_of("dynamo"), FLEET)
    for line in lines[20:]:
        line.model = "other"
    path = write(tmp_path / "log", lines)
    assert replay([str(path)]) == 1
    assert "--model" in capsys.readouterr().err
    assert replay([str(path), "--model", "other"]) == 0
    for line in lines:
        line.model, line.prefill_ms = "m", None
    path = write(tmp_path / "log", lines)
    assert replay([str(path)]) == 1
    assert "--prefill-tokens-per-s" in capsys.readouterr().err
    assert replay([str(path), "--prefill-tokens-per-s", "20000", "--capacity", "700"]) == 0
    assert replay([str(tmp_path / "none")]) == 1


def test_the_log_of_a_service_is_played_again(tmp_path: Path) -> None:
    path, figures = tmp_path / "log", tmp_path / "figures"
    with RunningService(
        "--use-kv-events", "false", "--router-ttl-secs", "60", "--decision-log", str(path)
    ) as service:
        for worker_id in (1, 2):
            service.add_worker(worker_id, model_name="m")
        for number in range(30):
            name = f"{number}"
            tokens = [number % 5, *range(1_500)]
            body = {"model_name": "m", "token_ids": tokens, "reservation_id": name}
            assert service.post("/select_and_reserve", body)[0] == 200
            assert service.post(f"/reservations/{name}/prefill_complete")[0] < 300
            assert service.end(name) == 200
    assert replay([str(path), "--set", "policy=latency", "--json", str(figures)]) == 0
    observed, *played = json.loads(figures.read_bytes())["rows"]
    assert len(played) == 3
    for row in played:
        assert len(row["ttft_s"]) == 30
        assert row["hit_tokens"] > 0
    assert observed["hit_tokens"] == 25 * 1_488  # of 1 501 tokens, 93 full blocks
