"""Prompts and the requests made of them: from a Mooncake-format trace, or of a chosen length.

Owns the order in which prompts are used (the trace's) and the count of those used twice. Hash
lists are those of "Block Hashing", so that what the engines announce and what is asked agree.
Every body is a function of the trace and a number: two runs send the same bytes.
"""

import random
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from lean_selector.core.hashing import sequence_hashes_bytes
from lean_selector.tools.simulated_engines import make_request
from lean_selector.tools.trace import trace_lines
from lean_selector.wire.decision_lines import DecisionLine
from loadtest.http_client import http
from loadtest.traces import prompt_tokens

MODEL_NAME = "versus"

encode_json = msgspec.json.Encoder().encode
encode_msgpack = msgspec.msgpack.Encoder().encode


class Prompt(msgspec.Struct, frozen=True):
    """A prompt as hashes, 8 bytes per full block, little-endian; tokens only on demand."""

    line: DecisionLine
    isl_tokens: int
    local: bytes
    sequence: bytes

    @property
    def blocks(self) -> int:
        return len(self.local) // 8


class Prompts:
    """The prompts of a trace in its order, hashed when first needed and kept (13 KB each)."""

    def __init__(self, path: Path | None, block_size: int) -> None:
        self.block_size = block_size
        self._lines = trace_lines(path)
        self._known: list[Prompt] = []
        self._ended = False

    def at(self, index: int) -> Prompt:
        """Prompt number `index`; after the last one the first again."""
        while not self._ended and index >= len(self._known):
            line = next(self._lines, None)
            if line is None:
                self._ended = True
            else:
                self._known.append(self._prompt(line))
        return self._known[index % len(self._known)]

    def repeats(self, used: int) -> int:
        """How many of the first `used` prompts were used before."""
        return max(0, used - len(self._known)) if self._ended else 0

    def _prompt(self, line: DecisionLine) -> Prompt:
        tokens = prompt_tokens(line)
        request = make_request("", tokens, len(tokens), 0, self.block_size)
        layout = f"<{len(request.block_hashes)}q"
        return Prompt(
            line,
            len(tokens),
            struct.pack(layout, *request.block_hashes),
            struct.pack(layout, *request.sequence_hashes),
        )

    def cut(self, number: int, blocks: int, known: int) -> Prompt:
        """A prompt of exactly `blocks` blocks, different for every number.

        Every second one begins as one of the first `known` prompts of the trace, which engines
        hold, for up to half of its length; the rest, and all of the others, is new.
        """
        held = self.at(number // 2 % known).local[: blocks // 2 * 8] if number % 2 else b""
        fresh = random.Random(f"{number}/{blocks}").randbytes(8 * blocks)
        local = held + fresh[len(held) :]
        line = DecisionLine(0.0, blocks * self.block_size, 0, [])
        return Prompt(line, blocks * self.block_size, local, sequence_hashes_bytes(local))


def _hashes(data: bytes) -> Sequence[int]:
    return struct.unpack(f"<{len(data) // 8}q", data)


def fields(prompt: Prompt) -> dict[str, object]:
    """A prompt as the fields of a body."""
    return {
        "model_name": MODEL_NAME,
        "block_hashes": _hashes(prompt.local),
        "sequence_hashes": _hashes(prompt.sequence),
        "isl_tokens": prompt.isl_tokens,
    }


def select_request(prompt: Prompt, asks: Mapping[str, object] | None = None) -> bytes:
    """`asks` stands in the body besides."""
    return http("POST", "/select", encode_json({**fields(prompt), **(asks or {})}))


def msgpack_select_request(prompt: Prompt) -> bytes:
    """The same fields in MessagePack, hash lists as `bin`."""
    body = encode_msgpack(
        {
            "model_name": MODEL_NAME,
            "block_hashes": prompt.local,
            "sequence_hashes": prompt.sequence,
            "isl_tokens": prompt.isl_tokens,
        }
    )
    return http("POST", "/select", body, "application/msgpack")


# On each connection a reservation's completion comes this many prompts later, and its end so many.
# With 32 connections 512 are alive at a time, on 16 ranks 32 on each, 12 of them in prefill.
PREFILL_LAG, FREE_LAG = 6, 16


def lifecycle_requests(
    prompts: Sequence[Prompt], prefix: str, id_field: str = "reservation_id"
) -> list[bytes]:
    """select_and_reserve, prefill_complete and DELETE of every prompt, as much later as above.

    For one connection: each request needs the answers to those before it. id_field: in which the
    body names the reservation.
    """
    count, requests = len(prompts), []
    for step in range(count + FREE_LAG):
        if step < count:
            body = {id_field: f"{prefix}-{step}", **fields(prompts[step])}
            requests.append(http("POST", "/select_and_reserve", encode_json(body)))
        if 0 <= (at := step - PREFILL_LAG) < count:
            requests.append(http("POST", f"/reservations/{prefix}-{at}/prefill_complete"))
        if (at := step - FREE_LAG) >= 0:
            requests.append(http("DELETE", f"/reservations/{prefix}-{at}"))
    return requests
