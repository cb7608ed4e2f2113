"""Sends a router's requests, and makes sure that every reservation is eventually freed.

A driver owns the connections and the reservations of one router. In background tasks, the driver
reports the progress of requests to the service, and frees reservations. Reports are sent one at a
time, in order. A report that the service has not confirmed is sent again."""

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from lean_selector.client import calls
from lean_selector.client.calls import Call
from lean_selector.client.client_settings import Backoff, Timeouts
from lean_selector.client.errors import (
    ClientClosed,
    ClientError,
    NotFound,
    OtherEventLoop,
    ServiceRefused,
    ServiceUnreachable,
)
from lean_selector.client.transport import Opened, OpenStream, ServiceConnection, WorkerConnections

T = TypeVar("T")

# At the end of a stream, the caller waits for the release, which takes a millisecond. If the
# service is unreachable, the release continues in the background after this time.
RELEASE_WAIT_S = 1.0
LAST_FREE_S = 1.0  # for the last attempt when the event loop ends
CLOSE_WAIT_S = 10.0  # longer than all attempts of one release
# If a call that reserves is cancelled, wait this long for its response, so that it can be freed;
# then close the connection, which removes the request from the queue.
RESERVE_GRACE_S = 0.5
# If a free finds no reservation, the call that makes it may still arrive for this long.
AMBIGUOUS_S = 0.5
# Tries of a free, over some six seconds; after that the service expires the reservation.
RELEASE = Backoff(max_retries=6, first_s=0.1, longest_s=5.0)
REPORT = Backoff(max_retries=2, first_s=0.1, longest_s=1.0)


class Reservation:
    """A client's record of one reservation. Its id is random, unless the user gives an id."""

    def __init__(
        self,
        isl_tokens: int,
        *,
        reservation_id: str | None = None,
        expected_output_tokens: int | None = None,
    ) -> None:
        self.id = str(uuid.uuid4()) if reservation_id is None else reservation_id
        self.call: asyncio.Task[Any] | None = None  # makes it; None: it is made
        self.opened: Opened | None = None  # the worker's response, which ends with it
        self.ambiguous = False  # the service may make it after it was freed
        self.ended = False  # no further reports
        self.is_reporting = False
        self.outcome: str | None = None  # of its worker: refused, failed, ok; None: unknown
        self.cached_tokens: int | None = None  # of the prompt, as reported by the engine
        self.prefill_outcome: str | None = None  # of the other worker of a pair
        self.block_size: int | None = None  # None: full output blocks are not reported
        self._isl_tokens = isl_tokens
        self._expected_output_tokens = expected_output_tokens
        self.output_tokens = 0  # so far; the first ends the prefill
        self.reports = 0  # that the service has received: of the prefill, then of each block

    def next_report(self) -> Call[None] | None:
        """Return the next progress report to send, or None if there is nothing to report."""
        if self.ended or self.output_tokens == 0:
            return None
        if self.reports == 0:
            return calls.prefill_complete(self.id)
        size = self.block_size
        if size is None:
            return None
        # A block is full when prompt and output together reach its end, because the prompt's hashes
        # cover only its full blocks.
        filled = (self._isl_tokens + self.output_tokens) // size - self._isl_tokens // size
        if self.reports > filled:
            return None
        decay_fraction = None
        if self._expected_output_tokens is not None:  # what share of it is left after this block
            done = self.reports * size
            decay_fraction = max(0.0, 1.0 - done / max(1, self._expected_output_tokens))
        return calls.output_block(self.id, decay_fraction)

    def freeing(self) -> Call[None]:
        """Return the call that frees the reservation and reports the request's outcome."""
        return calls.free(
            self.id,
            outcome=self.outcome,
            cached_tokens=self.cached_tokens,
            prefill_outcome=self.prefill_outcome,
        )


