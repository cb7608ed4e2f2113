"""Listeners: bind sockets, accept many connections at once, and shut down without losing one.

Handles listening sockets, the path of a UNIX socket, and errors of accept(2). A listener accepts up
to 64 connections per turn of the event loop. uvloop's own server accepts only one, so that clients
wait if turns are long. Independent of the protocol on a connection (decisions D14, D19 and D27)."""

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import socket
import stat
import struct
from collections.abc import Callable
from functools import partial
from typing import Final

from lean_selector.http.connections import Connections

log = logging.getLogger("lean_selector.server")

BACKLOG: Final = 1024

# Accepts per turn of the loop. They take 20 to 50 us each: a full turn takes 3 ms.
ACCEPTS_PER_TURN: Final = 64

# Pause after an accept that failed for lack of descriptors or memory. The clients wait in the
# backlog meanwhile. Without the pause, the readable socket would keep the loop busy.
ACCEPT_PAUSE_S: Final = 0.5

# Errors of accept(2) that concern only the accepted connection, which is lost.
_OF_ONE: Final = frozenset(
    {
        errno.ECONNABORTED,
        errno.ECONNRESET,
        errno.EPERM,
        errno.EPROTO,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ETIMEDOUT,
        errno.EINTR,
    }
)

# A client host that vanished is noticed after 30 s, even if nothing is sent to the client because
# it waits for a worker. Probes start after 15 s, and sent data may stay unconfirmed for 30 s.
# Accepted sockets inherit these options.
_OF_TCP: Final = (
    (socket.SOL_SOCKET, "SO_REUSEADDR", 1),
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 15),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 5),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 30_000),
)

_MAX_PATH_BYTES: Final = 107  # sun_path without the final zero byte

# struct sock_filter: load the flags of the TCP header, drop a segment with SYN, accept the rest.
_DROP_SYN: Final = struct.pack(
    "HBBIHBBIHBBIHBBI", 0x30, 0, 0, 13, 0x45, 0, 1, 0x02, 0x06, 0, 0, 0, 0x06, 0, 0, 0x40000
)
# must stay alive while the kernel reads it
_DROP_SYN_PROGRAM: Final = ctypes.create_string_buffer(_DROP_SYN)
_SO_ATTACH_FILTER: Final = 26


def inet_socket(
    host: str, port: int, kind: socket.SocketKind = socket.SOCK_STREAM
) -> socket.socket:
    """Return a bound socket. A TCP socket listens; accepted connections inherit its options. Raises
    OSError. Resolving `host` blocks, because the loop's resolver would leave threads behind."""
    try:
        found = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_PASSIVE)
    except UnicodeError:  # part of the name is too long for DNS
        raise OSError("not a host name") from None
    family, _, proto, _, address = found[0]
    bound = socket.socket(family, kind, proto)
    is_tcp = kind == socket.SOCK_STREAM
    try:
        for level, name, value in _OF_TCP if is_tcp else ():
            option = getattr(socket, name, None)  # some exist only on Linux
            if option is not None:
                bound.setsockopt(level, option, value)
        bound.bind(address)
        if is_tcp:
            bound.listen(BACKLOG)
    except BaseException:
        bound.close()
        raise
    return bound


class UnixPath:
    """The path of a UNIX socket at which we listen. `let_go` unlinks the path only if the path
    still leads to our socket, because a successor process may have bound the path already."""

    def __init__(self, path: str, kind: int = socket.SOCK_STREAM) -> None:
        """`kind` is SOCK_STREAM, or SOCK_DGRAM for a socket that only receives."""
        self._path = path
        self._kind = kind
        self._ours: tuple[int, int] | None = None  # (device, inode)

    def take(self) -> socket.socket:
        """Return a bound socket with mode 0660; a stream socket also listens. Replaces a stale
        socket at this path. Raises OSError, also if a process listens at the path."""
        if len(os.fsencode(self._path)) > _MAX_PATH_BYTES:
            raise OSError("AF_UNIX path too long")  # what Python's bind would report
        if self._is_taken():
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        listening = socket.socket(socket.AF_UNIX, self._kind)
        before = os.umask(0o117)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            listening.bind(self._path)
            if self._kind == socket.SOCK_STREAM:
                listening.listen(BACKLOG)
            made = os.lstat(self._path)
        except BaseException:
            listening.close()
            raise
        finally:
            os.umask(before)
        self._ours = made.st_dev, made.st_ino
        return listening

    def _is_taken(self) -> bool:
        try:
            if not stat.S_ISSOCK(os.lstat(self._path).st_mode):
                return True
        except FileNotFoundError:
            return False
        with socket.socket(socket.AF_UNIX, self._kind) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(self._path)
            except (ConnectionRefusedError, FileNotFoundError):
                return False
            except TimeoutError:
                pass  # the socket is alive: its backlog is full
        return True

    def let_go(self) -> None:
        """Unlink the path if it still leads to our socket. Call this before the socket is closed,
        because afterwards another file may get the socket's inode number."""
        ours, self._ours = self._ours, None
        if ours is None:
            return
        with contextlib.suppress(FileNotFoundError):
            there = os.lstat(self._path)
            if (there.st_dev, there.st_ino) == ours:
                os.unlink(self._path)


