"""Answers of the service, as far as the demo reads them."""

import msgspec


class Worker(msgspec.Struct):
    worker_id: int
    lifecycle: str
    not_schedulable_reasons: list[str] = []


class Overlap(msgspec.Struct):
    gpu: int


class Selection(msgspec.Struct):
    worker_id: int
    overlap: Overlap


class RankLoad(msgspec.Struct):
    """One row of /loads."""

    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int


class PartitionLoad(msgspec.Struct):
    """One partition of /loads, with what waits in its queue."""

    loads: list[RankLoad]
    pending_count: int
    pending_isl_tokens: int
