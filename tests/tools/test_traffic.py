"""The made-up conversations: deterministic, and each turn goes on from the one before."""

from itertools import islice, pairwise

from lean_selector.core.hashing import block_hashes, sequence_hashes
from lean_selector.tools.traffic import BLOCK_SIZE, conversations


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


def test_hashes_cover_the_prompt_and_the_blocks_that_decoding_fills() -> None:
    request = next(conversations(0, 0)).request
    assert request.prompt_blocks == request.isl_tokens // BLOCK_SIZE
    assert len(request.block_hashes) == request.prompt_blocks + request.output_blocks
    local = block_hashes(request.tokens, BLOCK_SIZE)
    assert [h % 2**64 for h in request.block_hashes] == local
    assert [h % 2**64 for h in request.sequence_hashes] == sequence_hashes(local)
