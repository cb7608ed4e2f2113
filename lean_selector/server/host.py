"""What a service runs on: its log, its listeners, a clock that ticks, signals, a stop in order."""

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
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from functools import partial
from typing import TYPE_CHECKING

import uvloop
import zmq
import zmq.asyncio

from lean_selector import __version__
from lean_selector.build_info import form
from lean_selector.http.connections import Connections
from lean_selector.http.listener import Listener, UnixPath, inet_socket
from lean_selector.http.protocol import App, HttpProtocol
from lean_selector.http.response import date_header
from lean_selector.server.flags import fields_of
from lean_selector.server.service_flags import ListenFlags, ServiceConfig, TlsFiles
from lean_selector.service import logs
from lean_selector.service.access import AccessTokens
from lean_selector.tasks import failed, failures, watch_process

if TYPE_CHECKING:
    from lean_selector.server.server_tls import ServerTls


def is_beyond_loopback(host: str) -> bool:
    """Whether others than this machine reach what is bound to `host`, the text of --host; a name
    but `localhost` counts as if they did."""
    if host.lower().rstrip(".") == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return True


def exposure_warnings(host: str, *, asks_who: bool, has_allowed: bool) -> list[str]:
    """What a stranger could make a service do that is bound to `host`. `asks_who`: who
    calls must have a token, or a certificate; `has_allowed`: endpoints are held against a list."""
    if asks_who or not is_beyond_loopback(host):
        return []
    if has_allowed:
        return [
            f"whoever reaches --host {host} can call every route: give --auth-token-file, or bind "
            "127.0.0.1"
        ]
    return [
        f"whoever reaches --host {host} can register workers and peers, and so make this process "
        "connect to any endpoint: give --auth-token-file or --allow-endpoint, or bind 127.0.0.1"
    ]


# -- expiry sweep --------------------------------------------------------------------------------
#
# Expiry in slices of the loop's turns: it keeps up with any rate, and nobody else waits long.
#
# One slice a turn until nothing is overdue, so that the loop looks at its sockets in between. What
# is booked meanwhile is overdue one day too, and a turn may have booked more than a slice has
# steps: so a slice drops at least twice as many as the turn before it booked, and a backlog shrinks
# however fast it is fed. Dropping is the cheaper of the two.

# About a millisecond and a half, with what is published to peers: a request meets this pause.
SLICE_STEPS = 250

CallSoon = Callable[[Callable[[], None]], object]


