"""Where connections come in: sockets bound, accepted in bulk, and given up without a loss.

Owns listening sockets, the path of a UNIX socket and what becomes of errors of accept(2). uvloop's
own server takes one connection per turn of the loop, so newcomers starve while turns are long; here
a turn takes many. Knows nothing of what is said on a connection (decisions D14, D19 and D27).
"""

import asyncio
import contextlib
import ctypes
import errno
import logging
import os
import secrets
import socket
import stat
import struct
from collections.abc import Callable
from functools import partial
from typing import Final

from lean_selector.http.connections import Connections

log = logging.getLogger("lean_selector.server")

BACKLOG: Final = 1024

# 20 to 50 us each, so that a turn that takes as many as it may is 3 ms long.
ACCEPTS_PER_TURN: Final = 64

# After an accept that failed for want of descriptors or memory. Those who wait stay in the backlog,
# and a listener that is readable and not read would turn the loop without end.
ACCEPT_PAUSE_S: Final = 0.5

# accept(2): errors of one connection, which is gone, and of nothing else.
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

# A client whose host vanished is noticed after 30 s, also one that waits for a worker and to whom
# nothing is sent meanwhile: probes from the 15th second on, and nothing sent stays unconfirmed
# longer. Accepted sockets inherit all of these from the listening one.
_OF_TCP: Final = (
    (socket.SOL_SOCKET, "SO_REUSEADDR", 1),
    (socket.SOL_SOCKET, "SO_KEEPALIVE", 1),
    (socket.IPPROTO_TCP, "TCP_KEEPIDLE", 15),
    (socket.IPPROTO_TCP, "TCP_KEEPINTVL", 5),
    (socket.IPPROTO_TCP, "TCP_KEEPCNT", 3),
    (socket.IPPROTO_TCP, "TCP_USER_TIMEOUT", 30_000),
)

_MAX_PATH_BYTES: Final = 107  # sun_path, without its last byte

# struct sock_filter: load the flags of the TCP header, drop a segment with SYN, take any other.
_DROP_SYN: Final = struct.pack(
    "HBBIHBBIHBBIHBBI", 0x30, 0, 0, 13, 0x45, 0, 1, 0x02, 0x06, 0, 0, 0, 0x06, 0, 0, 0x40000
)
_DROP_SYN_PROGRAM: Final = ctypes.create_string_buffer(_DROP_SYN)  # stays where the kernel reads it
_SO_ATTACH_FILTER: Final = 26


def inet_socket(
    host: str, port: int, kind: socket.SocketKind = socket.SOCK_STREAM
) -> socket.socket:
    """Bound; of TCP also listening, and set up for the connections to come. Raises OSError.

    Resolved here: the loop's own resolver would leave four threads behind.
    """
    try:
        found = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_PASSIVE)
    except UnicodeError:  # a part of it is too long for DNS
        raise OSError("not a host name") from None
    family, _, proto, _, address = found[0]
    bound = socket.socket(family, kind, proto)
    is_tcp = kind == socket.SOCK_STREAM
    try:
        for level, name, value in _OF_TCP if is_tcp else ():
            option = getattr(socket, name, None)  # some are Linux's alone
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
    """The path of a UNIX socket: taken in one step, and let go of only while it is ours.

    A successor takes it as soon as we have let go, long before we end; what lies there then is not
    ours to delete.
    """

    def __init__(self, path: str, kind: int = socket.SOCK_STREAM) -> None:
        """`kind` may be SOCK_DGRAM, for what is not listened to but read."""
        self._path = path
        self._kind = kind
        self._ours: tuple[int, int] | None = None  # device and inode

    def take(self) -> socket.socket:
        """Bound and listening (or just bound), mode 0660 from its first moment. Raises OSError.

        Replaces a socket that nobody serves. Until the last step nothing is at the path that does
        not answer.
        """
        if len(os.fsencode(self._path)) > _MAX_PATH_BYTES:
            raise OSError("AF_UNIX path too long")  # in the words of Python's own bind
        if self._is_taken():
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        listening = socket.socket(socket.AF_UNIX, self._kind)
        before = os.umask(0o117)
        try:
            name = _bind_beside(listening, self._path)
        except BaseException:
            listening.close()
            raise
        finally:
            os.umask(before)
        try:
            if self._kind == socket.SOCK_STREAM:
                listening.listen(BACKLOG)
            made = os.lstat(name)
            os.rename(name, self._path)
        except BaseException:
            os.unlink(name)
            listening.close()
            raise
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
                pass  # its backlog is full
        return True

    def let_go(self) -> None:
        """Leave the path free. Before the socket is closed: only until then no other file can have
        the same inode."""
        ours, self._ours = self._ours, None
        if ours is None:
            return
        with contextlib.suppress(FileNotFoundError):
            there = os.lstat(self._path)
            if (there.st_dev, there.st_ino) == ours:
                os.unlink(self._path)


def _bind_beside(listening: socket.socket, path: str) -> str:
    """Binds to a name of its own in the same directory, where it can be renamed from."""
    folder = os.path.dirname(path)
    while True:
        # Short, because it may not be longer than the path of a socket may be.
        name = os.path.join(folder, "." + secrets.token_hex(2))
        try:
            listening.bind(name)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return name


class Listener:
    """One listening socket on the running loop, and whatever connects to it."""

    def __init__(
        self,
        listening: socket.socket,
        new_protocol: Callable[[], asyncio.Protocol],
        connections: Connections,
        path: UnixPath | None = None,
    ) -> None:
        """`listening` is bound and listens; `path` is its path; `connections` has the counts."""
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
        """Closed, and all that was accepted is open."""
        return self._is_closed and not self._opening

    def start(self) -> None:
        self._socket.setblocking(False)
        self._loop.add_reader(self._socket.fileno(), self._accept)

    def stop_inviting(self) -> None:
        """Let nobody connect any more; who has is still accepted.

        A listening socket that is closed resets whoever has connected and was not accepted, with
        the request that it may have sent. So newcomers are kept away first: of a UNIX socket by its
        path, of TCP by dropping the first segment of each handshake, which clients send again
        after a second, when it is refused.
        """
        if self._path is not None:
            self._path.let_go()
        elif self._socket.family in (socket.AF_INET, socket.AF_INET6):
            # Where it cannot be had, some microseconds remain in which one may be reset.
            with contextlib.suppress(OSError):
                self._socket.setsockopt(
                    socket.SOL_SOCKET,
                    _SO_ATTACH_FILTER,
                    struct.pack("HP", len(_DROP_SYN) // 8, ctypes.addressof(_DROP_SYN_PROGRAM)),
                )

    def close(self) -> None:
        """Accept whoever has connected, and close."""
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
        """Called when somebody has connected; once more if not all could be taken. Take as many as
        one turn bears. True when more may be there."""
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
        if isinstance(error, OSError):  # the client's, who is gone
            log.debug("a connection could not be opened", extra={"error": str(error)})
        elif error is not None:
            with contextlib.suppress(RuntimeError):  # a transport has it
                accepted.close()
            message = "a connection could not be opened"
            self._loop.call_exception_handler({"message": message, "exception": error})

    def _starve(self, error: OSError) -> None:
        """No descriptor or no memory is left: say so once, and come back later."""
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
