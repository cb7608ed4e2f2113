"""Stories of one source, told to the cursor; the last one tells random ones."""

from collections import deque
from typing import Literal

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lean_selector.core.index import kv_cursor
from lean_selector.core.index.kv_cursor import UNSET_SEQ, BatchVerdict, KvCursor, SourceState

APPLY, IGNORE, HOLD, RESTART = (
    BatchVerdict.APPLY,
    BatchVerdict.IGNORE,
    BatchVerdict.HOLD,
    BatchVerdict.RESTART,
)


def live(cursor: KvCursor, *seqs: int) -> list[BatchVerdict]:
    return [cursor.live(seq, b"%d" % seq) for seq in seqs]


def replayed(cursor: KvCursor, *seqs: int) -> list[BatchVerdict]:
    return [cursor.replayed(seq, b"%d" % seq) for seq in seqs]


def held(cursor: KvCursor) -> list[int]:
    return [int(payload) for payload in iter(cursor.next_held, None)]


def after_gap() -> KvCursor:
    """0 and 1 applied, 2 and 3 missing, 4 applied; the replay requested, from 1 on."""
    cursor = KvCursor(can_replay=True)
    live(cursor, 0, 1, 4)
    assert cursor.replay_from == 1
    cursor.replay_started()
    assert replayed(cursor, 1) == [IGNORE]
    return cursor


def before_answer() -> KvCursor:
    """The same, but nothing of the replay has come."""
    cursor = KvCursor(can_replay=True)
    live(cursor, 0, 1, 4)
    cursor.replay_started()
    return cursor


def test_a_source_is_connecting_until_its_first_batch() -> None:
    cursor = KvCursor(can_replay=False)
    assert (cursor.state, cursor.watermark) == (SourceState.CONNECTING, None)
    assert live(cursor, 0, 1, 2) == [APPLY] * 3
    assert (cursor.state, cursor.watermark, cursor.last_live) == (SourceState.LIVE, 2, 2)


def test_a_gap_without_replay_is_lost_and_the_batch_applied() -> None:
    cursor = KvCursor(can_replay=False)
    assert live(cursor, 0, 5) == [APPLY, APPLY]
    assert (cursor.lost, cursor.gaps, cursor.state) == (4, 1, SourceState.DEGRADED)
    assert cursor.replay_from is None


def test_a_first_batch_beyond_zero_is_a_gap_from_zero() -> None:
    cursor = KvCursor(can_replay=True)
    assert live(cursor, 7) == [APPLY]
    assert (cursor.replay_from, cursor.lag, cursor.state) == (0, 7, SourceState.REPLAYING)


def test_a_full_replay_brings_the_source_back() -> None:
    cursor = after_gap()
    assert cursor.replay_from is None
    assert replayed(cursor, 2, 3, 4) == [APPLY] * 3
    assert cursor.state is SourceState.REPLAYING
    cursor.replay_finished()
    assert held(cursor) == []
    assert (cursor.state, cursor.watermark, cursor.replayed_batches) == (SourceState.LIVE, 4, 3)
    assert live(cursor, 5) == [APPLY]


def test_live_batches_are_applied_while_nobody_answers_the_replay() -> None:
    cursor = before_answer()
    assert live(cursor, 5, 6) == [APPLY, APPLY]
    cursor.replay_failed()
    assert held(cursor) == []
    assert (cursor.state, cursor.replay_from, cursor.watermark) == (SourceState.DEGRADED, 1, 6)
    assert live(cursor, 7) == [APPLY]


def test_what_a_replay_does_not_carry_is_applied_again_after_it() -> None:
    cursor = before_answer()
    assert live(cursor, 5, 6) == [APPLY, APPLY]
    assert replayed(cursor, 1, 2, 3, 4, 5) == [IGNORE] + [APPLY] * 4
    assert live(cursor, 7) == [HOLD]
    assert cursor.lag == 2 + 3
    cursor.replay_finished()
    assert held(cursor) == [6, 7]
    assert (cursor.state, cursor.watermark, cursor.lag) == (SourceState.LIVE, 7, 0)


def test_live_duplicates_of_replayed_batches_are_ignored() -> None:
    cursor = after_gap()
    replayed(cursor, 2, 3, 4, 5, 6)
    cursor.replay_finished()
    assert held(cursor) == []
    assert live(cursor, 5, 6, 7) == [IGNORE, IGNORE, APPLY]
    assert cursor.restarts == 0


