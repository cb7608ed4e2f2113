"""One attempt to connect a ZMQ socket, and what it brings until it is lost.

The socket is a zmq.asyncio one; messages are taken through its plain shadow, which costs a tenth,
when its descriptor says that something has come. libzmq is told not to connect again by itself. A
monitor tells how the attempt goes; it costs two more descriptors, so it is taken down once hands
are shaken, and from then on the connection's own descriptor, which the monitor named, is looked at
now and then: libzmq closes it when the connection is lost.
"""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from enum import Enum

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from lean_selector.curve.keys import CurveClient, give_keys
from lean_selector.sockets.links import Links
from lean_selector.sockets.lookups import Address

Message = list[bytes]  # its frames
Opening = Callable[["zmq.Socket[bytes]"], None]

CONNECT_S = 5.0  # per address
HANDSHAKE_S = 10.0
# A host that is gone is noticed within 20 s. No ZMTP heartbeats, whatever the reference does: a SUB
# that sends them while its queue is full for longer than their time-out aborts the process when it
# is read again (libzmq 4.3.5, issue 4767).
KEEPALIVE_S = 5
KEEPALIVE_PROBES = 3
# Messages that libzmq may hold for us; they are read as they come, and wait in the link, whose
# bytes are bounded. When even these are too many, it is the sender who waits or drops.
RCVHWM = 1_000
# Larger messages than the owner takes are brought to it whole, to be refused and counted, up to so
# many times its bound: libzmq answers its own by ending the connection.
_OVERSIZE = 2
# A source gives way to the next after this many messages, whatever they cost.
_MESSAGES_PER_READ = 64

_PROBE_S = 1.0  # for the reason of a failure
# What ZMTP 3 begins with, signature and version; then come mechanism, side and filler. Who has told
# so much is told all; who told of another mechanism, may be cut off first.
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
_GREETING_BYTES = 64

_NOW = int(zmq.DONTWAIT)
_OTHER_MECHANISM = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
_EVENTS = (
    zmq.Event.CONNECTED
    | zmq.Event.CLOSED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)


class ConnectionFailed(Exception):
    """There is no connection; the message is one clear line. `may_be_key`: the server may have
    another key than the one that was tried; `is_vague`: or be of another kind altogether."""

    def __init__(self, message: str, *, may_be_key: bool = False, is_vague: bool = False) -> None:
        super().__init__(message)
        self.is_vague = is_vague
        self.may_be_key = may_be_key


class _Step(Enum):
    CONNECTING = "it cannot be reached"
    SHAKING_HANDS = "it closed the connection before the handshake was over"
    READY = "it closed the connection"


