"""Drives flows by plain blocking calls: no event loop, no thread, no background.

Owns the connections and what is booked at the moment. Reports are sent between two chunks; freeing
takes place where a stream ends, is closed or is dropped. May be used from several threads.
"""

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import httpx

from lean_selector.client.access import Access
from lean_selector.client.errors import ClientClosed
from lean_selector.client.reservation import Reservation
from lean_selector.client.routing import Routing
from lean_selector.client.steps import Ask, Flow, HandOver, OpenStream, Pause, Release, Step
from lean_selector.client.sync.service_connection import SyncServiceConnection
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


class SyncOpened:
    """A worker's response whose status was 200."""

    def __init__(self, asked: OpenStream, response: httpx.Response) -> None:
        self.is_done = False  # the engine has said that no more comes
        self._asked = asked
        self._response = response
        self._pieces = response.iter_raw()

    def read(self) -> bytes | None:
        """The next bytes; None at the end. Raises WorkerStreamBroken."""
        try:
            return next(self._pieces, None)
        except STREAM_ERRORS as error:
            raise stream_broken(self._asked, error) from error

    def close(self) -> None:
        """Stop the engine; or, when it is done, leave the connection fit for another request."""
        with contextlib.suppress(*STREAM_ERRORS, OSError):
            try:
                if self.is_done:
                    with self._reads_end_soon():
                        next(self._pieces, None)
            finally:
                self._response.close()

    @contextlib.contextmanager
    def _reads_end_soon(self) -> Iterator[None]:
        """This thread's reads of the connection give up after DRAIN_S.

        An engine, or what stands before it, may keep the response open for as long as it likes,
        and the time-out of a request cannot be changed once its answer is being read. What httpx
        reads from is the stream that it shows; where it shows none, nothing more is read.
        """
        stream = self._response.extensions.get("network_stream")
        if stream is None:
            raise httpx.StreamClosed
        read, here = stream.read, threading.get_ident()

        def read_soon(max_bytes: int, timeout: float | None = None) -> bytes:
            # At the end of the answer the connection is free, and another thread may be quick.
            is_here = threading.get_ident() == here
            data: bytes = read(max_bytes, timeout=DRAIN_S if is_here else timeout)
            return data

        stream.read = read_soon
        try:
            yield
        finally:
            del stream.read


