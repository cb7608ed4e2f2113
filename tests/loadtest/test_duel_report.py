"""The figures of the comparison: medians, ratios, the budget, tables and the drawing."""

import json
import xml.etree.ElementTree as ET

import pytest

from loadtest.duel import index_stages, report
from loadtest.duel.report import LABEL, ROWS, Row, draw, verdicts
from loadtest.duel.results import LoadFailed, Results, latencies
from loadtest.duel.stages import Plan, stages
from loadtest.duel.targets import TargetError

OURS = "ours pure"


@pytest.fixture
def results() -> Results:
    results = Results(OURS, ["ref warn", "ref default log"])
    for own, other in ((9.0, 10.0), (50.0, 20.0), (8.0, 20.0)):  # medians 9 and 20
        results.add("select, 8 blocks, 16 workers", OURS, cpu_us=own)
        results.add("select, 8 blocks, 16 workers", "ref warn", cpu_us=other)
        results.add("select, 8 blocks, 16 workers", "ref default log", cpu_us=2 * other)
    results.add("process, after start", OURS, rss_mb=46.0)
    return results


def test_medians_and_ratios(results: Results) -> None:
    case = "select, 8 blocks, 16 workers"
    assert results.value(case, OURS, "cpu_us") == 9.0
    assert results.ratio(case, "cpu_us", "ref warn") == 0.45
    assert results.ratio(case, "rps", "ref warn") is None
    assert results.value("no such case", OURS, "cpu_us") is None


def test_what_it_costs_to_refuse_is_compared_with_nothing(results: Results) -> None:
    case, trace = "select, 8 blocks, 16 workers", "select, trace prompts at 16, 16 workers"
    results.references.append("ref 2 warn")
    results.add(case, "ref 2 warn", cpu_us=18.0)
    results.add(report.MSGPACK, OURS, cpu_us=5.0)
    results.add(trace, "ref warn", cpu_us=50.0)
    results.refused(case, "ref 2 warn", 0)
    assert results.ratio(case, "cpu_us", "ref 2 warn") == 0.5
    for answers in (100, 28):  # of two rounds
        results.refused(case, "ref warn", answers)
    results.refused(trace, "ref warn", 1)
    ratios = [results.ratio(case, "cpu_us", name) for name in results.references]
    assert ratios == [None, 0.225, 0.5]
    found = {row.title: row for row in verdicts(results)}
    assert found["CPU, select, 8 blocks, 16 workers"].values == ratios
    assert found["CPU, select, 8 blocks, 16 workers"].verdict == "not measured"
    assert found["CPU, msgpack body over the reference's JSON, trace prompts"].values[0] is None
    text = report.lines(results, {"machine": "m"}, markdown=False)
    assert f"{case}: 128 answers of ref warn were not 2xx, so it is compared with nothing" in text
    row = next(line for line in text.splitlines() if line.startswith("  CPU, select, 8 blocks"))
    assert row.split("16 workers")[1].split()[:3] == ["-", "0.23", "0.50"]


def test_ours_that_refuse_are_compared_with_nothing_either(results: Results) -> None:
    plain, large = "select, 8 blocks, 16 workers", "select, 8 blocks, 512 workers"
    title = "own CPU at 512 workers over own at 16"
    results.add(large, OURS, cpu_us=18.0)
    assert {row.title: row for row in verdicts(results)}[title].values[0] == 2.0
    results.refused(plain, OURS, 1)
    assert results.ratio(plain, "cpu_us", "ref warn") is None
    assert {row.title: row for row in verdicts(results)}[title].values[0] is None


@pytest.mark.parametrize(
    "error", [TargetError("r: 422"), LoadFailed("r: 422"), OSError("r: 422"), ValueError("r: 422")]
)
def test_what_fails_ends_its_own_cases_alone(results: Results, error: Exception) -> None:
    measured, missing = "select, 8 blocks, 16 workers", "lifecycle, 8 blocks, 16 workers"
    for _ in range(2):  # as in two rounds
        with results.keep([measured, missing]):
            raise error
    assert results.failures == ["r: 422"]
    assert results.skipped == {missing: "skipped: r: 422"}
    assert results.warnings() == [f"{measured}: not all rounds: r: 422"]
    assert results.value(measured, OURS, "cpu_us") == 9.0
    with pytest.raises(KeyError), results.keep([measured]):
        raise KeyError


def test_percentiles_of_single_latencies() -> None:
    found = latencies(range(1_000, 0, -1))
    assert found == {
        "open_p50_us": 501,
        "open_p99_us": 991,
        "open_p999_us": 1_000,
        "open_max_us": 1_000,
    }


