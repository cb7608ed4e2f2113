"""What the check makes of a source, state by state."""

import pytest

from lean_selector.tools.check_judgements import Level, judge_source

from .selector_answers import source


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


def test_a_problem_stands_in_place_of_what_the_state_means_and_of_the_last_error() -> None:
    problem = "the connection was lost: Connection refused"
    finding = judge_source(
        source("unreachable", problem=problem, last_error="no connection: Connection refused")
    )
    assert finding.what == f"unreachable at tcp://gpu:5557: {problem}"


def test_where_no_problem_is_told_the_state_is_explained_and_the_last_error_added() -> None:
    finding = judge_source(source("degraded", last_error="2 batches are in no replay"))
    assert "the index may say too little or too much; 2 batches are in no replay" in finding.what
    assert "last" not in judge_source(source("live", last_error="the last of yesterday")).what


def test_what_was_skipped_is_counted_by_its_reason() -> None:
    finding = judge_source(
        source("mismatch", problem="32 is not 16", skipped={"stored:block_size": 7})
    )
    assert finding.what.endswith("32 is not 16; skipped events: 7 stored:block_size")
    assert finding.mend == "register the worker with the engine's block size"


@pytest.mark.parametrize("state", ["no_replay", "degraded"])
def test_a_replay_endpoint_that_is_registered_is_not_asked_for_again(state: str) -> None:
    without = judge_source(source(state)).mend
    assert without is not None
    assert "register" in without
    beside = judge_source(source(state, replay_endpoint="tcp://gpu:5558")).mend
    assert beside is not None
    assert "register a replay_endpoint" not in beside
    assert "and register that" not in beside


def test_who_is_not_heard_for_its_keys_is_to_look_at_keys_and_not_at_ports() -> None:
    problem = "never connected: it asks for keys (CURVE), and none are given for it"
    mend = judge_source(source("unreachable", problem=problem)).mend
    assert mend is not None
    assert "--kv-events-curve-server-keys-file" in mend
    other = judge_source(source("unreachable", problem="never connected: monkey.example: no name"))
    assert other.mend is not None
    assert "kv_events_endpoint" in other.mend
