"""What the demo keeps: its options, requests, what an engine did with them, what came of them."""

from collections.abc import Sequence

import msgspec


class Held(msgspec.Struct, frozen=True):
    """What holding a chain did: blocks [0, hit) were there, [hit, hit + stored) are new.

    The rest of the chain found no room. evicted: hashes that had to go, in order.
    """

    hit: int
    stored: int
    evicted: list[int]


class Request(msgspec.Struct, frozen=True):
    """A prompt and what is generated for it.

    tokens: prompt, then the output as far as it is known beforehand. The hash lists have one
    entry per full block of tokens, signed 64 bits; the first isl_tokens // block_size are the
    prompt's. output_blocks: blocks that decoding fills.
    """

    request_id: str
    tokens: Sequence[int]
    isl_tokens: int
    prompt_blocks: int
    output_blocks: int
    block_hashes: Sequence[int]
    sequence_hashes: Sequence[int]


class EngineSpeed(msgspec.Struct, frozen=True):
    """How fast an engine computes. One prompt is prefilled at a time, decodes run together."""

    prefill_tokens_per_s: float = 8_000.0
    decode_tokens_per_s: float = 160.0  # of one request


class Running(msgspec.Struct):
    """A request inside an engine. held is the number of its leading blocks in the cache."""

    request: Request
    held: int
    hit_blocks: int
    prefill_done_at: float


class Turn(msgspec.Struct, frozen=True):
    """A request, and the pause of its user before it."""

    thinking_s: float
    request: Request


class Recorded(msgspec.Struct, frozen=True):
    """A request as it was played: without tokens, with its time of arrival and the choice."""

    arrival_s: float
    request: Request
    worker_id: int


class Outcome(msgspec.Struct, frozen=True):
    """One row of the table."""

    policy: str
    hit_rate: float  # prompt blocks found in the cache / prompt blocks
    imbalance: float  # prefill tokens computed by the busiest engine / by the average one
    ttft_p50_s: float  # arrival to the end of prefill, queueing for the engine included
    ttft_p99_s: float


class Options(msgspec.Struct, frozen=True):
    """The command line."""

    seconds: float
    workers: int
    seed: int
    port: int
    command: str | None
