"""What plays two services side by side finds a difference, and tells it in few steps."""

import functools
import sys

import pytest

from tests.support import side_by_side
from tests.support.reference_play import Play
from tests.support.side_by_side import SideBySide, Step

OURS = [sys.executable, "-m", "lean_selector", "--log-level", "error", "--use-kv-events", "false"]


def test_what_does_not_matter_is_left_out() -> None:
    steps: list[Step] = [{"do": "ask", "number": number} for number in range(100)]

    def differs(some: list[Step]) -> bool:
        numbers = [step["number"] for step in some]
        return 17 in numbers and 80 in numbers

    assert [each["number"] for each in side_by_side.shrunk(steps, differs, 100)] == [17, 80]
    assert len(side_by_side.shrunk(steps, differs, 3)) > 2, "no more attempts than it has"


def test_steps_that_wait_for_the_services_are_kept() -> None:
    steps: list[Step] = [{"do": "settle"}, {"do": "ask"}, {"do": "hear"}]
    assert side_by_side.shrunk(steps, lambda _: True, 100) == [{"do": "settle"}, {"do": "hear"}]


def test_a_difference_is_told_with_the_steps_that_show_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_by_side, "SHRINKING", 1)

    def otherwise(step: Step, status: int, text: str) -> tuple[int, str]:
        return (status + 1, text) if step["path"] == "/overlap_scores" else (status, text)

    def run(pair: SideBySide) -> None:
        Play(1, pair, has_events=False).run(200)

    opened = functools.partial(side_by_side.side_by_side, OURS, OURS, {}, amend=otherwise)
    with pytest.raises(AssertionError, match=r"with seed 1 .*\n.*\n  theirs \(201, ") as told:
        side_by_side.play(1, opened, run)
    *_, last = str(told.value).splitlines()
    assert '"path": "/overlap_scores"' in last
