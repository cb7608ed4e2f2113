"""Errors that the core raises, as a class tree:

    SelectorError
      BadRequest     400  the request is invalid, whatever the state
      NotFound       404  the request names something that does not exist
      Conflict       409  the request conflicts with existing state
      Unavailable    503  no worker can serve the request now
        AllWorkersBusy    the eligible workers are above their thresholds
        WaitedTooLong     the request was queued for too long
        NoWorkers         the model has no schedulable worker
      TooLate        504  the request waits, and cannot have its first token in time
        NoPrefillWorker   a pair of workers was asked for, and none can do the prefill

Each class has its HTTP status. A method that raises an error has changed nothing. Messages are part
of the API (spec: selection.md and slot_tracker.md)."""

from typing import ClassVar, Final

NO_ENDPOINTS: Final = "no endpoints available to route work"


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
    """The request was shed, because all eligible workers are above a load threshold."""

    def __init__(self) -> None:
        super().__init__("All workers are busy, please retry later")


class WaitedTooLong(Unavailable):
    """The request was shed, because it waited in the queue up to the queue's time limit."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(f"no worker became free within {limit_s:g} seconds")
        self.limit_s = limit_s


class TooLate(SelectorError):
    """The request left the queue, because its first token would come after its deadline."""

    STATUS: ClassVar[int] = 504

    def __init__(self, needs_s: float, left_s: float) -> None:
        super().__init__(
            f"the first token takes about {needs_s:.3g} seconds, and {left_s:.3g} are left"
        )


class NoWorkers(Unavailable):
    """No worker that serves this model for this tenant can be chosen.

    `is_missing`: True if workers are missing: the tenant has or had a worker of the model, or
    no model has a schedulable worker. False if the model or the tenant is unknown.
    `known_models`: the names of the models with schedulable workers, sorted.
    `other_tenants`: a text with the tenants that have schedulable workers of the model, or None."""

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


class NoPrefillWorker(Unavailable):
    """A pair of workers was asked for, and no worker can do the prefill. `reason` is one word."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"no usable prefill worker: {reason}")
        self.reason = reason


class UnknownModel(NotFound):
    """No worker serves a model or a LoRA adapter with this name."""

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{model}` does not exist.")
        self.model = model


class DuplicateRequest(Conflict):
    """A request that has not ended yet has the same id on this rank."""

    def __init__(self, request_id: str, worker_id: int, dp_rank: int) -> None:
        where = rank_text(worker_id, dp_rank)
        super().__init__(f"Request {request_id} already exists (assigned to worker {where})")


def rank_text(worker_id: int, dp_rank: int) -> str:
    """Return the text by which error messages name a rank, as in Dynamo's messages."""
    return f"WorkerWithDpRank {{ worker_id: {worker_id}, dp_rank: {dp_rank} }}"
