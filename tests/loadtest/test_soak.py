"""The soak: its judgement of stalls and of memory. `.ci/compiled` runs the whole."""

import pytest

from loadtest.soaking.verdict import Memory, growth, stalls
from loadtest.soaking.watch import Late


def test_a_stall_is_the_services_unless_the_machine_kept_it_or_we_stopped_it() -> None:
    probe = [
        Late("answer", 1.0, 1.2),  # its own
        Late("answer", 2.0, 2.3),  # the control was not woken either
        Late("answer", 3.0, 3.3),  # the process wanted a CPU
        Late("answer", 4.0, 4.3, waited=0.29),  # the probe did
        Late("answer", 5.0, 5.5),  # stopped
    ]
    control = [Late("woken", 1.9, 2.29), Late("starved", 3.0, 3.3, waited=0.28)]
    found = stalls(probe, control, [(5.0, 5.4)], [("disk full", 0.9, 1.1)])
    assert found.outside == pytest.approx(0.2)
    assert found.during == "disk full"
    assert found.raw == pytest.approx(0.3)
    assert found.injected == pytest.approx(0.5)
    assert found.answers_lost == 0
    assert stalls([Late("lost", 1.0, 2.0, why="closed")], [], []).answers_lost == 1


def test_memory_grows_by_what_is_held_and_not_by_what_is_kept_for_later() -> None:
    marks = [Memory(1, 100.0, 60.0), Memory(5, 120.0, 61.2), Memory(10, 90.0, 58.8)]
    assert growth(marks) == pytest.approx(0.02)
    assert growth([*marks, Memory(11, 100.0, 54.0)]) == pytest.approx(0.1)
    # Where the C library cannot be asked all that is resident counts.
    assert growth([Memory(1, 100.0, None), Memory(5, 104.0, None)]) == pytest.approx(0.04)
    assert growth([]) == 0.0
