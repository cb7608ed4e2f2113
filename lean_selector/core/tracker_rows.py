"""Rows of the slot tracker: its workers, and the loads of their ranks."""

import msgspec


class WorkerRow(msgspec.Struct, frozen=True, gc=False):
    """A registered worker and its contiguous range of ranks."""

    worker_id: int
    model_name: str
    tenant_id: str
    block_size: int
    dp_start: int
    dp_size: int

    @property
    def ranks(self) -> range:
        return range(self.dp_start, self.dp_start + self.dp_size)


class LoadRow(msgspec.Struct, frozen=True, gc=False):
    """Load of one rank."""

    model_name: str
    tenant_id: str
    worker_id: int
    dp_rank: int
    active_prefill_tokens: int
    active_decode_blocks: int


class PotentialLoadRow(msgspec.Struct, frozen=True, gc=False):
    """What the load of one rank would be with one more request on it."""

    worker_id: int
    dp_rank: int
    potential_prefill_tokens: int
    potential_decode_blocks: int
    active_requests: int  # without that request