class Driver:
    """Sends one router's requests. Not thread-safe: all calls must come from one event loop."""

    def __init__(self, service: ServiceConnection, timeouts: Timeouts) -> None:
        self._service = service
        self._workers = WorkerConnections(timeouts)
        self._is_closing = False
        self._loop: asyncio.AbstractEventLoop | None = None  # the loop that first used it
        self._live: set[Reservation] = set()  # those of streams and placements, or in flight
        self._releasing: dict[str, asyncio.Task[None]] = {}  # by reservation id
        self._tasks: set[asyncio.Task[None]] = set()  # one report and one release per reservation

    # -- exchanges ---------------------------------------------------------------------------------

    async def ask(self, call: Call[T]) -> T:
        """Sends a request to the service, and returns the parsed response. Raises ClientError."""
        self._check_loop()
        return await self._service.exchange(call)

    async def pause(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)

    async def retried(
        self,
        attempt: Callable[[], Awaitable[T]],
        backoff: Backoff,
        is_temporary: Callable[[ClientError], bool],
    ) -> T:
        """Runs `attempt`, and repeats it as `backoff` says while its errors are temporary."""
        tries = 0
        while True:
            try:
                return await attempt()
            except ClientError as error:
                asked_s = error.retry_after_s if isinstance(error, ServiceRefused) else None
                wait_s = backoff.wait_s(tries, asked_s) if is_temporary(error) else None
                if wait_s is None:
                    raise
            await self.pause(wait_s)
            tries += 1

    def closed(self) -> ClientClosed:
        return ClientClosed(self._service.endpoint)

    def _check_open(self) -> None:
        if self._is_closing:
            raise self.closed()

    def _check_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise OtherEventLoop

    async def open(self, step: OpenStream) -> Opened:
        """Sends a request to a worker. Return its open response, or raise a ClientError."""
        self._check_open()
        try:
            opened = await self._workers.open(step)
        except ClientError:
            self._check_open()
            raise
        if self._is_closing:  # and it was being connected, so that close() did not find it
            await opened.close()
            raise self.closed()
        return opened

    # -- reservations ------------------------------------------------------------------------------

    async def book(self, call: Call[T], reservation: Reservation) -> T:
        """Sends a request that makes a reservation. If this raises, no reservation exists, or it
        will be freed: also if the calling task is cancelled, or close() is called meanwhile."""
        while (earlier := self._releasing.get(reservation.id)) is not None:
            await asyncio.wait({earlier})  # otherwise it could free this new reservation
        self._check_open()
        reservation.call = task = asyncio.create_task(self.ask(call))
        self._live.add(reservation)
        try:
            await asyncio.wait({task})  # if this task is cancelled, the request continues
            if reservation.ended:
                raise self.closed()
            answer = task.result()
        except asyncio.CancelledError:
            self.release(reservation)
            raise
        except ServiceUnreachable:
            await self.release_now(reservation)  # a retry may use the same id
            raise
        except BaseException:
            self._live.discard(reservation)
            raise
        reservation.call = None
        return answer

    def hand_over(self, reservation: Reservation) -> None:
        """Leaves this reservation to the user: the driver will not free it."""
        self._live.discard(reservation)

    def report(self, reservation: Reservation) -> None:
        """Starts a background task that reports the request's progress to the service."""
        if not reservation.is_reporting and reservation.next_report() is not None:
            reservation.is_reporting = True
            self._spawn(self._reported(reservation))

    async def _reported(self, reservation: Reservation) -> None:
        """Sends all reports that are due. The next call repeats a report that failed."""
        try:
            with contextlib.suppress(ClientError):  # if it has expired, the free will show
                while (call := reservation.next_report()) is not None:
                    await self.retried(partial(self.ask, call), REPORT, _is_unreachable)
                    reservation.reports += 1
        finally:
            reservation.is_reporting = False

    def release(self, reservation: Reservation) -> None:
        """In the background, closes the worker's response and frees the reservation. Idempotent."""
        if not reservation.ended:
            reservation.ended = True
            self._live.discard(reservation)
            self._releasing[reservation.id] = self._spawn(self._released(reservation))

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

    async def _released(self, reservation: Reservation) -> None:
        try:
            if reservation.opened is not None:
                await reservation.opened.close()
            if reservation.call is None or await self._may_exist(reservation, reservation.call):
                await self._freed(reservation)
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
            reservation.ambiguous = True
            return True
        error = call.exception()
        if isinstance(error, ServiceUnreachable):
            reservation.ambiguous = True
            return not error.never_sent
        return error is None

    async def _freed(self, reservation: Reservation) -> None:
        """Frees a reservation, with retries."""

        async def attempt() -> None:
            try:
                await self.ask(reservation.freeing())
            except NotFound:
                if not reservation.ambiguous:
                    return
                reservation.ambiguous = False
                await self.pause(AMBIGUOUS_S)
                await attempt()

        with contextlib.suppress(ClientError):
            await self.retried(attempt, RELEASE, _is_service_error)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Frees all reservations, also those that are being made, then closes all connections."""
        self._check_loop()
        self._is_closing = True
        for reservation in list(self._live):
            self.release(reservation)
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=CLOSE_WAIT_S)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
        await self._workers.close()
        await self._service.close()


def _is_unreachable(error: ClientError) -> bool:
    return isinstance(error, ServiceUnreachable)


def _is_service_error(error: ClientError) -> bool:
    return isinstance(error, ServiceUnreachable | ServiceRefused)
