"""What one drawing of the demo shows."""

from collections.abc import Sequence

import msgspec


class WorkerRow(msgspec.Struct, frozen=True):
    """One worker: the first three as the service counts them, the rest as the engine does."""

    worker_id: int
    prefill_tokens: int
    decode_blocks: int
    requests: int
    cached_blocks: int
    capacity_blocks: int


class Snapshot(msgspec.Struct, frozen=True):
    """Everything that one drawing shows. Rates are over the time since the last drawing."""

    elapsed_s: float
    seconds: float
    workers: Sequence[WorkerRow]
    calls_per_s: float
    finished: int
    hit_rate: float
    select_p50_s: float
    select_p99_s: float
    errors: int
