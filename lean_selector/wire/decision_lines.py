"""Lines of a decision log: JSON objects, one for each request that has ended.

A line starts with the fields of a Mooncake trace (timestamp, lengths, and hash_ids of 512-token
blocks), so a trace is a log without the other fields. Numbers named `_ms` count from the request's
arrival. A file begins with a line of settings; a new process that continues a file writes one
too."""

import msgspec

SPAN_TOKENS = 512
VERSION = 1
HEADER_START = b'{"decision_log":'


class LogHeader(msgspec.Struct):
    """The first line of a file."""

    decision_log: int  # VERSION
    share: float  # share of the requests that are logged, drawn by their ids
    settings: dict[str, object]  # the router's settings that differ from the defaults


class LoggedCandidate(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The cost of a candidate and its terms, before the request was booked."""

    worker: int
    rank: int
    cost: float
    cached: int  # prompt tokens cached on the device
    prefill_tokens: int  # waiting on the rank
    decode_blocks: int
    requests: int
    credit_blocks: float
    evicted_blocks: float = 0  # only under the policy latency


class DecisionLine(msgspec.Struct, omit_defaults=True, gc=False):
    """One request. `timestamp` is its arrival in ms, in a log since the epoch."""

    timestamp: float
    input_length: int  # tokens
    output_length: int  # tokens
    hash_ids: list[int]  # one per span of 512 tokens, including a partial last one
    model: str = ""
    tenant: str = ""
    worker: int | None = None  # the worker that served the request
    rank: int = 0
    selected: int | None = None  # the worker chosen here, if another balancer chose `worker`
    waited_ms: float = 0  # time in the queue until it was booked
    prefill_ms: float | None = None  # time until its prefill was complete
    ttft_ms: float | None = None  # time until its first token, as reported
    ended_ms: float | None = None
    cached: int | None = None  # prompt tokens that the index predicted as cached on the rank
    engine_cached: int | None = None  # the engine's own count
    pinned: bool = False
    allowed: list[int] | None = None  # workers; None: all
    candidates: list[LoggedCandidate] = []  # cheapest first; only for a share of the requests
