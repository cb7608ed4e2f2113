"""The trace replay: expansion of the trace's blocks, and whole runs against our service."""

import asyncio
import gzip
import math
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lean_selector.tools.service_process import ServiceError
from loadtest import replay_trace
from loadtest.replay_trace import main, parse_options, replay
from loadtest.trace import TraceLine, prompt_tokens, read_trace
from tests.loadtest.conftest import WriteTrace, ended_by
from tests.support.running_service import RunningService
from tests.tools.conftest import ScriptedService


@pytest.fixture
def trace(write_trace: WriteTrace) -> Path:
    """Ten conversations of four turns; each turn repeats the blocks of the one before."""
    return write_trace(
        [
            (
                turn * 1_000 + user * 50,
                [user * 100 + i for i in range(turn + 1)],
                512 * turn + 300,
            )
            for turn in range(4)
            for user in range(10)
        ]
    )


def test_equal_hash_ids_have_equal_tokens_and_others_share_none() -> None:
    first = prompt_tokens(TraceLine(0, 1_030, 0, [5, 6, 7]))
    second = prompt_tokens(TraceLine(0, 1_500, 0, [5, 6, 8]))
    assert len(first) == 1_030
    assert first[:1_024] == second[:1_024]
    assert not set(first[1_024:]) & set(second[1_024:])
    assert all(0 <= token < 2**32 for token in prompt_tokens(TraceLine(0, 512, 0, [2**40 + 1])))


def test_lines_become_requests_in_seconds_and_blocks(trace: Path) -> None:
    requests = list(read_trace(trace, 16, 12))
    assert [arrival_s for arrival_s, _ in requests[:3]] == [0.0, 0.05, 0.1]
    second_turn = requests[10][1]
    assert second_turn.isl_tokens == 812
    assert second_turn.prompt_blocks == len(second_turn.sequence_hashes) == 50
    assert second_turn.output_blocks == 2
    assert second_turn.sequence_hashes[:18] == requests[0][1].sequence_hashes
    assert len({request.request_id for _, request in requests}) == 12
    plain = trace.with_name("plain.jsonl")  # without gzip
    plain.write_bytes(gzip.decompress(trace.read_bytes()))
    assert list(read_trace(plain, 16, 12)) == requests


LINE = '{"timestamp":0,"input_length":%d,"output_length":1,"hash_ids":[1]}'


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "truncated"),
        (LINE % 513, "input_length 513 for 1 hash_ids"),
        (LINE % 0, "input_length 0"),
        ('{"timestamp":0}', "input_length"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(f"{LINE % 100}\n{line}\n")
    with pytest.raises(ServiceError, match=rf"bad\.jsonl:2: .*{message}"):
        list(read_trace(path, 16, 10))


def test_full_speed_plays_all_requests_and_leaves_no_load(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--trace", str(trace), "--workers", "4", "--under-way", "4"]) == 0
    output = capsys.readouterr().out
    assert "40 requests played, 200 calls, 0 errors, load left at the end: 0" in output
    assert re.findall(r"^(\S+) +[\d.]+% ", output, re.M) == [
        "lean-selector",
        "round-robin",
        "least-loaded",
    ]
    assert "\nclosed loop: 4 requests under way, the next one when one has ended\n" in output
    assert "first token" not in output
    assert " ms" not in output.split("\npolicy ")[1]


def test_a_speed_factor_keeps_the_trace_s_time(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--trace", str(trace), "--workers", "2", "--speed", "10", "--requests", "20"]
    assert main(options) == 0
    output = capsys.readouterr().out
    elapsed = re.search(r"20 requests in ([\d.]+) s", output)
    assert elapsed is not None
    assert float(elapsed[1]) >= 0.1  # 1.45 s of trace, ten times as fast
    assert "latest start behind the trace" in output
    assert "\nopen loop: requests at the times of the trace, at 10 times its speed\n" in output
    assert re.search(r"^policy .* time to first token p50 / p99$", output, re.M)
    assert len(re.findall(r"^\S+ +[\d.]+% +[\d.]+ +\d+ ms / \d+ ms$", output, re.M)) == 3


def test_a_loop_that_held_requests_back_was_no_open_one(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # A request takes five exchanges in turn, and the next one is due after 50 ns.
    options = ["--trace", str(trace), "--workers", "2", "--speed", "1e6", "--under-way", "1"]
    assert main(options) == 0
    output = capsys.readouterr().out
    assert "\nno open loop: 39 requests were held back, 1 being under way\n" in output
    assert "first token" not in output


def test_workers_are_deleted_again_from_a_service_that_lives_on(trace: Path) -> None:
    with RunningService() as service:
        url = f"http://127.0.0.1:{service.port}"
        options = ["--trace", str(trace), "--url", url, "--workers", "2"]
        done = subprocess.run([sys.executable, "loadtest/replay_trace.py", *options], timeout=60)
        assert done.returncode == 0
        assert service.get("/workers") == (200, [])


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_leaves_no_process(trace: Path, sign: signal.Signals) -> None:
    slow = ["--trace", str(trace), "--workers", "1", "--speed", "0.001"]
    errors = ended_by(sign, 1, "loadtest/replay_trace.py", *slow)
    assert errors.endswith("replay_trace: interrupted\n")


def test_errors_of_the_service_end_the_run_early_and_are_told(
    trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay_trace, "TOO_MANY_ERRORS", 3)
    scripted = ScriptedService()
    scripted.answers = {
        "GET /health": (200, b"{}"),
        "GET /workers": (200, b"[]"),
        "POST /workers": (201, b'{"worker_id":1,"lifecycle":"schedulable"}'),
        "POST /select_and_reserve": (503, b'{"error":"shutdown"}'),
        "GET /loads?model_name=replay-trace": (200, b"[]"),
        "DELETE /workers/1": (200, b"{}"),
    }

    async def run() -> tuple[list[str], bool]:
        async with scripted.running() as url:
            options = ["--url", url, "--workers", "1", "--under-way", "1"]
            return await replay(parse_options(["--trace", str(trace), *options]))

    report, good = asyncio.run(run())
    assert not good
    assert "0 requests played, 0 calls, 3 errors, load left at the end: 0" in report
    assert '  error: POST /select_and_reserve: 503 {"error":"shutdown"}' in report
    assert scripted.requests[-1][0] == "DELETE /workers/1"


def test_what_cannot_be_played_is_one_clear_line_and_exit_1(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"{sys.executable} -m http.server --bind 127.0.0.1 {{port}}"
    assert main(["--trace", str(trace), "--workers", "1", "--cmd", command]) == 1
    error = capsys.readouterr().err
    assert error == "replay_trace: this is no selection service: /health answers 404\n"
    assert main(["--trace", "/no/such", "--workers", "1"]) == 1
    assert re.fullmatch(r"replay_trace: cannot read the trace: .*\n", capsys.readouterr().err)


def test_options() -> None:
    for text, speed, under_way in (("max", math.inf, 32), ("0", math.inf, 32), ("2.5", 2.5, 2_048)):
        options = parse_options(["--trace", "t", "--speed", text])
        assert (options.speed, options.under_way) == (speed, under_way)
    for bad in ("--speed -1", "--speed nan", "--requests 0", "--url u --cmd c"):
        with pytest.raises(SystemExit, match="2"):
            parse_options(["--trace", "t", *bad.split()])