class ZmqConnection:
    """From open() until `lost` comes true with the reason, or abort()."""

    def __init__(
        self,
        links: Links,
        socket_type: int,
        opening: Opening,
        on_message: Callable[[Message], None],
        *,
        max_message_bytes: int,
        curve: CurveClient | None = None,
        server_key: bytes | None = None,
    ) -> None:
        """With `curve` the server must have `server_key`."""
        assert (curve is None) == (server_key is None)
        self._curve = curve
        self._server_key = server_key
        self.lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._links = links
        self._socket_type = socket_type
        self._opening = opening
        self._on_message = on_message
        self._max_message_bytes = max_message_bytes
        self._socket: zmq.asyncio.Socket | None = None
        self._plain: zmq.Socket[bytes] | None = None  # the shadow of _socket
        self._monitor: zmq.asyncio.Socket | None = None
        self._step = _Step.CONNECTING
        self._descriptor: tuple[int, int] | None = None  # of the connection, and its inode
        self._is_put_off = False

    async def open(self, address: Address, *, more_keys: bool = False) -> None:
        """Returns when hands are shaken. `more_keys`: others are tried where it fails for the key.
        Raises OSError or ConnectionFailed; then all is closed."""
        try:
            self._begin(address)
            try:
                async with asyncio.timeout(CONNECT_S):
                    await self._until(_Step.SHAKING_HANDS)
            except TimeoutError:
                raise ConnectionFailed("no answer") from None
            try:
                async with asyncio.timeout(HANDSHAKE_S):
                    await self._until(_Step.READY)
            except TimeoutError:
                raise ConnectionFailed("it accepts connections and does not speak") from None
        except ConnectionFailed as error:
            self.abort()
            if self._step is _Step.CONNECTING:
                await _raise_why(address)  # libzmq does not say
            elif not (more_keys and error.may_be_key):
                await self._tell_more(error, address)
            raise error
        except BaseException:
            self.abort()
            raise
        self._end_monitor()
        self._links.watch(self)
        # Not before, so that who is told of messages knows of the connection; zmq.asyncio itself
        # reads the descriptor only of sockets that are awaited.
        assert self._socket is not None
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)
        self._read()

    async def _tell_more(self, error: ConnectionFailed, address: Address) -> None:
        """Raise ConnectionFailed with a better reason, where the other side gives one."""
        if await _speaks_http(address):
            raise ConnectionFailed("it speaks HTTP, not ZMQ") from None
        if error.is_vague:  # who closes first, we or it, is a race
            mechanism = await _mechanism_of(address)
            if mechanism is not None and (mechanism == b"CURVE") is (self._curve is None):
                raise ConnectionFailed(self._other_mechanism()) from None

    def _other_mechanism(self) -> str:
        if self._curve is None:
            return "it asks for keys (CURVE), and none are given for it"
        return "it does not encrypt, and keys are given for it"

    def _begin(self, address: Address) -> None:
        try:
            made = self._socket = self._links.context.socket(self._socket_type)
            plain = self._plain = zmq.Socket.shadow(made)
            plain.setsockopt(zmq.LINGER, 0)
            plain.setsockopt(zmq.RECONNECT_IVL, -1)
            plain.setsockopt(zmq.RCVHWM, RCVHWM)
            plain.setsockopt(zmq.MAXMSGSIZE, _OVERSIZE * self._max_message_bytes)
            plain.setsockopt(zmq.HANDSHAKE_IVL, 0)  # ours, in open(): libzmq's does not say it was
            if address[0] != socket.AF_UNIX:
                plain.setsockopt(zmq.TCP_KEEPALIVE, 1)
                plain.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_S)
                plain.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_S)
                plain.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_PROBES)
            plain.setsockopt(zmq.IPV6, address[0] == socket.AF_INET6)
            if self._curve is not None and self._server_key is not None:
                give_keys(plain, self._curve.pair, self._server_key)
            self._monitor = made.get_monitor_socket(_EVENTS)
            plain.connect(_endpoint(address))
            self._opening(plain)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from None

    # how the attempt goes

    async def _until(self, step: _Step) -> None:
        """Wait for the attempt to come so far. Raises ConnectionFailed."""
        assert self._monitor is not None
        while self._step not in (step, _Step.READY):
            self._note(*_event(await self._monitor.recv_multipart()))

    def _note(self, event: int, value: int) -> None:
        if event == zmq.Event.CONNECTED:
            self._step = _Step.SHAKING_HANDS
            with contextlib.suppress(OSError):  # it is lost already
                self._descriptor = value, os.fstat(value).st_ino
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._step = _Step.READY
        elif event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL and value == _OTHER_MECHANISM:
            raise ConnectionFailed(self._other_mechanism())
        elif event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            raise ConnectionFailed("it does not speak ZMQ as we do")
        elif event == zmq.Event.HANDSHAKE_FAILED_AUTH and self._curve is not None:
            raise ConnectionFailed(
                f"it does not admit our public key {self._curve.pair.public.decode()}"
            )
        elif event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            raise ConnectionFailed("it asks for credentials")
        elif self._step is _Step.SHAKING_HANDS and self._curve is not None:
            raise ConnectionFailed(
                "it has no server key that we believe", may_be_key=True, is_vague=True
            )
        else:
            raise ConnectionFailed(self._step.value, is_vague=self._step is _Step.SHAKING_HANDS)

    def _end_monitor(self) -> None:
        """Look once more, then see to the connection by its descriptor.

        libzmq tells of a loss before it closes the descriptor, so one whose inode was read before
        this look is the connection's own.
        """
        monitor = self._monitor
        assert monitor is not None
        plain: zmq.Socket[bytes] = zmq.Socket.shadow(monitor)
        try:
            while True:
                self._note(*_event(plain.recv_multipart(_NOW)))
        except zmq.Again:
            pass
        except ConnectionFailed:
            self._descriptor = None
        self._close_monitor()

    def _close_monitor(self) -> None:
        monitor, self._monitor = self._monitor, None
        if monitor is not None and self._socket is not None and not self._socket.closed:
            self._socket.disable_monitor()
            monitor.close(linger=0)

    def look(self) -> bool:
        """False once the connection is lost; then `lost` is true."""
        if self._socket is None:
            return False
        if self._descriptor is not None:
            number, inode = self._descriptor
            with contextlib.suppress(OSError):
                if os.fstat(number).st_ino == inode:
                    return True
        self._read_all()
        if not self.lost.done():
            self.lost.set_result(_Step.READY.value)
        self.abort()
        return False

    def give_up(self, reason: str = "too much waited") -> None:
        """Nothing more is brought, and the connection counts as lost."""
        if not self.lost.done():
            self.lost.set_result(reason)
        self.abort()

    def abort(self) -> None:
        """Nothing more is brought. May be called more than once."""
        self._close_monitor()
        made, self._socket, self._plain = self._socket, None, None
        if made is not None:
            self._links.unwatch(self)
            if not made.closed:  # it may have been, with its context
                asyncio.get_running_loop().remove_reader(made.fileno())
                made.close(linger=0)

    # what it brings

    def _read(self) -> None:
        """Take what has arrived. The descriptor tells only of changes: a read goes to the end."""
        if not self._is_put_off:
            self._read_on()

    def _read_on(self) -> None:
        self._is_put_off = False
        began = time.perf_counter()
        more = self._plain is not None
        try:
            if self._links.may_read():
                more = self._take(_MESSAGES_PER_READ)
                self._links.has_read(began)
        finally:  # the descriptor does not tell again of what is behind a message that fails
            if more:
                self._is_put_off = True
                self._links.put_off(self._read_on)

    def _take(self, most: int) -> bool:
        """Bring at most so many messages; True when there may be more."""
        for _ in range(most):
            plain = self._plain
            if plain is None:
                return False
            try:
                frame = plain.recv(_NOW, copy=False)
                frames = [frame.bytes]
                # Asking each frame whether more follow costs half of what asking the socket does.
                while frame.more:
                    frame = plain.recv(_NOW, copy=False)
                    frames.append(frame.bytes)
            except zmq.Again:
                return False
            except zmq.ZMQError as error:
                if self._socket is not None and not self._socket.closed:  # with its context
                    self.give_up(error_text(error))
                return False
            self._on_message(frames)
        return True

    def _read_all(self) -> None:
        """The rest of a connection that is lost: at most what libzmq holds."""
        while self._take(_MESSAGES_PER_READ):
            pass


