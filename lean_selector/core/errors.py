"""Errors that the core raises, one tree:

    SelectorError
      BadRequest     400  the request makes no sense, whatever the state
      NotFound       404  it names something that does not exist
      Conflict       409  it clashes with what exists
      Unavailable    503  no worker can take it now
        AllWorkersBusy    those that could are above their thresholds

Each class carries the HTTP status that fits it, so that a server needs no second table. A method
that raises one has changed nothing. Messages are part of the API (spec: selection.md and
slot_tracker.md).
"""


class SelectorError(Exception):
    """Base of the tree; never raised itself."""

    status = 500

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class BadRequest(SelectorError):
    status = 400


class NotFound(SelectorError):
    status = 404


class Conflict(SelectorError):
    status = 409


class Unavailable(SelectorError):
    status = 503


class AllWorkersBusy(Unavailable):
    """Shed: every worker that could take the request is busy (request-rejection document)."""

    def __init__(self) -> None:
        super().__init__("All workers are busy, please retry later")


class DuplicateRequest(Conflict):
    """The id is live already, on `worker_id`/`dp_rank`."""

    def __init__(self, request_id: str, worker_id: int, dp_rank: int) -> None:
        where = rank_text(worker_id, dp_rank)
        super().__init__(f"Request {request_id} already exists (assigned to worker {where})")


def rank_text(worker_id: int, dp_rank: int) -> str:
    """A rank as the documented error texts print it."""
    return f"WorkerWithDpRank {{ worker_id: {worker_id}, dp_rank: {dp_rank} }}"
