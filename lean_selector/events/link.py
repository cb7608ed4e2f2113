"""One persistent connection to a remote ZMQ socket.

A link resolves names itself, and gives libzmq only addresses. While an address refuses the
connection or does not answer, libzmq retries, so a listener that starts later is connected within a
second. After any other failure the link opens a new socket after a growing pause, because libzmq
would retry without a pause (if the listener does not speak ZMQ) or never (for example, after too
large a message). Received messages wait in the link until the link's owner takes them. If too many
bytes wait, the oldest messages are dropped.

During an attempt to connect, a libzmq monitor reports the progress. A monitor needs two more file
descriptors, so it is closed after the handshake. From then on, the link regularly checks the
descriptor of the connection, because libzmq closes this descriptor when the connection is lost.
Spec: indexer.md 1.1, slot_tracker.md 3.1."""

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
from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from lean_selector.events.links import MAX_BACKLOG_BYTES, Links
from lean_selector.events.names import Address, numeric
from lean_selector.tasks import supervise

if TYPE_CHECKING:
    from lean_selector.events.curve_keys import CurveClient

Message = list[bytes]  # the frames of a message
Opening = Callable[["zmq.Socket[bytes]"], None]

# Pauses between our own attempts. A restarted engine is found within 5 s, whatever listened at the
# engine's address before.
RETRY_FIRST_S = 0.1
RETRY_LIMIT_S = 5.0
# Pauses between libzmq's attempts at an address that refuses the connection.
RECONNECT_FIRST_MS: Final = 100
RECONNECT_MAX_MS: Final = 450
# If more links than this have no connection, each further one is retried half as often. So 4 096
# refused sources cost libzmq 14 % of a core, not 24 %.
OFTEN_TRIED: Final = 1_024
_RECONNECT_STOP: Final = 109  # ZMQ_RECONNECT_STOP; not every pyzmq has a name for it
HANDSHAKE_S = 5.0
# Timeout of libzmq's attempts at an address that did not answer before. When an attempt ends,
# libzmq searches the timers of all sockets: if every socket had this timer, 4 096 refused sources
# would cost nearly twice as much CPU.
CONNECT_MS: Final = 5_000
# A probe finds out why an attempt is unfinished: after 0.1 s, then at growing intervals. A name is
# resolved again every RETRY_LIMIT_S. If it has several addresses, libzmq tries one, and probes try
# the others.
LOOK_FIRST_S = 0.1
LOOK_LIMIT_S = 60.0
OTHERS_S = 0.3
_PROBE_S = 1.0
_SILENT: Final = "no answer"
# A vanished host is noticed within 20 s. There are no ZMTP heartbeats, unlike in the reference: a
# SUB that sends them aborts the process if its queue is full for longer than their timeout and is
# then read (libzmq 4.3.5, issue 4767).
KEEPALIVE_S: Final = 5
KEEPALIVE_PROBES: Final = 3
# How many messages (of up to MAXMSGSIZE each) libzmq may hold while the loop is busy. The link
# reads them as they arrive, and bounds their bytes. Above this number the sender waits or drops.
# With 32, bursts of 50 small messages cost a tenth more.
RCVHWM: Final = 64
# Messages of up to this multiple of the owner's limit are received, refused and counted. A larger
# message makes libzmq end the connection.
_OVERSIZE: Final = 2
# A source yields to the next one after this many messages.
_MESSAGES_PER_READ: Final = 64
# Memory that a message takes besides its bytes: a list, and an object per frame.
MESSAGE_OVERHEAD = 256
# Addresses that libzmq accepts without a name look-up. A port may not begin with a sign.
_TCP_ADDRESS = re.compile(r"[0-9A-Za-z\[:][0-9A-Za-z.\-:%;\[\]_*]*:[0-9]+\Z", re.ASCII)
_MAX_PATH = 107  # of a UNIX socket

_NOW: Final = int(zmq.DONTWAIT)
# The start of a ZMTP 3 greeting: signature and version. Mechanism, side and filler follow. A server
# sends its whole greeting to a client that sends this much. If the client's mechanism came too and
# differed, the server might disconnect first.
_GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00"
_GREETING_BYTES: Final = 64
# All events except MONITOR_STOPPED, which can block `disable_monitor`.
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
    _RECONNECT_STOP: 0x2 | 0x4,  # after a failed handshake, and after a loss
    zmq.HANDSHAKE_IVL: 0,  # off: we have a timeout, and libzmq does not report its own
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: KEEPALIVE_S,
    zmq.TCP_KEEPALIVE_INTVL: KEEPALIVE_S,
    zmq.TCP_KEEPALIVE_CNT: KEEPALIVE_PROBES,
}
_monitors = itertools.count()


