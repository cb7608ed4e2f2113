"""The trace replay: expansion of the trace's blocks, and whole runs against our service."""

import asyncio
import gzip
import json
import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lean_selector.tools.service_process import (
    HOST,
    HttpClient,
    ServiceError,
    check_port,
    running_service,
    service_command,
    wait_until_healthy,
)
from loadtest import replay_trace
from loadtest.replay_trace import (
    Replay,
    TraceLine,
    main,
    parse_options,
    prompt_tokens,
    read_trace,
)
from tests.tools.conftest import ScriptedService

DEADLINE_S = 60.0


def trace_line(timestamp: int, hash_ids: list[int], input_length: int) -> dict[str, object]:
    return {
        "timestamp": timestamp,
        "input_length": input_length,
        "output_length": 40,
        "hash_ids": hash_ids,
    }


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Ten conversations of four turns; each turn repeats the blocks of the one before."""
    lines = [
        trace_line(
            turn * 1_000 + user * 50, [user * 100 + i for i in range(turn + 1)], 512 * turn + 300
        )
        for turn in range(4)
        for user in range(10)
    ]
    path = tmp_path / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    return path


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


def test_a_trace_without_gzip_is_read_as_well(trace: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(gzip.decompress(trace.read_bytes()))
    assert list(read_trace(plain, 16, 40)) == list(read_trace(trace, 16, 40))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "truncated"),
        (json.dumps(trace_line(0, [1], 513)), "input_length 513 for 1 hash_ids"),
        (json.dumps(trace_line(0, [1], 0)), "input_length 0"),
        ('{"timestamp":0}', "input_length"),
    ],
)
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(trace_line(0, [1], 100)) + f"\n{line}\n")
    with pytest.raises(ServiceError, match=rf"bad\.jsonl:2: .*{message}"):
        list(read_trace(path, 16, 10))


def test_a_missing_trace_is_one_clear_line_and_exit_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--trace", str(tmp_path / "none.gz"), "--workers", "1"]) == 1
    assert re.fullmatch(r"replay_trace: cannot read the trace: .*\n", capsys.readouterr().err)


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


def test_workers_are_deleted_again_from_a_service_that_lives_on(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def run() -> bytes:
        port = check_port(0)
        url = f"http://{HOST}:{port}"
        client = HttpClient(url)
        async with running_service(service_command(port)) as service:
            await wait_until_healthy(client, service, lambda: False)
            options = ["--trace", str(trace), "--url", url, "--workers", "2"]
            assert await asyncio.to_thread(replay, options) == 0
            left = await client.call("GET", "/workers")
            client.close()
            return left

    def replay(options: list[str]) -> int:
        return subprocess.run(
            [sys.executable, "loadtest/replay_trace.py", *options], timeout=DEADLINE_S, check=False
        ).returncode

    assert asyncio.run(run()) == b"[]"


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_leaves_no_process(trace: Path, sign: signal.Signals) -> None:
    slow = ["--trace", str(trace), "--workers", "1", "--speed", "0.001"]
    with subprocess.Popen(
        [sys.executable, "loadtest/replay_trace.py", *slow],
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background of a shell has SIGINT ignored, and children too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        assert "requests/s" in process.stderr.readline()
        listing = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
        process.send_signal(sign)
        assert process.wait(DEADLINE_S) == 1
        assert process.stderr.read() == "replay_trace: interrupted\n"
    assert listing.split()
    for pid in map(int, listing.split()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


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
            return await Replay(parse_options(["--trace", str(trace), *options])).run()

    report, good = asyncio.run(run())
    assert not good
    assert "0 requests played, 0 calls, 3 errors, load left at the end: 0" in report
    assert '  error: POST /select_and_reserve: 503 {"error":"shutdown"}' in report
    assert scripted.requests[-1][0] == "DELETE /workers/1"


def test_a_program_that_is_no_selection_service_is_told_so(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"{sys.executable} -m http.server --bind 127.0.0.1 {{port}}"
    assert main(["--trace", str(trace), "--workers", "1", "--cmd", command]) == 1
    error = capsys.readouterr().err
    assert error == "replay_trace: this is no selection service: /health answers 404\n"


@pytest.mark.parametrize(("text", "speed"), [("max", math.inf), ("0", math.inf), ("2.5", 2.5)])
def test_speeds(text: str, speed: float) -> None:
    options = parse_options(["--trace", "t", "--speed", text])
    assert options.speed == speed
    assert options.under_way == (32 if speed == math.inf else 2_048)


@pytest.mark.parametrize(
    "arguments",
    [["--speed", "-1"], ["--speed", "nan"], ["--requests", "0"], ["--url", "u", "--cmd", "c"]],
)
def test_bad_options_exit_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(["--trace", "t", *arguments])
    assert caught.value.code == 2
