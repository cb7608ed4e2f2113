"""Runs flows, and frees every reservation when its owner ends.

A driver owns the connections and the live reservations, and reports and frees in its own tasks. For
clients without an event loop, `SyncDriver` runs a `Driver` on a loop in a thread. `routing` decides
what is sent, and when.
"""

import asyncio
import concurrent.futures
import contextlib
import threading
import weakref
from collections.abc import Awaitable, Callable, Coroutine
from functools import cached_property, wraps
from inspect import signature
from typing import Any, Concatenate, ParamSpec, TypeVar, get_args

import httpx

from lean_selector.client.client_settings import Access, Timeouts
from lean_selector.client.errors import ClientClosed, ClientError, OtherEventLoop, ServiceRefused
from lean_selector.client.reservation import Reservation
from lean_selector.client.routing import (
    Ask,
    Flow,
    HandOver,
    OpenStream,
    Pause,
    Release,
    Routing,
    Step,
)
from lean_selector.client.transport import (
    MAX_ERROR_BYTES,
    OPEN_ERRORS,
    WORKER_LIMITS,
    Opened,
    ServiceConnection,
    not_opened,
    stream_request,
    worker_refused,
)

P = ParamSpec("P")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])

# A stream's end waits for its reservation to be freed, which takes a millisecond; when the service
# is away, it goes on in the background after this long.
RELEASE_WAIT_S = 1.0
LAST_FREE_S = 1.0  # for the last try when the event loop ends
CLOSE_WAIT_S = 10.0  # longer than all tries of one release together
# A booking cancelled while in flight waits this long for its response, so that it can be freed;
# after that the connection is closed, which removes it from the queue.
BOOKING_GRACE_S = 0.5


class Driver:
    """For one router. Not thread-safe: everything happens on the loop that uses it."""

    def __init__(
        self,
        endpoint: str,
        routing: Routing,
        timeouts: Timeouts,
        sleep: Callable[[float], Awaitable[object]] | None,
        access: Access | None = None,
    ) -> None:
        self._endpoint = endpoint
        self._routing = routing
        self._timeouts = timeouts
        self._is_closing = False
        self._sleep = asyncio.sleep if sleep is None else sleep
        self._service = ServiceConnection(endpoint, timeouts, access)
        self._loop: asyncio.AbstractEventLoop | None = None  # the first loop that used it
        # Reservations of streams and placements, with the worker's response.
        self._held: dict[Reservation, Opened | None] = {}
        self._bookings: dict[Reservation, asyncio.Task[Any]] = {}  # in flight
        self._reporting: set[Reservation] = set()
        self._releasing: dict[str, asyncio.Task[None]] = {}  # by reservation id
        self._tasks: set[asyncio.Task[None]] = set()  # one report and one release per reservation

    @cached_property
    def _workers(self) -> httpx.AsyncClient:
        transport = httpx.AsyncHTTPTransport(limits=WORKER_LIMITS)
        return httpx.AsyncClient(transport=transport, trust_env=False)

    # -- flows ---------------------------------------------------------------------------------

    async def drive(self, flow: Flow[T]) -> T:
        """Run a flow to its end. An exception that ends us, or a cancellation, is first thrown into
        the flow."""
        self._check_loop()
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
        """Run a booking that outlives its caller's cancellation, because its outcome must be known.

        Raises ClientClosed also if close() came while it was in flight; it is released then.
        """
        while (earlier := self._releasing.get(reservation.id)) is not None:
            await asyncio.wait({earlier})  # otherwise its free could hit this booking
        self._check_open()
        task = asyncio.create_task(self._service.exchange(step.call))
        self._bookings[reservation] = task
        try:
            outcome = await asyncio.shield(task)
        except asyncio.CancelledError:
            if reservation.ended and not _is_cancelled():
                raise self.closed() from None  # close() cancelled the booking
            raise  # the release will look up the outcome
        except BaseException:
            self._bookings.pop(reservation, None)
            raise
        if reservation.ended:
            raise self.closed()
        del self._bookings[reservation]
        self._held[reservation] = None
        return outcome

    async def _open(self, step: OpenStream) -> Opened:
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
            pass  # the status is what counts
        finally:
            await response.aclose()
        raise worker_refused(step, response.status_code, body)

    # -- reservations --------------------------------------------------------------------------

    def hold(self, reservation: Reservation, opened: Opened) -> None:
        """From now on, releasing the reservation stops the stream."""
        self._held[reservation] = opened

    def report(self, reservation: Reservation) -> None:
        """Report its progress to the service, without delaying the stream."""
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
        """Release it, and wait a limited time for that."""
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
            # This task is cancelled only by the end of the loop, or by aclose() at its time limit.
            with contextlib.suppress(ClientError, TimeoutError):
                async with asyncio.timeout(LAST_FREE_S):
                    await self._service.exchange(reservation.freeing())
            raise
        finally:
            if self._releasing.get(reservation.id) is asyncio.current_task():
                del self._releasing[reservation.id]

    async def _may_exist(self, reservation: Reservation, booking: asyncio.Task[Any]) -> bool:
        """Whether a booking of a cancelled caller may exist: False if the service refused it."""
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
        """Release all reservations, also those in flight, wait for that, and close all
        connections."""
        self._check_loop()
        self._is_closing = True
        for reservation in [*self._held, *self._bookings]:
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


