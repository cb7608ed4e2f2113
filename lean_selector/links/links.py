"""What all ZMQ connections (`Link`) of a process share: name resolution, and the limits of the work
per iteration of the event loop and of the received bytes that wait.

In each iteration, only a few links are opened, closed and read. Received bytes count as waiting
until they are used. If too many bytes wait in the process, the connection with the most waiting
bytes drops its oldest messages."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import zmq
import zmq.asyncio

from lean_selector.links.names import Resolver
from lean_selector.links.turns import Turns

if TYPE_CHECKING:
    from lean_selector.http.allowed_endpoints import AllowedEndpoints

# How many bytes may wait in total. One source may have MAX_BACKLOG_BYTES: one second of events at
# 64 MB/s, or 300 000 small batches.
MAX_WAITING_BYTES = 256 * 1024 * 1024
MAX_BACKLOG_BYTES = 64 * 1024 * 1024
# What is dropped at once, so that not every message has to search for the largest backlog.
_SHED_PART = 16
# How many sockets are opened or closed per turn of the loop. Each takes some 50 us.
STEPS_PER_TURN = 16
# How many probes per second search the reason of a missing connection, for all links together. With
# 4 096 refused sources, each has its reason within 82 s, for some 3 % of a core.
PROBES_PER_S = 50
# Descriptors: four per engine rank and per peer, and per running replay.
MAX_ZMQ_SOCKETS = 65_536


class Backlog:
    """Counts the unused bytes that a connection received. `shed(size)` drops about `size` bytes."""

    def __init__(self, waiting: "Backlogs", shed: Callable[[int], None]) -> None:
        self.bytes = 0
        self.shed = shed
        self._waiting = waiting

    def set(self, size: int) -> None:
        self._waiting.change(self, size)


class Backlogs:
    """The received, unused bytes of all ZMQ connections of the process, with one limit."""

    def __init__(self, limit: int = MAX_WAITING_BYTES) -> None:
        self.bytes = 0
        self.limit = limit
        self._backlogs: set[Backlog] = set()  # those that are not empty

    def backlog(self, shed: Callable[[int], None]) -> Backlog:
        return Backlog(self, shed)

    def change(self, backlog: Backlog, size: int) -> None:
        grows = size > backlog.bytes
        if not backlog.bytes:
            self._backlogs.add(backlog)
        self.bytes += size - backlog.bytes
        backlog.bytes = size
        if not size:
            self._backlogs.discard(backlog)
        elif grows and self.bytes > self.limit:
            self._make_room()

    def _make_room(self) -> None:
        """Make the connections with the most waiting bytes drop messages, to respect the limit."""
        goal = self.limit - self.limit // _SHED_PART
        for backlog in sorted(self._backlogs, key=lambda each: -each.bytes):
            if self.bytes <= goal:
                return
            backlog.shed(self.bytes - goal)


class Links:
    """State that all ZMQ connections (`Link`) of the process share. Not thread-safe."""

    def __init__(
        self,
        context: zmq.asyncio.Context | None = None,
        resolver: Resolver | None = None,
        waiting: Backlogs | None = None,
        allowed: "AllowedEndpoints | None" = None,
    ) -> None:
        """`context` must not have sockets yet; the default is pyzmq's context of the process.
        `allowed` restricts the destinations (None: all allowed)."""
        self.allowed = allowed
        self.context = context or zmq.asyncio.Context.instance()
        limit = self.context.get(zmq.SOCKET_LIMIT)
        self.context.set(zmq.MAX_SOCKETS, min(MAX_ZMQ_SOCKETS, limit))
        self.resolver = resolver or Resolver()
        self.waiting = waiting or Backlogs()
        self._probing = asyncio.Lock()
        self._steps: deque[Callable[[], None]] = deque()
        self._is_stepping = False
        self.is_ending = False  # once true, no link starts
        # All links together read for one slice in each turn of the loop, one after another.
        self.reading = Turns()

    def socket(self, kind: int) -> "zmq.Socket[bytes]":
        """Return a plain (not asyncio) socket, which is closed with the context."""
        make: Any = self.context.socket
        return cast("zmq.Socket[bytes]", make(kind, socket_class=zmq.Socket))

    # opening and closing

    def call(self, step: Callable[[], None]) -> None:
        """Call `step` soon. Steps run in the order of the calls, a few in each turn of the loop."""
        self._steps.append(step)
        if not self._is_stepping:
            self._is_stepping = True
            asyncio.get_running_loop().call_soon(self._step)

    async def turn(self) -> None:
        """Wait until it is this caller's turn to open a socket."""
        mine = asyncio.get_running_loop().create_future()
        self.call(lambda: None if mine.done() else mine.set_result(None))
        await mine

    def _step(self) -> None:
        for _ in range(min(len(self._steps), STEPS_PER_TURN)):
            # A step that raises does not affect the others.
            asyncio.get_running_loop().call_soon(self._steps.popleft())
        self._is_stepping = bool(self._steps)
        if self._is_stepping:
            asyncio.get_running_loop().call_soon(self._step)

    async def turn_to_probe(self) -> None:
        """Wait until the limit of probes (test connections) per second permits the next probe."""
        async with self._probing:
            await asyncio.sleep(1 / PROBES_PER_S)
