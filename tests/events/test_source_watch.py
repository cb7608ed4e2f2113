"""When what is wrong with a source becomes a line of the log, told by hand."""

import logging

import pytest

from lean_selector.events.source_watch import SourceWatch

GRACE_S = 60.0


class Told:
    """A watch, what it logged, and whether the rank has requests."""

    def __init__(self) -> None:
        self.lines: list[tuple[int, str]] = []
        self.has_work = False
        self.watch = SourceWatch(self._log, lambda: self.has_work, GRACE_S)

    def _log(self, level: int, text: str) -> None:
        self.lines.append((level, text))

    def record(self, state: str, now: float) -> list[tuple[int, str]]:
        """What it logged then."""
        self.lines.clear()
        self.watch.record(state, f"what is {state}", now)
        return list(self.lines)


@pytest.mark.parametrize("state", ["resolving", "connecting", "replaying", "live", "degraded"])
def test_nothing_is_said_of_what_is_not_wrong_or_tells_of_itself(state: str) -> None:
    of = Told()
    of.has_work = True
    assert of.record(state, 0.0) == of.record(state, 1e6) == []


@pytest.mark.parametrize(
    ("state", "level"), [("mismatch", logging.WARNING), ("partial", logging.INFO)]
)
def test_what_no_start_explains_is_said_at_once_and_once(state: str, level: int) -> None:
    of = Told()
    assert of.record(state, 5.0) == [(level, f"{state}: what is {state}")]
    assert of.record(state, 500.0) == []


@pytest.mark.parametrize("state", ["unreachable", "no_replay"])
def test_a_late_start_is_no_warning(state: str) -> None:
    of = Told()
    assert of.record(state, 100.0) == of.record(state, 159.0) == []
    assert of.record("live", 159.5) == []  # nor is its end
    assert of.record(state, 200.0) == of.record(state, 259.0) == []
    assert of.record(state, 260.0) == [(logging.WARNING, f"{state}: what is {state}")]
    assert of.record(state, 900.0) == []


def test_an_engine_without_requests_may_be_silent_for_ever() -> None:
    of = Told()
    assert of.record("silent", 0.0) == of.record("silent", 10_000.0) == []
    of.has_work = True
    assert of.record("silent", 10_001.0) == []  # its first events may be on their way
    of.has_work = False
    assert of.record("silent", 10_060.0) == []
    assert of.record("silent", 10_061.0) == [(logging.WARNING, "silent: what is silent")]


def test_the_end_of_what_was_said_is_said_too() -> None:
    of = Told()
    of.record("mismatch", 10.0)
    assert of.record("live", 75.0) == [(logging.INFO, "no longer mismatch, after 65 s: live")]
    assert of.record("live", 80.0) == []
    assert of.watch.since == 75.0


def test_one_fault_may_follow_another() -> None:
    of = Told()
    of.record("partial", 0.0)
    assert of.record("mismatch", 1.0) == [
        (logging.INFO, "no longer partial, after 1 s: mismatch"),
        (logging.WARNING, "mismatch: what is mismatch"),
    ]
