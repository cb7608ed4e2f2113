"""A selector that is killed while it is changed and booked on knows afterwards what it answered.

A few of the points that `python -m loadtest.kill_points` has by the hundred.
"""

from pathlib import Path

from loadtest.kill_points import Play

POINTS = 8


def test_what_is_lost_by_kill_9_lies_within_an_interval_and_expires(tmp_path: Path) -> None:
    play = Play(tmp_path, seed=1, interval_s=0.4, longest_s=2.5)
    play.run(POINTS)
    assert play.problems == []
    assert len(play.points) == POINTS
    assert sum(point.calls for point in play.points) > 0
    assert sum(point.live for point in play.points) > 0
