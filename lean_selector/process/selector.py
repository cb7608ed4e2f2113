"""Owns the loop: builds a service, listens, ticks, and stops it in order.

Everything lives on one uvloop loop in one thread. This module only wires: it makes the objects,
hands each the two or three others that it uses, and takes them down again (decision D14).
"""

import asyncio
import contextlib
import gc
import logging
import os
import random
import resource
import signal
import socket
import time
from collections.abc import Awaitable, Callable

import uvloop
import zmq
import zmq.asyncio

from lean_selector import __version__
from lean_selector.core.errors import Unavailable
from lean_selector.core.index.kv_index import KvIndex
from lean_selector.core.replication.events import ReplicaEvent
from lean_selector.core.selection.inspection import established
from lean_selector.core.selection.selector import Selector
from lean_selector.http1.connections import Connections
from lean_selector.http1.limits import Limits
from lean_selector.http1.listener import Listener, UnixPath, tcp_socket
from lean_selector.http1.protocol import App, HttpProtocol
from lean_selector.http1.response import date_header
from lean_selector.observing import logs
from lean_selector.observing.lifecycle_log import SelectorLog
from lean_selector.observing.load_metrics import replica_families
from lean_selector.observing.selection_metrics import selection_families
from lean_selector.process.expiry_sweep import ExpirySweep
from lean_selector.process.replica_plane import ReplicaPlane
from lean_selector.process.selector_config import Listen, SelectorConfig
from lean_selector.services.busy_threshold import BusyThresholdService
from lean_selector.services.connection_metrics import connection_families
from lean_selector.services.dump_answers import DumpAnswers
from lean_selector.services.observed import Observation, observed
from lean_selector.services.selection import SHUTDOWN, SelectionService
from lean_selector.sockets.index_sweeps import IndexSweeps
from lean_selector.sockets.kv_subscriptions import KvSubscriptions
from lean_selector.sockets.links import Links
from lean_selector.sockets.recovery import Recovery
from lean_selector.sockets.replica_mesh import ReplicaSyncError
from lean_selector.tasks import supervise

log = logging.getLogger("lean_selector.server")

TICK_S = 0.5  # the date header, time-outs and expiry are at most this late
DRAIN_LOOK_S = 0.05
# For handshakes under way when a stop begins. It costs a newcomer of that time a second.
LAST_CALL_S = 0.05


class StartError(Exception):
    """The service cannot start; the message is one clear line."""


def run_selector(config: SelectorConfig) -> None:
    """Runs the selection service until it is told to stop. Raises StartError."""
    log_state = logs.set_up(config.listen.log_level, config.listen.log_format)
    log.info("configuration", extra=logs.flat(config))
    for warning in config.warnings:
        log.warning(warning)
    uvloop.run(_selector(config, log_state))


async def _selector(config: SelectorConfig, log_state: logs.LogState) -> None:
    loop = asyncio.get_running_loop()
    context = new_zmq_context()
    links = Links(context)
    subscriptions = KvSubscriptions(links)

    sweeps = IndexSweeps()

    def new_index(block_size: int) -> KvIndex:
        index = KvIndex(
            block_size,
            device_bound=config.device_blocks_per_rank,
            lower_tier_bound=config.lower_tier_blocks_per_rank,
        )
        index.on_sweep = sweeps.start
        return index

    selector = Selector(
        config.router, subscriptions, random.Random(), new_index=new_index, thresholds=config.busy
    )
    plane = None
    if config.replica is not None:

        def on_applied(event: ReplicaEvent, now: float) -> None:
            request_id = event.booking.request_id
            selector.load_changed(event.model_name, event.tenant_id, request_id, now)

        try:
            plane = ReplicaPlane(
                context,
                config.replica,
                selector.scheduling_partition,
                lambda: established(selector.catalog, None, None),
                on_applied,
                config.router.reservation_expiry_s,
                links,
            )
        except ReplicaSyncError as error:
            raise StartError(str(error)) from None
        selector.events = plane.events
    dumps = DumpAnswers(selector.catalog, subscriptions.watermarks, loop.call_soon)
    service = SelectionService(
        selector,
        dump=dumps.answer,
        sources=subscriptions,
        plane=plane,
        call_later=loop.call_later,
    )
    routes = (*service.routes(), *BusyThresholdService(selector).routes())
    recovering = start_recovery(config, selector, subscriptions, service)
    connections = Connections(
        loop.call_soon, Limits(), max_connections=config.listen.max_connections
    )
    server = HttpServer(
        observed(
            routes,
            lambda meters: [
                *selection_families(selector, subscriptions, meters, config.overload_status),
                *replica_families(plane),
                *connection_families(connections),
            ],
            observation("selector", config.listen, log_state),
            config.overload_status,
        ),
        connections,
        config.listen,
    )
    await server.start()
    if plane is not None:
        plane.start()

    lifecycle = SelectorLog(selector)

    def expire(now: float, max_steps: int) -> int:
        expired = selector.expire(now, max_steps)
        lifecycle.expired(expired)
        return len(expired)

    expiry = ExpirySweep(expire, selector.arrived, loop.call_soon)

    def tick(now: float) -> None:
        expiry.begin()
        lifecycle.look()
        selector.admit_waiting(now)

    def refuse_new() -> None:
        service.draining = True
        recovering.cancel()
        selector.refuse_parked(Unavailable(SHUTDOWN))

    async def close() -> None:
        expiry.stop()
        await subscriptions.close()
        if plane is not None:
            await plane.close()

    await server.serve(tick, refuse_new, close)
    context.destroy(linger=0)