def test_our_other_form_is_shown_with_a_ratio_of_its_own(results: Results) -> None:
    results.ours, results.beside = "ours compiled", [OURS]
    results.add("select, 8 blocks, 16 workers", "ours compiled", cpu_us=6.0)
    results.add("process, after start", "ours compiled", rss_mb=46.0)
    text = report.lines(results, {"machine": "m"}, markdown=False)
    row = next(line for line in text.splitlines() if line.startswith("  select, 8 blocks"))
    assert row.split()[-7:] == ["6.00", "9.00", "20.0", "40.0", "0.30", "0.15", "0.45"]
    assert "pure / ref warn" in text
    found = {row.title: row for row in verdicts(results)}
    select = found["CPU, select, 8 blocks, 16 workers"]
    assert (select.values, select.beside) == ([0.3, 0.15], [0.45])
    assert found["resident memory after start, pure"].verdict == "does not hold"
    assert found["resident memory after start, compiled"].verdict == "holds"


def test_every_row_of_the_budget_says_whether_it_holds(results: Results) -> None:
    found = {row.title: row for row in verdicts(results)}
    assert len(found) == len(ROWS) == 44
    select = found["CPU, select, 8 blocks, 16 workers"]
    assert select.values == [0.45, 0.225]
    assert select.verdict == "holds, the aim too"
    assert found["resident memory after start, pure"].verdict == "does not hold"
    assert found["threads at 512 workers"].verdict == "not measured"


@pytest.mark.parametrize(
    ("at_least", "inside"), [(False, [True, True, False]), (True, [False, True, True])]
)
def test_a_bound_itself_is_inside(at_least: bool, inside: list[bool]) -> None:
    row = Row("r", lambda results, reference: None, 2.0, at_least=at_least)
    assert [row.holds(value, 2.0) for value in (1.9, 2.0, 2.1)] == inside


def test_budget_cases_are_names_of_cases_that_are_run() -> None:
    names = {name for stage in stages(Plan([], None, 1)) for name in stage.names()}
    names |= {*index_stages.NAMES, "process, after start"}
    results = Results("ours compiled", ["ref"], beside=[OURS])
    for name in names:
        for target in results.targets:
            metrics = dict.fromkeys(
                ["cpu_us", "rps", "open_p999_us", "open_max_us", "threads"], 1.0
            )
            more = ["descriptors", "rss_mb", "block_cpu_us", "holding_bytes", "match_us"]
            results.add(name, target, **metrics, **dict.fromkeys(more, 1.0))
    assert [row.title for row in verdicts(results) if row.verdict == "not measured"] == []


def test_no_stage_uses_more_prompts_than_the_published_trace_has() -> None:
    plan = Plan([], None, 5)
    for stage in stages(plan):
        used = sum(
            case.prompts * plan.rounds_of(case) for case in stage.cases if case.blocks is None
        )
        assert used <= 12_031 - 1_000  # of which the engines hold the first 600 to 900


def test_the_report_shows_figures_ratios_and_verdicts(results: Results) -> None:
    text = report.lines(results, {"machine": "m"}, markdown=False)
    row = next(line for line in text.splitlines() if line.startswith("  select, 8 blocks"))
    assert row.split()[-5:] == ["9.00", "20.0", "40.0", "0.45", "0.23"]
    assert "≤ 45 MB" in text
    assert "not measured" not in text
    document = report.lines(results, {"machine": "m"}, markdown=True)
    assert "| select, 8 blocks, 16 workers | 9.00 | 20.0 | 40.0 | 0.45 | 0.23 |" in document
    assert "- machine: m" in document


def test_json_has_every_round(results: Results) -> None:
    found = json.loads(report.as_json(results, {"machine": "m"}))
    case = found["cases"]["select, 8 blocks, 16 workers"]
    assert case[OURS]["cpu_us"] == {"median": 9.0, "rounds": [9.0, 50.0, 8.0]}
    assert found["ratios"]["select, 8 blocks, 16 workers"]["ref warn"] == {"cpu_us": 0.45}
    assert found["about"] == {"machine": "m"}
    assert len(found["budget"]) == 44


def test_the_drawing_has_a_bar_for_every_target_in_proportion(results: Results) -> None:
    root = ET.fromstring(draw(results, "a <machine>"))
    bars = [
        (element.get("fill"), int(element.get("width", "")))
        for element in root.iter("{http://www.w3.org/2000/svg}rect")
        if element.get("x") == str(LABEL)
    ]
    assert [width for _, width in bars] == [135, 300, 420]  # 9, 20, and 40 cut at 1.4 times 20
    assert len({colour for colour, _ in bars}) == 3
    assert "a <machine>" in [element.text for element in root.iter()]
