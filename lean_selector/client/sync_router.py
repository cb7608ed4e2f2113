"""SyncKvRouter: a KvRouter in a thread, for programs without an event loop."""

import asyncio
import concurrent.futures
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    contextmanager,
    suppress,
)
from functools import wraps
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from lean_selector.client.completions import Chunk
from lean_selector.client.drivers import Driver
from lean_selector.client.errors import ClientClosed
from lean_selector.client.placements import Placed, Placement, TokenStream
from lean_selector.client.router import KvRouter

P = ParamSpec("P")
T = TypeVar("T")


class Closing:
    """Base class that adds `with`, which calls close() at its end."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class LoopThread:
    """An event loop in a thread, for a driver that several threads use. The thread starts with the
    first run(), and ends with close() or when this object is garbage-collected."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.Lock()
        self.thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs `work` on the thread's loop, and returns its result. An exception in the calling
        thread, such as KeyboardInterrupt, cancels `work`."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._running())
        except ClientClosed:
            work.close()
            raise
        try:
            return future.result()
        except concurrent.futures.CancelledError:  # the loop has ended
            raise self._driver.closed() from None
        except BaseException:
            future.cancel()
            raise

    def _running(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            is_dead = self.thread is not None and not self.thread.is_alive()  # in a fork
            if self._is_closed or is_dead:
                raise self._driver.closed()
            if self._loop is None:
                runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
                self._loop, stop = runner.get_loop(), asyncio.Event()
                self.thread = threading.Thread(
                    target=_run_loop,
                    args=(runner, stop, self._driver),
                    name="lean-selector client",
                    daemon=True,
                )
                self.thread.start()
                self._end = weakref.finalize(self, self._loop.call_soon_threadsafe, stop.set)
            return self._loop

    def close(self) -> None:
        """Frees all reservations and closes all connections, then ends the thread."""
        with self._lock:
            self._is_closed = True
        if self.thread is not None and self.thread.is_alive():
            self._end()
            self.thread.join()


def _run_loop(runner: asyncio.Runner, stop: asyncio.Event, driver: Driver) -> None:
    async def until_stopped() -> None:
        await stop.wait()
        await driver.close()

    with runner:  # leaving the context cancels running tasks
        runner.run(until_stopped())


class SyncTokenStream(Placed, Closing):
    """The chunks of one generation, as dicts; see CompletionStream.

    The reservation is freed when the stream ends or fails, on close(), and when this object is
    garbage-collected."""

    def __init__(self, thread: LoopThread, stream: TokenStream) -> None:
        super().__init__(stream._selected, stream._reservation)
        self._thread = thread
        self._stream = stream

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            return self._thread.run(self._stream.__anext__())
        except (StopAsyncIteration, ClientClosed):
            raise StopIteration from None

    def close(self) -> None:
        """Stops the generation, and frees the reservation."""
        with suppress(ClientClosed):  # which has freed it
            self._thread.run(self._stream.aclose())


class SyncPlacement(Placed):
    """A rank that is reserved until the end of the `with` block."""

    def __init__(self, thread: LoopThread, placement: Placement) -> None:
        super().__init__(placement._selected, placement._reservation)
        self._thread = thread
        self._placement = placement

    # Not with @wraps: to a type checker such a method is called without its object.
    def prefill_complete(self) -> None:
        """Reports that the first token has come. Raises NotFound if the reservation has expired."""
        self._thread.run(self._placement.prefill_complete())

    def output_block(self, decay_fraction: float | None = None) -> None:
        """Reports one more full block of output, as Placement.output_block does."""
        self._thread.run(self._placement.output_block(decay_fraction))


def _made_as(
    init: Callable[Concatenate[Any, P], None],
) -> Callable[[Callable[..., None]], Callable[Concatenate[Any, P], None]]:
    """Return a decorator that gives a constructor the signature and docstring of `init`."""
    return lambda own: cast(Callable[Concatenate[Any, P], None], wraps(init)(own))


def _run(
    method: Callable[Concatenate[KvRouter, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate["SyncKvRouter", P], T]:
    """Return a method of SyncKvRouter that runs `method` of KvRouter in the router's thread."""

    @wraps(method)
    def run(router: "SyncKvRouter", /, *args: P.args, **kwargs: P.kwargs) -> T:
        return router._thread.run(method(router._router, *args, **kwargs))

    return run


def _streamed(
    method: Callable[Concatenate[KvRouter, P], Coroutine[Any, Any, TokenStream]],
) -> Callable[Concatenate["SyncKvRouter", P], SyncTokenStream]:
    @wraps(method)
    def streamed(router: "SyncKvRouter", /, *args: P.args, **kwargs: P.kwargs) -> SyncTokenStream:
        stream = router._thread.run(method(router._router, *args, **kwargs))
        return SyncTokenStream(router._thread, stream)

    return streamed


def _reserved(
    method: Callable[Concatenate[KvRouter, P], AbstractAsyncContextManager[Placement]],
) -> Callable[Concatenate["SyncKvRouter", P], AbstractContextManager[SyncPlacement]]:
    """Return a method of SyncKvRouter that runs `method`, a context manager, in a thread."""

    @wraps(method)
    @contextmanager
    def reserved(
        router: "SyncKvRouter", /, *args: P.args, **kwargs: P.kwargs
    ) -> Iterator[SyncPlacement]:
        held = method(router._router, *args, **kwargs)
        placement = router._thread.run(held.__aenter__())
        try:
            yield SyncPlacement(router._thread, placement)
        finally:
            if not placement._reservation.ended:  # by the end of the router
                router._thread.run(held.__aexit__(None, None, None))

    return reserved


class SyncKvRouter(Closing):
    """KvRouter for programs without an event loop. Use `with`, or call close()."""

    @_made_as(KvRouter.__init__)
    def __init__(self, *args: Any, **settings: Any) -> None:
        self._router = KvRouter(*args, **settings)
        self._thread = LoopThread(self._router._driver)

    generate = _streamed(KvRouter.generate)
    best_worker = _run(KvRouter.best_worker)
    get_potential_loads = _run(KvRouter.get_potential_loads)
    get_overlap_scores = _run(KvRouter.get_overlap_scores)
    mark_prefill_complete = _run(KvRouter.mark_prefill_complete)
    free = _run(KvRouter.free)
    report = _run(KvRouter.report)
    dump_events = _run(KvRouter.dump_events)
    reserve = _reserved(KvRouter.reserve)
    route = _reserved(KvRouter.route)

    def close(self) -> None:
        """Frees what generate(), reserve() and route() reserved, then closes all connections."""
        self._thread.close()
