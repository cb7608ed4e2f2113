"""`lean-selector top`: what it draws of a fleet, and as users run it."""

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from lean_selector.api.judgements import Level
from lean_selector.tools.top import Screen, drawing, main
from lean_selector.wire.findings import Finding
from lean_selector.wire.fleet import Fleet, FleetModel, FleetRank, FleetWorker
from tests.support.running_service import RunningService, free_port

TOP = [sys.executable, "-m", "lean_selector", "top"]


def rank(worker_id: int, state: str = "in_service", **sums: int) -> FleetRank:
    return FleetRank(worker_id, 0, state, None, "live", **sums)


def fleet(*ranks: FleetRank, findings: tuple[Finding, ...] = ()) -> Fleet:
    workers = [
        FleetWorker(each.worker_id, "m", "default", "schedulable", "http://w", 16, 100)
        for each in ranks
    ]
    models = [FleetModel("m", "default", 16, 3, 4096, 0)]
    return Fleet("1", 0.0, workers, list(ranks), models, list(findings))


def first_words(lines: list[str]) -> list[str]:
    head = next(at for at, line in enumerate(lines) if line.split()[:1] == ["worker"])
    return [line.split()[0] for line in lines[head + 1 :] if not line.startswith(" ")]


def test_the_worst_ranks_come_first_then_those_with_most_to_do() -> None:
    found = (
        Finding(Level.NOTE, "worker 4 rank 0", "silent"),
        Finding(Level.WARNING, "worker 3", "no replay"),
        Finding(Level.ERROR, "worker 5 rank 0", "unreachable"),
    )
    ranks = [rank(1), rank(2, prefill_tokens=9), rank(3), rank(4), rank(5), rank(6, "ejected")]
    lines = drawing(fleet(*ranks, findings=found), {}, 110, None, colours=True)
    assert [line.split()[0] for line in lines[3:]] == [
        *("\x1b[31m5", "\x1b[31m", "\x1b[31m6", "\x1b[33m3", "\x1b[33m", "2", "1", "4", "silent")
    ]
    assert "unreachable" in lines[4]
    assert "no replay" in lines[7]


def test_endpoints_are_shown_and_nothing_is_cut_at_110_columns() -> None:
    what = "its replay endpoint does not answer, " * 5
    found = Finding(Level.ERROR, "worker 7", what)
    busy = rank(7, "unschedulable", prefill_tokens=1_234_567, requests=1234, cached_blocks=99_999)
    lines = drawing(fleet(rank(10**18), busy, findings=(found,)), {}, 110, None, colours=False)
    assert max(map(len, lines)) <= 110
    assert "7                    w         unschedulable  1234567      1234  99999/100" in lines[3]
    assert " ".join(" ".join(lines[4:-1]).split()) == what.strip()


def test_shares_are_since_the_first_look_or_ever() -> None:
    before = rank(1, prompt_tokens=100, overlap_tokens=0)
    now = rank(1, prompt_tokens=200, overlap_tokens=80)
    assert "  40%  " in drawing(fleet(now), {}, 200, None, colours=False)[-1]
    assert "  80%  " in drawing(fleet(now), {(1, 0): before}, 200, None, colours=False)[-1]
    assert "  40%  " in drawing(fleet(now), {(1, 0): now}, 200, None, colours=False)[-1]


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (20, 5), (200, 60)])
def test_it_fits_the_terminal(columns: int, lines: int) -> None:
    drawn = drawing(fleet(*map(rank, range(64))), {}, columns, lines, colours=False)
    assert len(drawn) <= lines - 1
    assert max(map(len, drawn)) <= columns


def test_what_others_wrote_cannot_steer_the_terminal() -> None:
    odd = Finding(Level.ERROR, "model \x1b[2J\u202e", "\x1b]0;title\x07<script>")
    text = "".join(drawing(fleet(rank(1), findings=(odd,)), {}, 200, None, colours=False))
    assert "<script>" in text
    assert not {"\x1b", "\x07", "\u202e"} & set(text)


def test_on_a_pipe_it_prints_all_ranks_once_and_on_a_terminal_it_draws(tmp_path: Path) -> None:
    tokens, own = tmp_path / "tokens", tmp_path / "own"
    tokens.write_text("read r-1\nadmin a-1\n")
    own.write_text("r-1\n")
    flags = ("--use-kv-events", "false", "--auth-token-file", str(tokens))
    with RunningService(*flags) as service:
        service.token = "a-1"
        for worker_id in (7, 8):
            service.add_worker(worker_id)
        command = [*TOP, f"http://127.0.0.1:{service.port}"]
        refused = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert (refused.returncode, refused.stdout) == (2, "")
        command += ["--token-file", str(own)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert first_words(done.stdout.splitlines()) == ["7", "8"]
        ours, its = pty.openpty()
        with subprocess.Popen(command, stdout=its, stderr=its) as process:
            drawn = b""
            while b"worker" not in drawn or b"\n8 " not in drawn:
                drawn += os.read(ours, 4096)
            process.terminate()
        os.close(ours)
        os.close(its)
        assert b"\x1b[" in drawn


def test_no_selector_is_an_error_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"http://127.0.0.1:{free_port()}"]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)


def test_the_screen_is_redrawn_in_place_and_the_cursor_comes_back() -> None:
    out = io.StringIO()
    screen = Screen(out)
    screen.close()
    assert out.getvalue() == ""
    screen.draw(["one", "two"])
    first = out.getvalue()
    assert "\x1b[2A" not in first
    screen.draw(["one", "two"])
    assert "\x1b[2A\r" in out.getvalue()[len(first) :]
    screen.close()
    assert out.getvalue().endswith("\x1b[?25h")