def test_a_replay_that_repeats_itself_is_applied_once() -> None:
    cursor = after_gap()
    assert replayed(cursor, 2, 2, 3, UNSET_SEQ, 4) == [APPLY, IGNORE, APPLY, IGNORE, APPLY]


def test_batches_that_the_engine_has_forgotten_are_lost() -> None:
    cursor = after_gap()
    assert replayed(cursor, 3) == [APPLY]
    replayed(cursor, 4)
    cursor.replay_finished()
    held(cursor)
    assert (cursor.lost, cursor.state, cursor.replay_from) == (1, SourceState.DEGRADED, None)


def test_an_empty_replay_loses_the_gap_and_is_not_repeated() -> None:
    cursor = before_answer()
    cursor.replay_finished()
    held(cursor)
    assert (cursor.lost, cursor.lag, cursor.replay_from, cursor.watermark) == (2, 0, None, 4)


def test_a_replay_that_stops_midway_is_asked_for_again_from_there() -> None:
    cursor = before_answer()
    live(cursor, 5)
    replayed(cursor, 1, 2)
    cursor.replay_failed()
    assert held(cursor) == [5]
    assert (cursor.replay_from, cursor.state, cursor.watermark) == (2, SourceState.DEGRADED, 5)
    cursor.replay_started()
    replayed(cursor, 2, 3, 4, 5)
    cursor.replay_finished()
    assert held(cursor) == []
    assert cursor.state is SourceState.LIVE


def test_a_replay_short_of_nothing_but_its_end_marker_is_complete() -> None:
    cursor = after_gap()
    replayed(cursor, 2, 3, 4)
    cursor.replay_failed()
    assert held(cursor) == []
    assert cursor.state is SourceState.LIVE


def test_a_second_gap_during_a_replay_is_asked_for_after_it() -> None:
    cursor = after_gap()
    replayed(cursor, 2, 3, 4)
    assert live(cursor, 7) == [HOLD]
    cursor.replay_finished()
    assert held(cursor) == [7]
    assert (cursor.replay_from, cursor.gaps) == (4, 2)


def test_a_second_gap_before_the_replay_answers_is_part_of_it() -> None:
    cursor = before_answer()
    assert live(cursor, 6) == [APPLY]
    assert cursor.lag == 3
    replayed(cursor, 1, 2, 3, 4, 5, 6)
    cursor.replay_finished()
    assert held(cursor) == []
    assert cursor.state is SourceState.LIVE


def test_an_empty_replay_says_nothing_of_gaps_that_came_after_it_was_asked_for() -> None:
    """Its answer may be older than they are."""
    cursor = connected(KvCursor(can_replay=True))
    assert live(cursor, 0, 1, 2, 9, 10) == [APPLY] * 5
    cursor.replay_finished()
    assert held(cursor) == []
    assert (cursor.lost, cursor.unknown, cursor.lag, cursor.replay_from) == (0, 0, 6, 0)
    cursor.replay_started()
    replayed(cursor, *range(11))
    cursor.replay_finished()
    assert held(cursor) == []
    assert (cursor.state, cursor.watermark) == (SourceState.LIVE, 10)


def test_a_first_batch_that_nobody_answers_for_any_more_is_not_known_of() -> None:
    cursor = connected(KvCursor(can_replay=True))
    live(cursor, 9)
    for lag in (9, 0):
        cursor.replay_finished()
        assert held(cursor) == []
        assert (cursor.lost, cursor.unknown, cursor.lag) == (0, 9 - lag, lag)
        if lag:
            assert cursor.state is SourceState.REPLAYING
            cursor.replay_started()
    assert (cursor.state, cursor.replay_from) == (SourceState.PARTIAL, None)


def test_an_empty_replay_loses_what_was_missing_and_not_what_has_been_since() -> None:
    cursor = before_answer()
    live(cursor, 5, 8)
    cursor.replay_finished()
    held(cursor)
    assert (cursor.lost, cursor.lag, cursor.replay_from) == (2, 2, 4)
    cursor.replay_started()
    cursor.replay_finished()
    held(cursor)
    assert (cursor.lost, cursor.lag, cursor.replay_from) == (4, 0, None)


def test_a_number_that_does_not_grow_is_a_new_publisher() -> None:
    cursor = KvCursor(can_replay=True)
    live(cursor, 0, 1, 2)
    assert live(cursor, 2) == [RESTART]
    assert (cursor.replay_from, cursor.restarts) == (0, 1)
    cursor.replay_started()
    replayed(cursor, 0)
    assert live(cursor, 0) == [RESTART]
    assert (cursor.is_settled, cursor.state, cursor.watermark) == (True, SourceState.LIVE, 0)
    assert replayed(cursor, 1) == [IGNORE]


