"""Runs a service: log, listening sockets, periodic work, signals, graceful shutdown."""

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import uvloop
import zmq
import zmq.asyncio

from lean_selector import __version__
from lean_selector.api import logs
from lean_selector.api.access import AccessTokens
from lean_selector.app.flags import fields_of
from lean_selector.app.service_flags import ListenFlags, ServiceConfig, TlsFiles
from lean_selector.build_info import form
from lean_selector.http.connections import Connections
from lean_selector.http.listener import Listener, UnixPath, inet_socket
from lean_selector.http.response import date_header
from lean_selector.parts import Part
from lean_selector.tasks import failed, failures, watch_process

if TYPE_CHECKING:
    from lean_selector.app.server_tls import ServerTls

C = TypeVar("C", bound=ServiceConfig)


def is_beyond_loopback(host: str) -> bool:
    """Whether other machines can reach `host`, the value of --host. Any name except `localhost` is
    assumed to be reachable."""
    if host.lower().rstrip(".") == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return True


def exposure_warnings(host: str, *, asks_who: bool, has_allowed: bool) -> list[str]:
    """Return warnings about what any client that reaches `host` could do. `asks_who`: clients need
    a token or a certificate. `has_allowed`: endpoints are checked against an allowlist."""
    if asks_who or not is_beyond_loopback(host):
        return []
    if has_allowed:
        return [
            f"any client that reaches --host {host} can call every route: set --auth-token-file, "
            "or bind 127.0.0.1"
        ]
    return [
        f"any client that reaches --host {host} can register workers and peers, so that this "
        "process connects to any endpoint: set --auth-token-file or --allow-endpoint, or bind "
        "127.0.0.1"
    ]


# -- expiry sweep ----------------------------------------------------------------------------------
# Reservations are expired in slices, so that other requests are hardly delayed.
#
# Each iteration of the loop runs one slice until nothing is overdue, and polls the sockets between
# slices. An iteration may make more reservations than a slice has steps. Therefore a slice drops
# at least twice as many as the previous iteration made, and a backlog always shrinks. Dropping is
# cheaper than reserving.

# A slice takes about 1.5 ms, including events to peers. It delays a request no longer.
SLICE_STEPS = 250

CallSoon = Callable[[Callable[[], None]], object]


