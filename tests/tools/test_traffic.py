"""The demo's traffic."""

from itertools import islice, pairwise

from lean_selector.tools.traffic import conversations


def test_a_turn_begins_with_all_of_the_turn_before() -> None:
    turns = [turn.request for turn in islice(conversations(0, 0), 30)]
    goes_on = [
        list(later.tokens)[: len(earlier.tokens)] == earlier.tokens
        for earlier, later in pairwise(turns)
    ]
    assert 0 < goes_on.count(False) < 10  # where a new conversation begins
    assert len({turn.request_id for turn in turns}) == 30
