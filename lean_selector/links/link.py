"""One persistent connection to a remote ZMQ socket.

What goes wrong. Left alone, libzmq looks names up in the thread that carries the messages of all
sockets, so two names that hang in DNS stop every source for half a minute. A listener that is not
ZMQ is tried thousands of times a second. After a message that is too large, or a listener with
another mechanism, the socket never connects again. An address that drops packets is waited for as
long as the kernel waits, minutes. Queues are bounded in messages, of any size. And a subscriber is
told nothing of all this: it only hears nothing, as from an idle engine.

The rule. libzmq gets an address and one connection; all else is ours. While the address refuses,
libzmq retries on the same socket, so a listener that starts later is heard within half a second.
However else an attempt or a connection ends, the socket is closed, and after a growing pause a new
one begins with a look-up. A libzmq monitor stays open as long as the socket, and reports the
connection, its handshake and its loss. It says nothing about refused attempts: probes of our own
find their reason, and that of a failed handshake. Of a name with several addresses, a probe first
finds one that accepts. Received messages wait in the link, bounded in bytes, until its owner takes
them; if too many wait, the oldest are dropped, or a link that is used `once` ends.

    state        event                                              next state
    CONNECTING   the endpoint has a name                            RESOLVING
    RESOLVING    the name has an address                            CONNECTING
    RESOLVING    the look-up fails                                  RETRYING, CLOSED (1)
    CONNECTING   a probe is refused or not answered                 RETRYING, CLOSED (1)
    CONNECTING   the handshake fails                                RETRYING, CLOSED (1)
    CONNECTING   the handshake succeeds                             CONNECTED
    CONNECTED    the connection is lost                             RETRYING, CLOSED (1)
    RETRYING     libzmq connects after all; the handshake succeeds  CONNECTED
    RETRYING     the pause is over                                  CONNECTING, RESOLVING
    any          close()                                            CLOSED

(1) CLOSED if the link is used `once`, for a replay.

What was tried. The monitor was closed after the handshake, which saves two descriptors a source;
the loss was then found by comparing inodes of a descriptor that libzmq owns, up to a second late. A
connection timeout on each socket: when an attempt ends, libzmq searches the timers of all sockets,
so 4 096 refused sources cost nearly twice as much. Links beyond 1 024 without a connection were
retried half as often; one loop that waits saves more. ZMTP heartbeats: see `KEEPALIVE_S`.

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
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

import zmq
from zmq.utils.monitor import parse_monitor_message

from lean_selector.links.links import MAX_BACKLOG_BYTES, Links
from lean_selector.links.names import Address, numeric
from lean_selector.tasks import failed, supervise

if TYPE_CHECKING:
    from lean_selector.links.curve_keys import CurveClient

Message = list[bytes]  # the frames of a message
Opening = Callable[["zmq.Socket[bytes]"], object]

# Pauses between our own attempts. A restarted engine is found within 5 s, whatever listened at the
# engine's address before.
RETRY_FIRST_S = 0.1
RETRY_LIMIT_S = 5.0
# Pauses between libzmq's attempts at an address that refuses the connection.
RECONNECT_FIRST_MS: Final = 100
RECONNECT_MAX_MS: Final = 450
_RECONNECT_STOP: Final = 109  # ZMQ_RECONNECT_STOP; not every pyzmq has a name for it
HANDSHAKE_S = 5.0
# A probe finds out why an attempt is unfinished: after 0.1 s, then at growing intervals.
LOOK_FIRST_S = 0.1
LOOK_LIMIT_S = 60.0
# While no address of a name with several listens, all are probed this often.
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
    zmq.RECONNECT_IVL_MAX: RECONNECT_MAX_MS,
    _RECONNECT_STOP: 0x2 | 0x4,  # after a failed handshake, and after a loss
    zmq.HANDSHAKE_IVL: 0,  # off: we have a timeout, and libzmq does not report its own
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: KEEPALIVE_S,
    zmq.TCP_KEEPALIVE_INTVL: KEEPALIVE_S,
    zmq.TCP_KEEPALIVE_CNT: KEEPALIVE_PROBES,
}
_monitors = itertools.count()


class _Step(Enum):
    CONNECTING = "it cannot be reached"
    SHAKING_HANDS = "it closed the connection before the handshake was over"
    READY = "it closed the connection"


class LinkState(Enum):
    RESOLVING = "resolving"
    CONNECTING = "connecting"
    CONNECTED = "connected"
    # The last attempt failed, or the connection was lost; libzmq tries on, or the next attempt
    # follows a pause.
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


@dataclass(eq=False)
class Link:
    """A persistent connection to a ZMQ socket, from start() to close(). Not thread-safe. Until
    close(), `on_message()` is called when a message arrives while no other message waits, and
    `on_state()` is called after each change of `state`.

    `socket_type` is a constant of zmq. `opening(socket)` subscribes or sends on a new socket. With
    `once`, the link does not reconnect, but the messages that it has received can still be taken.
    With `curve`, the link uses CURVE, and accepts only servers whose keys are in `curve`."""

    links: Links
    endpoint: str
    socket_type: int
    opening: Opening
    on_message: Callable[[], None]
    on_state: Callable[[], None] = lambda: None
    _: KW_ONLY
    max_message_bytes: int
    max_backlog_bytes: int = MAX_BACKLOG_BYTES
    once: bool = False
    curve: "CurveClient | None" = None

    def __post_init__(self) -> None:
        self._server_key: bytes | None = None  # the last key that worked
        self._failed_at: dict[Address, float] = {}  # failed handshakes since the last good one
        # Used from start() to close().
        self._task: asyncio.Task[None] | None = None
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._step = _Step.CONNECTING
        self._failure: str | None = None  # why the attempt, or the connection, ended
        self._is_refused_for_key = False
        self._news: asyncio.Timeout | None = None  # ends the wait for the attempt
        self._lost = asyncio.Event()
        self._queue: deque[tuple[Message, int]] = deque()
        self._backlog = self.links.waiting.backlog(self._shed)
        # State when the link was last looked at.
        self.state = LinkState.CONNECTING
        self.was_connected = False
        self.retries = 0  # attempts since the connection was lost, or since start()
        self.dropped = 0  # messages dropped because too many waited
        self.has_overflowed = False  # the bounds ended a link with `once`
        self.error: str | None = None  # why there is no connection now

    def start(self) -> None:
        """Connect soon. In one iteration of the event loop, only a few links open a socket."""
        self.links.call(self._begin)

    def _begin(self) -> None:
        if self.state is not LinkState.CLOSED and not self.links.is_ending:
            assert self._task is None, "started twice"
            self._task = supervise("zmq link", self._run)

    def close(self) -> "asyncio.Task[None] | None":
        """Close the connection, and stop all callbacks. The caller must await a returned task."""
        self.on_message = self.on_state = lambda: None
        self.state = LinkState.CLOSED
        self._queue.clear()
        self._backlog.set(0)
        if self._task is not None:
            self.links.call(self._end)
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
        over = self._backlog.bytes - self.max_backlog_bytes
        if over > 0:
            self._shed(over)
        if was_empty:
            self.on_message()

    def _shed(self, size: int) -> None:
        """Drop the oldest waiting messages, at least `size` bytes, but keep the newest message.
        With `once`, drop the newest messages instead, and end the link; the caller can then request
        the dropped messages again."""
        held = self._backlog.bytes
        goal = held - size
        while held > goal and len(self._queue) > 1:
            held -= (self._queue.pop() if self.once else self._queue.popleft())[1]
            self.dropped += not self.once
        self._backlog.set(held)
        if self.once:
            self.has_overflowed = True
            self._give_up("too much waited")

    # the connection

    async def _run(self) -> None:
        pause_s = RETRY_FIRST_S
        if self._socket is not None:  # an internal error ended the previous run
            self._drop()
            self.state = LinkState.RETRYING
        while True:
            began = time.monotonic()
            try:
                self.error = await self._connect()
                if self.error is None:
                    began = await self._receive()
                    self.error = self._failure
                    if time.monotonic() - began >= RETRY_LIMIT_S:
                        pause_s = RETRY_FIRST_S
            except OSError as error:
                self.error = error_text(error)
            self._drop()
            if self.once:
                self._to(LinkState.CLOSED)
                return
            self._to(LinkState.RETRYING)
            await asyncio.sleep(pause_s * random.uniform(0.8, 1.2))
            await self.links.turn()
            pause_s = min(2 * pause_s, RETRY_LIMIT_S)
            self.retries += 1

    def _to(self, state: LinkState) -> None:
        if self.state is not state and self.state is not LinkState.CLOSED:
            self.state = state
            self.on_state()

    async def _connect(self) -> str | None:
        """Return None when the handshake is complete, else why not. Raises OSError."""
        host = self.endpoint.partition("://")[2].rpartition(":")[0]
        is_name = self.endpoint.startswith("tcp:") and numeric(host) is None
        if is_name:
            self._to(LinkState.RESOLVING)
        address, *others = await self._addresses()
        self._to(LinkState.CONNECTING)
        if others:
            address = await self._listening()
        keys: list[bytes | None] = [None]
        if self.curve is not None:  # the key that worked last comes first
            keys = [*sorted(self.curve.believed, key=lambda key: key != self._server_key)]
        for key in keys:
            why = await self._shake_hands(address, key, is_name)
            if why is None:
                self._server_key = key
                self._failed_at.clear()
                return None
            self._drop()
            if self._step is _Step.CONNECTING:
                return why
            self._failed_at[address] = time.monotonic()
            if self._is_refused_for_key:
                return why
        await self.links.turn_to_probe()
        return await why_no_handshake(address, is_curve=self.curve is not None) or why

    async def _listening(self) -> Address:
        """Wait until one of the name's addresses accepts connections. Those where something else
        than an engine listened come last. Raises OSError."""
        while True:
            await self.links.turn()
            why = None
            found = await self._addresses()
            for address in sorted(found, key=lambda each: self._failed_at.get(each, 0.0)):
                why = await why_unreachable(address)
                if why is None:
                    return address
            self._unreachable(why or _SILENT)
            await asyncio.sleep(OTHERS_S)
            await self.links.turn_to_probe()

    async def _shake_hands(self, address: Address, key: bytes | None, is_name: bool) -> str | None:
        """Return None when the handshake is complete, else why not. Raises OSError."""
        self._open(address, key)
        try:
            async with asyncio.timeout(None) as self._news:
                self._read_monitor()
                return await self._find_out_why(address, is_name)
        except TimeoutError:
            if self._step is _Step.READY:
                return None
            return self._failure or "it accepts connections and sends nothing"
        finally:
            self._news = None

    async def _find_out_why(self, address: Address, is_name: bool) -> str:
        """While libzmq cannot connect to `address`, find out why. Return a reason to stop."""
        pause_s = LOOK_FIRST_S
        while True:
            await asyncio.sleep(pause_s)
            addresses = await self._addresses() if is_name else [address]
            if address not in addresses:
                return "its name has another address now"
            await self.links.turn_to_probe()
            why = await why_unreachable(address)
            if why is not None and self._step is _Step.CONNECTING:
                self._unreachable(why)
                if why == _SILENT or len(addresses) > 1:  # libzmq would wait for minutes, or here
                    return why
            pause_s = min(4 * pause_s, RETRY_LIMIT_S if is_name else LOOK_LIMIT_S)

    def _unreachable(self, why: str) -> None:
        if self.once:
            raise OSError(why)
        self.error = why
        self.retries += 1
        self._to(LinkState.RETRYING)

    async def _addresses(self) -> list[Address]:
        scheme, _, rest = self.endpoint.partition("://")
        allowed = self.links.allowed
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
        addresses = await self.links.resolver.resolve(host, int(port))
        if allowed is not None:
            addresses = allowed.among(self.endpoint, addresses)
        return addresses

    # an attempt, by the socket and its monitor

    def _open(self, address: Address, key: bytes | None) -> None:
        self._step, self._failure, self._is_refused_for_key = _Step.CONNECTING, None, False
        self._lost.clear()
        try:
            made = self._socket = self.links.socket(self.socket_type)
            for option, value in _OPTIONS.items():
                made.setsockopt(option, value)
            made.setsockopt(zmq.MAXMSGSIZE, _OVERSIZE * self.max_message_bytes)
            made.setsockopt(zmq.IPV6, address[0] == socket.AF_INET6)
            if self.curve is not None and key is not None:
                from lean_selector.links.curve_keys import give_keys

                give_keys(made, self.curve.pair, key)
            monitored = f"inproc://link-{next(_monitors)}"
            made.monitor(monitored, _EVENTS)
            monitor = self._monitor = self.links.socket(zmq.PAIR)
            monitor.connect(monitored)
            asyncio.get_running_loop().add_reader(monitor.fileno(), self._read_monitor)
            made.connect(_endpoint(address))
            self.opening(made)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror) from None

    def _read_monitor(self) -> None:
        """Read libzmq's reports. The end of an attempt wakes `_shake_hands`."""
        with contextlib.suppress(zmq.Again):
            while self._monitor is not None and not self._monitor.closed:
                parsed = parse_monitor_message(self._monitor.recv_multipart(_NOW))
                self._note(int(parsed["event"]))
        news = self._news
        if news and not news.expired() and self._step is not _Step.CONNECTING:
            left_s = 0.0 if self._failure or self._step is _Step.READY else HANDSHAKE_S
            news.reschedule(asyncio.get_running_loop().time() + left_s)

    def _note(self, event: int) -> None:
        if event == zmq.Event.CONNECTED:
            self._step = _Step.SHAKING_HANDS
        elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
            self._step = _Step.READY
        elif self._failure is None:
            self._failure = self._failed(event)
            if self._step is _Step.READY:
                self._lost.set()

    def _failed(self, event: int) -> str:
        if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            return "it violated the protocol in the ZMTP handshake"
        if event == zmq.Event.HANDSHAKE_FAILED_AUTH:
            self._is_refused_for_key = True
            if self.curve is None:
                return "it requires credentials"
            return f"it does not admit our public key {self.curve.pair.public.decode()}"
        if self.curve is None or self._step is _Step.READY:
            return self._step.value
        return "its server key is not trusted"

    def _drop(self) -> None:
        loop = asyncio.get_running_loop()
        made, self._socket = self._socket, None
        monitor, self._monitor = self._monitor, None
        if monitor is not None and not monitor.closed:  # else its context was closed
            loop.remove_reader(monitor.fileno())
            if made is not None and not made.closed:
                made.disable_monitor()  # first, so that libzmq does not wait for a reader
            monitor.close(linger=0)
        if made is not None and not made.closed:
            loop.remove_reader(made.fileno())
            made.close(linger=0)

    # a connection

    async def _receive(self) -> float:
        """Receive messages until the connection is lost. Return when it was made."""
        assert self._socket is not None
        self.was_connected = True
        self._to(LinkState.CONNECTED)
        self.retries = 0
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._wake)
        self._wake()
        began = time.monotonic()
        await self._lost.wait()
        await self.links.turn()  # a host may end with hundreds of ranks
        while self._take():  # libzmq holds at most a few rounds of messages
            pass
        return began

    def _give_up(self, reason: str) -> None:
        """Stop receiving, and treat the connection as lost."""
        self._failure = reason
        self._lost.set()
        self._drop()

    def _wake(self) -> None:
        self.links.reading.start(self._take, self._failed_to_take)

    def _failed_to_take(self, error: Exception) -> None:
        failed("zmq link", "it reads on", error)
        self._wake()  # the descriptor does not signal again

    def _take(self, _deadline: float = 0.0) -> bool:
        """Receive a few messages from libzmq. Return True if libzmq may have more."""
        for _ in range(_MESSAGES_PER_READ):
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


async def first_bytes_at(address: Address) -> bytes:
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
    said = await first_bytes_at(address)
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
