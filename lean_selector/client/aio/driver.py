"""Drives flows on an event loop, and sees to it that no reservation outlives its owner.

Owns the connections, what is booked at the moment, and the tasks that report and free in the
background. What to send, and when, is decided in `routing`.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import httpx

from lean_selector.client.access import Access
from lean_selector.client.aio.service_connection import ServiceConnection
from lean_selector.client.errors import ClientClosed, ClientError, ServiceRefused
from lean_selector.client.reservation import Reservation
from lean_selector.client.routing import Routing
from lean_selector.client.steps import Ask, Flow, HandOver, OpenStream, Pause, Release, Step
from lean_selector.client.timeouts import Timeouts
from lean_selector.client.transport import (
    BOOKING_GRACE_S,
    DRAIN_S,
    MAX_ERROR_BYTES,
    OPEN_ERRORS,
    STREAM_ERRORS,
    WORKER_LIMITS,
    not_opened,
    stream_broken,
    stream_request,
    worker_refused,
)

T = TypeVar("T")

# A stream's end waits for its reservation to be freed, which takes a millisecond; when the service
# is away, it goes on in the background after this long.
RELEASE_WAIT_S = 1.0
LAST_FREE_S = 1.0  # for the one try that is left when the event loop ends
CLOSE_WAIT_S = 10.0  # longer than all tries of a release together


class Opened:
    """A worker's response whose status was 200."""

    def __init__(self, asked: OpenStream, response: httpx.Response) -> None:
        self.is_done = False  # the engine has said that no more comes
        self._asked = asked
        self._response = response
        self._pieces = response.aiter_raw()

    async def read(self) -> bytes | None:
        """The next bytes; None at the end. Raises WorkerStreamBroken."""
        try:
            return await anext(self._pieces, None)
        except STREAM_ERRORS as error:
            raise stream_broken(self._asked, error) from error

    async def close(self) -> None:
        """Stop the engine; or, when it is done, leave the connection fit for another request."""
        with contextlib.suppress(*STREAM_ERRORS, ClientError, OSError):
            try:
                if self.is_done:
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(DRAIN_S):
                            await self.read()
            finally:
                await self._response.aclose()


