"""Reads traces in the Mooncake format, and decision logs (the same format with more fields)."""

import gzip
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from lean_selector.tools.service_process import ServiceError
from lean_selector.wire.decision_lines import HEADER_START, SPAN_TOKENS, DecisionLine, LogHeader

TRACE_BLOCK_TOKENS = SPAN_TOKENS
MADE_UP_REQUESTS = 12_000  # about as many as in the published conversation trace


def trace_lines(path: Path | None, limit: int | None = None) -> Iterator[DecisionLine]:
    """Yields the first `limit` requests of a trace or decision log, which may be gzipped. Without a
    path, yields generated requests.

    Raises ServiceError, which names an unreadable line."""
    if path is None:
        yield from islice(made_up_lines(), limit)
        return
    lines = (line for _, line in log_lines(path) if isinstance(line, DecisionLine))
    yield from islice(lines, limit)


def log_lines(path: Path) -> Iterator[tuple[int, LogHeader | DecisionLine]]:
    """Yields (line number, decoded line) for a trace or decision log. Raises ServiceError."""
    decode = msgspec.json.Decoder(DecisionLine).decode
    decode_header = msgspec.json.Decoder(LogHeader).decode
    try:
        with path.open("rb") as probe:
            opened = gzip.open if probe.read(2) == b"\x1f\x8b" else open
        with opened(path, "rb") as lines:
            for number, text in enumerate(lines, 1):
                try:
                    if text.startswith(HEADER_START):
                        yield number, decode_header(text)
                        continue
                    line = decode(text)
                except ValueError as error:
                    raise ServiceError(f"{path}:{number}: {error}") from error
                tokens, blocks = line.input_length, len(line.hash_ids)
                if not 0 < tokens <= blocks * TRACE_BLOCK_TOKENS:
                    raise ServiceError(
                        f"{path}:{number}: input_length {tokens} for {blocks} hash_ids"
                    )
                yield number, line
    except OSError as error:
        raise ServiceError(f"cannot read the trace: {error}") from error


def made_up_lines() -> Iterator[DecisionLine]:
    """Yields generated requests, the same at each call. Lengths resemble Mooncake's trace."""
    rng = random.Random("versus")
    fresh = 1
    talks: list[list[int]] = []
    for number in range(MADE_UP_REQUESTS):
        goes_on = talks and rng.random() < 0.5
        talk = talks.pop(rng.randrange(len(talks))) if goes_on else [0]  # 0: the system prompt
        grown = rng.randint(1, 24)
        talk = talk + list(range(fresh, fresh + grown))
        fresh += grown
        if len(talk) < 120:
            talks.append(talk)
        yield DecisionLine(number * 300.0, len(talk) * TRACE_BLOCK_TOKENS - 200, 300, talk)
