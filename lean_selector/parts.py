"""The parts of which a service is composed. Each feature is a part, of a module that is imported
only if the feature is on."""

from collections.abc import Awaitable, Iterable
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from lean_selector.api.routes import Route
    from lean_selector.wire.exposition import Families


class Part:
    """A part of a service, which defines those of these methods that it needs."""

    def routes(self) -> "Iterable[Route]":
        return ()

    def families(self) -> "Families":
        """Return the part's metrics."""
        return []

    def start(self) -> None:
        """Begins outbound work. Called on the running event loop, once the service listens."""

    def tick(self, now: float) -> None:
        """Called every TICK_S."""

    def refuse_new(self) -> None:
        """Called when a shutdown begins; open requests are still answered."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in progress that a shutdown waits for, besides HTTP requests."""
        return True

    def close(self) -> Awaitable[None] | None:
        """Called at the end of the shutdown; may be a coroutine."""
        return None


P = TypeVar("P", bound=Part)


class Parts(Part):
    """Parts in the order in which they start; they are closed in the reverse order."""

    def __init__(self) -> None:
        self._parts: list[Part] = []

    def add(self, part: P) -> P:
        self._parts.append(part)
        return part

    def routes(self) -> "tuple[Route, ...]":
        return tuple(route for part in self._parts for route in part.routes())

    def families(self) -> "Families":
        return [family for part in self._parts for family in part.families()]

    def start(self) -> None:
        for part in self._parts:
            part.start()

    def tick(self, now: float) -> None:
        for part in self._parts:
            part.tick(now)

    def refuse_new(self) -> None:
        for part in self._parts:
            part.refuse_new()

    @property
    def is_idle(self) -> bool:
        return all(part.is_idle for part in self._parts)

    async def close(self) -> None:
        for part in reversed(self._parts):
            closing = part.close()
            if closing is not None:
                await closing