class Listener:
    """A listening socket on the running loop. Accepts connections."""

    def __init__(
        self,
        listening: socket.socket,
        new_protocol: Callable[[], asyncio.Protocol],
        connections: Connections,
        path: UnixPath | None = None,
    ) -> None:
        """`listening` is bound and listens. `path` is set for a UNIX socket. Failed accepts are
        counted in `connections`."""
        self._connections = connections
        self._socket = listening
        self._new_protocol = new_protocol
        self._path = path
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[object]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._is_starved = False
        self._is_closed = False

    @property
    def is_done(self) -> bool:
        """Whether the listener is closed, and all connected clients were accepted."""
        return self._is_closed and not self._opening

    def start(self) -> None:
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def stop_inviting(self) -> None:
        """Keep new clients away. Clients that are already connected are still accepted.

        Closing a listening socket resets connections that are not accepted yet, and their requests
        are lost. So new clients are kept away first: for a UNIX socket by unlinking the path, for
        TCP by dropping SYNs. Clients repeat a SYN after a second, and are then refused."""
        if self._path is not None:
            self._path.let_go()
        elif self._socket.family in (socket.AF_INET, socket.AF_INET6):
            # Without the filter, connections made in the last microseconds could be reset.
            with contextlib.suppress(OSError):
                self._socket.setsockopt(
                    socket.SOL_SOCKET,
                    _SO_ATTACH_FILTER,
                    struct.pack("HP", len(_DROP_SYN) // 8, ctypes.addressof(_DROP_SYN_PROGRAM)),
                )

    def close(self) -> None:
        """Accept the clients that have already connected, and close the listening socket."""
        if self._is_closed:
            return
        if self._path is not None:
            self._path.let_go()
        self._is_closed = True
        while self._accept():
            pass
        self._stop_waiting()
        self._socket.close()

    def _accept(self) -> bool:
        """Accept up to ACCEPTS_PER_TURN connections. Return True if more connections may wait.
        Called when the socket is readable. `close` calls this until the result is False."""
        for _ in range(ACCEPTS_PER_TURN):
            try:
                accepted, _ = self._socket.accept()
            except BlockingIOError:
                return False
            except OSError as error:
                if error.errno in _OF_ONE:
                    continue
                self._starve(error)
                return False
            if self._is_starved:
                self._is_starved = False
                failures = self._connections.accept_failures
                log.info("connections are accepted again", extra={"failures": failures})
            accepted.setblocking(False)
            task = self._loop.create_task(
                self._loop.connect_accepted_socket(self._new_protocol, accepted)
            )
            self._opening.add(task)
            task.add_done_callback(partial(self._opened, accepted))
        return True

    def _opened(self, accepted: socket.socket, task: "asyncio.Task[object]") -> None:
        self._opening.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, OSError):  # it concerns only this client, which is gone
            log.debug("a connection could not be opened", extra={"error": str(error)})
        elif error is not None:
            with contextlib.suppress(RuntimeError):  # raised if a transport already owns the socket
                accepted.close()
            message = "a connection could not be opened"
            self._loop.call_exception_handler({"message": message, "exception": error})

    def _starve(self, error: OSError) -> None:
        """Pause accepting, because no descriptor or memory is left. Log this once."""
        self._connections.accept_failures += 1
        if not self._is_starved:
            self._is_starved = True
            log.error(
                "no connection can be accepted", extra={"error": error.strerror or str(error)}
            )
        self._stop_waiting()
        if not self._is_closed:
            self._pause = self._loop.call_later(ACCEPT_PAUSE_S, self._resume)

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def _stop_waiting(self) -> None:
        self._loop.remove_reader(self._socket.fileno())
        if self._pause is not None:
            self._pause.cancel()
            self._pause = None
