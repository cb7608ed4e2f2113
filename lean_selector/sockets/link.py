"""One connection that we keep up to a ZMQ socket which listens elsewhere.

Resolves, connects, waits for the handshake, and after any failure tries again after a pause that
grows. What arrives waits here until its owner takes it; beyond a bound in bytes the oldest is
dropped and counted. Left to itself libzmq would resolve in its one thread for all sockets, which
stands still meanwhile, try a listener that is not ZMQ ten times a second for ever, and bound what
waits in messages only. So each attempt is a socket of its own (`zmq_connection`), to an address
that is one. Spec: indexer.md 1.1, slot_tracker.md 3.1.
"""

import asyncio
import os
import random
import re
import socket
import time
from collections import deque
from collections.abc import Callable
from enum import Enum

from lean_selector.curve.keys import CurveClient
from lean_selector.sockets.links import MAX_BACKLOG_BYTES, Links
from lean_selector.sockets.lookups import Address
from lean_selector.sockets.resolver import numeric
from lean_selector.sockets.zmq_connection import (
    ConnectionFailed,
    Message,
    Opening,
    ZmqConnection,
    error_text,
)
from lean_selector.tasks import supervise

# An engine that comes back is found again within 5 s, whatever stood in its place meanwhile.
RETRY_FIRST_S = 0.1
RETRY_LIMIT_S = 5.0
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
        """`socket_type` is zmq's. `opening(socket)` is called before each attempt to connect: to
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
        self._connection: ZmqConnection | None = None
        self._queue: deque[tuple[Message, int]] = deque()
        self._queued_bytes = 0
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
        self._queued_bytes = 0
        self._account()
        if self._task is not None:
            self._links.call(self._end)
        return self._task

    def _end(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._connection is not None:
            self._connection.abort()

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
        self._account()
        over = self._queued_bytes - self._max_backlog_bytes
        if over > 0:
            self._shed(over)
        if was_empty:
            self._on_message()

    def _account(self) -> None:
        self._backlog.set(self._queued_bytes)

    def _shed(self, size: int) -> None:
        """Drop the oldest, but not the newest: it tells what is missing. A link that is there once
        ends, and drops its newest: what it keeps is in order, and the rest can be asked for
        again."""
        goal = self._queued_bytes - size
        if self._once:
            self.has_overflowed = True
            while self._queued_bytes > goal and len(self._queue) > 1:
                self._queued_bytes -= self._queue.pop()[1]
            self._account()
            if self._connection is not None:
                self._connection.give_up()
            return
        while self._queued_bytes > goal and len(self._queue) > 1:
            self._queued_bytes -= self._queue.popleft()[1]
            self.dropped += 1
        self._account()

    # the connection

    async def _run(self) -> None:
        pause_s = RETRY_FIRST_S
        if self._connection is not None:  # a bug ended the run before this one
            self._connection.abort()
            self.state = LinkState.RETRYING
        while True:
            try:
                connection = await self._connected()
            except (OSError, ConnectionFailed) as error:
                self.error = error_text(error)
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
            self._on_state()

    async def _connected(self) -> ZmqConnection:
        """A connection that has shaken hands, by the first address that has one."""
        error: Exception = OSError("the name has no addresses")
        for address in await self._addresses():
            keys = (
                None if self._curve is None else _candidates(self._curve.believed, self._server_key)
            )
            while True:
                key = None if keys is None else keys.pop(0)
                connection = self._connection = ZmqConnection(
                    self._links,
                    self._socket_type,
                    self._opening,
                    self._arrived,
                    max_message_bytes=self._max_message_bytes,
                    curve=self._curve,
                    server_key=key,
                )
                try:
                    await connection.open(address, more_keys=bool(keys))
                except (OSError, ConnectionFailed) as failed:
                    error = failed
                    if not keys or not getattr(failed, "may_be_key", False):
                        break
                else:
                    self._server_key = key
                    return connection
        raise error

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
        if numeric(host) is None:
            self._to(LinkState.RESOLVING)
        addresses = await self._links.resolver.resolve(host, int(port))
        if allowed is not None:
            addresses = allowed.among(self.endpoint, addresses)
        self._to(LinkState.CONNECTING)
        return addresses


def _candidates(believed: tuple[bytes, ...], last: bytes | None) -> list[bytes]:
    """The server keys to try, in order: the one that was right last comes first."""
    return sorted(believed, key=lambda key: key != last)
