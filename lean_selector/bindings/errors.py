"""What the class raises beside ValueError, which is for what makes no sense whatever the state."""

from lean_selector.core.errors import NoWorkers, SelectorError


class SelectionServiceError(Exception):
    """A refusal that depends on the state. `status_code` is what HTTP would answer.

    `kind`: not_found, conflict, scheduler (nobody can take it now), not_ready (there is no
    worker at all, or the service is shut down), sequence (the worker has no such rank), unreachable
    (RemoteSelectionService only).
    """

    def __init__(self, message: str, status_code: int, kind: str) -> None:
        super().__init__(message)
        self.status_code = status_code
        self.kind = kind


_KINDS = {404: "not_found", 409: "conflict", 429: "scheduler", 503: "scheduler"}
# Over HTTP an answer has no kind: these are the words of one that is `not_ready`.
_NOT_READY = ("no schedulable workers", "selection service is shutting down")
_NO_SUCH_RANK = "Worker WorkerWithDpRank"

NOT_FOUND = 404


def refusal_of(status: int, message: str) -> ValueError | SelectionServiceError:
    """What an answer of this status is raised as."""
    if status in (400, 413, 415, 422):
        return ValueError(message)
    kind = _KINDS.get(status, "internal")
    if message.startswith(_NOT_READY):
        kind = "not_ready"
    elif message.startswith(_NO_SUCH_RANK):
        kind = "sequence"
    return SelectionServiceError(message, status, kind)


def refusal(error: SelectorError) -> ValueError | SelectionServiceError:
    """What an error of the core is raised as."""
    if isinstance(error, NoWorkers):
        return SelectionServiceError(error.message, error.status, "not_ready")
    return refusal_of(error.status, error.message)


def shut_down() -> SelectionServiceError:
    return SelectionServiceError("selection service is shutting down", 503, "not_ready")