def test_a_restart_forgets_what_was_lost() -> None:
    cursor = KvCursor(can_replay=False)
    live(cursor, 0, 5)
    assert live(cursor, 0) == [RESTART]
    assert (cursor.lost, cursor.state) == (0, SourceState.LIVE)


def test_the_largest_number_is_applied_and_leaves_a_fresh_cursor() -> None:
    cursor = KvCursor(can_replay=False)
    live(cursor, 0, 1)
    assert live(cursor, UNSET_SEQ) == [APPLY]
    assert (cursor.watermark, cursor.last_live) == (None, None)
    assert live(cursor, 0, 1) == [APPLY, APPLY]


def test_a_recovered_source_goes_on_behind_its_watermark_without_replay() -> None:
    cursor = KvCursor(can_replay=True)
    cursor.resume_at(41)
    assert live(cursor, 42) == [APPLY]
    assert cursor.state is SourceState.LIVE


def test_a_recovered_source_asks_only_for_what_is_missing() -> None:
    cursor = KvCursor(can_replay=True)
    cursor.resume_at(41)
    assert live(cursor, 45) == [APPLY]
    assert cursor.replay_from == 41  # which it has, too


def test_a_recovered_source_notices_that_its_engine_is_a_new_one() -> None:
    cursor = KvCursor(can_replay=True)
    cursor.resume_at(41)
    assert live(cursor, 41) == [RESTART]
    assert cursor.replay_from == 0


def test_a_clear_makes_what_was_missing_before_it_irrelevant() -> None:
    cursor = KvCursor(can_replay=True)
    live(cursor, 0, 3)
    cursor.cleared()
    assert (cursor.is_settled, cursor.state, cursor.lag) == (True, SourceState.LIVE, 0)
    lossy = KvCursor(can_replay=False)
    live(lossy, 0, 3)
    lossy.cleared()
    assert lossy.state is SourceState.LIVE


def test_a_clear_ends_a_replay_that_nobody_has_answered() -> None:
    cursor = before_answer()
    live(cursor, 5)
    cursor.cleared()
    assert cursor.is_settled
    assert held(cursor) == []


def test_a_clear_within_a_replay_leaves_it_running() -> None:
    cursor = after_gap()
    replayed(cursor, 3)
    assert cursor.lost == 1
    cursor.cleared()
    assert (cursor.lost, cursor.is_settled) == (0, False)


def test_an_undecodable_batch_degrades_the_source() -> None:
    cursor = KvCursor(can_replay=True)
    live(cursor, 0)
    cursor.lose()
    assert cursor.state is SourceState.DEGRADED
    assert live(cursor, 1) == [APPLY]


@pytest.mark.parametrize(("limit", "value"), [("MAX_HELD", 2), ("MAX_HELD_BYTES", 2)])
def test_batches_kept_beyond_the_limit_leave_a_gap_to_ask_for_again(
    monkeypatch: pytest.MonkeyPatch, limit: Literal["MAX_HELD", "MAX_HELD_BYTES"], value: int
) -> None:
    monkeypatch.setattr(kv_cursor, limit, value)
    cursor = after_gap()
    replayed(cursor, 2, 3, 4)
    live(cursor, 5, 6, 7, 8)
    assert (cursor.held_bytes, cursor.dropped) == (2, 2)
    cursor.replay_finished()
    assert held(cursor) == [7, 8]
    assert (cursor.replay_from, cursor.held_bytes) == (4, 0)


def test_what_is_kept_is_given_up_from_the_oldest_but_for_the_newest() -> None:
    cursor = after_gap()
    for seq, size in ((5, 10), (6, 20), (7, 30), (8, 40)):
        cursor.live(seq, b"%0*d" % (size, seq))
    cursor.shed(10)
    assert (cursor.held_bytes, cursor.dropped) == (90, 1)
    cursor.shed(11)
    assert (cursor.held_bytes, cursor.dropped) == (70, 2)
    cursor.shed(30)
    assert (cursor.held_bytes, cursor.dropped) == (40, 3)
    cursor.shed(1_000)
    assert (cursor.held_bytes, cursor.dropped) == (40, 3)
    replayed(cursor, 2, 3, 4)
    cursor.replay_finished()
    assert held(cursor) == [8]
    assert (cursor.gaps, cursor.replay_from) == (2, 4)


