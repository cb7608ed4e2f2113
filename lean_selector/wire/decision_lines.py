"""The lines of a decision log: JSON objects, one for each request that has ended.

The first fields of a line are those of a Mooncake trace: timestamp, lengths, and hash_ids of
512-token blocks. The other fields may be missing, so a Mooncake trace can be read as a log. Fields
ending in `_ms` count milliseconds from the request's arrival. A file begins with a line of
settings. A process that appends to an existing file also begins with a line of settings."""

import msgspec

SPAN_TOKENS = 512
VERSION = 1
HEADER_START = b'{"decision_log":'


class LogHeader(msgspec.Struct):
    """A line with the settings of the process that writes the lines after it."""

    decision_log: int  # VERSION
    share: float  # share of the requests that are logged, drawn by their ids
    settings: dict[str, object]  # those of the router's settings that differ from the defaults


class DecisionLine(msgspec.Struct, omit_defaults=True, gc=False):
    """One ended request. `timestamp`: its arrival in ms (Unix time, except in Mooncake traces)."""

    timestamp: float
    input_length: int  # tokens
    output_length: int  # tokens
    hash_ids: list[int]  # one per 512 tokens; a partial span at the end has one too
    model: str = ""
    tenant: str = ""
    worker: int | None = None  # the worker that served the request
    rank: int = 0
    selected: int | None = None  # our choice, if another balancer chose `worker`
    waited_ms: float = 0  # ms in the queue before the request was booked
    prefill_ms: float | None = None  # ms until the prefill was complete
    ttft_ms: float | None = None  # ms until the first token, as reported
    ended_ms: float | None = None
    cached: int | None = None  # prompt tokens cached on the rank, according to the index
    engine_cached: int | None = None  # cached prompt tokens, according to the engine
    prefill_worker: int | None = None  # of a pair: who did the prefill; `cached` is there, too
    prefill_rank: int = 0
    pinned: bool = False
    allowed: list[int] | None = None  # allowed workers; None: all
