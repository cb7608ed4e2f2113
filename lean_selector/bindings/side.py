"""What one loop has of a remote service: connections, and what it tells beside its calls."""

import asyncio
import contextlib
import logging
from collections import deque
from typing import Any

from lean_selector.client import calls
from lean_selector.client.calls import Call
from lean_selector.client.drivers import BOOKING_GRACE_S
from lean_selector.client.errors import ClientError, NotFound, ServiceRefused
from lean_selector.client.transport import ServiceConnection
from lean_selector.tasks import watched

# Output blocks that wait to be told. Of a service that is away for longer they are lost; what they
# weigh ends with their requests.
MAX_UNTOLD = 4096
_log = logging.getLogger("lean_selector.bindings")


class Side:
    """From its first exchange to `close`."""

    def __init__(self, service: ServiceConnection) -> None:
        self.service = service
        self.lost = 0  # output blocks that were never told
        self._untold: deque[tuple[str, Call[None]]] = deque()
        self._telling: asyncio.Task[None] | None = None
        self._undoing: set[asyncio.Task[None]] = set()

    # -- what does not wait --------------------------------------------------------------------

    def tell(self, selection_id: str, call: Call[None]) -> None:
        """Ask in the background, in the order of the calls; an unknown id is nobody's fault."""
        if len(self._untold) >= MAX_UNTOLD:
            self.lost += 1
            return
        self._untold.append((selection_id, call))
        if self._telling is None or self._telling.done():
            self._telling = watched("telling the service", self._tell())

    async def _tell(self) -> None:
        while self._untold:
            _, call = self._untold.popleft()
            try:
                await self.service.exchange(call)
            except NotFound:
                pass  # it has ended meanwhile
            except ClientError as error:
                self.lost += 1
                _log.debug("an output block was not told: %s", error)

    def forget(self, selection_id: str) -> None:
        """It ends: what is still to be told of it counts no more."""
        if self._untold:
            self._untold = deque(each for each in self._untold if each[0] != selection_id)

    # -- bookings that nobody waits for --------------------------------------------------------

    def take_back(self, booking: asyncio.Task[Any] | None, selection_id: object) -> None:
        """Free what a booking may have left, once it is known what became of it; None: it is."""
        if isinstance(selection_id, str):
            task = watched("taking back a booking", self._taken_back(booking, selection_id))
            self._undoing.add(task)
            task.add_done_callback(self._undoing.discard)

    async def _taken_back(self, booking: asyncio.Task[Any] | None, selection_id: str) -> None:
        if booking is not None and not await self._may_exist(booking):
            return
        with contextlib.suppress(ClientError):
            await self.service.exchange(calls.free(selection_id))

    async def _may_exist(self, booking: asyncio.Task[Any]) -> bool:
        await asyncio.wait({booking}, timeout=BOOKING_GRACE_S)
        if not booking.done():
            booking.cancel()  # which takes it out of a queue
            await asyncio.wait({booking})
        return booking.cancelled() or not isinstance(booking.exception(), ServiceRefused)

    async def close(self) -> None:
        waiting = {*self._undoing, *([self._telling] if self._telling is not None else [])}
        if waiting:
            await asyncio.wait(waiting)
        await self.service.close()
