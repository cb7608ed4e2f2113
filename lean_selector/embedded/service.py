"""SelectionService: the selector in the calling program, without HTTP.

A method converts its arguments to the body of an HTTP route, calls the route's handler, and returns
the response as a dict. So results are the same as over HTTP (spec selection_16.md 11.1)."""

import asyncio
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

import msgspec
import zmq.asyncio

from lean_selector.api.replies import Queued, Reply
from lean_selector.api.selection import SelectionService as Handlers
from lean_selector.app.flags import OneLineParser, add_flags, load
from lean_selector.app.host import TICK_S, StartError
from lean_selector.app.replication import Replication
from lean_selector.app.selector_flags import SelectorConfig
from lean_selector.app.selector_process import SelectorParts
from lean_selector.core.errors import NotFound, SelectorError
from lean_selector.core.numbers import not_a
from lean_selector.embedded.dialect import (
    Done,
    Fields,
    SelectionCacheConfig,
    body_of,
    record,
    refusal,
    selection_id_of,
    shut_down,
    worker_id_of,
)
from lean_selector.tasks import watched
from lean_selector.wire.prompt_forms import binary_form
from lean_selector.wire.scalars import json_form
from lean_selector.wire.selection_16_bodies import (
    ReservationRequest16,
    SelectAndReserveRequest16,
)
from lean_selector.wire.selection_bodies import (
    OutputBlockRequest,
    ProjectionRequest,
    SelectRequest,
    WorkerPatch,
    WorkerRequest,
)

# -- a selector on a loop, without HTTP ------------------------------------------------------------

T = TypeVar("T")

# Time limit for a call from another thread, which normally takes microseconds. A loop that has not
# answered by then is stopped, or waits for the caller.
ANSWERS_WITHIN_S = 10.0


class _Context(zmq.asyncio.Context):
    """A ZMQ context with strong references to its sockets, so that a finaliser can close them.
    (pyzmq's own references are weak. With an open socket, terminating a context waits forever.)"""

    kept: list[zmq.asyncio.Socket] = []

    def socket(self, *kind: Any, **more: Any) -> zmq.asyncio.Socket:
        made = super().socket(*kind, **more)
        self.kept = [*(each for each in self.kept if not each.closed), made]
        return made


# Contexts whose sockets may be open. If a context is garbage-collected with open sockets it waits
# for them forever, so each one is referenced here until it is destroyed.
_open: set["Running"] = set()


