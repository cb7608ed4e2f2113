"""One selector that runs on a loop: configured, ticked, asked, and taken down again, without HTTP.

Everything happens in the thread of that loop. A call from another thread, such as those of Ray
Serve's routers from a loop of their own, is carried over and back.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

import zmq.asyncio

from lean_selector.core.numbers import not_a, number, optional, whole
from lean_selector.inprocess.dialect import SelectionCacheConfig
from lean_selector.server.flags import OneLineParser, add_flags, load
from lean_selector.server.host import TICK_S
from lean_selector.server.selector_flags import SelectorConfig
from lean_selector.server.selector_process import SelectorParts
from lean_selector.tasks import watched

T = TypeVar("T")

# A call from another thread that does not wait takes microseconds; a loop that has not answered
# by then is stopped, or waits for its caller.
ANSWERS_WITHIN_S = 10.0


class _Context(zmq.asyncio.Context):
    """Keeps its sockets. pyzmq's own has weak references alone, which are cleared before a
    finaliser runs: then it would close none of them, and wait for all."""

    kept: list[zmq.asyncio.Socket] = []
    looked_through_at: int = 64

    def __init__(self, io_threads: int) -> None:
        super().__init__(io_threads=io_threads)
        self.kept = []

    def socket(self, *kind: Any, **more: Any) -> zmq.asyncio.Socket:
        made = super().socket(*kind, **more)
        if len(self.kept) >= self.looked_through_at:
            self.kept = [each for each in self.kept if not each.closed]
            self.looked_through_at = 64 + 2 * len(self.kept)
        self.kept.append(made)
        return made


# Those whose sockets may be open. A context that the collector finds with open ones waits for them
# for ever, and it may find both together: so nothing of them is garbage before it was destroyed.
_open: set["Running"] = set()


class Running:
    """From its making, on the running loop, to `stopped`. Raises StartError.

    A loop that was closed without a word to its tasks takes this with it: what it left open is
    closed when its user goes, or when the next one begins.
    """

    def __init__(self, config: SelectorConfig) -> None:
        for other in list(_open):
            other.destroy_after_its_loop()
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._context = _Context(io_threads=1)
        _open.add(self)
        try:
            self.parts = SelectorParts(config, self._context)
        except BaseException:
            self._destroy()
            raise
        self.parts.start()
        self._stopping: asyncio.Task[None] | None = None
        self._next_tick: asyncio.Handle = self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._next_tick = self._loop.call_later(TICK_S, self._tick)
        self.parts.tick(time.monotonic())

    # -- from wherever it is asked -------------------------------------------------------------

    def at_once(self, work: Callable[[], T]) -> T:
        """What `work` returns, called in the thread of the loop."""
        if threading.get_ident() == self._thread:
            return work()
        done: Future[T] = Future()

        def call() -> None:
            try:
                done.set_result(work())
            except BaseException as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(call)
        return done.result(ANSWERS_WITHIN_S)

    async def in_time(
        self, work: Callable[[], Coroutine[Any, Any, T]], undo: Callable[[T], None] | None = None
    ) -> T:
        """What `work` returns, run on the loop. `undo` takes back, there, what was returned to a
        caller that was cancelled and never saw it."""
        if asyncio.get_running_loop() is self._loop:
            return await work()
        if threading.get_ident() == self._thread:
            raise RuntimeError("the event loop of this SelectionService runs no more")
        done: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = self._loop.create_task(work())
            tasks.append(task)
            task.add_done_callback(tell)

        def tell(task: asyncio.Task[T]) -> None:
            if task.cancelled():
                done.cancel()
            elif (error := task.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result(task.result())

        def give_up() -> None:
            task = tasks[0]
            if not task.done():
                task.cancel()
            elif undo is not None and not task.cancelled() and task.exception() is None:
                undo(task.result())

        self._loop.call_soon_threadsafe(begin)
        try:
            return await asyncio.shield(asyncio.wrap_future(done))
        except asyncio.CancelledError:
            self._loop.call_soon_threadsafe(give_up)
            raise

    # -- the end -------------------------------------------------------------------------------

    def stop(self) -> None:
        """Refuse requests that wait, and stop listening; once, however often it is called."""
        if self._loop.is_closed():
            self._destroy()
        elif self._stopping is None:
            self._next_tick.cancel()
            self.parts.refuse_new()
            self.parts.begin_no_links()
            self._stopping = watched("selection service stop", self._close())
            # Also where the loop ends before its first step.
            self._stopping.add_done_callback(lambda _: self._destroy())

    async def _close(self) -> None:
        try:
            await self.parts.close()
        except asyncio.CancelledError:  # the loop ends: what was not reached yet is closed, too
            await self.parts.close()
            raise
        self._destroy()  # before the caller goes on: the port is free then

    def destroy_after_its_loop(self) -> None:
        if self._loop.is_closed():
            self._destroy()

    def _destroy(self) -> None:
        self._context.destroy(linger=0)
        _open.discard(self)

    async def stopped(self) -> None:
        self.stop()
        if self._stopping is not None:
            await asyncio.shield(self._stopping)

    def abandoned(self) -> None:
        """Its last user is gone, perhaps in another thread, or with the loop."""
        try:
            self._loop.call_soon_threadsafe(self.stop)
        except RuntimeError:  # the loop is closed
            self._destroy()


# -- its configuration ----------------------------------------------------------------------------
#
# The arguments of the class are flags of `lean-selector`, so that ranges are checked and defaults
# stand in one place; what has no argument comes from the same environment, DYN_*.

# The flags that are not called as the arguments are.
_ARGUMENTS = {
    "--threads": "indexer_threads",
    "--selection-cache-ttl-secs": "selection_cache.ttl_secs",
    "--selection-cache-max-entries": "selection_cache.max_entries",
    "--selection-cache-max-bytes": "selection_cache.max_bytes",
}


class _Parser(OneLineParser):
    """Complains to the caller."""

    def error(self, message: str) -> NoReturn:
        flag, colon, fault = message.removeprefix("argument ").partition(": ")
        raise ValueError(
            _ARGUMENTS.get(flag, flag.removeprefix("--").replace("-", "_")) + colon + fault
        )


def config_of(
    indexer_threads: int,
    indexer_peers: Sequence[str] | None,
    replica_sync_port: int | None,
    replica_sync_peers: Sequence[str] | None,
    selection_cache: SelectionCacheConfig | None,
    session_affinity_ttl_secs: float | None,
) -> SelectorConfig:
    """What arguments and environment say. Raises ValueError or, for one of a wrong type, TypeError;
    both name it."""
    if not isinstance(selection_cache, SelectionCacheConfig | None):
        raise not_a("selection_cache", "a SelectionCacheConfig", selection_cache)
    cache = selection_cache or SelectionCacheConfig()
    ttl_s, entries, size = cache.ttl_secs, cache.max_entries, cache.max_bytes
    given = {
        "--threads": whole("indexer_threads", indexer_threads),
        "--indexer-peers": _joined("indexer_peers", indexer_peers),
        "--replica-sync-port": optional(whole, "replica_sync_port", replica_sync_port),
        "--replica-sync-peers": _joined("replica_sync_peers", replica_sync_peers),
        "--session-affinity-ttl-secs": optional(
            number, "session_affinity_ttl_secs", session_affinity_ttl_secs
        ),
        "--selection-cache-ttl-secs": optional(number, "selection_cache.ttl_secs", ttl_s),
        "--selection-cache-max-entries": optional(whole, "selection_cache.max_entries", entries),
        "--selection-cache-max-bytes": optional(whole, "selection_cache.max_bytes", size),
    }
    if replica_sync_peers and replica_sync_port is None:
        raise ValueError("replica_sync_peers requires replica_sync_port")
    flags = ["--api=1.6"]
    flags += [f"{flag}={value}" for flag, value in given.items() if value is not None]
    parser = _Parser(prog="SelectionService", allow_abbrev=False)
    add_flags(parser, SelectorConfig)
    return load(parser, SelectorConfig, flags, os.environ)


def _joined(name: str, values: Sequence[str] | None) -> str | None:
    return None if values is None else ",".join(texts_of(name, values)) or None


def texts_of(name: str, values: object) -> list[str]:
    """Raises TypeError, also for a text alone, which is a sequence of its letters."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise not_a(name, "a sequence of str", values)
    for place, value in enumerate(values):
        if not isinstance(value, str):
            raise not_a(f"{name}[{place}]", "a str", value)
    return list(values)
