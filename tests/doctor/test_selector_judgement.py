"""What the check makes of a selector as a whole."""

from lean_selector.doctor.findings import Level
from lean_selector.doctor.selector_judgement import judge_selector
from lean_selector.doctor.selector_shapes import SelectorFacts, WorkerRecord


def worker(worker_id: int) -> WorkerRecord:
    return WorkerRecord(worker_id=worker_id, model_name="m", lifecycle="schedulable", block_size=16)


def test_workers_without_any_events_are_a_warning() -> None:
    found = list(judge_selector(SelectorFacts(True, [worker(1)], [])))
    assert [finding.level for finding in found] == [Level.OK, Level.WARNING]
    assert "by load alone" in found[1].what


def test_a_selector_that_tells_no_sources_as_the_reference_is_a_note() -> None:
    found = list(judge_selector(SelectorFacts(True, [worker(1)], None)))
    assert [finding.level for finding in found] == [Level.OK, Level.NOTE]