class Running:
    """A selector on the running loop. The constructor starts the selector, or raises StartError.

    If the loop is closed while tasks are unfinished, the sockets stay open until the
    SelectionService is garbage-collected, or the next selector starts."""

    def __init__(self, config: SelectorConfig) -> None:
        self.loop: asyncio.AbstractEventLoop = asyncio.get_running_loop()
        for other in list(_open):
            if other.loop.is_closed():
                other._destroy()
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
        self._next_tick: asyncio.Handle = self.loop.call_soon(self._tick)

    def _tick(self) -> None:
        self._next_tick = self.loop.call_later(TICK_S, self._tick)
        self.parts.tick(time.monotonic())

    # -- calls from any thread ---------------------------------------------------------------------

    def at_once(self, work: Callable[[], T]) -> T:
        """Calls `work` on the thread of the selector's event loop, and returns the result."""
        if threading.get_ident() == self._thread:
            return work()

        async def call() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(call(), self.loop).result(ANSWERS_WITHIN_S)

    async def in_time(
        self, work: Callable[[], Coroutine[Any, Any, T]], undo: Callable[[T], None] | None = None
    ) -> T:
        """Runs `work` on the selector's event loop, and returns the result. If the caller is
        cancelled, `work` is cancelled too; if `work` is already done, `undo` reverts its result."""
        if asyncio.get_running_loop() is self.loop:
            return await work()
        if threading.get_ident() == self._thread:
            raise RuntimeError("the event loop of this SelectionService has stopped")
        done: Future[T] = Future()
        tasks: list[asyncio.Task[T]] = []

        def begin() -> None:
            task = self.loop.create_task(work())
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

        self.loop.call_soon_threadsafe(begin)
        try:
            return await asyncio.shield(asyncio.wrap_future(done))
        except asyncio.CancelledError:
            self.loop.call_soon_threadsafe(give_up)
            raise

    # -- the end -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Begins to stop the selector, and refuses queued requests. May be called repeatedly."""
        if self.loop.is_closed():
            self._destroy()
        elif self._stopping is None:
            self._next_tick.cancel()
            self.parts.refuse_new()
            self.parts.core.links.is_ending = True  # the loop is about to end
            self._stopping = watched("selection service stop", self._close())
            # Called even if the loop ends before the task's first step.
            self._stopping.add_done_callback(lambda _: self._destroy())

    async def _close(self) -> None:
        try:
            await self.parts.close()
        except asyncio.CancelledError:  # the loop ends: close the rest too
            await self.parts.close()
            raise
        self._destroy()  # before the caller continues, so that the port is free

    def _destroy(self) -> None:
        self._context.destroy(linger=0)
        _open.discard(self)

    async def stopped(self) -> None:
        self.stop()
        if self._stopping is not None:
            await asyncio.shield(self._stopping)

    def abandoned(self) -> None:
        """Stops the selector of a garbage-collected SelectionService. Works in any thread."""
        try:
            self.loop.call_soon_threadsafe(self.stop)
        except RuntimeError:  # the loop is closed
            self._destroy()


# -- its configuration -----------------------------------------------------------------------------
# The arguments of the class correspond to flags of `lean-selector`, so that ranges and defaults are
# defined once; other settings come from the same environment variables, DYN_*.

# Flags whose names differ from the arguments.
_ARGUMENTS = {
    "--threads": "indexer_threads",
    "--selection-cache-ttl-secs": "selection_cache.ttl_secs",
    "--selection-cache-max-entries": "selection_cache.max_entries",
    "--selection-cache-max-bytes": "selection_cache.max_bytes",
}


class _Parser(OneLineParser):
    def error(self, message: str) -> NoReturn:
        flag, colon, fault = message.removeprefix("argument ").partition(": ")
        raise ValueError(
            _ARGUMENTS.get(flag, flag.removeprefix("--").replace("-", "_")) + colon + fault
        )


def config_of(given: dict[str, object]) -> SelectorConfig:
    """Return the selector's configuration, from the flags that are not None and from environment
    variables. Raises ValueError with the name of the setting."""
    flags = [f"{flag}={value}" for flag, value in given.items() if value is not None]
    parser = _Parser(prog="SelectionService", allow_abbrev=False)
    add_flags(parser, SelectorConfig)
    return load(parser, SelectorConfig, ["--api=1.6", *flags], os.environ)


def _joined(name: str, values: Sequence[str] | None) -> str | None:
    return None if values is None else ",".join(texts_of(name, values)) or None


