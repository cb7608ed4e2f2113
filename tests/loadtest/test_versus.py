"""Whole runs of the comparison, with tiny rounds; we ourselves play the reference, but for one."""

import json
import os
import shlex
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lean_selector import __version__
from lean_selector.build_info import PURE, form
from tests.support.running_service import wait_until

LIMIT_S = 240.0
OURSELVES = shlex.join([sys.executable, "-m", "lean_selector", "--port", "{port}"])
OURSELVES_16 = f"{OURSELVES} --api 1.6"
WITHOUT_REPLICAS = """
import os, sys
if "--replica-sync-port" in sys.argv:
    sys.exit("no replicas here")
os.execv(sys.executable, [sys.executable, "-m", "lean_selector", *sys.argv[1:]])
"""
SELECT = "select, 8 blocks, 16 workers"


def command(*flags: str) -> list[str]:
    return [sys.executable, "loadtest/versus.py", "--quick", *flags]


def environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "LEAN_SELECTOR_TRACE"}


def versus(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*flags),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"  # whoever inherits it has not looked yet


def test_all_cases_run_and_are_told_as_tables_json_and_a_drawing(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("f.json", "f.md", "f.svg")]
    flags = ["--json", str(files[0]), "--markdown", str(files[1]), "--svg", str(files[2])]
    run = versus("--reference", OURSELVES, *flags)
    assert run.returncode == 0, run.stderr
    figures: dict[str, Any] = json.loads(files[0].read_text())
    listed = versus("--list").stdout.splitlines()
    assert set(listed) - set(figures["skipped"]) <= set(figures["cases"])
    targets = {figures["ours"], *figures["beside"], *figures["references"]}
    assert len(targets) == (3 if form() == "pure" else 4)  # a compiled form has its sources with it
    assert figures["ours"].endswith(f" {form()}")
    for case, by_target in figures["cases"].items():
        if case.startswith(("select, ", "lifecycle")):
            assert set(by_target) == targets, case
            for found in by_target.values():
                assert found["cpu_us"]["median"] > 0
                assert found["rps"]["median"] > 0
    fixed = next(found for case, found in figures["cases"].items() if "fixed rate" in case)
    by_client = {case: set(f) for case, f in figures["cases"].items() if "our client" in case}
    assert list(by_client.values()) == [targets, {figures["ours"], *figures["beside"]}]
    assert all(found["open_p999_us"]["median"] > 0 for found in fixed.values())
    assert not [note for note in figures["notes"] if "not 2xx" in note]
    # The verdict is in the table and never in the exit status.
    assert {row["verdict"] for row in figures["budget"]} & {"holds", "does not hold"}
    assert f"  {SELECT}" in run.stdout
    assert f"| {SELECT} |" in files[1].read_text()
    assert ET.fromstring(files[2].read_text()).tag.endswith("svg")


