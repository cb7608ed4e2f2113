"""One connection that we keep up to a ZMQ socket which listens elsewhere.

libzmq itself tries again what is refused or silent, so a listener that appears is heard within
RECONNECT_MAX_MS; it is given an address, never a name. Every other end comes back to us
(RECONNECT_STOP), and the next attempt, on a socket of its own, comes after a pause that grows:
after a message that is too large or a wrong mechanism libzmq would never connect again, and before
a listener that is not ZMQ it would hammer. What arrives waits here until its owner takes it; beyond
a bound in bytes the oldest is dropped and counted. Spec: indexer.md 1.1, slot_tracker.md 3.1.

Messages are taken from a plain socket when its descriptor says that something has come. A monitor
tells how an attempt goes; it costs two more descriptors, so it is taken down once hands are shaken,
and from then on the connection's own descriptor, which the monitor named, is looked at now and
then: libzmq closes it when the connection is lost.
"""

import asyncio
import contextlib
import itertools
import os
import random
import re
import socket
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from lean_selector.curve.keys import CurveClient, give_keys
from lean_selector.sockets.links import MAX_BACKLOG_BYTES, Links
from lean_selector.sockets.lookups import Address
from lean_selector.sockets.probes import (
    error_text,
    other_mechanism,
    why_no_handshake,
    why_unreachable,
)
from lean_selector.sockets.resolver import numeric
from lean_selector.tasks import supervise

Message = list[bytes]  # its frames
Opening = Callable[["zmq.Socket[bytes]"], None]

# Our own attempts. An engine that comes back is found again within 5 s, whatever stood in its place
# meanwhile.
RETRY_FIRST_S = 0.1
RETRY_LIMIT_S = 5.0
# libzmq's, to an address that refuses. 4 096 refused sources cost a fifth of a core.
RECONNECT_FIRST_MS: Final = 100
RECONNECT_MAX_MS: Final = 450
_RECONNECT_STOP: Final = 109  # ZMQ_RECONNECT_STOP; pyzmq has no name for it everywhere
HANDSHAKE_S = 5.0
CONNECT_MS: Final = 5_000  # of each of libzmq's
# Why an attempt still goes on is looked into after 0.1 s, and then ever more rarely: each time is
# a connection of our own. A name is asked again after RETRY_LIMIT_S at most.
LOOK_FIRST_S = 0.1
LOOK_LIMIT_S = 60.0
# A host that is gone is noticed within 20 s. No ZMTP heartbeats, whatever the reference does: a SUB
# that sends them while its queue is full for longer than their time-out aborts the process when it
# is read again (libzmq 4.3.5, issue 4767).
KEEPALIVE_S: Final = 5
KEEPALIVE_PROBES: Final = 3
# Messages that libzmq may hold for us while the loop stands still, of up to MAXMSGSIZE each. They
# are read as they come, and wait in the link, whose bytes are bounded. When even these are too
# many, the sender waits or drops.
RCVHWM: Final = 32
# Larger messages than the owner takes are brought to it whole, to be refused and counted, up to so
# many times its bound: libzmq answers its own by ending the connection.
_OVERSIZE: Final = 2
# A source gives way to the next after this many messages, whatever they cost.
_MESSAGES_PER_READ: Final = 64
# What a message costs us besides its bytes: a list and an object for each frame.
MESSAGE_OVERHEAD = 256
# As libzmq: what it refuses at once, before any look-up. A port may not begin with a sign.
_TCP_ADDRESS = re.compile(r"[0-9A-Za-z\[:][0-9A-Za-z.\-:%;\[\]_*]*:[0-9]+\Z", re.ASCII)
_MAX_PATH = 107  # of a UNIX socket

