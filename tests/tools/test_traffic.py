"""The demo's traffic."""

from itertools import islice, pairwise

from lean_selector.tools.traffic import conversations, percentile


def test_percentile_takes_the_nearest_rank() -> None:
    assert percentile([], 0.5) == 0.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 0.5) == 3.0
    assert percentile([1.0, 2.0], 0.99) == 2.0


def test_the_same_seed_gives_the_same_turns_and_another_seed_does_not() -> None:
    first = list(islice(conversations(1, 0), 12))
    assert first == list(islice(conversations(1, 0), 12))
    assert first != list(islice(conversations(2, 0), 12))
    assert first != list(islice(conversations(1, 1), 12))


def test_a_turn_begins_with_all_of_the_turn_before() -> None:
    turns = [turn.request for turn in islice(conversations(0, 0), 30)]
    goes_on = [
        list(later.tokens)[: len(earlier.tokens)] == earlier.tokens
        for earlier, later in pairwise(turns)
    ]
    assert 0 < goes_on.count(False) < 10  # where a new conversation begins
    assert len({turn.request_id for turn in turns}) == 30
