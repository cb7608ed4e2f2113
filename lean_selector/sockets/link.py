"""One connection that we keep up to a ZMQ socket which listens elsewhere.

Resolves, connects, shakes hands, and after any failure tries again after a pause that grows. What
arrives waits here until its owner takes it; beyond a bound in bytes the oldest is dropped and
counted. No libzmq: its one thread for all sockets stands still while it resolves a name, its queues
are bounded in messages only, it tries a listener that is not ZMQ ten times a second for ever, and
it says of none of that. Spec: indexer.md 1.1, slot_tracker.md 3.1.
"""

import asyncio
import contextlib
import os
import random
import re
import socket
import time
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import cast

from lean_selector.sockets.links import MAX_BACKLOG_BYTES, Links
from lean_selector.sockets.resolver import Address, SocketAddress, numeric
from lean_selector.sockets.zmtp import Decoder, Message, ProtocolError
from lean_selector.tasks import supervise

# An engine that comes back is found again within 5 s, whatever stood in its place meanwhile.
RETRY_FIRST_S = 0.1
RETRY_LIMIT_S = 5.0
CONNECT_S = 5.0  # per address
HANDSHAKE_S = 10.0
# A host that is gone is noticed within 20 s. No ZMTP heartbeats of ours, as the engines' are none.
KEEPALIVE_S = 5
KEEPALIVE_PROBES = 3
# What a message costs us besides its bytes: a list and an object for each frame.
MESSAGE_OVERHEAD = 256
# As libzmq: what it refuses at once, before any look-up. A port may not begin with a sign.
_TCP_ADDRESS = re.compile(r"[0-9A-Za-z\[:][0-9A-Za-z.\-:%;\[\]_*]*:[0-9]+\Z", re.ASCII)
_MAX_PATH = 107  # of a UNIX socket


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
        socket_type: bytes,
        opening: bytes,
        on_message: Callable[[], None],
        on_state: Callable[[], None] = lambda: None,
        *,
        max_message_bytes: int,
        max_backlog_bytes: int = MAX_BACKLOG_BYTES,
        once: bool = False,
    ) -> None:
        """`opening` is sent after each handshake. `once`: after one attempt, or one connection, the
        link is closed; what has arrived can still be taken."""
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
        # from start() to close()
        self._task: asyncio.Task[None] | None = None
        self._connection: _Connection | None = None
        self._queue: deque[tuple[Message, int]] = deque()
        self._queued_bytes = 0
        self._partial_bytes = 0  # of a large message that is not whole yet
        self._backlog = links.waiting.backlog(self._shed)
        self._is_closed = False
        # what was seen
        self.state = LinkState.CONNECTING
        self.since = time.monotonic()  # of the last change of state
        self.was_connected = False
        self.retries = 0  # attempts since the connection was lost, or since start()
        self.dropped = 0  # messages that nobody took, for there were too many
        self.has_overflowed = False  # it was to be there once, and ended because of its bounds
        self.error: str | None = None  # why there is no connection now

    def start(self) -> None:
        """Soon: many that start at once take turns."""
        self._links.call(self._begin)

    def _begin(self) -> None:
        if not self._is_closed:
            assert self._task is None, "started twice"
            self._task = supervise("zmq link", self._run)

    def close(self) -> "asyncio.Task[None] | None":
        """Nothing is called any more once this returns. Returns what is left to wait for."""
        self._is_closed = True
        self._on_message = self._on_state = lambda: None
        self.state = LinkState.CLOSED
        self._queue.clear()
        self._queued_bytes = self._partial_bytes = 0
        self._account()
        if self._task is not None:
            self._links.call(self._end)
        return self._task

    def _end(self) -> None:
        if self._connection is not None:
            self._connection.abort()
        if self._task is not None:
            self._task.cancel()

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
        self._queued_bytes -= cost
        self._account()
        return message

    def _arrived(self, message: Message) -> None:
        if self._is_closed:
            return
        cost = MESSAGE_OVERHEAD + sum(map(len, message))
        was_empty = not self._queue
        self._queue.append((message, cost))
        self._queued_bytes += cost
        self._partial_bytes = 0
        self._account()
        over = self._queued_bytes - self._max_backlog_bytes
        if over > 0:
            self._shed(over)
        if was_empty:
            self._on_message()

    def _gathering(self, partial_bytes: int) -> None:
        if not self._is_closed:
            self._partial_bytes = partial_bytes
            self._account()

    def _account(self) -> None:
        self._backlog.set(self._queued_bytes + self._partial_bytes)

    def _shed(self, size: int) -> None:
        """Drop the oldest, but not the newest: it tells what is missing. A link that is there once
        ends instead: what it already has is in order, and the rest can be asked for again."""
        if self._once:
            self.has_overflowed = True
            if self._connection is not None:
                self._connection.abort()
            return
        goal = self._queued_bytes - size
        while self._queued_bytes > goal and len(self._queue) > 1:
            self._queued_bytes -= self._queue.popleft()[1]
            self.dropped += 1
        self._account()

    # the connection

    async def _run(self) -> None:
        pause_s = RETRY_FIRST_S
        while True:
            try:
                connection = await self._connected()
            except TimeoutError:
                self.error = "no answer"
            except (OSError, ProtocolError) as error:
                self.error = _reason(error)
            else:
                self.error = None
                self.was_connected = True
                self._to(LinkState.CONNECTED)
                self.retries = 0
                began = time.monotonic()
                self.error = await connection.lost
                if time.monotonic() - began >= RETRY_LIMIT_S:
                    pause_s = RETRY_FIRST_S
            self._connection = None
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
            self.since = time.monotonic()
            self._on_state()

    async def _connected(self) -> "_Connection":
        """A connection that has shaken hands, by the first address that has one."""
        error: Exception = OSError("the name has no addresses")
        for family, address in await self._addresses():
            try:
                return await self._shaken(family, address)
            except (OSError, ProtocolError, TimeoutError) as failed:
                error = failed
        raise error

    async def _addresses(self) -> list[Address]:
        scheme, _, rest = self.endpoint.partition("://")
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
        if numeric(host) is None:
            self._to(LinkState.RESOLVING)
        addresses = await self._links.resolver.resolve(host, int(port))
        self._to(LinkState.CONNECTING)
        return addresses

    async def _shaken(self, family: int, address: SocketAddress) -> "_Connection":
        loop = asyncio.get_running_loop()
        decoder = Decoder(self._socket_type, self._arrived, self._max_message_bytes)
        connection = _Connection(self._links, decoder, self._opening, self._gathering)
        self._connection = connection
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            if family != socket.AF_UNIX:
                _keep_alive(sock)
            async with asyncio.timeout(CONNECT_S):
                await loop.sock_connect(sock, address)
            if family == socket.AF_UNIX:
                await loop.create_unix_connection(lambda: connection, sock=sock)
            else:
                await loop.create_connection(lambda: connection, sock=sock)
        except BaseException:
            if not connection.abort():
                sock.close()
            raise
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                await connection.ready
        except TimeoutError:
            raise ProtocolError("it accepts connections and does not speak") from None
        finally:
            if not connection.is_ready:
                connection.abort()
        return connection