class ExpirySweep:
    """Only from the thread of the loop."""

    def __init__(
        self,
        expire: Callable[[float, int], int],
        arrived: Callable[[], int],
        call_soon: CallSoon,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`expire` drops what is overdue at a time, in at most so many steps, and says how many it
        took: as many as it might means that more may be left. `arrived` counts what was booked,
        ever; `call_soon` is the loop's."""
        self._expire = expire
        self._arrived = arrived
        self._call_soon = call_soon
        self._clock = clock
        self._arrived_before = 0
        self._is_scheduled = False
        self._is_stopped = False

    def begin(self) -> None:
        """Call it about every second: takes the first slice now, the others in turns to come."""
        if not self._is_scheduled:
            self._arrived_before = self._arrived()
            self._slice()

    def stop(self) -> None:
        """No slice is begun any more."""
        self._is_stopped = True

    def _slice(self) -> None:
        self._is_scheduled = False
        if self._is_stopped:
            return
        arrived = self._arrived()
        # A partition that went took its count along: then the difference says nothing.
        steps = max(SLICE_STEPS, 2 * (arrived - self._arrived_before))
        self._arrived_before = arrived
        if self._expire(self._clock(), steps) >= steps:
            self._is_scheduled = True
            self._call_soon(self._slice)


# -- host ----------------------------------------------------------------------------------------
#
# Knows no service: it is given an app, and what to call when (decision D14 for the stop).

log = logging.getLogger("lean_selector.server")

TICK_S = 0.5  # the date header, time-outs and expiry are at most this late
# One tick that fails is a bug that the next may not meet. So many in a row, in some 10 s, are a
# service that neither times out nor expires any more: it stops as when told to, with status 1, and
# whoever runs it begins it again.
MOST_TICKS_LOST = 20
DRAIN_LOOK_S = 0.05
# For handshakes under way when a stop begins. It costs a newcomer of that time a second.
LAST_CALL_S = 0.05


class StartError(Exception):
    """The service cannot start; the message is one clear line."""


def run(
    config: ServiceConfig, serve: Callable[[logs.LogState], Coroutine[object, object, None]]
) -> None:
    """Sets up the log, writes the form that runs and what of `config` is not the default, and runs
    `serve` on a loop to its end. What is doubtful stands behind what it listens at."""
    listen = config.listen
    log_state = logs.set_up(listen.log_level, listen.log_format)
    told = logs.flat(config)
    own = (
        f"{each.group}.{each.name}"
        for each in fields_of(type(config))
        if getattr(getattr(config, each.group), each.name) != each.default
    )
    log.info("configuration", extra={"form": form(), **{name: told[name] for name in own}})
    exposed = exposure_warnings(
        listen.host, asks_who=listen.is_guarded, has_allowed=bool(config.endpoints.allowed)
    )
    log_state.doubts = (*config.warnings, *exposed)
    uvloop.run(_under_watch(serve(log_state)))


async def _under_watch(service: Coroutine[object, object, None]) -> None:
    watch_process(asyncio.get_running_loop())
    await service


def new_zmq_context() -> zmq.asyncio.Context:
    """A context for what is published, and descriptors for as many engines as a fleet may have."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return zmq.asyncio.Context(io_threads=1)


class HttpServer:
    """Listens on TCP and perhaps on a UNIX socket, and serves one app until told to stop."""

    def __init__(
        self,
        app: App,
        connections: Connections,
        listen: ListenFlags,
        name: str = "lean-selector",
        protocol: type[HttpProtocol] = HttpProtocol,
        port_flag: str = "--port",
    ) -> None:
        """`name` is for the log, `port_flag` for the reason why it cannot listen."""
        self._listen = listen
        self._name = name
        self._port_flag = port_flag
        self._loop = asyncio.get_running_loop()
        self.connections = connections
        self._app = app
        self._new_protocol = protocol
        self._listeners: list[Listener] = []
        self._refusals = 0, 0  # that the log knows of
        # Called on SIGHUP, which otherwise ends the process: fill it before `serve`.
        self.on_reload: list[Callable[[], object]] = []
        self._looks: list[Callable[[], object]] = []
        self._tls: ServerTls | None = None
        self._stop = asyncio.Event()
        self._stop_now = asyncio.Event()

    async def start(self) -> None:
        """Bind the listeners. Raises StartError."""
        date_header.set(time.time())
        self.connections.sweep(time.monotonic())
        listen = self._listen
        tcp_protocol: Callable[[], asyncio.Protocol] = self._protocol
        if listen.tls is not None:
            self._tls = self._server_tls(listen.tls)
            self.on_reload.append(self._tls.reload)
            tcp_protocol = self._tls.new_connection
        try:
            tcp = inet_socket(listen.host, listen.port)
        except OSError as error:
            where = f"{listen.host}:{listen.port} ({self._port_flag})"
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
            self._listeners.append(Listener(unix, self._protocol, self.connections, path))
        for listener in self._listeners:
            listener.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal)
        fields = {"service": self._name, "version": __version__, "host": listen.host, "port": port}
        if listen.tls is not None:
            fields["tls"] = "on" if listen.tls.client_ca is None else "mutual"
        log.info("listening", extra={**fields, **({"uds": listen.uds} if listen.uds else {})})

    def _server_tls(self, files: TlsFiles) -> "ServerTls":
        from lean_selector.server.server_tls import ServerTls

        try:
            return ServerTls(files, self.connections, self._protocol)
        except ValueError as error:
            raise StartError(str(error)) from None

    def _protocol(self) -> HttpProtocol:
        return self._new_protocol(self._app, self.connections)

    def _on_signal(self) -> None:
        if self._stop.is_set():
            self._stop_now.set()
        self._stop.set()

    def watch(self, look: Callable[[bool], object]) -> None:
        """`look` at a file that may have changed: about every TICK_S, and on SIGHUP with True,
        which says that it has. Before `serve`."""
        self._looks.append(partial(look, False))
        self.on_reload.append(partial(look, True))

    def _on_hangup(self) -> None:
        for reload in self.on_reload:
            reload()

    async def serve(
        self,
        tick: Callable[[float], None],
        refuse_new: Callable[[], None],
        close: Callable[[], Awaitable[None]],
        doubts: Iterable[str] = (),
    ) -> None:
        """Serves until a signal; then drains for at most `drain_s`, or until a second signal. First
        it tells its `doubts`.

        `tick` runs about every TICK_S; `refuse_new` when the stop begins; `close` at its end.
        A tick that fails MOST_TICKS_LOST times in a row is a signal, too; what it raised the last
        time is then raised at the end.
        """
        for doubt in doubts:
            log.warning(doubt)
        if self.on_reload:
            self._loop.add_signal_handler(signal.SIGHUP, self._on_hangup)
        gc.collect()
        gc.freeze()  # what start-up made stays: no collection need look at it again
        failures.setdefault("tick", 0)  # from the first scrape on
        ticking = asyncio.create_task(self._tick(tick))
        ticking.add_done_callback(lambda _: self._stop.set())
        try:
            await self._stop.wait()
            for listener in self._listeners:
                listener.stop_inviting()
            refuse_new()
            await self._drain()
        finally:
            ticking.cancel()
            self.abort()
            await close()
        if ticking.done() and not ticking.cancelled():
            ticking.result()
        log.info("stopped")

    def sweep(self, now: float) -> None:
        """Time-outs of connections, the log of those who were refused, and files that changed:
        for `serve`, and for whoever runs a second server beside it."""
        self.connections.sweep(now)
        self._log_refusals()
        if self._tls is not None:
            self._tls.look(now)
        for look in self._looks:
            look()

    def abort(self) -> None:
        """At once: nobody connects any more, and who is connected is dropped."""
        for listener in self._listeners:
            listener.close()
        self.connections.abort()

    async def _drain(self) -> None:
        """Answer what still comes until all are quiet, for at most `drain_s` (D14, D27)."""
        started = now = time.monotonic()
        self.connections.sweep(now)
        self.connections.start_draining()
        is_told = False
        while now - started < self._listen.drain_s and not self._stop_now.is_set():
            if now - started >= LAST_CALL_S:
                for listener in self._listeners:
                    listener.close()
            self.connections.sweep(now)
            connections = self.connections
            is_empty = not connections.open and not connections.greeting
            if is_empty and all(each.is_done for each in self._listeners):
                return
            if now - started >= LAST_CALL_S and connections.open and not is_told:
                is_told = True
                text = "stopping waits for answers under way; a second signal (Ctrl-C) ends it now"
                fields = {"connections": len(connections.open), "at_most_s": self._listen.drain_s}
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


def os_reason(error: OSError) -> str:
    if error.errno is None:
        return str(error)
    if isinstance(error, socket.gaierror):  # numbers of their own
        return error.strerror or str(error)
    return f"{os.strerror(error.errno)} (os error {error.errno})"


# -- access --------------------------------------------------------------------------------------
#
# The tokens that a service asks for.


def tokens_of(listen: ListenFlags) -> AccessTokens | None:
    """None where none are asked for. Raises StartError."""
    path = listen.auth_token_file
    if path is None:
        return None
    try:
        return AccessTokens(path)
    except OSError as error:
        raise StartError(f"--auth-token-file: {os_reason(error)}: {path}") from None
    except ValueError as error:
        raise StartError(f"--auth-token-file: {error}") from None
