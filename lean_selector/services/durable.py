"""Changes that are on disk before they are answered, where state is kept.

A handler has done its work by then, and whoever asks meanwhile sees it (decision D10): only the
answer waits. Changes that come together are written together. They are what an administrator may
do: workers, thresholds and peers.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from lean_selector.access.roles import ADMIN
from lean_selector.http.head import Request
from lean_selector.services.gate import Endpoint, Route
from lean_selector.services.replies import Answer, LaterReply


class Saving(Protocol):
    """What puts changes on disk."""

    def note(self) -> None: ...

    def when_saved(self, then: Callable[[], None]) -> bool: ...


def durable(routes: Sequence[Route], saving: Saving) -> tuple[Route, ...]:
    """The routes; those that change the catalog answer when that is on disk, or cannot be.

    A request that is refused has changed nothing, and is answered at once.
    """
    return tuple(
        (method, path, role, _durable(endpoint, saving) if role == ADMIN else endpoint)
        for method, path, role, endpoint in routes
    )


def _durable(endpoint: Endpoint, saving: Saving) -> Endpoint:
    def answer(request: Request, param: bytes | None) -> Answer:
        made = endpoint(request, param)
        saving.note()
        if not isinstance(made, bytes):
            return made
        response: bytes = made
        later = LaterReply(is_being_made=True)
        return later if saving.when_saved(lambda: later.resolve(response)) else response

    return answer
