"""Who chooses a worker, as the gateway asks: the selector in this process, or one beside it."""

from typing import TYPE_CHECKING, Protocol

from lean_selector.gateway.lease import WorkerLease

if TYPE_CHECKING:
    from lean_selector.prompts.routed import Routed


class NobodyChose(Exception):
    """There is no answer from the selector, or it knows no worker: the gateway takes them in turn.

    `why` is a word for the metrics."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Shed(Exception):
    """All workers are busy: the client is to come again."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class Chooser(Protocol):
    async def choose(
        self, routed: "Routed", reservation_id: str, avoided: frozenset[int]
    ) -> WorkerLease:
        """Chooses a worker that is not in `avoided`, and books it. Raises NobodyChose and Shed.

        Whoever cancels it holds nothing.
        """
        ...