class _TryAt(OSError):
    """Raised to stop an attempt to connect, and to try the host's address `address` next."""

    def __init__(self, address: Address) -> None:
        super().__init__("another address of its name is tried")
        self.address = address


class _Step(Enum):
    CONNECTING = "it cannot be reached"
    SHAKING_HANDS = "it closed the connection before the handshake was over"
    READY = "it closed the connection"


class LinkState(Enum):
    RESOLVING = "resolving"
    CONNECTING = "connecting"
    CONNECTED = "connected"
    # The last attempt failed, or the connection was lost; the next attempt follows a pause.
    RETRYING = "retrying"
    CLOSED = "closed"


def check_link(endpoint: str) -> None:
    """Raise ValueError if no connection to a ZMQ endpoint is possible: the TCP address is
    malformed, or the UNIX path is too long. The endpoint must have passed `check_endpoint`."""
    scheme, _, address = endpoint.partition("://")
    if scheme == "tcp" and not _TCP_ADDRESS.match(address):
        raise ValueError("no address to connect to")
    if scheme == "ipc" and len(os.fsencode(address)) > _MAX_PATH:
        raise ValueError("the path is too long")


class Link:
    """A persistent connection to a ZMQ socket, from start() to close(). Not thread-safe. Until
    close(), `on_message()` is called when a message arrives while no other message waits, and
    `on_state()` is called after each change of `state`."""

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
        curve: "CurveClient | None" = None,
    ) -> None:
        """`socket_type` is a constant of zmq. `opening(socket)` subscribes or sends on a new
        socket. With `once`, the link does not reconnect, but the messages that it has received can
        still be taken. With `curve`, the link uses CURVE, and accepts only servers whose keys are
        in `curve`."""
        # Set once, in the constructor.
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
        self._server_key: bytes | None = None  # the last key that worked
        # Used from start() to close().
        self._task: asyncio.Task[None] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._step = _Step.CONNECTING
        self._failure: str | None = None  # of the current attempt
        self._is_refused_for_key = False
        self._is_silent = False  # the address did not even refuse the connection
        self._reasons: dict[str, str | None] = {}  # libzmq's reason -> a better one
        self._news: asyncio.Timeout | None = None  # ends the wait for the attempt
        self._descriptor: tuple[int, int] | None = None  # (descriptor of the connection, its inode)
        self._lost: asyncio.Future[str] | None = None
        self._is_put_off = False
        self._queue: deque[tuple[Message, int]] = deque()
        self._backlog = links.waiting.backlog(self._shed)
        # State when the link was last looked at.
        self.state = LinkState.CONNECTING
        self.was_connected = False
        self.retries = 0  # attempts since the connection was lost, or since start()
        self.dropped = 0  # messages dropped because too many waited
        self.has_overflowed = False  # the bounds ended a link with `once`
        self.error: str | None = None  # why there is no connection now

    def start(self) -> None:
        """Connect soon. In one iteration of the event loop, only a few links open a socket."""
        self._links.call(self._begin)

    def _begin(self) -> None:
        if self.state is not LinkState.CLOSED and not self._links.is_ending:
            assert self._task is None, "started twice"
            self._task = supervise("zmq link", self._run)

    def close(self) -> "asyncio.Task[None] | None":
        """Close the connection, and stop all callbacks. The caller must await a returned task."""
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

    # waiting messages

    @property
    def waiting(self) -> int:
        """How many received messages `take` has not returned yet."""
        return len(self._queue)

    @property
    def waiting_bytes(self) -> int:
        return self._backlog.bytes

    def take(self) -> Message | None:
        """Return the next received message, or None if no message waits."""
        if not self._queue:
            return None
        message, cost = self._queue.popleft()
        self._backlog.set(self._backlog.bytes - cost)
        return message

    def _arrived(self, message: Message) -> None:
        if self.state is LinkState.CLOSED:
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
        """Drop the oldest waiting messages, at least `size` bytes, but keep the newest message.
        With `once`, drop the newest messages instead, and end the link; the caller can then request
        the dropped messages again."""
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
        if self._socket is not None:  # an internal error ended the previous run
            self._drop()
            self.state = LinkState.RETRYING
        while True:
            try:
                await self._connect()
            except OSError as error:
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
        """Try the endpoint's addresses until one completes the handshake. Raises OSError."""
        host = self.endpoint.partition("://")[2].rpartition(":")[0]
        is_name = self.endpoint.startswith("tcp:") and numeric(host) is None
        if is_name:
            self._to(LinkState.RESOLVING)
        left = await self._addresses()
        self._to(LinkState.CONNECTING)
        while True:
            address = left.pop(0)
            try:
                return await self._reach(address, is_name)
            except _TryAt as found:
                left = [found.address, *(each for each in left if each != found.address)]
            except OSError:
                if not left:
                    raise

    async def _reach(self, address: Address, is_name: bool) -> None:
        """Connect to this address. With CURVE, try each trusted server key. Raises OSError."""
        keys: list[bytes | None] = [None]
        if self._curve is not None:  # the key that worked last comes first
            keys = [*sorted(self._curve.believed, key=lambda key: key != self._server_key)]
        for key in keys:
            self._open(address, key)
            try:
                async with asyncio.timeout(None) as self._news:
                    self._hear()
                    await self._look_into(address, is_name)
            except TimeoutError:
                pass
            finally:
                self._news = None
                self._end_monitor()
            if self._step is _Step.READY:
                self._links.seeking.discard(self)
                self._server_key, self._is_silent = key, False
                return
            self._drop()
            if self._is_refused_for_key:
                break
        failure = self._failure or "it accepts connections and sends nothing"
        if not self._is_refused_for_key and self._links.may_probe():
            is_curve = self._curve is not None
            self._reasons[failure] = await why_no_handshake(address, is_curve=is_curve)
        raise OSError(self._reasons.get(failure) or failure)

    async def _look_into(self, address: Address, is_name: bool) -> None:
        """While libzmq cannot connect to `address`, find out why. Raises OSError if libzmq should
        stop its attempts, or if another address should be tried."""
        loop = asyncio.get_running_loop()
        pause_s = again_s = LOOK_FIRST_S
        ask_at = loop.time() + pause_s
        while True:
            await self._links.turn(min(again_s, ask_at - loop.time()))
            addresses = await self._addresses() if is_name else [address]
            if address not in addresses:
                raise OSError(self.error or "its name has another address now")
            again_s = OTHERS_S if len(addresses) > 1 else RETRY_LIMIT_S if is_name else LOOK_LIMIT_S
            for other in addresses:
                is_up = other != address and await self._why_unreachable(other) is None
                if is_up and self._step is _Step.CONNECTING:
                    raise _TryAt(other)
            if loop.time() >= ask_at:
                why = await self._why_unreachable(address)
                if why is not None and self._step is _Step.CONNECTING:
                    if self._once:
                        raise OSError(why)
                    self.error = why
                    self.retries += 1
                    self._to(LinkState.RETRYING)
                    if why == _SILENT and not self._is_silent:
                        self._is_silent = True
                        raise _TryAt(address)
                pause_s = min(4 * pause_s, LOOK_LIMIT_S)
                ask_at = loop.time() + pause_s

    async def _why_unreachable(self, address: Address) -> str | None:
        await self._links.turn_to_probe()
        return await why_unreachable(address)

    async def _addresses(self) -> list[Address]:
        scheme, _, rest = self.endpoint.partition("://")
        allowed = self._links.allowed
        if allowed is not None:
            allowed.check(self.endpoint)
        if scheme == "ipc":
            path = os.fsencode(rest)
            return [(socket.AF_UNIX, b"\0" + path[1:] if path.startswith(b"@") else path)]
        if scheme != "tcp":
            raise OSError(f"{scheme} is not reachable outside of this process")
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
        self._is_refused_for_key = False
        try:
            made = self._socket = self._links.socket(self._socket_type)
            for option, value in _OPTIONS.items():
                made.setsockopt(option, value)
            is_one_of_many = len(self._links.seeking) >= OFTEN_TRIED
            self._links.seeking.add(self)
            made.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS << is_one_of_many)
            made.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS if self._is_silent else 0)
            made.setsockopt(zmq.MAXMSGSIZE, _OVERSIZE * self._max_message_bytes)
            made.setsockopt(zmq.IPV6, address[0] == socket.AF_INET6)
            if self._curve is not None and key is not None:
                from lean_selector.events.curve_keys import give_keys

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
        """Read libzmq's reports on an attempt to connect. The end of the attempt wakes `_reach`."""
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
            with contextlib.suppress(OSError):  # the connection is already lost again
                self._descriptor = value, os.fstat(value).st_ino
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._step = _Step.READY
        elif self._step is _Step.READY:  # the connection was made and lost again
            self._descriptor = None
        elif self._failure is None:
            self._failure = self._failed(event)

    def _failed(self, event: int) -> str:
        if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            return "it violated the protocol in the ZMTP handshake"
        if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            self._is_refused_for_key = True
            if self._curve is None:
                return "it requires credentials"
            return f"it does not admit our public key {self._curve.pair.public.decode()}"
        return self._step.value if self._curve is None else "its server key is not trusted"

    def _end_monitor(self) -> None:
        """Read the last events of the libzmq monitor, then close the monitor. From now on, a loss
        of the connection is found by checks of the connection's file descriptor."""
        if self._monitor is not None and not self._monitor.closed:  # else its context was closed
            self._hear()
            asyncio.get_running_loop().remove_reader(self._monitor.fileno())
            if self._socket is not None and not self._socket.closed:
                self._socket.disable_monitor()  # first, so that libzmq does not wait for a reader
            self._monitor.close(linger=0)
        self._monitor = None

    def _drop(self) -> None:
        self._end_monitor()
        self._links.seeking.discard(self)
        self._links.unwatch(self)
        made, self._socket = self._socket, None
        if made is not None and not made.closed:
            asyncio.get_running_loop().remove_reader(made.fileno())
            made.close(linger=0)

    # a connection

    def look(self) -> None:
        """Check whether the connection is lost, which means that libzmq has closed the connection's
        file descriptor."""
        if self._descriptor is not None:
            number, inode = self._descriptor
            with contextlib.suppress(OSError):
                if os.fstat(number).st_ino == inode:
                    return
        self._links.unwatch(self)
        while self._take(_MESSAGES_PER_READ):  # libzmq holds at most a few rounds of messages
            pass
        self._lose(_Step.READY.value)

    def _lose(self, reason: str) -> None:
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(reason)

    def _give_up(self, reason: str) -> None:
        """Stop receiving, and treat the connection as lost."""
        self._lose(reason)
        self._drop()

    def _begin_reading(self) -> None:
        """Start to receive messages, after the link's owner was told of the connection."""
        assert self._socket is not None
        self._links.watch(self)
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._read)
        self._read()

    def _read(self) -> None:
        """Receive messages. Called when the socket's descriptor signals that messages arrived."""
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
        finally:  # the descriptor does not signal again after an exception
            if more:
                self._is_put_off = True
                self._links.put_off(self._read_on)

    def _take(self, most: int) -> bool:
        """Receive at most `most` messages from libzmq. Returns True if libzmq may have more."""
        for _ in range(most):
            made = self._socket
            if made is None:
                return False
            try:
                frame = made.recv(_NOW, copy=False)
                frames = [frame.bytes]
                # Asking each frame whether another follows costs half as much as asking the socket.
                while frame.more:
                    frame = made.recv(_NOW, copy=False)
                    frames.append(frame.bytes)
            except zmq.Again:
                return False
            except zmq.ZMQError as error:
                if not made.closed:  # otherwise it was closed with its context
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


