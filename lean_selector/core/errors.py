"""Errors that the core raises, one tree:

    SelectorError
      BadRequest     400  the request makes no sense, whatever the state
      NotFound       404  it names something that does not exist
      Conflict       409  it clashes with what exists
      Unavailable    503  no worker can take it now
        AllWorkersBusy    those that could are above their thresholds
        WaitedTooLong     it was parked for longer than it may be
        NoWorkers         the model has none that are schedulable

Each class carries the HTTP status that fits it, so that a server needs no second table. A method
that raises one has changed nothing. Messages are part of the API (spec: selection.md and
slot_tracker.md).
"""

from typing import ClassVar


class SelectorError(Exception):
    """Base of the tree; never raised itself."""

    STATUS: ClassVar[int] = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
        self.status = self.STATUS


class BadRequest(SelectorError):
    STATUS: ClassVar[int] = 400


class NotFound(SelectorError):
    STATUS: ClassVar[int] = 404


class Conflict(SelectorError):
    STATUS: ClassVar[int] = 409


class Unavailable(SelectorError):
    STATUS: ClassVar[int] = 503


class AllWorkersBusy(Unavailable):
    """Shed: every worker that could take the request is busy (request-rejection document)."""

    def __init__(self) -> None:
        super().__init__("All workers are busy, please retry later")


class WaitedTooLong(Unavailable):
    """Shed: no rank that could take the request had room while it was queued."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"no worker became free within {limit_s:g} seconds")
        self.limit_s = limit_s


class NoWorkers(Unavailable):
    """The model and tenant have no schedulable worker.

    `is_missing`: they had one, or there are no workers at all; otherwise the name is unknown, or
    with `other_tenants` only that of the tenant. `known_models` have schedulable workers, sorted;
    `other_tenants`, as text: tenants of this model that have some.
    """

    def __init__(
        self,
        message: str,
        is_missing: bool,
        known_models: list[str],
        other_tenants: str | None = None,
    ) -> None:
        super().__init__(message)
        self.is_missing = is_missing
        self.known_models = known_models
        self.other_tenants = other_tenants


class UnknownModel(NotFound):
    """No worker serves it, neither as a model nor as an adapter."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model}` does not exist.")
        self.model = model


class DuplicateRequest(Conflict):
    """The id is live already, on `worker_id`/`dp_rank`."""

    def __init__(self, request_id: str, worker_id: int, dp_rank: int) -> None:
        where = rank_text(worker_id, dp_rank)
        super().__init__(f"Request {request_id} already exists (assigned to worker {where})")


def rank_text(worker_id: int, dp_rank: int) -> str:
    """A rank as the documented error texts print it."""
    return f"WorkerWithDpRank {{ worker_id: {worker_id}, dp_rank: {dp_rank} }}"
