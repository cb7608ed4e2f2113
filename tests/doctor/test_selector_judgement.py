"""What the check makes of a selector's own words, state by state."""

import pytest

from lean_selector.doctor.findings import Level
from lean_selector.doctor.selector_judgement import judge_selector, judge_source
from lean_selector.doctor.selector_shapes import SelectorFacts, Source, WorkerRecord


def source(state: str, **more: object) -> Source:
    return Source(worker_id=3, dp_rank=1, endpoint="tcp://gpu:5557", state=state, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("state", "level"),
    [
        ("live", Level.OK),
        ("replaying", Level.OK),
        ("partial", Level.NOTE),
        ("silent", Level.NOTE),
        ("no_replay", Level.WARNING),
        ("degraded", Level.WARNING),
        ("connecting", Level.WARNING),
        ("mismatch", Level.ERROR),
        ("unreachable", Level.ERROR),
        ("failed", Level.ERROR),
        ("of a later version", Level.WARNING),
    ],
)
def test_each_state_of_a_source_has_its_weight(state: str, level: Level) -> None:
    finding = judge_source(source(state))
    assert (finding.level, finding.subject) == (level, "worker 3 rank 1")
    assert state in finding.what


def test_what_was_skipped_and_the_last_error_are_told() -> None:
    finding = judge_source(
        source("mismatch", skipped={"stored:block_size": 7}, last_error="32 is not 16")
    )
    assert "skipped events: 7 stored:block_size" in finding.what
    assert "32 is not 16" in finding.what
    assert finding.mend == "register the worker with the engine's block size"


def worker(worker_id: int, block_size: int, tenant_id: str = "default") -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        model_name="m",
        lifecycle="schedulable",
        tenant_id=tenant_id,
        block_size=block_size,
    )


def test_block_sizes_of_a_model_that_differ_are_an_error_and_of_two_tenants_are_none() -> None:
    def errors(*workers: WorkerRecord) -> list[str]:
        facts = SelectorFacts(True, list(workers), [source("live")])
        return [finding.what for finding in judge_selector(facts) if finding.level is Level.ERROR]

    assert errors(worker(1, 16), worker(2, 32)) == [
        "its workers (tenant default) have blocks of [16, 32] tokens"
    ]
    assert errors(worker(1, 16), worker(2, 32, "other")) == []


def test_workers_without_any_events_are_a_warning() -> None:
    found = list(judge_selector(SelectorFacts(True, [worker(1, 16)], [])))
    assert [finding.level for finding in found] == [Level.OK, Level.WARNING]
    assert "by load alone" in found[1].what


def test_a_selector_that_tells_no_sources_as_the_reference_is_a_note() -> None:
    found = list(judge_selector(SelectorFacts(True, [worker(1, 16)], None)))
    assert [finding.level for finding in found] == [Level.OK, Level.NOTE]
