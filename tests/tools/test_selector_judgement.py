"""What the check makes of a selector as a whole."""

from lean_selector.tools.check_judgements import (
    Level,
    Readiness,
    SelectorFacts,
    WorkerRecord,
    judge_selector,
)


def worker(worker_id: int) -> WorkerRecord:
    return WorkerRecord(worker_id=worker_id, model_name="m", lifecycle="schedulable", block_size=16)


def test_workers_without_any_events_are_a_warning() -> None:
    found = list(judge_selector(SelectorFacts(True, [worker(1)], [])))
    assert [finding.level for finding in found] == [Level.OK, Level.WARNING]
    assert "by load alone" in found[1].what


def test_a_selector_that_tells_no_sources_as_the_reference_is_a_note() -> None:
    found = list(judge_selector(SelectorFacts(True, [worker(1)], None)))
    assert [finding.level for finding in found] == [Level.OK, Level.NOTE]


def test_a_state_that_is_not_written_is_a_warning_and_a_recovery_under_way_a_note() -> None:
    readiness = Readiness(recovering=True, state_fault="catalog: No space left on device")
    facts = SelectorFacts(True, [worker(1)], None, readiness=readiness)
    ok, note, warning, _ = judge_selector(facts)
    assert ok.level is Level.OK
    assert (note.level, note.subject) == (Level.NOTE, "selector")
    assert "recovers its index" in note.what
    assert (warning.level, warning.subject) == (Level.WARNING, "selector")
    assert warning.what.endswith(": catalog: No space left on device")