def texts_of(name: str, values: object) -> list[str]:
    """Return `values` as a list of strings. Raises TypeError, also for a single string."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise not_a(name, "a sequence of str", values)
    for place, value in enumerate(values):
        if not isinstance(value, str):
            raise not_a(f"{name}[{place}]", "a str", value)
    return list(values)


# -- the class -------------------------------------------------------------------------------------

Handler = Callable[..., object]

# Hash lists of a prompt may be packed: bytes, 8 per hash.
_SELECT: type[SelectRequest] = binary_form(SelectRequest)
_SELECT_AND_RESERVE: type[SelectAndReserveRequest16] = binary_form(SelectAndReserveRequest16)
_RESERVATION: type[ReservationRequest16] = binary_form(ReservationRequest16)
_PROJECTION: type[ProjectionRequest] = binary_form(ProjectionRequest)


class SelectionService:
    """A selector on the caller's event loop.

    The selector starts in the constructor if a loop is running, or else with the first call under a
    running loop. The selector stays on this loop; calls from other threads and loops are forwarded.
    Router settings come from the HTTP service's environment variables. Requests and responses are
    those of HTTP with `--api 1.6`, but in maps with a key per dp_rank, the keys are ints.

    Raises ValueError where HTTP answers 400 or 422, SelectionServiceError for other error
    responses, TypeError and OverflowError for an invalid id."""

    def __init__(
        self,
        *,
        indexer_threads: int = 4,
        indexer_peers: Sequence[str] | None = None,
        replica_sync_port: int | None = None,
        replica_sync_peers: Sequence[str] | None = None,
        selection_cache: SelectionCacheConfig | None = None,
        session_affinity_ttl_secs: float | None = None,
    ) -> None:
        """`indexer_threads` is accepted for compatibility; there is one thread. Raises ValueError,
        also for an invalid environment variable; TypeError for what is no list of peers or no
        SelectionCacheConfig; and OSError if the replica port cannot be bound."""
        if not isinstance(selection_cache, SelectionCacheConfig | None):
            raise not_a("selection_cache", "a SelectionCacheConfig", selection_cache)
        if replica_sync_peers and replica_sync_port is None:
            raise ValueError("replica_sync_peers requires replica_sync_port")
        cache = selection_cache or SelectionCacheConfig()
        self._config = config_of(
            {
                "--threads": indexer_threads,
                "--indexer-peers": _joined("indexer_peers", indexer_peers),
                "--replica-sync-port": replica_sync_port,
                "--replica-sync-peers": _joined("replica_sync_peers", replica_sync_peers),
                "--session-affinity-ttl-secs": session_affinity_ttl_secs,
                "--selection-cache-ttl-secs": cache.ttl_secs,
                "--selection-cache-max-entries": cache.max_entries,
                "--selection-cache-max-bytes": cache.max_bytes,
            }
        )
        self._running: Running | None = None
        self._is_shut_down = False
        if _is_on_a_loop():
            self._start()

    def _start(self) -> Running:
        """Return the running selector. The first call creates the selector on the running loop."""
        if self._running is None:
            try:
                self._running = running = Running(self._config)
            except StartError as error:
                raise OSError(str(error)) from None
            # The loop references only `running`, so that this object can be garbage-collected.
            weakref.finalize(self, running.abandoned).atexit = False
        return self._running

    def _check_open(self) -> None:
        if self._is_shut_down:
            raise shut_down()

    @property
    def _handlers(self) -> Handlers:
        return self._start().parts.service

    async def _call(
        self,
        handler: Handler,
        *arguments: object,
        undo: Callable[[Fields], None] | None = None,
    ) -> Fields:
        """Calls the handler of a route, waits for the response, and returns the parsed JSON."""
        running = self._start()
        answer: Fields = await running.in_time(lambda: _awaited(handler, arguments), undo)
        return answer

    def _call_at_once(
        self, handler: Callable[[SelectorParts], Handler], *arguments: object, before: object
    ) -> Any:
        """Return the response of the handler that `handler` returns. If the selector has not
        started and no event loop runs, returns `before`, the response of an empty selector."""
        if self._running is None and not _is_on_a_loop():
            return before
        running = self._start()
        answering = handler(running.parts)
        return running.at_once(lambda: _decoded(_called(answering, *arguments)))

    # -- workers -----------------------------------------------------------------------------------

    async def upsert_worker(self, worker: object) -> Fields:
        """Registers or replaces a worker; returns the worker's record."""
        self._check_open()
        body = body_of(WorkerRequest, "worker", worker)
        return record(await self._call(self._handlers.register, body))

    async def patch_worker(self, worker_id: int, patch: object) -> Fields:
        """Changes the given fields that are not None; returns the worker's record."""
        self._check_open()
        worker_id = worker_id_of(worker_id)
        body = body_of(WorkerPatch, "patch", patch)
        return record(await self._call(self._handlers.patch, worker_id, body))

    async def delete_worker(self, worker_id: int) -> Fields:
        """Removes a worker, its blocks and its reservations; returns the worker's last record."""
        worker_id = worker_id_of(worker_id)
        return record(await self._call(self._handlers.remove, worker_id))

    def list_workers(
        self, *, model_name: str | None = None, routing_group: str | None = None
    ) -> list[Fields]:
        """Return the records of all workers, or only of workers that match the filters."""
        query = _query(model_name, routing_group)
        found = self._call_at_once(lambda parts: parts.service.workers, query, before=[])
        return list(map(record, found))

    def ready(self) -> Fields:
        """Return whether at least one worker can be chosen, and the records of all workers."""
        before = {"ready": False, "schedulable_workers": 0, "workers": []}
        found: Fields = self._call_at_once(lambda parts: parts.service.ready, before=before)
        return {**found, "workers": list(map(record, found["workers"]))}

    # -- selections and reservations ---------------------------------------------------------------

    async def select(self, request: object) -> Fields:
        """Chooses a rank. A choice with a selection_id is cached for create_reservation."""
        self._check_open()
        body = body_of(_SELECT, "request", request)
        return await self._call(self._handlers.select, body)

    async def select_and_reserve(self, request: object) -> Fields:
        """Chooses a rank and reserves it, in one step. If queueing is enabled, the call may wait.
        If the caller is cancelled, the request leaves the queue, and nothing stays reserved."""
        self._check_open()
        body = body_of(_SELECT_AND_RESERVE, "request", request)
        service = self._handlers

        def undo(booked: Fields) -> None:
            with contextlib.suppress(SelectorError):
                service.free(booked["selection_id"], None)

        return await self._call(service.select_and_reserve, body, undo=undo)

    async def create_reservation(self, request: object) -> Fields:
        """Reserves the rank that `select` chose for the request's selection_id. If the request has
        a worker_id, the rank `dp_rank` (default 0) of that worker is reserved instead."""
        self._check_open()
        body = body_of(_RESERVATION, "request", request)
        return await self._call(self._handlers.reserve, body)

    async def prefill_complete(self, selection_id: str) -> Done:
        """Reports the first token, which ends the prefill."""
        name = selection_id_of(selection_id)
        await self._call(self._handlers.prefill_complete, name)
        return ()

    def add_output_block(self, selection_id: str, *, decay_fraction: float | None = None) -> None:
        """Reports one more block of output. With a `decay_fraction` (0 to 1), the new block and all
        blocks that only this request has count as this fraction of a block in the rank's load."""
        name = selection_id_of(selection_id)
        body = body_of(OutputBlockRequest, "request", {"decay_fraction": decay_fraction})
        if self._call_at_once(lambda parts: parts.service.output_block, name, body, before=0) == 0:
            raise refusal(NotFound(f"reservation {name} not found"))

    async def free_reservation(self, selection_id: str) -> Done:
        """Frees the reservation of a request that has ended."""
        name = selection_id_of(selection_id)
        await self._call(self._handlers.free, name, None)
        return ()

    # -- inspection --------------------------------------------------------------------------------

    def loads(
        self, *, model_name: str | None = None, routing_group: str | None = None
    ) -> list[Fields]:
        """Return the active load of every rank, by model and routing group."""
        query = _query(model_name, routing_group)
        loads: list[Fields] = self._call_at_once(
            lambda parts: parts.service.loads, query, before=[]
        )
        return loads

    async def potential_loads(self, request: object) -> list[Fields]:
        """Return the load that each rank would have with this prompt."""
        body = body_of(_PROJECTION, "request", request)
        rows: Any = await self._call(self._handlers.potential_loads, body)
        return list(rows)

    async def overlap_scores(self, request: object) -> Fields:
        """Return how many blocks of this prompt each rank has cached, by tier."""
        body = body_of(_PROJECTION, "request", request)
        return await self._call(self._handlers.overlap_scores, body)

    async def indexer_snapshot(self) -> Fields:
        """Return the index in the format of GET /dump. Other calls can run during the export."""
        running = self._start()

        async def made() -> bytes:
            text = bytearray()
            for part in running.parts.dumps.parts(as_1_6=True):
                text += part
                await asyncio.sleep(0)
            return bytes(text)

        snapshot: Fields = msgspec.json.decode(await running.in_time(made))
        return snapshot

    # -- replicas ----------------------------------------------------------------------------------

    async def register_replica_peer(self, endpoint: str) -> bool:
        """Subscribes to the events of a replica. Return False if the replica is a peer already.
        Raises ValueError, or RuntimeError if replica sync is off."""
        replication = self._replication()
        return self._start().at_once(lambda: replication.register_peer(endpoint))

    async def deregister_replica_peer(self, endpoint: str) -> bool:
        """Removes a replica from the peers. Return False if the endpoint is not a peer."""
        replication = self._replication()
        return self._start().at_once(lambda: replication.deregister_peer(endpoint))

    def list_replica_peers(self) -> list[str]:
        """Return the endpoints of the replicas that this service subscribes to."""
        if self._running is None or (replication := self._running.parts.replication) is None:
            return []
        return self._running.at_once(replication.peers)

    def _replication(self) -> Replication:
        replication = self._start().parts.replication
        if replication is None:
            raise RuntimeError("replica sync is disabled")
        return replication

    async def recover_indexer_from_peers(self, peers: Sequence[str]) -> bool:
        """Copies the index from the first peer that has a usable dump. Return False if no peer has
        a usable dump. `peers` are HTTP URLs."""
        self._check_open()
        running = self._start()
        recovery = running.parts.core.recovery(texts_of("peers", peers))
        return await running.in_time(recovery.run)

    # -- the end -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        """Disconnects from engines and replicas, and refuses queued requests. Reservations can
        still be freed. Background tasks end soon afterwards; `shutdown_async` waits for them."""
        self._is_shut_down = True
        if self._running is not None:
            self._running.at_once(self._running.stop)

    async def shutdown_async(self) -> Done:
        """Shuts down, and waits until all tasks have ended and the port is free."""
        self._is_shut_down = True
        if self._running is not None:
            await self._running.in_time(self._running.stopped)
        return ()


def _is_on_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _query(model_name: str | None, routing_group: str | None) -> dict[str, str]:
    """Return query parameters. The HTTP handlers know a routing group as tenant_id (D2)."""
    filters = {"model_name": model_name, "tenant_id": routing_group}
    return {name: value for name, value in filters.items() if value is not None}


def _called(handler: Handler, *arguments: object) -> object:
    """Calls the handler of a route. Raises the exceptions that SelectionService documents."""
    try:
        return handler(*arguments)
    except SelectorError as error:
        raise refusal(error) from None
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from None


def _decoded(result: object) -> Any:
    if isinstance(result, Reply):
        result = result.body
    return msgspec.json.decode(json_form(result))


async def _awaited(handler: Handler, arguments: Sequence[object]) -> Any:
    """Awaits a handler's response. If the caller is cancelled, nothing stays reserved."""
    result = _called(handler, *arguments)
    if not isinstance(result, Queued):
        return _decoded(result)
    answered: asyncio.Future[object] = asyncio.get_running_loop().create_future()
    result.on_answer(lambda body: None if answered.done() else answered.set_result(body))
    try:
        body = await answered
    except asyncio.CancelledError:
        result.cancel()
        raise
    if isinstance(body, SelectorError):
        raise refusal(body)
    if isinstance(body, Exception):
        raise body  # a defect of ours
    return _decoded(body)