class ExpirySweep:
    """Drops expired reservations in slices, between other work. Used only on the loop's thread."""

    def __init__(
        self,
        expire: Callable[[float, int], int],
        arrived: Callable[[], int],
        call_soon: CallSoon,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`expire(now, steps)` drops at most `steps` expired reservations, and returns how many it
        has dropped. `arrived` returns how many reservations were made so far. A slice takes more
        steps if many were made since the last one. `call_soon` is the event loop's method."""
        self._expire = expire
        self._arrived = arrived
        self._call_soon = call_soon
        self._clock = clock
        self._arrived_before = 0
        self._is_scheduled = False
        self._is_stopped = False

    def begin(self) -> None:
        """Starts a sweep of expired reservations, unless one is running. Call this periodically."""
        if not self._is_scheduled:
            self._arrived_before = self._arrived()
            self._slice()

    def stop(self) -> None:
        self._is_stopped = True

    def _slice(self) -> None:
        self._is_scheduled = False
        if self._is_stopped:
            return
        arrived = self._arrived()
        # `arrived` decreases when a partition is removed; then the difference is meaningless.
        steps = max(SLICE_STEPS, 2 * (arrived - self._arrived_before))
        self._arrived_before = arrived
        if self._expire(self._clock(), steps) >= steps:
            self._is_scheduled = True
            self._call_soon(self._slice)


# -- host ------------------------------------------------------------------------------------------
# Independent of the service: it gets an app and callbacks (decision D14 for the shutdown).

log = logging.getLogger("lean_selector.server")

TICK_S = 0.5  # maximum delay of the date header, timeouts and expiry
# A single failed tick may be a transient bug. After this many consecutive failures, in some 10 s,
# the service has no timeouts and no expiry any more. Then it shuts down gracefully with status 1,
# and its supervisor restarts it.
MOST_TICKS_LOST = 20
DRAIN_LOOK_S = 0.05
# Time for handshakes in progress when a shutdown begins. A client that connects then loses a
# second.
LAST_CALL_S = 0.05


class StartError(Exception):
    """The service cannot start. The text of the exception has one line."""


def run(config: C, serve: Callable[[C, logs.LogState], Coroutine[object, object, None]]) -> None:
    """Sets up the log, and logs the build (pure or compiled) and the settings that differ from the
    defaults. Then runs `serve` on an event loop until a signal stops it. Warnings about the
    settings are kept in `LogState.doubts`, for `serve` to log. Raises StartError."""
    listen = config.listen
    log_state = logs.set_up(listen.log_level, listen.log_format)
    own = {
        f"{each.group}.{each.name}": str(value) if isinstance(value, float) else value
        for each in fields_of(type(config))
        if (value := getattr(getattr(config, each.group), each.name)) != each.default
    }
    log.info("configuration", extra={"form": form(), **own})
    exposed = exposure_warnings(
        listen.host, asks_who=listen.is_guarded, has_allowed=bool(config.endpoints.allowed)
    )
    log_state.doubts = (*config.warnings, *exposed)
    uvloop.run(_under_watch(serve(config, log_state)))


async def _under_watch(service: Coroutine[object, object, None]) -> None:
    watch_process(asyncio.get_running_loop())
    await service


def new_zmq_context() -> zmq.asyncio.Context:
    """Raises the process's limit of open files as far as allowed, and creates a ZMQ context."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return zmq.asyncio.Context(io_threads=1)


@dataclass(eq=False)
class HttpServer:
    """Listens on TCP, optionally also on a UNIX socket, until it is stopped.

    `new_protocol` makes the protocol object of a connection. `name` is for the log. Errors name
    `port_flag`, or flags that begin with `tls_flags`. `spoken` is the protocol that ALPN names."""

    new_protocol: Callable[[], asyncio.Protocol]
    connections: Connections
    listen: ListenFlags
    name: str = "lean-selector"
    port_flag: str = "--port"
    tls_flags: str = "--tls"
    spoken: str = "http/1.1"
    tokens: AccessTokens | None = None  # their file is reloaded with the others

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._listeners: list[Listener] = []
        self._reloads: list[Callable[[bool], object]] = []
        if self.tokens is not None:
            self.watch(self.tokens.reload)
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def start(self) -> None:
        """Opens the listening sockets and begins to accept connections. Raises StartError."""
        date_header.set(time.time())
        self.connections.sweep(time.monotonic())
        listen = self.listen
        tcp_protocol = self.new_protocol
        if listen.tls is not None:
            tls = self._server_tls(listen.tls)
            self.watch(tls.reload)
            tcp_protocol = tls.new_connection
        try:
            tcp = inet_socket(listen.host, listen.port)
        except OSError as error:
            where = f"{listen.host}:{listen.port} ({self.port_flag})"
            raise StartError(f"{os_reason(error)}: {where}") from None
        port = tcp.getsockname()[1]
        self._listeners.append(Listener(tcp, tcp_protocol, self.connections))
        if listen.uds is not None:
            path = UnixPath(listen.uds)
            try:
                unix = path.take()
            except OSError as error:
                tcp.close()
                raise StartError(f"{os_reason(error)}: {listen.uds} (--uds)") from None
            self._listeners.append(Listener(unix, self.new_protocol, self.connections, path))
        for listener in self._listeners:
            listener.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        fields = {"service": self.name, "version": __version__, "host": listen.host, "port": port}
        if listen.tls is not None:
            fields["tls"] = "on" if listen.tls.client_ca is None else "mutual"
        log.info("listening", extra={**fields, **({"uds": listen.uds} if listen.uds else {})})

    def _server_tls(self, files: TlsFiles) -> "ServerTls":
        from lean_selector.app.server_tls import ServerTls

        try:
            return ServerTls(
                files, self.connections, self.new_protocol, self.spoken, self.tls_flags
            )
        except ValueError as error:
            raise StartError(str(error)) from None

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    def watch(self, reload: Callable[[bool], object]) -> None:
        """Makes the server call `reload(False)` about every TICK_S, to reload a changed file, and
        `reload(True)` on SIGHUP, to force a reload. Call `watch` before `serve`."""
        self._reloads.append(reload)

    def reload(self, again: bool) -> None:
        for reload in self._reloads:
            reload(again)

    async def serve(self, parts: Part, doubts: Iterable[str] = ()) -> None:
        """Logs the warnings in `doubts`, starts `parts`, serves until a signal, then drains until
        all connections are idle, `drain_s` has passed, or a second signal arrives.

        Calls `tick` of the parts about every TICK_S, `refuse_new` when the shutdown begins, and
        `close` at its end. MOST_TICKS_LOST consecutive failures of `tick` also cause a shutdown;
        then `serve` raises the last exception."""
        parts.start()
        for doubt in doubts:
            log.warning(doubt)
        if self._reloads:  # otherwise the signal ends the process
            self._loop.add_signal_handler(signal.SIGHUP, self.reload, True)
        gc.collect()
        gc.freeze()  # exempt objects made at start-up from garbage collection
        failures.setdefault("tick", 0)  # export it from the first scrape on
        ticking = asyncio.create_task(self._tick(parts.tick))
        ticking.add_done_callback(lambda _: self._stop.set())
        try:
            await self._stop.wait()
            for listener in self._listeners:
                listener.stop_inviting()
            parts.refuse_new()
            await self._drain(parts)
        finally:
            ticking.cancel()
            self.abort()
            closing = parts.close()
            if closing is not None:
                await closing
        if ticking.done() and not ticking.cancelled():
            ticking.result()
        log.info("stopped")

    def sweep(self, now: float) -> None:
        """Applies timeouts of connections, and reloads changed files. `serve` calls this. For a
        server that runs without `serve`, call it about every TICK_S."""
        self.connections.sweep(now)
        self.reload(False)

    def abort(self) -> None:
        """Stops listening, and drops open connections at once."""
        for listener in self._listeners:
            listener.close()
        self.connections.abort()

    async def _drain(self, parts: Part) -> None:
        """Answers requests until all connections and parts are idle, for at most `drain_s` (D14,
        D27)."""
        started = now = time.monotonic()
        self.connections.sweep(now)
        self.connections.start_draining()
        is_told = False
        while now - started < self.listen.drain_s and not self._stop_now.is_set():
            if now - started >= LAST_CALL_S:
                for listener in self._listeners:
                    listener.close()
            self.connections.sweep(now)
            connections = self.connections
            is_empty = not connections.open and not connections.greeting and parts.is_idle
            if is_empty and all(each.is_done for each in self._listeners):
                return
            if now - started >= LAST_CALL_S and connections.open and not is_told:
                is_told = True
                text = (
                    "stopping: waiting for open responses; a second signal (Ctrl-C) stops at once"
                )
                fields = {"connections": len(connections.open), "at_most_s": self.listen.drain_s}
                log.info(text, extra=fields)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_LOOK_S):
                    await self._stop_now.wait()
            now = time.monotonic()

    async def _tick(self, tick: Callable[[float], None]) -> None:
        lost = 0
        while True:
            try:
                now = time.monotonic()
                date_header.set(time.time())
                self.sweep(now)
                tick(now)
                lost = 0
            except Exception:
                lost += 1
                is_last = lost >= MOST_TICKS_LOST
                failed("tick", "the service stops" if is_last else "the next one is due")
                if is_last:
                    raise
            await asyncio.sleep(TICK_S)


def os_reason(error: OSError) -> str:
    if error.errno is None:
        return str(error)
    if isinstance(error, socket.gaierror):  # these have their own error numbers
        return error.strerror or str(error)
    return f"{os.strerror(error.errno)} (os error {error.errno})"


def tokens_of(listen: ListenFlags) -> AccessTokens | None:
    """Return the accepted bearer tokens, or None if no token is required. Raises StartError."""
    path = listen.auth_token_file
    if path is None:
        return None
    try:
        return AccessTokens(path)
    except OSError as error:
        raise StartError(f"--auth-token-file: {os_reason(error)}: {path}") from None
    except ValueError as error:
        raise StartError(f"--auth-token-file: {error}") from None