class SyncDriver:
    """A Driver for calls from any thread. Its loop runs in a thread that starts with the first call
    and ends with close(), or when the client is garbage-collected."""

    def __init__(
        self,
        endpoint: str,
        routing: Routing,
        timeouts: Timeouts,
        sleep: Callable[[float], object] | None,
        access: Access | None = None,
    ) -> None:
        """`sleep` is called in a thread of its own."""
        asleep = None if sleep is None else lambda wait_s: asyncio.to_thread(sleep, wait_s)
        self.driver = Driver(endpoint, routing, timeouts, asleep, access)
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of `work`, run on the loop. An exception in the caller, such as Ctrl-C,
        cancels it."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._running())
        except ClientClosed:
            work.close()
            raise
        return self._result(future)

    def _result(self, future: "concurrent.futures.Future[T]") -> T:
        try:
            return future.result()
        except concurrent.futures.CancelledError:  # the loop has ended
            raise self.driver.closed() from None
        except BaseException:
            future.cancel()
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            is_dead = self._thread is not None and not self._thread.is_alive()  # in a fork
            if self._is_closed or is_dead:
                raise self.driver.closed()
            if self._loop is None:
                runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
                self._loop = runner.get_loop()
                self._thread = threading.Thread(
                    target=_run_loop, args=(runner,), name="lean-selector client", daemon=True
                )
                self._thread.start()
                self._dropped = weakref.finalize(self, _end, self._loop, self.driver)
            return self._loop

    def drive(self, flow: Flow[T]) -> T:
        return self.run(self.driver.drive(flow))

    def release(self, reservation: Reservation) -> None:
        """Stop its stream and free it, once; waits a limited time."""
        if not reservation.ended:
            self.run(self.driver.release_now(reservation))

    def close(self) -> None:
        """Release all reservations, also those in flight, wait for that, and close all
        connections."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed or self._loop is None or self._thread is None:
            return
        self._dropped.detach()
        if self._thread.is_alive():
            ended = _end(self._loop, self.driver)
            self._thread.join()
            ended.result()


def _run_loop(runner: asyncio.Runner) -> None:
    with runner:  # its exit cancels running tasks
        runner.get_loop().run_forever()


def _end(loop: asyncio.AbstractEventLoop, driver: Driver) -> "concurrent.futures.Future[None]":
    """Close the driver, then its loop. Never waits: garbage collection calls it in any thread."""

    async def ended() -> None:
        try:
            await driver.close()
        finally:
            loop.stop()

    return asyncio.run_coroutine_threadsafe(ended(), loop)


# -- methods of both kinds of client, made from their common flow ----------------------


def described_by(made: Callable[..., object]) -> Callable[[F], F]:
    """Give a method the name, signature and docstring of `made`, which it calls.

    Its return annotation is its own, or the result type of the flow or call.
    """

    def described(method: F) -> F:
        arguments, own = signature(made), signature(method).return_annotation
        if isinstance(own, TypeVar):
            own = get_args(arguments.return_annotation)[-1]
        wraps(made)(method)
        vars(method)["__signature__"] = arguments.replace(return_annotation=own)
        return method

    return described


def awaited(
    flow: Callable[Concatenate[Any, P], Flow[T]],
) -> Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]:
    """A method of a client with a Driver: awaits the flow that its `_calls` return."""

    @described_by(flow)
    async def method(client: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        driver: Driver = client._driver
        return await driver.drive(flow(client._calls, *args, **kwargs))

    return method


def done(flow: Callable[Concatenate[Any, P], Flow[T]]) -> Callable[Concatenate[Any, P], T]:
    """A method of a client with a SyncDriver: returns the result of the flow of its `_calls`."""

    @described_by(flow)
    def method(client: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        driver: SyncDriver = client._driver
        return driver.drive(flow(client._calls, *args, **kwargs))

    return method