def test_what_is_kept_is_counted_until_it_is_applied() -> None:
    cursor = after_gap()
    live(cursor, 10, 11, 12)
    replayed(cursor, *range(2, 10))
    cursor.replay_finished()
    left = []
    while cursor.next_held() is not None:
        left.append(cursor.held_bytes)
    assert left == [4, 2, 0]


def test_what_is_lost_adds_up_until_a_restart() -> None:
    cursor = KvCursor(can_replay=False)
    live(cursor, 0, 5, 8)
    assert (cursor.lost, cursor.gaps) == (4 + 2, 2)
    cursor.lose()
    cursor.lose()
    assert cursor.lost == 8
    assert live(cursor, 0, 0) == [RESTART] * 2
    assert (cursor.lost, cursor.restarts) == (0, 2)


def test_a_replay_adds_to_what_was_lost_before_it() -> None:
    forgotten = after_gap()
    forgotten.lose()
    replayed(forgotten, 3, 4)
    assert forgotten.lost == 1 + 1

    rolled = before_answer()
    rolled.lose()
    replayed(rolled, 2)
    assert rolled.lost == 1 + 1

    empty = before_answer()
    empty.lose()
    empty.replay_finished()
    assert empty.lost == 1 + 2

    short = before_answer()
    short.lose()
    replayed(short, 1, 2, 3)
    short.replay_finished()
    assert short.lost == 1 + 1


def test_what_was_applied_live_is_not_lost_though_the_engine_has_forgotten_it() -> None:
    cursor = before_answer()
    live(cursor, 5)
    assert replayed(cursor, 1) == [IGNORE]
    assert live(cursor, 6) == [HOLD]
    assert replayed(cursor, 6) == [APPLY]  # 2 to 5 have rolled out, of which 4 and 5 were heard
    assert cursor.lost == 2


def test_after_a_replay_that_stops_only_what_it_did_not_bring_is_missing() -> None:
    cursor = before_answer()
    replayed(cursor, 1, 2, 3)
    cursor.replay_failed()
    assert held(cursor) == []
    assert (cursor.lag, cursor.replay_from, cursor.state) == (1, 3, SourceState.DEGRADED)


def test_a_single_batch_that_no_replay_brought_degrades() -> None:
    cursor = KvCursor(can_replay=True)
    live(cursor, 0, 2)
    cursor.replay_started()
    cursor.replay_failed()
    assert held(cursor) == []
    assert (cursor.lag, cursor.state) == (1, SourceState.DEGRADED)


@pytest.mark.parametrize("answered", [False, True])
def test_a_replay_whose_asker_has_failed_is_one_that_failed(answered: bool) -> None:
    cursor = before_answer()
    if answered:
        replayed(cursor, 1, 2)
    assert cursor.replay_interrupted()
    assert held(cursor) == []
    assert (cursor.replay_from, cursor.state) == (2 if answered else 1, SourceState.DEGRADED)


def test_a_replay_that_has_ended_leaves_what_was_kept_to_whoever_finds_its_asker_gone() -> None:
    cursor = after_gap()
    replayed(cursor, 2, 3, 4)
    live(cursor, 5)
    cursor.replay_finished()
    assert cursor.replay_interrupted()
    assert held(cursor) == [5]
    assert not cursor.replay_interrupted()
    assert cursor.state is SourceState.LIVE


def test_a_clear_leaves_nothing_to_be_asked_for_though_the_connection_is_new() -> None:
    cursor = before_answer()
    cursor.connected()
    live(cursor, 5, 6)
    assert cursor.held_bytes == 2
    cursor.cleared()
    assert held(cursor) == []
    assert (cursor.held_bytes, cursor.replay_from, cursor.is_settled) == (0, None, True)


def test_a_replay_is_asked_for_from_a_batch_that_we_have() -> None:
    cursor = after_gap()
    assert replayed(cursor, 2, 3, 4) == [APPLY] * 3
    cursor.replay_finished()
    assert held(cursor) == []
    assert (cursor.state, cursor.restarts) == (SourceState.LIVE, 0)


def test_another_batch_under_a_number_that_we_have_is_a_new_publisher() -> None:
    cursor = before_answer()
    live(cursor, 5)
    assert cursor.replayed(1, b"of another") is RESTART
    assert (cursor.restarts, cursor.lost, cursor.lag) == (1, 0, 6)
    assert (cursor.replay_from, cursor.state) == (0, SourceState.REPLAYING)
    assert live(cursor, 6) == [APPLY]
    cursor.replay_started()
    assert replayed(cursor, 0, 1, 2, 3, 4, 5, 6) == [APPLY] * 7
    cursor.replay_finished()
    assert held(cursor) == []
    assert (cursor.state, cursor.watermark, cursor.lag) == (SourceState.LIVE, 6, 0)


