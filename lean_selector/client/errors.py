"""Errors that the clients raise, as a class tree:

    ClientError
      ServiceUnreachable     the service did not respond: connection refused, lost or timed out
      ServiceRefused         the service answered with an error: .status, .error (the message)
        InvalidRequest       400, 413, 415, 422
        NotFound             404
        AlreadyExists        409
        NoWorkerAvailable    503, 429: retry later
      WorkerError            the request to a worker failed: .worker_id, .endpoint
        WorkerUnreachable    no connection, or the connection ended before an answer
        WorkerRefused        the worker answered with an error: .status, .error (the message)
        WorkerStreamBroken   the worker's response timed out, ended early or was malformed
      OtherEventLoop         the client was used on another event loop before
      ClientClosed           the client was closed before or during the call
      ModelNotNamed          the selector serves several models, but the router has no model_name
      WrongBlockSize         the router and the workers have different block sizes

A method that raises one of these errors has left no reservation behind, unless its docstring says
otherwise."""

from collections.abc import Iterable
from typing import ClassVar


class ClientError(Exception):
    pass


class ServiceUnreachable(ClientError):
    """`never_sent`: True if the request was certainly not sent."""

    def __init__(self, where: str, reason: str, *, never_sent: bool = False) -> None:
        super().__init__(f"{where}: {reason}")
        self.never_sent = never_sent


class ServiceRefused(ClientError):
    """`retry_after_s`: the header retry-after of the answer, in seconds."""

    STATUSES: ClassVar[tuple[int, ...]] = ()

    def __init__(self, status: int, error: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{status}: {error}")
        self.status = status
        self.error = error
        self.retry_after_s = retry_after_s


class InvalidRequest(ServiceRefused):
    STATUSES = (400, 413, 415, 422)


class NotFound(ServiceRefused):
    STATUSES = (404,)


class AlreadyExists(ServiceRefused):
    STATUSES = (409,)


class NoWorkerAvailable(ServiceRefused):
    STATUSES = (429, 503)


def service_refusal(status: int, error: str, retry_after_s: float | None = None) -> ServiceRefused:
    """Return the error for a response of the service with this HTTP status."""
    for kind in (InvalidRequest, NotFound, AlreadyExists, NoWorkerAvailable):
        if status in kind.STATUSES:
            return kind(status, error, retry_after_s)
    return ServiceRefused(status, error, retry_after_s)


class WorkerError(ClientError):
    def __init__(self, worker_id: int, endpoint: str, reason: str) -> None:
        super().__init__(f"worker {worker_id} at {endpoint}: {reason}")
        self.worker_id = worker_id
        self.endpoint = endpoint


class WorkerUnreachable(WorkerError):
    """`never_connected`: True if the request was certainly not sent."""

    def __init__(
        self, worker_id: int, endpoint: str, reason: str, *, never_connected: bool = False
    ) -> None:
        super().__init__(worker_id, endpoint, reason)
        self.never_connected = never_connected


class WorkerRefused(WorkerError):
    def __init__(self, worker_id: int, endpoint: str, status: int, error: str) -> None:
        super().__init__(worker_id, endpoint, f"{status}: {error}")
        self.status = status
        self.error = error


class WorkerStreamBroken(WorkerError):
    pass


class ClientClosed(ClientError):
    def __init__(self, endpoint: str) -> None:
        super().__init__(f"{endpoint}: the client is closed")


class OtherEventLoop(ClientError):
    def __init__(self) -> None:
        super().__init__(
            "this client was used on another event loop, which its connections belong to; create "
            "one client per asyncio.run()"
        )


class ModelNotNamed(ClientError):
    def __init__(self, served: Iterable[str]) -> None:
        names = ", ".join(sorted(served))
        super().__init__(f"the selector serves several models, set model_name: {names}")


class WrongBlockSize(ClientError):
    def __init__(self, ours: int, theirs: int) -> None:
        super().__init__(f"the router has block_size {ours}, the workers have {theirs}")