_NOW: Final = int(zmq.DONTWAIT)
_OTHER_MECHANISM: Final = 0x11000002  # ZMQ_PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH
# Never MONITOR_STOPPED, which can block `disable_monitor`.
_EVENTS: Final = (
    zmq.Event.CONNECTED
    | zmq.Event.DISCONNECTED
    | zmq.Event.HANDSHAKE_SUCCEEDED
    | zmq.Event.HANDSHAKE_FAILED_NO_DETAIL
    | zmq.Event.HANDSHAKE_FAILED_PROTOCOL
    | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_OPTIONS: Final = {
    zmq.LINGER: 0,
    zmq.RCVHWM: RCVHWM,
    zmq.RECONNECT_IVL: RECONNECT_FIRST_MS,
    zmq.RECONNECT_IVL_MAX: RECONNECT_MAX_MS,
    _RECONNECT_STOP: 0x2 | 0x4,  # where a handshake failed, and after a loss
    zmq.HANDSHAKE_IVL: 0,  # ours: libzmq does not say that it was that
    zmq.CONNECT_TIMEOUT: CONNECT_MS,
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: KEEPALIVE_S,
    zmq.TCP_KEEPALIVE_INTVL: KEEPALIVE_S,
    zmq.TCP_KEEPALIVE_CNT: KEEPALIVE_PROBES,
}
_monitors = itertools.count()


class ConnectionFailed(Exception):
    """There is no connection; the message is one clear line. `is_vague`: the server may have
    another key than the one that was tried, or be of another kind altogether."""

    def __init__(self, message: str, *, is_vague: bool = False) -> None:
        super().__init__(message)
        self.is_vague = is_vague


class _Step(Enum):
    CONNECTING = "it cannot be reached"
    SHAKING_HANDS = "it closed the connection before the handshake was over"
    READY = "it closed the connection"


class LinkState(Enum):
    RESOLVING = "resolving"
    CONNECTING = "connecting"
    CONNECTED = "connected"
    RETRYING = "retrying"  # the last attempt failed, or the connection was lost; after a pause
    CLOSED = "closed"


def check_link(endpoint: str) -> None:
    """Raise ValueError for an endpoint that cannot be connected to, whatever its name resolves to.

    `endpoint` passes `check_endpoint`.
    """
    scheme, _, address = endpoint.partition("://")
    if scheme == "tcp" and not _TCP_ADDRESS.match(address):
        raise ValueError("no address to connect to")
    if scheme == "ipc" and len(os.fsencode(address)) > _MAX_PATH:
        raise ValueError("the path is too long")


class Link:
    """A connection from start() to close(). From the thread of the loop only.

    `on_message()` is called when a message has come and none waited before it; `on_state()` after
    each change of `state`. Neither is called after close().
    """

    def __init__(
        self,
        links: Links,
        endpoint: str,
        socket_type: int,
        opening: Opening,
        on_message: Callable[[], None],
        on_state: Callable[[], None] = lambda: None,
        *,
        max_message_bytes: int,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
        once: bool = False,
        curve: CurveClient | None = None,
    ) -> None:
        """`socket_type` is zmq's. `opening(socket)` is called with each socket that connects: to
        subscribe, or to say what is to be sent. `once`: after one attempt, or one connection, the
        link is closed; what has arrived can still be taken. With `curve` only servers with
        one of its keys are spoken to."""
        # for good
        self.endpoint = endpoint
        self._links = links
        self._socket_type = socket_type
        self._opening = opening
        self._on_message = on_message
        self._on_state = on_state
        self._max_message_bytes = max_message_bytes
        self._max_backlog_bytes = max_backlog_bytes
        self._once = once
        self._curve = curve
        self._server_key: bytes | None = None  # the one that was right last
        # from start() to close()
        self._task: asyncio.Task[None] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._step = _Step.CONNECTING
        self._failure: ConnectionFailed | None = None  # of the attempt
        self._news: asyncio.Timeout | None = None  # ends the wait for the attempt
        self._descriptor: tuple[int, int] | None = None  # of the connection, and its inode
        self._lost: asyncio.Future[str] | None = None
        self._is_put_off = False
        self._queue: deque[tuple[Message, int]] = deque()
        self._backlog = links.waiting.backlog(self._shed)
        self._is_closed = False
        # what was seen
        self.state = LinkState.CONNECTING
        self.was_connected = False
        self.retries = 0  # attempts since the connection was lost, or since start()
        self.dropped = 0  # messages that nobody took, for there were too many
        self.has_overflowed = False  # it was to be there once, and ended because of its bounds
        self.error: str | None = None  # why there is no connection now

    def start(self) -> None:
        """Soon: many that start at once take turns."""
        self._links.call(self._begin)

    def _begin(self) -> None:
        if not self._is_closed and not self._links.is_ending:
            assert self._task is None, "started twice"
            self._task = supervise("zmq link", self._run)

    def close(self) -> "asyncio.Task[None] | None":
        """Nothing is called any more once this returns. Returns what is left to wait for."""
        self._is_closed = True
        self._on_message = self._on_state = lambda: None
        self.state = LinkState.CLOSED
        self._queue.clear()
        self._backlog.set(0)
        if self._task is not None:
            self._links.call(self._end)
        return self._task

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._drop()

    # what has arrived

    @property
    def waiting(self) -> int:
        """Messages."""
        return len(self._queue)

    @property
    def waiting_bytes(self) -> int:
        return self._backlog.bytes

    def take(self) -> Message | None:
        """The next message; None when there is none."""
        if not self._queue:
            return None
        message, cost = self._queue.popleft()
        self._backlog.set(self._backlog.bytes - cost)
        return message

    def _arrived(self, message: Message) -> None:
        if self._is_closed:
            return
        cost = MESSAGE_OVERHEAD + sum(map(len, message))
        was_empty = not self._queue
        self._queue.append((message, cost))
        self._backlog.set(self._backlog.bytes + cost)
        over = self._backlog.bytes - self._max_backlog_bytes
        if over > 0:
            self._shed(over)
        if was_empty:
            self._on_message()

    def _shed(self, size: int) -> None:
        """Drop the oldest, but not the newest: it tells what is missing. A link that is there once
        ends, and drops its newest: what it keeps is in order, and the rest can be asked for
        again."""
        held = self._backlog.bytes
        goal = held - size
        while held > goal and len(self._queue) > 1:
            held -= (self._queue.pop() if self._once else self._queue.popleft())[1]
            self.dropped += not self._once
        self._backlog.set(held)
        if self._once:
            self.has_overflowed = True
            self._give_up("too much waited")

    # the connection

    async def _run(self) -> None:
        pause_s = RETRY_FIRST_S
        if self._socket is not None:  # a bug ended the run before this one
            self._drop()
            self.state = LinkState.RETRYING
        while True:
            try:
                await self._connect()
            except (OSError, ConnectionFailed) as error:
                self.error = error_text(error)
            else:
                self.error = None
                self.was_connected = True
                lost = self._lost = asyncio.get_running_loop().create_future()
                self._to(LinkState.CONNECTED)
                self.retries = 0
                self._begin_reading()
                began = time.monotonic()
                self.error = await lost
                if time.monotonic() - began >= RETRY_LIMIT_S:
                    pause_s = RETRY_FIRST_S
            self._drop()
            if self._once:
                self._to(LinkState.CLOSED)
                return
            self._to(LinkState.RETRYING)
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            await self._links.turn()
            pause_s = min(2 * pause_s, RETRY_LIMIT_S)
            self.retries += 1

    def _to(self, state: LinkState) -> None:
        if self.state is not state and self.state is not LinkState.CLOSED:
            self.state = state
            self._on_state()

    async def _connect(self) -> None:
        """Until hands are shaken, by the first address that does. Raises OSError or
        ConnectionFailed."""
        host = self.endpoint.partition("://")[2].rpartition(":")[0]
        is_name = self.endpoint.startswith("tcp:") and numeric(host) is None
        if is_name:
            self._to(LinkState.RESOLVING)
        addresses = await self._addresses()
        self._to(LinkState.CONNECTING)
        error: Exception = OSError("the name has no addresses")
        for address in addresses:
            try:
                await self._reach(address, is_name, is_last=len(addresses) == 1)
            except (OSError, ConnectionFailed) as failed:
                error = failed
            else:
                return
        raise error

    async def _reach(self, address: Address, is_name: bool, is_last: bool) -> None:
        """As `_connect`, at this address, with the first key that is right."""
        is_curve = self._curve is not None
        keys: list[bytes | None] = [None]
        if self._curve is not None:  # the one that was right last comes first
            keys = [*sorted(self._curve.believed, key=lambda key: key != self._server_key)]
        for key in keys:
            self._open(address, key)
            try:
                async with asyncio.timeout(None) as self._news:
                    self._hear()
                    await self._look_into(address, is_name, may_wait=is_last and not self._once)
            except TimeoutError:
                pass
            finally:
                self._news = None
                self._end_monitor()
            if self._step is _Step.READY:
                self._server_key = key
                return
            failure = self._failure or ConnectionFailed("it accepts connections and does not speak")
            self._drop()
            if not failure.is_vague:
                break
        assert failure is not None
        why = await why_no_handshake(address, is_curve=is_curve, is_vague=failure.is_vague)
        raise ConnectionFailed(why or str(failure))

    async def _look_into(self, address: Address, is_name: bool, *, may_wait: bool) -> None:
        """Tells why there is no connection yet, until there is one. Raises ConnectionFailed where
        it is not to be waited for, or is at another address now."""
        look_s = LOOK_FIRST_S
        while True:
            await self._links.turn(look_s)
            why = await why_unreachable(address)
            if why is not None and self._step is _Step.CONNECTING:
                if not may_wait:
                    raise ConnectionFailed(why)
                self.error = why
                self.retries += 1
                self._to(LinkState.RETRYING)
            if is_name and address not in await self._addresses():
                raise ConnectionFailed(self.error or "its name has another address now")
            look_s = min(2 * look_s, RETRY_LIMIT_S if is_name else LOOK_LIMIT_S)

    async def _addresses(self) -> list[Address]:
        scheme, _, rest = self.endpoint.partition("://")
        allowed = self._links.allowed
        if allowed is not None:
            allowed.check(self.endpoint)
        if scheme == "ipc":
            path = os.fsencode(rest)
            return [(socket.AF_UNIX, b"\0" + path[1:] if path.startswith(b"@") else path)]
        if scheme != "tcp":
            raise OSError(f"{scheme} reaches nobody outside of this process")
        host, _, port = rest.rpartition(":")
        try:
            check_link(self.endpoint)
        except ValueError as error:
            raise OSError(str(error)) from None
        addresses = await self._links.resolver.resolve(host, int(port))
        if allowed is not None:
            addresses = allowed.among(self.endpoint, addresses)
        return addresses

    # an attempt, by the socket and its monitor

    def _open(self, address: Address, key: bytes | None) -> None:
        self._drop()
        self._step, self._failure, self._descriptor = _Step.CONNECTING, None, None
        try:
            made = self._socket = self._links.socket(self._socket_type)
            for option, value in _OPTIONS.items():
                made.setsockopt(option, value)
            made.setsockopt(zmq.MAXMSGSIZE, _OVERSIZE * self._max_message_bytes)
            made.setsockopt(zmq.IPV6, address[0] == socket.AF_INET6)
            if self._curve is not None and key is not None:
                give_keys(made, self._curve.pair, key)
            monitored = f"inproc://link-{next(_monitors)}"
            made.monitor(monitored, _EVENTS)
            monitor = self._monitor = self._links.socket(zmq.PAIR)
            monitor.connect(monitored)
            asyncio.get_running_loop().add_reader(monitor.fileno(), self._hear)
            made.connect(_endpoint(address))
            self._opening(made)
        except zmq.ZMQError as error:
            self._drop()
            raise OSError(error.errno, error.strerror) from None

    def _hear(self) -> None:
        """Take what the monitor tells; end the wait where the attempt has ended."""
        assert self._monitor is not None
        with contextlib.suppress(zmq.Again):
            while True:
                parsed = parse_monitor_message(self._monitor.recv_multipart(_NOW))
                self._note(int(parsed["event"]), int(parsed["value"]))
        news = self._news
        if news and not news.expired() and self._step is not _Step.CONNECTING:
            left_s = 0.0 if self._failure or self._step is _Step.READY else HANDSHAKE_S
            news.reschedule(asyncio.get_running_loop().time() + left_s)

    def _note(self, event: int, value: int) -> None:
        if event == zmq.Event.CONNECTED:
            self._step = _Step.SHAKING_HANDS
            with contextlib.suppress(OSError):  # it is lost already
                self._descriptor = value, os.fstat(value).st_ino
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._step = _Step.READY
        elif self._step is _Step.READY:  # it is lost again
            self._descriptor = None
        elif self._failure is None:
            self._failure = self._failed(event, value)

    def _failed(self, event: int, value: int) -> ConnectionFailed:
        is_curve = self._curve is not None
        if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            if value == _OTHER_MECHANISM:
                return ConnectionFailed(other_mechanism(is_curve=is_curve))
            return ConnectionFailed("it does not speak ZMQ as we do")
        if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            if self._curve is None:
                return ConnectionFailed("it asks for credentials")
            public = self._curve.pair.public.decode()
            return ConnectionFailed(f"it does not admit our public key {public}")
        if is_curve:
            return ConnectionFailed("it has no server key that we believe", is_vague=True)
        return ConnectionFailed(self._step.value, is_vague=True)

    def _end_monitor(self) -> None:
        """From here on the connection is seen to by its descriptor: libzmq tells of a loss before
        it closes it, so one whose inode was read before this last look is the connection's own."""
        if self._monitor is not None and not self._monitor.closed:  # as with its context
            self._hear()
            asyncio.get_running_loop().remove_reader(self._monitor.fileno())
            if self._socket is not None and not self._socket.closed:
                self._socket.disable_monitor()  # first: what it tells nobody waits for ever
            self._monitor.close(linger=0)
        self._monitor = None

    def _drop(self) -> None:
        self._end_monitor()
        self._links.unwatch(self)
        made, self._socket = self._socket, None
        if made is not None and not made.closed:
            asyncio.get_running_loop().remove_reader(made.fileno())
            made.close(linger=0)

    # a connection

    def look(self) -> bool:
        """False once it is lost; then `_lost` is true."""
        if self._descriptor is not None:
            number, inode = self._descriptor
            with contextlib.suppress(OSError):
                if os.fstat(number).st_ino == inode:
                    return True
        while self._take(_MESSAGES_PER_READ):  # at most what libzmq holds
            pass
        self._lose(_Step.READY.value)
        return False

    def _lose(self, reason: str) -> None:
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(reason)

    def _give_up(self, reason: str) -> None:
        """Nothing more is brought, and the connection counts as lost."""
        self._lose(reason)
        self._drop()

    def _begin_reading(self) -> None:
        """Not before the owner knows of the connection, and not while there is none."""
        assert self._socket is not None
        self._links.watch(self)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)
        self._read()

    def _read(self) -> None:
        """Take what has arrived. The descriptor tells only of changes: a read goes to the end."""
        if not self._is_put_off:
            self._read_on()

    def _read_on(self) -> None:
        self._is_put_off = False
        began = time.perf_counter()
        more = self._socket is not None
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
            made = self._socket
            if made is None:
                return False
            try:
                frame = made.recv(_NOW, copy=False)
                frames = [frame.bytes]
                # Asking each frame whether more follow costs half of what asking the socket does.
                while frame.more:
                    frame = made.recv(_NOW, copy=False)
                    frames.append(frame.bytes)
            except zmq.Again:
                return False
            except zmq.ZMQError as error:
                if not made.closed:  # as with its context
                    self._give_up(error_text(error))
                return False
            self._arrived(frames)
        return True


def _endpoint(address: Address) -> str:
    family, where = address
    if isinstance(where, bytes):
        return "ipc://" + os.fsdecode(b"@" + where[1:] if where.startswith(b"\0") else where)
    if family == socket.AF_INET6:
        host, port, _, scope = where
        return f"tcp://[{host}%{scope}]:{port}" if scope else f"tcp://[{host}]:{port}"
    return f"tcp://{where[0]}:{where[1]}"