def test_an_engine_that_replays_more_than_was_asked_for_is_compared_too() -> None:
    cursor = before_answer()
    assert replayed(cursor, 0) == [IGNORE]
    assert cursor.replayed(1, b"of another") is RESTART


def test_a_batch_is_compared_once() -> None:
    cursor = after_gap()
    assert cursor.replayed(1, b"again, and odd") is IGNORE
    replayed(cursor, 2)
    assert cursor.replayed(2, b"again, and odd") is IGNORE
    assert cursor.restarts == 0


def test_a_replay_that_fails_leaves_the_batch_to_compare() -> None:
    cursor = after_gap()
    replayed(cursor, 2)
    cursor.replay_failed()
    held(cursor)
    assert cursor.replay_from == 2
    cursor.replay_started()
    assert cursor.replayed(2, b"of another") is RESTART


def test_a_buffer_that_has_rolled_past_what_we_have_vouches_for_nothing() -> None:
    cursor = before_answer()
    assert replayed(cursor, 2, 3, 4) == [APPLY] * 3
    cursor.replay_finished()
    held(cursor)
    assert (cursor.lost, cursor.state) == (1, SourceState.DEGRADED)


def test_a_replay_that_ends_before_what_was_heard_leaves_batches_out_of_order() -> None:
    cursor = before_answer()
    live(cursor, 5)
    assert replayed(cursor, 1, 2, 3) == [IGNORE, APPLY, APPLY]
    cursor.replay_finished()
    assert held(cursor) == [5]
    assert (cursor.lost, cursor.state, cursor.watermark) == (1, SourceState.DEGRADED, 5)


def test_a_recovered_source_has_nothing_to_compare() -> None:
    cursor = KvCursor(can_replay=True)
    cursor.resume_at(41)
    live(cursor, 45)
    cursor.replay_started()
    assert cursor.replayed(41, b"whatever it was") == IGNORE
    assert replayed(cursor, 42, 43, 44, 45) == [APPLY] * 4
    cursor.replay_finished()
    assert held(cursor) == []
    assert cursor.state is SourceState.LIVE


def test_an_engine_that_counts_from_one_has_lost_nothing() -> None:
    cursor = KvCursor(can_replay=False)
    assert live(cursor, 1, 2) == [APPLY, APPLY]
    assert (cursor.state, cursor.gaps) == (SourceState.LIVE, 0)
    assert live(cursor, 1) == [RESTART]
    assert cursor.state is SourceState.LIVE


def test_a_replay_that_begins_at_one_is_whole() -> None:
    cursor = KvCursor(can_replay=True)
    assert live(cursor, 1) == [APPLY]
    assert cursor.replay_from == 0
    cursor.replay_started()
    assert replayed(cursor, 1) == [APPLY]
    cursor.replay_finished()
    assert held(cursor) == []
    assert (cursor.state, cursor.lost) == (SourceState.LIVE, 0)


@pytest.mark.parametrize("first", [2, 3, 1000])
def test_what_came_before_a_first_number_beyond_one_is_unknown(first: int) -> None:
    cursor = KvCursor(can_replay=False)
    live(cursor, first)
    assert (cursor.unknown, cursor.lost, cursor.state) == (first, 0, SourceState.NO_REPLAY)
    asking = KvCursor(can_replay=True)
    live(asking, first)
    asking.replay_started()
    replayed(asking, first)
    ended(asking)
    assert (asking.unknown, asking.lost, asking.state) == (first, 0, SourceState.PARTIAL)


# -- asked at once --------------------------------------------------------------------------------


def connected(cursor: KvCursor) -> KvCursor:
    """Connected anew, and the replay requested."""
    cursor.connected()
    cursor.replay_started()
    return cursor


def ended(cursor: KvCursor) -> KvCursor:
    """Its replay has ended, and what was kept is applied."""
    assert cursor.replay_finished() is IGNORE
    held(cursor)
    return cursor


