"""The measurement of several selectors: whole runs with real processes, and how it counts."""

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from lean_selector.core.selection.shapes import RankLoadRow
from lean_selector.tools.service_process import ServiceError
from lean_selector.tools.traffic import PartitionLoad
from loadtest.scale import APART, PARTITIONED, SYNCED, Fleet, Truth, main, parse, runs, spread
from tests.loadtest.conftest import WriteTrace, ended_by

REQUESTS = 24


@pytest.fixture
def trace(write_trace: WriteTrace) -> Path:
    """Six conversations of four turns; all begin alike, and part in their second block."""
    lines = [
        (turn * 1_000 + user * 50, [0, *range(user * 100 + 1, user * 100 + turn + 2)], turn + 2)
        for turn in range(4)
        for user in range(6)
    ]
    assert len(lines) == REQUESTS
    return write_trace([(at, hash_ids, 512 * blocks) for at, hash_ids, blocks in lines])


@pytest.mark.parametrize("mode", [SYNCED, APART, PARTITIONED])
def test_two_selectors_play_the_whole_trace_and_believe_in_nothing_at_its_end(
    mode: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "rows.json"
    flags = ["--selectors", "2", "--modes", mode, "--speed", "10", "--workers", "4"]
    flags += ["--models", "2"]
    status = main(["--trace", str(trace), "--json", str(kept), *flags])
    printed = capsys.readouterr()
    assert status == 0, printed.err
    (row,) = json.loads(kept.read_text())
    assert (row["mode"], row["selectors"], row["errors"], row["left"]) == (mode, 2, 0, 0)
    assert row["finished"] == REQUESTS
    assert row["models"] == (2 if mode == PARTITIONED else 1)
    assert 0.0 < row["hit_rate"] < 1.0
    assert row["imbalance"] >= 1.0
    assert f"| 2 | {mode}" in printed.out


def test_a_signal_ends_it_and_leaves_no_selector(trace: Path) -> None:
    slow = ["--trace", str(trace), "--selectors", "2", "--modes", SYNCED, "--speed", "0.001"]
    assert ended_by(signal.SIGTERM, 2, "-m", "loadtest.scale", *slow) == "scale: interrupted\n"


def test_requests_of_one_moment_can_be_spread_until_the_next() -> None:
    request: Any = object()
    moments = [0.0, 0.0, 3.0, 3.0, 3.0, 6.0, 6.0]
    spread_out = spread((moment, request) for moment in moments)
    assert [at for at, _ in spread_out] == [0.0, 1.5, 3.0, 4.0, 5.0, 6.0, 6.0]
    assert list(spread([])) == []


def test_one_selector_alone_is_measured_once_and_in_parts() -> None:
    pairs = [(SYNCED, 1), (SYNCED, 2), (APART, 2), (PARTITIONED, 1), (PARTITIONED, 2)]
    assert runs([1, 2], [SYNCED, APART, PARTITIONED]) == pairs


class TellsLoads:
    """A player whose selector believes what the test says, and during whose answer time passes."""

    def __init__(self, fleet: Fleet, active: dict[int, int], meanwhile: dict[int, int]) -> None:
        self._fleet, self._active, self._meanwhile = fleet, active, meanwhile

    async def loads(self) -> list[PartitionLoad]:
        for engine in self._fleet.engines:
            engine.active = self._meanwhile.get(engine.worker_id, engine.active)
        rows = [RankLoadRow(worker_id, 0, 0, 0, count) for worker_id, count in self._active.items()]
        return [PartitionLoad(rows, 0, 0)]


@pytest.mark.parametrize(
    ("believed", "meanwhile", "phantom", "missed"),
    [
        pytest.param({1: 3, 2: 2}, {}, 0, 0, id="what runs"),
        pytest.param({1: 5, 2: 2}, {}, 2, 0, id="more"),
        pytest.param({1: 1, 2: 2}, {}, 0, 2, id="less"),
        pytest.param({1: 4, 2: 1}, {}, 1, 1, id="more here and less there are not made up for"),
        pytest.param({1: 3, 2: 2}, {1: 2, 2: 4}, 0, 0, id="as it was before the answer"),
        pytest.param({1: 2, 2: 4}, {1: 2, 2: 4}, 0, 0, id="as it was after"),
    ],
)
def test_phantom_load_is_what_runs_neither_before_nor_after_the_answer(
    believed: dict[int, int], meanwhile: dict[int, int], phantom: int, missed: int
) -> None:
    async def sampled() -> Truth:
        fleet = Fleet(parse(["--trace", "t", "--workers", "2"]), SYNCED, 1)
        for engine, count in zip(fleet.engines, (3, 2), strict=True):
            engine.active = count
        truth = Truth(fleet)
        player: Any = TellsLoads(fleet, believed, meanwhile)
        await truth._sample(player)
        for engine in fleet.engines:
            engine.close()
        return truth

    truth = asyncio.run(sampled())
    assert (truth.phantom, truth.missed, truth.samples) == (phantom, missed, 1)


def test_what_cannot_begin_is_told_in_a_line(
    trace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(port: int) -> list[str]:
        raise ServiceError("no such program")

    one = ["--selectors", "1", "--modes", SYNCED]
    assert main(["--trace", "/no/such", *one]) == 1
    assert "cannot read the trace" in capsys.readouterr().err
    monkeypatch.setattr("lean_selector.tools.service_process.service_command", fails)
    assert main(["--trace", str(trace), *one]) == 1
    assert "no such program" in capsys.readouterr().err
