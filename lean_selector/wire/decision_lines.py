"""Lines of a decision log: JSON objects, one for each request that has ended.

A line begins as one of a Mooncake trace, with timestamp, lengths and hash_ids of 512-token blocks;
a trace is a log without the rest. Numbers named `_ms` count from the request's arrival. Each file
begins with a line that tells the settings, as does a file that a new process goes on with.
"""

import msgspec

SPAN_TOKENS = 512
VERSION = 1
HEADER_START = b'{"decision_log":'


class LogHeader(msgspec.Struct):
    """The first line of a file."""

    decision_log: int  # VERSION
    share: float  # of the requests, drawn by their ids
    settings: dict[str, object]  # the router's, where they are not its defaults


class LoggedCandidate(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The cost of a candidate and its terms, as they were before the request was booked."""

    worker: int
    rank: int
    cost: float
    cached: int  # tokens of the prompt on the device
    prefill_tokens: int  # waiting there
    decode_blocks: int
    requests: int
    credit_blocks: float
    evicted_blocks: float = 0  # only under the policy latency


class DecisionLine(msgspec.Struct, omit_defaults=True, gc=False):
    """One request. `timestamp` is its arrival, in ms; of a log, since the epoch."""

    timestamp: float
    input_length: int  # tokens
    output_length: int  # tokens
    hash_ids: list[int]  # of all spans of 512 tokens, the last one possibly partial
    model: str = ""
    tenant: str = ""
    worker: int | None = None  # that served it
    rank: int = 0
    selected: int | None = None  # the worker chosen here, where another balancer took `worker`
    waited_ms: float = 0  # in the queue, until it was booked
    prefill_ms: float | None = None  # until its prefill was complete
    ttft_ms: float | None = None  # until its first token, as reported
    ended_ms: float | None = None
    cached: int | None = None  # tokens of the prompt that the index found on the rank
    engine_cached: int | None = None  # the engine's own count
    pinned: bool = False
    allowed: list[int] | None = None  # workers; None: all
    candidates: list[LoggedCandidate] = []  # the cheapest first; of some requests