def test_a_new_source_asks_for_everything_without_having_heard_anything() -> None:
    cursor = KvCursor(can_replay=True)
    assert cursor.is_settled  # before somebody could be heard
    cursor.connected()
    assert (cursor.state, cursor.lag) == (SourceState.REPLAYING, 0)
    assert cursor.replay_from == 0
    cursor.replay_started()
    assert replayed(cursor, 0, 1, 2) == [APPLY] * 3
    ended(cursor)
    assert (cursor.state, cursor.watermark, cursor.complete_to) == (SourceState.LIVE, 2, 2)
    assert (cursor.last_live, cursor.gaps, cursor.has_told) == (None, 0, True)


def test_what_the_replay_brought_too_is_ignored_live_and_what_follows_is_not() -> None:
    cursor = connected(KvCursor(can_replay=True))
    assert replayed(cursor, 0, 1, 2) == [APPLY] * 3
    assert live(cursor, 1) == [HOLD]
    ended(cursor)
    assert live(cursor, 2, 3) == [IGNORE, APPLY]
    assert (cursor.restarts, cursor.watermark) == (0, 3)


def test_an_engine_with_nothing_to_tell_is_silent_until_it_does() -> None:
    cursor = ended(connected(KvCursor(can_replay=True)))
    assert (cursor.state, cursor.has_told, cursor.is_settled) == (SourceState.SILENT, False, True)
    assert live(cursor, 0) == [APPLY]
    assert cursor.state is SourceState.LIVE


def test_without_a_replay_endpoint_nobody_is_asked() -> None:
    cursor = KvCursor(can_replay=False)
    cursor.connected()
    assert (cursor.replay_from, cursor.state) == (None, SourceState.CONNECTING)
    assert live(cursor, 0) == [APPLY]
    assert cursor.state is SourceState.LIVE


@pytest.mark.parametrize(("first", "unknown"), [(0, 0), (1, 0), (2, 2), (400, 400)])
def test_a_replay_that_begins_late_is_partial(first: int, unknown: int) -> None:
    cursor = connected(KvCursor(can_replay=True))
    replayed(cursor, first, first + 1)
    ended(cursor)
    state = SourceState.PARTIAL if unknown else SourceState.LIVE
    assert (cursor.unknown, cursor.lost, cursor.state) == (unknown, 0, state)
    assert live(cursor, first + 2) == [APPLY]
    assert (cursor.state, cursor.complete_to) == (state, first + 2)
    cursor.cleared()
    assert (cursor.unknown, cursor.state) == (0, SourceState.LIVE)


def test_a_live_batch_that_is_faster_than_the_replay_changes_nothing() -> None:
    cursor = connected(KvCursor(can_replay=True))
    assert live(cursor, 500) == [APPLY]
    assert replayed(cursor, *range(400, 501)) == [APPLY] * 101
    ended(cursor)
    assert (cursor.unknown, cursor.lost, cursor.watermark) == (400, 0, 500)
    assert cursor.state is SourceState.PARTIAL


def test_a_replay_that_nobody_answers_is_asked_for_until_it_is_of_no_matter() -> None:
    cursor = connected(KvCursor(can_replay=True))
    cursor.replay_failed()
    assert held(cursor) == []
    assert (cursor.state, cursor.is_settled) == (SourceState.NO_REPLAY, False)
    assert live(cursor, 0) == [APPLY]  # so nothing was missed
    assert (cursor.state, cursor.is_settled) == (SourceState.LIVE, True)


def test_without_an_answer_what_came_before_is_unknown_and_gaps_degrade() -> None:
    cursor = connected(KvCursor(can_replay=True))
    cursor.replay_failed()
    held(cursor)
    assert live(cursor, 500, 501) == [APPLY, APPLY]
    assert (cursor.state, cursor.replay_from, cursor.complete_to) == (
        SourceState.NO_REPLAY,
        0,
        None,
    )
    assert live(cursor, 503) == [APPLY]
    assert cursor.state is SourceState.DEGRADED


def test_a_replay_that_stops_is_taken_up_there_though_nothing_beyond_was_heard_of() -> None:
    cursor = connected(KvCursor(can_replay=True))
    replayed(cursor, 0, 1, 2)
    cursor.replay_failed()
    assert held(cursor) == []
    assert cursor.replay_from == 2
    cursor.replay_started()
    assert replayed(cursor, 2, 3, 4) == [IGNORE, APPLY, APPLY]
    ended(cursor)
    assert (cursor.state, cursor.watermark) == (SourceState.LIVE, 4)


def followed() -> KvCursor:
    """0 to 2 heard live, 3 and 4 out of a replay after the connection was lost."""
    cursor = KvCursor(can_replay=True)
    live(cursor, 0, 1, 2)
    cursor.connected()
    assert cursor.replay_from == 2
    cursor.replay_started()
    assert replayed(cursor, 2, 3, 4) == [IGNORE, APPLY, APPLY]
    return ended(cursor)


