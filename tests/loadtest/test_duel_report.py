"""The figures of the comparison: medians, ratios, the targets and tables."""

import pytest

from loadtest.duel import index, report
from loadtest.duel.report import ROWS, verdicts
from loadtest.duel.results import Results
from loadtest.duel.stages import Plan, stages

OURS, OTHER_FORM = "ours compiled", "ours pure"
SELECT = "select, 8 blocks, 16 workers"
OWN_RATIO = "own CPU at 512 workers over own at 16"


@pytest.fixture
def results() -> Results:
    results = Results([OURS, OTHER_FORM], ["ref 1", "ref 2"])
    for own, other in ((9.0, 10.0), (50.0, 20.0), (8.0, 20.0)):  # medians 9 and 20
        results.add(SELECT, OURS, cpu_us=own)
        results.add(SELECT, "ref 1", cpu_us=other)
        results.add(SELECT, "ref 2", cpu_us=2 * other)
    results.add(SELECT, OTHER_FORM, cpu_us=12.0)
    results.add("process, 512 workers", OURS, threads=5, descriptors=1_000)
    return results


def judged(results: Results, title: str) -> tuple[list[float | None], str]:
    (found,) = [row for row in verdicts(results) if row.title == title]
    return found.values, found.verdict


def test_medians_ratios_and_verdicts_of_each_form_beside_each_reference(results: Results) -> None:
    assert results.value(SELECT, OURS, "cpu_us") == 9.0
    assert results.value("no such case", OURS, "cpu_us") is None
    assert results.ratio(SELECT, "rps", "ref 1") is None
    ratios = [0.45, 0.225, 0.6]  # the other form only beside the first reference
    assert judged(results, f"CPU, {SELECT}") == (ratios, "met, and the stricter aim too")
    assert judged(results, "threads at 512 workers")[1] == "missed"
    assert judged(results, "descriptors at 512 workers beyond one per engine")[1] == "met"
    assert judged(results, OWN_RATIO)[1] == "not measured"
    text = report.lines(results, {"machine": "m"})
    row = next(line for line in text.splitlines() if line.startswith("| select, 8 blocks"))
    cells = [cell.strip() for cell in row.split("|")[2:-1]]
    assert cells == ["9.00", "12.0", "20.0", "40.0", "0.45", "0.23", "0.60"]
    assert "pure / ref 1" in text
    assert "≤ 10 ms" not in text  # of what was not measured
    assert "- machine: m" in text


def test_targets_are_of_names_of_cases_that_are_run() -> None:
    names = {name for stage in stages(Plan([], None)) for name in stage.names()}
    results = Results([OURS, OTHER_FORM], ["ref"])
    for name in names | {*index.NAMES}:
        for target in results.targets:
            metrics = ["cpu_us", "rps", "open_p999_us", "open_max_us", "threads", "descriptors"]
            metrics += ["block_cpu_us", "holding_bytes"]
            results.add(name, target, **dict.fromkeys(metrics, 1.0))
    found = verdicts(results)
    assert len(found) == len(ROWS)
    assert [row.title for row in found if row.verdict == "not measured"] == []


def test_no_stage_uses_more_prompts_than_the_published_trace_has() -> None:
    plan = Plan([], None, 5)
    for stage in stages(plan):
        used = sum(case.prompts * plan.rounds for case in stage.cases if case.blocks is None)
        assert used <= 12_031 - 1_000  # of which the engines hold the first 600 to 900