def start_recovery(
    config: SelectorConfig,
    selector: Selector,
    subscriptions: KvSubscriptions,
    service: SelectionService,
) -> "asyncio.Task[None]":
    """Recovers the KV index from a peer, if there are any, beside everything else."""
    peers = config.indexer_peers if config.router.use_kv_events else []
    recovery = Recovery(selector.catalog, subscriptions, peers, config.recovery_timeout_s)
    service.recovering = bool(peers)

    async def recover() -> None:
        try:
            if peers:
                await recovery.run()
        finally:
            service.recovering = False
        if peers:
            await recovery.forget_unclaimed()

    return supervise("recovery", recover, again=False)


def new_zmq_context() -> zmq.asyncio.Context:
    """A context for what is published, and descriptors for as many engines as a fleet may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return zmq.asyncio.Context(io_threads=1)


def observation(service: str, listen: Listen, log_state: logs.LogState) -> Observation:
    loop = asyncio.get_running_loop()
    return Observation(
        service=service,
        version=__version__,
        access_log=listen.access_log,
        suppressed_log_lines=log_state.suppressed,
        dropped_log_lines=log_state.dropped,
        call_soon=loop.call_soon,
        call_later=loop.call_later,
    )


class HttpServer:
    """Listens on TCP and perhaps on a UNIX socket, and serves one app until told to stop."""

    def __init__(
        self, app: App, connections: Connections, listen: Listen, name: str = "lean-selector"
    ) -> None:
        """`name` is for the log."""
        self._listen = listen
        self._name = name
        self._loop = asyncio.get_running_loop()
        self.connections = connections
        self._app = app
        self._listeners: list[Listener] = []
        self._refusals = 0, 0  # that the log knows of
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def start(self) -> None:
        """Binds. Raises StartError."""
        date_header.set(time.time())
        self.connections.sweep(time.monotonic())
        listen = self._listen
        try:
            tcp = tcp_socket(listen.host, listen.port)
        except OSError as error:
            raise StartError(f"{_os_reason(error)}: {listen.host}:{listen.port}") from None
        port = tcp.getsockname()[1]
        self._listeners.append(Listener(tcp, self._protocol, self.connections))
        if listen.uds is not None:
            path = UnixPath(listen.uds)
            try:
                unix = path.take()
            except OSError as error:
                tcp.close()
                raise StartError(f"{_os_reason(error)}: {listen.uds}") from None
            self._listeners.append(Listener(unix, self._protocol, self.connections, path))
        for listener in self._listeners:
            listener.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        fields = {"service": self._name, "version": __version__, "host": listen.host, "port": port}
        log.info("listening", extra={**fields, **({"uds": listen.uds} if listen.uds else {})})

    def _protocol(self) -> HttpProtocol:
        return HttpProtocol(self._app, self.connections)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    async def serve(
        self,
        tick: Callable[[float], None],
        refuse_new: Callable[[], None],
        close: Callable[[], Awaitable[None]],
    ) -> None:
        """Serves until a signal; then drains for at most `drain_s`, or until a second signal.

        `tick` runs about every TICK_S; `refuse_new` when the stop begins; `close` at its end.
        """
        gc.collect()
        gc.freeze()  # what start-up made stays: no collection need look at it again
        ticking = asyncio.create_task(self._tick(tick))
        try:
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait({ticking, stopping}, return_when=asyncio.FIRST_COMPLETED)
            stopping.cancel()
            if ticking.done():
                ticking.result()
            for listener in self._listeners:
                listener.stop_inviting()
            refuse_new()
            await self._drain()
        finally:
            ticking.cancel()
            for listener in self._listeners:
                listener.close()
            self.connections.abort()
            await close()
        log.info("stopped")

    async def _drain(self) -> None:
        """Answer what still comes until all are quiet, for at most `drain_s` (D14, D27)."""
        started = now = time.monotonic()
        self.connections.sweep(now)
        self.connections.start_draining()
        while now - started < self._listen.drain_s and not self._stop_now.is_set():
            if now - started >= LAST_CALL_S:
                for listener in self._listeners:
                    listener.close()
            self.connections.sweep(now)
            if not self.connections.open and all(each.is_done for each in self._listeners):
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_now.wait(), DRAIN_LOOK_S)
            now = time.monotonic()

    async def _tick(self, tick: Callable[[float], None]) -> None:
        while True:
            now = time.monotonic()
            date_header.set(time.time())
            self.connections.sweep(now)
            self._log_refusals()
            tick(now)
            await asyncio.sleep(TICK_S)

    def _log_refusals(self) -> None:
        connections = self.connections
        refusals = connections.refused, connections.bodies_refused
        if refusals != self._refusals:
            were, self._refusals = self._refusals, refusals
            log.warning(
                "clients were refused",
                extra={
                    "connections": refusals[0] - were[0],
                    "bodies": refusals[1] - were[1],
                    "open": len(connections.open),
                    "held_bytes": connections.held_bytes,
                },
            )


def _os_reason(error: OSError) -> str:
    if error.errno is None:
        return str(error)
    if isinstance(error, socket.gaierror):  # numbers of their own
        return error.strerror or str(error)
    return f"{os.strerror(error.errno)} (os error {error.errno})"