def test_a_connection_that_came_back_is_asked_for_what_it_missed() -> None:
    cursor = followed()
    assert (cursor.state, cursor.watermark, cursor.gaps) == (SourceState.LIVE, 4, 0)
    assert live(cursor, 5) == [APPLY]


def test_an_engine_that_has_not_even_our_last_batch_is_another() -> None:
    cursor = followed()
    connected(cursor)
    assert cursor.replay_finished() is RESTART
    assert (cursor.restarts, cursor.replay_from, cursor.watermark) == (1, 0, None)
    cursor.replay_started()
    assert replayed(cursor, 0) == [APPLY]
    ended(cursor)
    assert (cursor.state, cursor.watermark) == (SourceState.LIVE, 0)


def test_an_engine_with_another_batch_under_our_number_is_another() -> None:
    cursor = followed()
    connected(cursor)
    assert cursor.replayed(4, b"of another") is RESTART
    assert (cursor.restarts, cursor.replay_from, cursor.lag) == (1, 0, 0)


def test_a_number_that_we_have_is_a_new_publishers_once_the_connection_is_new() -> None:
    cursor = followed()
    cursor.connected()
    assert live(cursor, 4) == [RESTART]
    assert cursor.replay_from == 0


def test_what_rolled_out_of_the_buffer_while_the_connection_was_lost_degrades() -> None:
    cursor = followed()
    connected(cursor)
    assert replayed(cursor, 8, 9) == [APPLY, APPLY]
    ended(cursor)
    assert (cursor.lost, cursor.state, cursor.watermark) == (3, SourceState.DEGRADED, 9)


def test_a_connection_that_is_new_while_a_replay_runs_is_asked_after_it() -> None:
    cursor = after_gap()
    replayed(cursor, 2, 3, 4)
    cursor.connected()
    ended(cursor)
    assert cursor.replay_from == 4
    cursor.replay_started()
    assert replayed(cursor, 4, 5) == [IGNORE, APPLY]
    ended(cursor)
    assert (cursor.state, cursor.is_settled) == (SourceState.LIVE, True)


def test_a_recovered_source_asks_from_its_watermark_on() -> None:
    cursor = KvCursor(can_replay=True)
    cursor.resume_at(41)
    connected(cursor)
    assert replayed(cursor, 41, 42, 43) == [IGNORE, APPLY, APPLY]
    ended(cursor)
    assert (cursor.state, cursor.watermark, cursor.unknown) == (SourceState.LIVE, 43, 0)


def test_a_recovered_source_whose_engine_began_again_meanwhile_starts_over() -> None:
    cursor = KvCursor(can_replay=True)
    cursor.resume_at(41)
    connected(cursor)
    assert cursor.replay_finished() is RESTART
    assert cursor.replay_from == 0


def test_what_is_only_asked_for_does_not_keep_an_index_from_being_recovered() -> None:
    cursor = followed()
    connected(cursor)
    assert cursor.complete_to == 4
    cursor.replay_failed()
    held(cursor)
    assert (cursor.complete_to, cursor.state) == (4, SourceState.NO_REPLAY)


Operation = tuple[str, int]
BUFFER = 4  # batches that the engine below can replay


def apply_operation(blocks: set[int], operation: Operation) -> None:
    kind, block = operation
    if kind == "store":
        blocks.add(block)
    elif kind == "remove":
        blocks.discard(block)
    else:
        blocks.clear()


