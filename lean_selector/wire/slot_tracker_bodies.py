"""Request bodies of the slot tracker, as typed structs (spec slot_tracker.md 1.2 and 1.3).

Unlike in the selector's bodies, no field may be null. A field with a default may be omitted.
Unknown fields are ignored."""

import msgspec

from lean_selector.core.load.shapes import WorkerRow
from lean_selector.core.numbers import U32, NonNegative, check_u64
from lean_selector.wire.scalars import Id, hashes_from_json
from lean_selector.wire.selection_bodies import Scoped


class ScopedBody(Scoped, kw_only=True):
    """The fields of every body: the model and the tenant (`tenant_id` or `routing_group`, D2)."""

    model_name: str


class WorkerBody(ScopedBody, kw_only=True):
    """A body that names a worker."""

    worker_id: NonNegative

    def __post_init__(self) -> None:
        check_u64("worker_id", self.worker_id)


class RegisterRequest(WorkerBody, kw_only=True):
    """The body of POST /register, which registers a worker with the slot tracker."""

    block_size: U32
    dp_start: U32
    dp_size: U32

    def row(self) -> WorkerRow:
        return WorkerRow(
            self.worker_id,
            self.model_name,
            self.group(),
            self.block_size,
            self.dp_start,
            self.dp_size,
        )


class UnregisterRequest(WorkerBody, kw_only=True):
    """The body of POST /unregister, which removes a worker from the slot tracker."""


class LifecycleRequest(ScopedBody, kw_only=True):
    """The body of POST /prefill_complete and /free of the slot tracker."""

    request_id: str


class PotentialLoadsRequest(ScopedBody, kw_only=True):
    """The body of POST /potential_loads of the slot tracker."""

    sequence_hashes: msgspec.Raw  # 64-bit integers
    new_isl_tokens: NonNegative = 0

    def __post_init__(self) -> None:
        check_u64("new_isl_tokens", self.new_isl_tokens)

    def hashes(self) -> bytes:
        """Return `sequence_hashes` packed, 8 bytes each. Raises msgspec.ValidationError."""
        return hashes_from_json("sequence_hashes", self.sequence_hashes)


class AddRequest(PotentialLoadsRequest, kw_only=True):
    """The body of POST /add, which adds a request to a rank's load in the slot tracker."""

    request_id: Id
    worker_id: NonNegative
    dp_rank: U32

    def __post_init__(self) -> None:
        super().__post_init__()
        check_u64("worker_id", self.worker_id)
