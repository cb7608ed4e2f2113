"""Lines of a trace as requests."""

import gzip
from pathlib import Path

import pytest

from lean_selector.wire.decision_lines import DecisionLine
from loadtest.traces import prompt_tokens, read_trace
from tests.loadtest.conftest import WriteTrace


@pytest.fixture
def trace(write_trace: WriteTrace) -> Path:
    """Ten conversations of four turns; each turn repeats the blocks of the one before."""
    return write_trace(
        [
            (turn * 1_000 + user * 50, [user * 100 + i for i in range(turn + 1)], 512 * turn + 300)
            for turn in range(4)
            for user in range(10)
        ]
    )


def test_equal_hash_ids_have_equal_tokens_and_others_share_none() -> None:
    first = prompt_tokens(DecisionLine(0, 1_030, 0, [5, 6, 7]))
    second = prompt_tokens(DecisionLine(0, 1_500, 0, [5, 6, 8]))
    assert len(first) == 1_030
    assert first[:1_024] == second[:1_024]
    assert not set(first[1_024:]) & set(second[1_024:])
    assert all(0 <= token < 2**32 for token in prompt_tokens(DecisionLine(0, 512, 0, [2**40 + 1])))


def test_lines_become_requests_in_seconds_and_blocks(trace: Path) -> None:
    requests = list(read_trace(trace, 16, 12))
    assert [arrival_s for arrival_s, _ in requests[:3]] == [0.0, 0.05, 0.1]
    second_turn = requests[10][1]
    assert second_turn.isl_tokens == 812
    assert second_turn.prompt_blocks == len(second_turn.sequence_hashes) == 50
    assert second_turn.output_blocks == 2
    assert second_turn.sequence_hashes[:18] == requests[0][1].sequence_hashes
    assert len({request.request_id for _, request in requests}) == 12
    plain = trace.with_name("plain.jsonl")  # without gzip
    plain.write_bytes(gzip.decompress(trace.read_bytes()))
    assert list(read_trace(plain, 16, 12)) == requests