class Story(RuleBasedStateMachine):
    """An engine, a lossy live channel, a replay channel that may fall silent, and the cursor.

    Not told: a restart of which the first batch that arrives has the very next number. It looks
    like a stream that goes on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.log: list[Operation] = []  # of the running engine
        self.snapshots: list[set[int]] = []  # what it held after each
        self.engine = 0  # how often it has begun again
        # None: from there on it is another connection.
        self.live: deque[tuple[int, list[set[int]], bytes] | None] = deque([None])
        self.replies: deque[tuple[int, bytes] | None] = deque()
        self.request: int | None = None  # under way to the engine
        self.is_asking = False
        self.cursor = KvCursor(can_replay=True)
        self.indexed: set[int] = set()
        self.followed: list[set[int]] = []  # the snapshots of the engine last heard

    def payload(self, seq: int) -> bytes:
        """A batch of the running engine, which tells its engine as its time does."""
        kind, block = self.log[seq]
        return f"{kind} {block} {self.engine}".encode()

    def apply(self, payload: bytes) -> None:
        kind, block, _ = payload.decode().split()
        apply_operation(self.indexed, (kind, int(block)))
        if kind == "clear":
            self.cursor.cleared()

    def settle(self) -> None:
        if self.cursor.is_settled:
            self.is_asking = False
        if not self.is_asking:
            self.replies.clear()
            self.request = None

    @rule(kind=st.sampled_from(["store", "store", "remove", "clear"]), block=st.integers(0, 2))
    def publish(self, kind: str, block: int) -> None:
        held_now = set(self.snapshots[-1]) if self.snapshots else set()
        apply_operation(held_now, (kind, block))
        self.log.append((kind, block))
        self.snapshots.append(held_now)
        seq = len(self.log) - 1
        self.live.append((seq, self.snapshots, self.payload(seq)))

    @precondition(lambda self: self.log)
    @rule(blocks=st.lists(st.integers(0, 2), max_size=1))
    def restart(self, blocks: list[int]) -> None:
        self.log, self.snapshots = [], []
        self.engine += 1
        self.request = None
        self.replies.clear()
        self.live.append(None)
        for block in blocks:
            self.publish("store", block)

    @rule()
    def reconnect(self) -> None:
        self.live.append(None)

    def is_unheard_of(self) -> bool:
        """The next batch is the first heard of a new engine, and has the very next number."""
        if not self.live or self.live[0] is None:
            return False
        seq, snapshots, _ = self.live[0]
        known = self.cursor.watermark
        return snapshots is not self.followed and known is not None and seq == known + 1

    @precondition(lambda self: self.live and not self.is_unheard_of())
    @rule()
    def deliver(self) -> None:
        message = self.live.popleft()
        if message is None:
            self.cursor.connected()
            return
        seq, snapshots, payload = message
        verdict = self.cursor.live(seq, payload)
        if verdict is RESTART:
            self.indexed.clear()
            self.is_asking = False
        if verdict in (APPLY, RESTART):
            self.apply(payload)
        self.followed = snapshots
        self.settle()

    @precondition(lambda self: self.live and self.live[0] is not None)
    @rule()
    def lose(self) -> None:
        self.live.popleft()

    @precondition(lambda self: self.cursor.replay_from is not None)
    @rule()
    def ask(self) -> None:
        self.request = self.cursor.replay_from
        self.cursor.replay_started()
        self.is_asking = True

    @precondition(lambda self: self.request is not None)
    @rule()
    def answer(self) -> None:
        assert self.request is not None
        first = max(self.request, len(self.log) - BUFFER)
        self.replies.extend((seq, self.payload(seq)) for seq in range(first, len(self.log)))
        self.replies.append(None)
        self.request = None

    @precondition(lambda self: self.replies)
    @rule()
    def receive_reply(self) -> None:
        reply = self.replies.popleft()
        verdict = self.cursor.replay_finished() if reply is None else self.cursor.replayed(*reply)
        if verdict is RESTART:
            self.indexed.clear()
            self.is_asking = False
            self.settle()
        elif reply is None:
            self.drain()
        elif verdict is APPLY:
            self.followed = self.snapshots
            self.apply(reply[1])

    @precondition(lambda self: self.is_asking)
    @rule()
    def give_up(self) -> None:
        self.cursor.replay_failed()
        self.drain()

    def drain(self) -> None:
        self.is_asking = False
        while (payload := self.cursor.next_held()) is not None:
            self.apply(payload)
        self.settle()

    @invariant()
    def what_the_engine_still_has_is_not_lost(self) -> None:
        if self.followed is self.snapshots and len(self.log) <= BUFFER:
            assert (self.cursor.lost, self.cursor.unknown) == (0, 0)

    @invariant()
    def live_means_what_the_engine_held(self) -> None:
        knows_of_the_restart = all(
            message is not None and message[1] is self.followed for message in self.live
        )
        if not knows_of_the_restart:
            return
        state, watermark = self.cursor.state, self.cursor.watermark
        if state is SourceState.LIVE:
            assert watermark is not None
            assert self.indexed == self.followed[watermark]
        elif state is SourceState.SILENT:
            assert not self.indexed
        elif state is SourceState.PARTIAL:  # some of it, and nothing that it does not hold
            assert watermark is not None
            assert self.indexed <= self.followed[watermark]


TestStory = Story.TestCase
TestStory.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