async def why_unreachable(address: Address) -> str | None:
    """Return why an attempt to connect to the address fails, or None if something listens."""
    try:
        await _ask(address, b"", 0)
    except TimeoutError:
        return _SILENT
    except OSError as error:
        return error_text(error)
    return None


HTTP: Final = b"HTTP/"


async def said_at(address: Address) -> bytes:
    """Return `HTTP/` if an HTTP server listens, else the reply to a ZMTP greeting (b"": none)."""
    for question, size in ((b"HEAD / HTTP/1.0\r\n\r\n", len(HTTP)), (_GREETING, _GREETING_BYTES)):
        said = b""
        with contextlib.suppress(OSError):  # a timeout is an OSError
            said = await _ask(address, question, size)
        if said == HTTP:
            break
    return said


def is_greeting(said: bytes) -> bool:
    """Whether these bytes begin a greeting of ZMTP 2.0 or later (spec 23/ZMTP)."""
    return said[:1] == b"\xff" and said[9:10] == b"\x7f"


async def why_no_handshake(address: Address, *, is_curve: bool) -> str | None:
    """Return why a ZMTP handshake with the listener at `address` failed; None if unknown."""
    said = await said_at(address)
    if said == HTTP:
        return "it speaks HTTP, not ZMQ"
    if len(said) < _GREETING_BYTES or not is_greeting(said):
        return None
    if (said[12:32].rstrip(b"\0") == b"CURVE") is is_curve:
        return None
    if is_curve:
        return "it does not encrypt, but keys are configured for it"
    return "it requires CURVE, but no keys are configured for it"


async def _ask(address: Address, question: bytes, size: int) -> bytes:
    """Connect to the address, send `question`, and return up to `size` bytes of the answer. Raises
    OSError, or TimeoutError after a second."""
    loop = asyncio.get_running_loop()
    family, where = address
    answer = b""
    with socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        async with asyncio.timeout(_PROBE_S):
            await loop.sock_connect(probe, where)
            await loop.sock_sendall(probe, question)
            while len(answer) < size and (data := await loop.sock_recv(probe, size - len(answer))):
                answer += data
    return answer


def error_text(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # look-ups of names have error numbers of their own
    return str(error) or type(error).__name__
