"""What a number that does not follow the last one says was missed."""

import pytest

from lean_selector.core.replication.events import (
    MAX_JUMP,
    MAX_LATE,
    MAX_PUBLISHERS,
    ReplicaSequences,
)

PEER, OTHER = 22, 33


def heard(*numbers: int) -> ReplicaSequences:
    sequences = ReplicaSequences()
    for at, number in enumerate(numbers):
        sequences.event(PEER, number, float(at))
    return sequences


def behind(sequences: ReplicaSequences) -> list[int]:
    return [publisher.router_id for publisher in sequences.behind()]


def test_numbers_that_follow_each_other_miss_nothing() -> None:
    sequences = heard(1, 2, 3)
    assert sequences.heartbeat(PEER, 3, 9.0) == 0
    assert (sequences.missed, behind(sequences)) == (0, [])


def test_what_came_before_the_first_that_is_heard_is_not_missed() -> None:
    assert heard(1000, 1001).missed == 0
    assert ReplicaSequences().heartbeat(PEER, 1000, 0.0) == 0


def test_a_gap_is_as_many_as_its_numbers() -> None:
    sequences = heard(1)
    assert sequences.event(PEER, 5, 0.0) == 3
    assert sequences.event(PEER, 7, 0.0) == 1
    assert (sequences.missed, behind(sequences)) == (4, [PEER])


def test_a_loss_that_nothing_follows_shows_with_the_heartbeat() -> None:
    sequences = heard(1)
    assert sequences.heartbeat(PEER, 4, 0.0) == 3
    assert sequences.event(PEER, 5, 0.0) == 0
    assert behind(sequences) == [PEER]


def test_each_publisher_has_numbers_of_its_own() -> None:
    sequences = heard(1)
    assert sequences.event(OTHER, 50, 0.0) == 0
    assert sequences.event(PEER, 2, 0.0) == 0
    assert [publisher.router_id for publisher in sequences.publishers()] == [PEER, OTHER]


def test_what_comes_twice_is_not_missed() -> None:
    """A peer under two names; one copy of everything is late."""
    sequences = heard(1, 2, 3, 1, 2, 4, 3)
    assert sequences.heartbeat(PEER, 2, 0.0) == 0
    assert sequences.missed == 0


@pytest.mark.parametrize("odd", [3 + MAX_JUMP, 2**64 - 1])
def test_a_number_that_nobody_can_have_counted_to_is_no_loss_and_hides_none(odd: int) -> None:
    sequences = heard(1, odd)
    assert sequences.missed == 0
    sequences.heartbeat(PEER, 10, 0.0)
    assert sequences.event(PEER, 12, 0.0) == 1
    assert sequences.missed == 1


def test_numbers_that_begin_again_far_back_are_followed_anew() -> None:
    sequences = heard(MAX_LATE + 5, 1)
    assert sequences.event(PEER, 3, 0.0) == 1


def test_a_gap_is_mended_by_what_was_told_up_to_it_and_no_less() -> None:
    sequences = heard(1, 5)
    assert not sequences.mended(PEER, 4)
    assert behind(sequences) == [PEER]
    assert sequences.mended(PEER, 5)
    assert behind(sequences) == []
    assert not sequences.mended(PEER, 6)  # there was none
    assert not sequences.mended(OTHER, 6)
    assert sequences.missed == 3


def test_publishers_are_bounded_and_the_one_silent_longest_is_forgotten() -> None:
    sequences = ReplicaSequences()
    for router_id in range(MAX_PUBLISHERS):
        sequences.event(router_id, 1, 0.0)
    sequences.event(0, 2, 0.0)
    sequences.event(MAX_PUBLISHERS, 1, 0.0)
    known = {publisher.router_id for publisher in sequences.publishers()}
    assert len(known) == MAX_PUBLISHERS
    assert 0 in known
    assert 1 not in known