@pytest.mark.reference
@pytest.mark.parametrize("version", ["131", "161"])
def test_the_reference_takes_the_same_fleet_and_requests(
    version: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    python: Path = request.getfixturevalue(f"reference_{version}")
    given = shlex.join([str(python), "-m", "dynamo.select_service", "--port", "{port}"])
    path = tmp_path / "f.json"
    cases = f"^({SELECT}|lifecycle |index, (ingest|removal)|select with no events.* 16 )"
    run = versus("--reference", given, "--cases", cases, "--json", str(path))
    assert run.returncode == 0, run.stderr
    figures = json.loads(path.read_text())
    assert not [note for note in figures["notes"] if "not 2xx" in note]
    assert SELECT in figures["cases"]
    assert all(found for found in figures["ratios"].values())


def test_a_reference_that_names_bookings_as_1_6_does_is_compared_in_all_cases(
    tmp_path: Path,
) -> None:
    path = tmp_path / "f.json"
    cases = "^(lifecycle, 8 blocks|lifecycle with a replica|select with no events.* 16 )"
    run = versus("--reference", OURSELVES_16, "--cases", cases, "--json", str(path))
    assert run.returncode == 0, run.stderr
    figures = json.loads(path.read_text())
    assert len(figures["cases"]) == 3
    assert not figures["skipped"]
    assert not [note for note in figures["notes"] if "not 2xx" in note]
    for ratios in figures["ratios"].values():
        assert len(ratios) == len(figures["references"])
        assert all(ratio["cpu_us"] for ratio in ratios.values())


def test_what_a_reference_cannot_do_is_skipped_and_the_others_figures_stay(tmp_path: Path) -> None:
    program, path = tmp_path / "other.py", tmp_path / "f.json"
    program.write_text(WITHOUT_REPLICAS)
    reference = shlex.join([sys.executable, str(program), "--port", "{port}"])
    replicas = "lifecycle with a replica, trace prompts at 16, 16 workers"
    cases = f"^({SELECT}|{replicas})$"
    run = versus("--reference", reference, "--cases", cases, "--json", str(path))
    assert run.returncode == 1
    reason = run.stderr.splitlines()[-1].removeprefix("versus: ")
    assert reason.endswith(" ended with 1: no replicas here")
    assert f"  {SELECT}" in run.stdout
    figures = json.loads(path.read_text())
    assert set(figures["cases"]) == {SELECT}
    assert figures["skipped"] == {replicas: f"skipped: {reason}"}
    assert f"{replicas}: skipped: {reason}" in run.stdout


def test_only_the_cases_that_are_named_are_run() -> None:
    run = versus("--reference", OURSELVES, "--cases", f"^{SELECT}$", "--rounds", "2")
    assert run.returncode == 0, run.stderr
    told = [line.split("s  ", 1)[1] for line in run.stderr.splitlines()]
    assert told == [f"{SELECT}: round 1", f"{SELECT}: round 2"]


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_it_however_it_ends(sign: signal.Signals, tmp_path: Path) -> None:
    flags = ["--reference", OURSELVES, "--cases", f"^{SELECT}$", "--rounds", "1000"]
    with subprocess.Popen(
        command(*flags),
        env={**environment(), "TMPDIR": str(tmp_path)},  # SIGKILL leaves files behind
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert "round 1" in process.stderr.readline()
        started = children(process.pid)
        assert len(started) >= 3
        process.send_signal(sign)
        words = process.stderr.read()
        status = process.wait(LIMIT_S)
    for pid in started:
        wait_until(partial(has_ended, pid), f"process {pid} has ended")
    if sign != signal.SIGKILL:
        assert status == 1
        assert words.endswith("versus: interrupted\n")


def test_a_reference_that_does_not_start_is_one_line_and_exit_1() -> None:
    run = versus("--reference", "/no/such --port {port}", "--cases", SELECT)
    assert run.returncode == 1
    assert run.stderr == "versus: such warn: cannot start /no/such: [Errno 2] No such file or" + (
        " directory: '/no/such'\n"
    )


@pytest.mark.parametrize(
    ("python", "words"),
    [
        ("/no/such", "cannot start /no/such: [Errno 2] No such file or directory: '/no/such'\n"),
        (
            sys.executable,
            f"{sys.executable} has lean-selector {__version__} {PURE}, where it should",
        ),
        ("/usr/bin/env", "/usr/bin/env has no lean-selector: "),
    ],
)
def test_an_interpreter_without_the_compiled_form_is_one_line_and_exit_1(
    python: str, words: str
) -> None:
    if python == sys.executable and form() != PURE:
        pytest.skip("this one has it")
    run = versus("--reference", OURSELVES, "--compiled", python, "--cases", SELECT)
    assert run.returncode == 1
    assert run.stderr.startswith(f"versus: {words}")


def test_a_trace_that_is_not_there_is_one_line_and_exit_1(tmp_path: Path) -> None:
    trace = str(tmp_path / "none.jsonl")
    run = versus("--reference", OURSELVES, "--trace", trace, "--cases", SELECT)
    assert run.returncode == 1
    assert "versus: [Errno 2]" in run.stderr
    assert "Traceback" not in run.stderr
