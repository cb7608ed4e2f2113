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
import stat
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
from lean_selector.http1.protocol import App, Connections, HttpProtocol
from lean_selector.http1.reader import Limits
from lean_selector.http1.response import date_header
from lean_selector.observing import logs
from lean_selector.observing.lifecycle_log import SelectorLog
from lean_selector.observing.load_metrics import replica_families
from lean_selector.observing.selection_metrics import selection_families
from lean_selector.process.expiry_sweep import ExpirySweep
from lean_selector.process.replica_plane import ReplicaPlane
from lean_selector.process.selector_config import Listen, SelectorConfig
from lean_selector.services.busy_threshold import BusyThresholdService
from lean_selector.services.dump_answers import DumpAnswers
from lean_selector.services.observed import Observation, observed
from lean_selector.services.selection import SHUTDOWN, SelectionService
from lean_selector.sockets.kv_subscriptions import KvSubscriptions
from lean_selector.sockets.links import Links
from lean_selector.sockets.recovery import Recovery
from lean_selector.sockets.replica_mesh import ReplicaSyncError
from lean_selector.tasks import supervise

log = logging.getLogger("lean_selector.server")

TICK_S = 0.5  # the date header, time-outs and expiry are at most this late
BACKLOG = 1024
# One SUB per worker rank, and beside it a DEALER while a rank replays.
MAX_ZMQ_SOCKETS = 65_536


class StartError(Exception):
    """The service cannot start; the message is one clear line."""


def run_selector(config: SelectorConfig) -> None:
    """Runs the selection service until it is told to stop. Raises StartError."""
    limit = logs.set_up(config.listen.log_level, config.listen.log_format)
    log.info("configuration", extra=logs.flat(config))
    for warning in config.warnings:
        log.warning(warning)
    uvloop.run(_selector(config, limit))


async def _selector(config: SelectorConfig, limit: logs.RateLimit) -> None:
    loop = asyncio.get_running_loop()
    context = new_zmq_context()
    links = Links()
    subscriptions = KvSubscriptions(context)

    def new_index(block_size: int) -> KvIndex:
        return KvIndex(
            block_size,
            device_bound=config.device_blocks_per_rank,
            lower_tier_bound=config.lower_tier_blocks_per_rank,
        )

    selector = Selector(
        config.router, subscriptions, random.Random(), new_index=new_index, thresholds=config.busy
    )
    plane = None
    if config.replica is not None:

        def on_applied(event: ReplicaEvent, now: float) -> None:
            selector.load_changed(event.model_name, event.tenant_id, event.request_id, now)

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
    server = HttpServer(
        observed(
            routes,
            lambda meters: [
                *selection_families(selector, subscriptions, meters, config.overload_status),
                *replica_families(plane),
            ],
            observation("selector", config.listen, limit),
            config.overload_status,
        ),
        Limits(),
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

    return supervise("recovery", recover, again=False)


def new_zmq_context() -> zmq.asyncio.Context:
    """A context, and descriptors, for as many sockets as a fleet may need."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    context = zmq.asyncio.Context(io_threads=1)
    context.set(zmq.MAX_SOCKETS, min(MAX_ZMQ_SOCKETS, context.get(zmq.SOCKET_LIMIT)))
    return context


def observation(service: str, listen: Listen, limit: logs.RateLimit) -> Observation:
    loop = asyncio.get_running_loop()
    return Observation(
        service=service,
        version=__version__,
        access_log=listen.access_log,
        suppressed_log_lines=lambda: limit.suppressed,
        call_soon=loop.call_soon,
        call_later=loop.call_later,
    )


class HttpServer:
    """Listens on TCP and perhaps on a UNIX socket, and serves one app until told to stop."""

    def __init__(
        self, app: App, limits: Limits, listen: Listen, name: str = "lean-selector"
    ) -> None:
        """`name` is for the log."""
        self._listen = listen
        self._name = name
        self._loop = asyncio.get_running_loop()
        self.connections = Connections(self._loop.call_soon, limits)
        self._app = app
        self._servers: list[asyncio.Server] = []
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def start(self) -> None:
        """Binds. Raises StartError."""
        date_header.set(time.time())
        self.connections.sweep(time.monotonic())
        listen = self._listen
        try:
            tcp = await self._loop.create_server(
                self._protocol, sock=_tcp_listener(listen.host, listen.port), backlog=BACKLOG
            )
        except OSError as error:
            raise StartError(f"{_os_reason(error)}: {listen.host}:{listen.port}") from None
        self._servers.append(tcp)
        if listen.uds is not None:
            try:
                self._servers.append(await self._bind_unix(listen.uds))
            except OSError as error:
                tcp.close()
                raise StartError(f"{_os_reason(error)}: {listen.uds}") from None
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        port = tcp.sockets[0].getsockname()[1]
        fields = {"service": self._name, "version": __version__, "host": listen.host, "port": port}
        log.info("listening", extra={**fields, **({"uds": listen.uds} if listen.uds else {})})

    def _protocol(self) -> HttpProtocol:
        return HttpProtocol(self._app, self.connections)

    async def _bind_unix(self, path: str) -> asyncio.Server:
        """A UNIX socket of mode 0660 from its first moment; one that nobody serves is replaced."""
        with contextlib.suppress(FileNotFoundError):
            if stat.S_ISSOCK(os.lstat(path).st_mode):
                with socket.socket(socket.AF_UNIX) as probe:
                    probe.settimeout(1.0)
                    try:
                        probe.connect(path)
                    except (ConnectionRefusedError, FileNotFoundError):
                        os.unlink(path)
        listener = socket.socket(socket.AF_UNIX)
        before = os.umask(0o117)
        try:
            listener.bind(path)
        except BaseException:
            listener.close()
            raise
        finally:
            os.umask(before)
        return await self._loop.create_unix_server(self._protocol, sock=listener, backlog=BACKLOG)

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
            for server in self._servers:
                server.close()
            refuse_new()
            self.connections.start_draining()
            await self._drained()
        finally:
            ticking.cancel()
            self.connections.abort()
            if self._listen.uds is not None:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self._listen.uds)
            await close()
        log.info("stopped")

    async def _drained(self) -> None:
        deadline = self._loop.time() + self._listen.drain_s
        while self.connections.open and self._loop.time() < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stop_now.wait(), 0.02)
            if self._stop_now.is_set():
                return

    async def _tick(self, tick: Callable[[float], None]) -> None:
        while True:
            now = time.monotonic()
            date_header.set(time.time())
            self.connections.sweep(now)
            tick(now)
            await asyncio.sleep(TICK_S)


def _tcp_listener(host: str, port: int) -> socket.socket:
    """Resolved and bound here: the loop's own resolver would leave four threads behind."""
    family, kind, proto, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def _os_reason(error: OSError) -> str:
    if error.errno is None:
        return str(error)
    return f"{os.strerror(error.errno)} (os error {error.errno})"
