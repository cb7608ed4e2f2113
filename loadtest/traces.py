"""Requests with tokens, made of the lines of a trace."""

from collections.abc import Iterator
from pathlib import Path

from lean_selector.tools.simulated_engines import EngineRequest, make_request
from lean_selector.tools.trace import TRACE_BLOCK_TOKENS, trace_lines
from lean_selector.wire.decision_lines import DecisionLine


def prompt_tokens(line: DecisionLine) -> list[int]:
    """Return made-up tokens for the prompt: equal hash ids get equal tokens."""
    tokens: list[int] = []
    for hash_id in line.hash_ids:
        first = hash_id * TRACE_BLOCK_TOKENS % 2**32
        tokens += range(first, first + TRACE_BLOCK_TOKENS)
    return tokens[: line.input_length]


def read_trace(
    path: Path, block_size: int, limit: int | None = None
) -> Iterator[tuple[float, EngineRequest]]:
    """Yields (arrival in seconds, request) for the first `limit` lines of a trace."""
    for number, line in enumerate(trace_lines(path, limit), 1):
        tokens = prompt_tokens(line)
        name, output_blocks = f"trace-{number}", line.output_length // block_size
        request = make_request(name, tokens, len(tokens), output_blocks, block_size)
        yield line.timestamp / 1e3, request
