"""Errors that the core raises, one tree:

    SelectorError
      BadRequest     400  the request is invalid in any state
      NotFound       404  the request names something that does not exist
      Conflict       409  the request conflicts with existing state
      Unavailable    503  no worker can serve the request now
        AllWorkersBusy    the eligible workers are above their thresholds
        WaitedTooLong     the request was queued for too long
        NoWorkers         the model has no schedulable worker

Each class has its HTTP status. A method that raises one has changed nothing. Messages are part of
the API (spec: selection.md and slot_tracker.md)."""

from typing import ClassVar


class SelectorError(Exception):
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
    """The request was shed, because every eligible worker is busy (request-rejection document)."""

    def __init__(self) -> None:
        super().__init__("All workers are busy, please retry later")


class WaitedTooLong(Unavailable):
    """The request was shed, because no eligible rank had room before the queue's time limit."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"no worker became free within {limit_s:g} seconds")
        self.limit_s = limit_s


class NoWorkers(Unavailable):
    """This tenant of the model has no schedulable worker.

    `is_missing`: the tenant had a worker before, or no worker of any model is registered. Otherwise
    the model is unknown or, with `other_tenants`, only this tenant of the model. `known_models`:
    models with schedulable workers, sorted. `other_tenants`: a text that lists the model's tenants
    with schedulable workers."""

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
    """No worker serves this name, neither as a model nor as an adapter."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model}` does not exist.")
        self.model = model


class DuplicateRequest(Conflict):
    """A live request on `worker_id`/`dp_rank` already has the id."""

    def __init__(self, request_id: str, worker_id: int, dp_rank: int) -> None:
        where = rank_text(worker_id, dp_rank)
        super().__init__(f"Request {request_id} already exists (assigned to worker {where})")


def rank_text(worker_id: int, dp_rank: int) -> str:
    """Return a rank as the documented error texts name it."""
    return f"WorkerWithDpRank {{ worker_id: {worker_id}, dp_rank: {dp_rank} }}"
