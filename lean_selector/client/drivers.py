"""Sends a router's requests, and makes sure that every reservation is eventually freed.

A driver owns the connections and the reservations of one router. In background tasks, the driver
reports the progress of requests to the service, and frees reservations."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Coroutine
from functools import cached_property
from typing import Any, TypeVar

import httpx

from lean_selector.client.calls import Call
from lean_selector.client.client_settings import Access, Timeouts
from lean_selector.client.errors import ClientClosed, ClientError, OtherEventLoop, ServiceRefused
from lean_selector.client.reservation import Reservation, release, report
from lean_selector.client.transport import (
    MAX_ERROR_BYTES,
    OPEN_ERRORS,
    WORKER_LIMITS,
    Opened,
    OpenStream,
    ServiceConnection,
    not_opened,
    stream_request,
    worker_refused,
)

T = TypeVar("T")

# At the end of a stream, the caller waits for the release, which takes a millisecond. If the
# service is unreachable, the release continues in the background after this time.
RELEASE_WAIT_S = 1.0
LAST_FREE_S = 1.0  # for the last attempt when the event loop ends
CLOSE_WAIT_S = 10.0  # longer than all attempts of one release
# If a call that reserves is cancelled, wait this long for its response, so that it can be freed;
# then close the connection, which removes the request from the queue.
RESERVE_GRACE_S = 0.5


class Driver:
    """Sends one router's requests. Not thread-safe: all calls must come from one event loop."""

    def __init__(
        self,
        endpoint: str,
        timeouts: Timeouts,
        sleep: Callable[[float], Awaitable[object]] | None,
        access: Access | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._timeouts = timeouts
        self._is_closing = False
        self.pause = asyncio.sleep if sleep is None else sleep
        self._rng = random.Random()
        self._service = ServiceConnection(endpoint, timeouts, access)
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop that first used it
        # Reservations of streams and placements, with the worker's response.
        self._held: dict[Reservation, Opened | None] = {}
        self._reserving: dict[Reservation, asyncio.Task[Any]] = {}  # in flight
        self._reporting: set[Reservation] = set()
        self._releasing: dict[str, asyncio.Task[None]] = {}  # by reservation id
        self._tasks: set[asyncio.Task[None]] = set()  # one report and one release per reservation

    @cached_property
    def _workers(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(limits=WORKER_LIMITS)
        return httpx.AsyncClient(transport=transport, trust_env=False)

    # -- exchanges ---------------------------------------------------------------------------------

    async def ask(self, call: Call[T]) -> T:
        """Sends a request to the service, and returns the parsed response. Raises ClientError."""
        self._check_loop()
        return await self._service.exchange(call)

    def closed(self) -> ClientClosed:
        return ClientClosed(f"{self._endpoint}: the client is closed")

    def _check_open(self) -> None:
        if self._is_closing:
            raise self.closed()

    def _check_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise OtherEventLoop

    async def book(self, call: Call[T], reservation: Reservation) -> T:
        """Sends a request that makes a reservation. If the calling task is cancelled, the request
        continues, so that the reservation can be freed.

        Raises ClientClosed if close() is called before or during this call. If the service makes
        the reservation nevertheless, the driver frees it."""
        self._check_loop()
        while (earlier := self._releasing.get(reservation.id)) is not None:
            await asyncio.wait({earlier})  # otherwise it could free this new reservation
        self._check_open()
        task = asyncio.create_task(self._service.exchange(call))
        self._reserving[reservation] = task
        try:
            outcome = await asyncio.shield(task)
        except asyncio.CancelledError:
            if reservation.ended and not _is_cancelled():
                raise self.closed() from None  # close() cancelled the call
            raise  # the release will find out the outcome
        except BaseException:
            self._reserving.pop(reservation, None)
            raise
        if reservation.ended:
            raise self.closed()
        del self._reserving[reservation]
        self._held[reservation] = None
        return outcome

    async def open(self, step: OpenStream) -> Opened:
        """Sends a request to a worker. Return its open response, or raise a ClientError."""
        self._check_open()
        try:
            response = await self._workers.send(stream_request(step, self._timeouts), stream=True)
        except OPEN_ERRORS as error:
            self._check_open()
            raise not_opened(step, error) from error
        if self._is_closing:
            await response.aclose()
            raise self.closed()
        if response.status_code == 200:
            return Opened(step, response)
        body = b""
        try:
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > MAX_ERROR_BYTES:
                    break
        except httpx.HTTPError:
            pass  # the body is optional: the status is enough
        finally:
            await response.aclose()
        raise worker_refused(step, response.status_code, body)

    # -- reservations ------------------------------------------------------------------------------

    def hold(self, reservation: Reservation, opened: Opened) -> None:
        """Records the worker's open response for a reservation. release() will close it."""
        self._held[reservation] = opened

    def hand_over(self, reservation: Reservation) -> None:
        """Leaves this reservation to the user: the driver will not free it."""
        self._held.pop(reservation, None)

    def report(self, reservation: Reservation) -> None:
        """Starts a background task that reports the request's progress to the service."""
        if reservation not in self._reporting and reservation.next_report() is not None:
            self._reporting.add(reservation)
            self._spawn(self._reported(reservation))

    async def _reported(self, reservation: Reservation) -> None:
        try:
            await report(reservation, self.ask, self.pause, self._rng)
        finally:
            self._reporting.discard(reservation)

    def release(self, reservation: Reservation) -> None:
        """In the background, closes the worker's response and frees the reservation. Idempotent."""
        if not reservation.ended:
            reservation.ended = True
            opened = self._held.pop(reservation, None)
            self._releasing[reservation.id] = self._spawn(self._released(reservation, opened))

    def release_from_anywhere(self, reservation: Reservation) -> None:
        """Schedules the release of a reservation. Any thread may call this, also in a finaliser."""
        if not reservation.ended and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and so has the driver
                self._loop.call_soon_threadsafe(self.release, reservation)

    async def release_now(self, reservation: Reservation) -> None:
        """Releases a reservation. Waits for the end of the release, but at most RELEASE_WAIT_S."""
        self.release(reservation)
        if (task := self._releasing.get(reservation.id)) is not None:
            await asyncio.wait({task}, timeout=RELEASE_WAIT_S)  # does not cancel it

    async def _released(self, reservation: Reservation, opened: Opened | None) -> None:
        try:
            if opened is not None:
                await opened.close()
            call = self._reserving.pop(reservation, None)
            if call is None or await self._may_exist(reservation, call):
                await release(reservation, self.ask, self.pause, self._rng)
        except asyncio.CancelledError:
            # Only the end of the loop, or aclose() at its time limit, cancels this task.
            with contextlib.suppress(ClientError, TimeoutError):
                async with asyncio.timeout(LAST_FREE_S):
                    await self._service.exchange(reservation.freeing())
            raise
        finally:
            if self._releasing.get(reservation.id) is asyncio.current_task():
                del self._releasing[reservation.id]

    async def _may_exist(self, reservation: Reservation, call: asyncio.Task[Any]) -> bool:
        """Return whether the service may hold `reservation`. Waits for `call`, the call that
        makes the reservation, for at most RESERVE_GRACE_S, then cancels the call."""
        await asyncio.wait({call}, timeout=RESERVE_GRACE_S)
        if not call.done():
            call.cancel()
            await asyncio.wait({call})
        if call.cancelled():
            return True
        error = call.exception()
        reservation.ambiguous = error is not None
        return not isinstance(error, ServiceRefused)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Frees all reservations, also those that are being made, then closes all connections."""
        self._check_loop()
        self._is_closing = True
        for reservation in [*self._held, *self._reserving]:
            self.release(reservation)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=CLOSE_WAIT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        if "_workers" in vars(self):
            await self._workers.aclose()
        await self._service.close()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