class Driver:
    """For one router. Not thread-safe: everything happens on the loop that uses it."""

    def __init__(
        self,
        endpoint: str,
        routing: Routing,
        timeouts: Timeouts,
        sleep: Callable[[float], Awaitable[object]],
        access: Access | None = None,
    ) -> None:
        self._routing = routing
        self._timeouts = timeouts
        self._sleep = sleep
        self._service = ServiceConnection(endpoint, timeouts, access)
        self._workers = httpx.AsyncClient(
            transport=httpx.AsyncHTTPTransport(limits=WORKER_LIMITS), trust_env=False
        )
        self._endpoint = endpoint
        self._is_closing = False
        # What streams and placements hold, with the worker's answer; one for each.
        self._held: dict[Reservation, Opened | None] = {}
        self._bookings: dict[Reservation, asyncio.Task[Any]] = {}  # on their way
        self._reporting: set[Reservation] = set()
        self._releasing: dict[str, asyncio.Task[None]] = {}  # by reservation id
        self._tasks: set[asyncio.Task[None]] = set()  # a report and a release for each reservation

    # -- flows ---------------------------------------------------------------------------------

    async def drive(self, flow: Flow[T]) -> T:
        """Run a flow to its end. What ends us, a cancellation too, is first shown to the flow."""
        try:
            step = next(flow)
            while True:
                try:
                    outcome = await self._perform(step)
                except BaseException as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(outcome)
        except StopIteration as end:
            result: T = end.value
            return result

    async def _perform(self, step: Step) -> object:
        if isinstance(step, Ask):
            if step.books is None:
                return await self._service.exchange(step.call)
            return await self._book(step, step.books)
        if isinstance(step, Pause):
            return await self._sleep(step.seconds)
        if isinstance(step, Release):
            if step.first:
                await self.release_now(step.reservation)
            else:
                self.release(step.reservation)
            return None
        if isinstance(step, HandOver):
            self._held.pop(step.reservation, None)
            return None
        return await self._open(step)

    async def _book(self, step: Ask[Any], reservation: Reservation) -> object:
        """A booking is not torn off with its caller: it must be known what became of it.

        Raises ClientClosed also when close() meets it on its way, and has released it by then.
        """
        while (earlier := self._releasing.get(reservation.id)) is not None:
            await asyncio.wait({earlier})  # or its free would meet this booking
        self._check_open()
        task = asyncio.create_task(self._service.exchange(step.call))
        self._bookings[reservation] = task
        try:
            outcome = await asyncio.shield(task)
        except asyncio.CancelledError:
            if reservation.ended and not _is_cancelled():
                raise self._closed() from None  # it was the booking that close() has cancelled
            raise  # and the release will ask what became of it
        except BaseException:
            self._bookings.pop(reservation, None)
            raise
        if reservation.ended:
            raise self._closed()
        del self._bookings[reservation]
        self._held[reservation] = None
        return outcome

    def _check_open(self) -> None:
        if self._is_closing:
            raise self._closed()

    def _closed(self) -> ClientClosed:
        return ClientClosed(f"{self._endpoint}: the client is closed")

    async def _open(self, step: OpenStream) -> Opened:
        self._check_open()
        try:
            response = await self._workers.send(stream_request(step, self._timeouts), stream=True)
        except OPEN_ERRORS as error:
            self._check_open()
            raise not_opened(step, error) from error
        if self._is_closing:
            await response.aclose()
            raise self._closed()
        if response.status_code == 200:
            return Opened(step, response)
        body = b""
        try:
            async for piece in response.aiter_raw():
                body += piece
                if len(body) > MAX_ERROR_BYTES:
                    break
        except httpx.HTTPError:
            pass  # the status is what counts
        finally:
            await response.aclose()
        raise worker_refused(step, response.status_code, body)

    # -- what is held --------------------------------------------------------------------------

    def hold(self, reservation: Reservation, opened: Opened) -> None:
        """From now on the stream is stopped when the reservation is released."""
        self._held[reservation] = opened

    def report(self, reservation: Reservation) -> None:
        """Tell the service what is new about it, without holding up the stream."""
        if reservation not in self._reporting and reservation.next_report() is not None:
            self._reporting.add(reservation)
            self._spawn(self._reported(reservation))

    async def _reported(self, reservation: Reservation) -> None:
        try:
            await self.drive(self._routing.report(reservation))
        finally:
            self._reporting.discard(reservation)

    def release(self, reservation: Reservation) -> None:
        """Stop its stream and free it, once, in the background."""
        if not reservation.ended:
            reservation.ended = True
            opened = self._held.pop(reservation, None)
            self._releasing[reservation.id] = self._spawn(self._released(reservation, opened))

    async def release_now(self, reservation: Reservation) -> None:
        """Release it, and wait for that, but not for long."""
        self.release(reservation)
        if (task := self._releasing.get(reservation.id)) is not None:
            await asyncio.wait({task}, timeout=RELEASE_WAIT_S)  # which does not cancel it

    async def _released(self, reservation: Reservation, opened: Opened | None) -> None:
        try:
            if opened is not None:
                await opened.close()
            booking = self._bookings.pop(reservation, None)
            if booking is None or await self._may_exist(reservation, booking):
                await self.drive(self._routing.release(reservation))
        except asyncio.CancelledError:
            # Only the end of the event loop cancels this task, or aclose() when time is up.
            with contextlib.suppress(ClientError, TimeoutError):
                async with asyncio.timeout(LAST_FREE_S):
                    await self._service.exchange(reservation.freeing())
            raise
        finally:
            if self._releasing.get(reservation.id) is asyncio.current_task():
                del self._releasing[reservation.id]

    async def _may_exist(self, reservation: Reservation, booking: asyncio.Task[Any]) -> bool:
        """What became of a booking nobody waits for: False when the service has refused it."""
        await asyncio.wait({booking}, timeout=BOOKING_GRACE_S)
        if not booking.done():
            booking.cancel()
            await asyncio.wait({booking})
        if booking.cancelled():
            return True
        error = booking.exception()
        reservation.ambiguous = error is not None
        return not isinstance(error, ServiceRefused)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Release what is held or on its way, wait for that, and close all connections."""
        self._is_closing = True
        for reservation in [*self._held, *self._bookings]:
            self.release(reservation)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=CLOSE_WAIT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._workers.aclose()
        await self._service.close()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