def _event(frames: list[bytes]) -> tuple[int, int]:
    parsed = parse_monitor_message(frames)
    return int(parsed["event"]), int(parsed["value"])


def _endpoint(address: Address) -> str:
    family, where = address
    if isinstance(where, bytes):
        return "ipc://" + os.fsdecode(b"@" + where[1:] if where.startswith(b"\0") else where)
    if family == socket.AF_INET6:
        host, port, _, scope = where
        return f"tcp://[{host}%{scope}]:{port}" if scope else f"tcp://[{host}]:{port}"
    return f"tcp://{where[0]}:{where[1]}"


async def _raise_why(address: Address) -> None:
    """Raises OSError with the system's own reason why nothing listens there, if it gives one."""
    family, where = address
    probe = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    with probe, contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_PROBE_S):
            await asyncio.get_running_loop().sock_connect(probe, where)


async def _speaks_http(address: Address) -> bool:
    """Whether an HTTP server answers there: of wrong ports the commonest."""
    loop = asyncio.get_running_loop()
    family, where = address
    probe = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    with probe, contextlib.suppress(OSError):  # a time-out is one
        async with asyncio.timeout(_PROBE_S):
            await loop.sock_connect(probe, where)
            await loop.sock_sendall(probe, b"HEAD / HTTP/1.0\r\n\r\n")
            return (await loop.sock_recv(probe, 16)).startswith(b"HTTP/")
    return False


async def _mechanism_of(address: Address) -> bytes | None:
    """How a ZMQ socket there wants to be spoken to: NULL, PLAIN, CURVE. None: it does not say."""
    loop = asyncio.get_running_loop()
    family, where = address
    probe = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    with probe, contextlib.suppress(OSError):  # a time-out is one
        async with asyncio.timeout(_PROBE_S):
            await loop.sock_connect(probe, where)
            await loop.sock_sendall(probe, _GREETING)
            greeting = b""
            while len(greeting) < _GREETING_BYTES:
                data = await loop.sock_recv(probe, _GREETING_BYTES - len(greeting))
                if not data:
                    return None
                greeting += data
            if greeting[:1] == _GREETING[:1]:
                return greeting[12:32].rstrip(b"\0")
    return None


def error_text(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # of a look-up, whose numbers are of another kind
    return str(error) or type(error).__name__