class SyncDriver:
    """For one synchronous router."""

    def __init__(
        self,
        endpoint: str,
        routing: Routing,
        timeouts: Timeouts,
        sleep: Callable[[float], object],
        access: Access | None = None,
    ) -> None:
        self._routing = routing
        self._timeouts = timeouts
        self._sleep = sleep
        self._service = SyncServiceConnection(endpoint, timeouts, access)
        self._workers = httpx.Client(
            transport=httpx.HTTPTransport(limits=WORKER_LIMITS), trust_env=False
        )
        # What streams and placements hold, with the worker's answer; one for each.
        self._held: dict[Reservation, SyncOpened | None] = {}
        # Streams that were collected while this thread was inside httpx, whose locks it must not
        # take a second time; released when the thread is out. One for each stream at most.
        self._dropped: deque[Reservation] = deque()
        self._thread = threading.local()
        # The service is needed until the last flow has ended, in whichever thread: one that waits
        # for the answer to a booking has to free it.
        self._endpoint = endpoint
        self._flow_ended = threading.Condition()
        self._flows = 0
        self._is_closing = False
        self._closes_with_last_flow = False

    # -- flows ---------------------------------------------------------------------------------

    def drive(self, flow: Flow[T]) -> T:
        """Run a flow to its end. What ends us, Ctrl-C too, is first shown to the flow."""
        self._release_dropped()
        with self._flow_ended:
            self._flows += 1
        try:
            return self._drive(flow)
        finally:
            with self._flow_ended:
                self._flows -= 1
                self._flow_ended.notify_all()
                is_last = self._closes_with_last_flow and not self._flows
            if is_last:
                self._service.close()

    def _drive(self, flow: Flow[T]) -> T:
        try:
            step = next(flow)
            while True:
                try:
                    outcome = self._perform(step)
                except BaseException as error:
                    step = flow.throw(error)
                else:
                    step = flow.send(outcome)
        except StopIteration as end:
            result: T = end.value
            return result

    def _perform(self, step: Step) -> object:
        if isinstance(step, Pause):
            return self._sleep(step.seconds)
        if isinstance(step, Release):
            self.release(step.reservation)
            return None
        if isinstance(step, HandOver):
            self._held.pop(step.reservation, None)
            return None
        if isinstance(step, OpenStream):
            return self._open(step)
        if step.books is not None:
            return self._book(step, step.books)
        with self._inside_httpx():
            outcome: object = self._service.exchange(step.call)
        return outcome

    def _book(self, step: Ask[Any], reservation: Reservation) -> object:
        """Raises ClientClosed also when close() was called on its way, and has freed it by then."""
        self._check_open()
        with self._inside_httpx():
            outcome: object = self._service.exchange(step.call)
        self._held[reservation] = None
        if self._is_closing:
            self.release(reservation)
        self._check_open()
        return outcome

    def _check_open(self) -> None:
        if self._is_closing:
            raise ClientClosed(f"{self._endpoint}: the client is closed")

    def _open(self, step: OpenStream) -> SyncOpened:
        self._check_open()
        with self._inside_httpx():
            try:
                response = self._workers.send(stream_request(step, self._timeouts), stream=True)
            except OPEN_ERRORS as error:
                self._check_open()
                raise not_opened(step, error) from error
            if self._is_closing:
                response.close()
                self._check_open()
            if response.status_code == 200:
                return SyncOpened(step, response)
            body = b""
            try:
                for piece in response.iter_raw():
                    body += piece
                    if len(body) > MAX_ERROR_BYTES:
                        break
            except httpx.HTTPError:
                pass  # the status is what counts
            finally:
                response.close()
            raise worker_refused(step, response.status_code, body)

    # -- what is held --------------------------------------------------------------------------

    def hold(self, reservation: Reservation, opened: SyncOpened) -> None:
        """From now on the stream is stopped when the reservation is released."""
        self._held[reservation] = opened

    def read(self, opened: SyncOpened) -> bytes | None:
        """The next bytes of a stream."""
        with self._inside_httpx():
            return opened.read()

    def report(self, reservation: Reservation) -> None:
        """Tell the service what is new about it."""
        self.drive(self._routing.report(reservation))

    def release(self, reservation: Reservation) -> None:
        """Stop its stream and free it, once."""
        if reservation.ended:
            return
        reservation.ended = True
        opened = self._held.pop(reservation, None)
        if opened is not None:
            with self._inside_httpx():
                opened.close()
        self.drive(self._routing.release(reservation))

    def drop(self, reservation: Reservation) -> None:
        """Release what nobody refers to any more; called by the collector, at any moment."""
        self._dropped.append(reservation)
        self._release_dropped()

    def _release_dropped(self) -> None:
        while self._dropped and not getattr(self._thread, "depth", 0):
            with contextlib.suppress(IndexError):  # another thread took it
                self.release(self._dropped.popleft())

    @contextlib.contextmanager
    def _inside_httpx(self) -> Iterator[None]:
        self._thread.depth = getattr(self._thread, "depth", 0) + 1
        try:
            yield
        finally:
            self._thread.depth -= 1

    def close(self) -> None:
        """Release what is held, and close all connections.

        A booking that another thread waits for is freed by that thread when it is answered: close()
        gives it a moment, and leaves the connection to the service to it after that.
        """
        self._is_closing = True
        self._release_dropped()
        for reservation in list(self._held):
            self.release(reservation)
        with self._flow_ended:
            self._flow_ended.wait_for(lambda: not self._flows, BOOKING_GRACE_S)
        self._workers.close()
        with self._flow_ended:
            self._closes_with_last_flow = True
            is_last = not self._flows
        if is_last:
            self._service.close()