class _Connection(asyncio.Protocol):
    """One connection; `ready` and then `lost` come true, the latter with the reason."""

    def __init__(
        self,
        links: Links,
        decoder: Decoder,
        opening: bytes,
        on_partial: Callable[[int], None],
    ) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[None] = loop.create_future()
        self.lost: asyncio.Future[str] = loop.create_future()
        self.is_ready = False
        self._links = links
        self._decoder = decoder
        self._opening = opening
        self._on_partial = on_partial
        self._partial_bytes = 0
        self._transport: asyncio.Transport | None = None
        self._fault: str | None = None
        self._is_over = False

    def abort(self) -> bool:
        """False if there is nothing to abort yet."""
        self._is_over = True
        if self._transport is None:
            return False
        self._transport.abort()
        return True

    def pause_reading(self) -> None:
        if self._transport is not None and not self._is_over:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._is_over:
            with contextlib.suppress(RuntimeError):  # it is closing
                self._transport.resume_reading()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._reply()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            return
        began = time.perf_counter()
        decoder = self._decoder
        try:
            decoder.feed(data)
        except ProtocolError as error:
            self._fault = str(error)
            if not self.ready.done():
                self.ready.set_exception(error)
            self.abort()
            return
        if decoder.is_ready and not self.is_ready:
            self.is_ready = True
            decoder.reply += self._opening
            if not self.ready.done():
                self.ready.set_result(None)
        if decoder.reply:
            self._reply()
        if decoder.partial_bytes != self._partial_bytes:
            self._partial_bytes = decoder.partial_bytes
            self._on_partial(self._partial_bytes)
        self._links.has_read(self, began)

    def _reply(self) -> None:
        assert self._transport is not None
        reply = bytes(self._decoder.reply)
        self._decoder.reply.clear()
        self._transport.write(reply)

    def connection_lost(self, error: Exception | None) -> None:
        self._is_over = True
        self._on_partial(0)
        why = self._fault or (_reason(error) if error is not None else "it closed the connection")
        if not self.ready.done():
            self.ready.set_exception(ProtocolError(f"{why} before the handshake was over"))
            self.ready.exception()  # nobody may be waiting
        if not self.lost.done():
            self.lost.set_result(why)


def _keep_alive(sock: socket.socket) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno)
    if isinstance(error, OSError) and error.strerror:
        return error.strerror  # of a look-up, whose numbers are of another kind
    return str(error) or type(error).__name__
