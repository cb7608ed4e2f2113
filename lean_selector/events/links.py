"""What all ZMQ connections (`Link`) of a process share: name resolution, and the limits of the work
per iteration of the event loop and of the received bytes that wait.

In each iteration, only a few links are opened, closed and read. Received bytes count as waiting
until they are used. If too many bytes wait in the process, the connection with the most waiting
bytes drops its oldest messages."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, cast

import zmq
import zmq.asyncio

from lean_selector.events.names import Resolver

if TYPE_CHECKING:
    from lean_selector.events.curve_keys import CurveClient
    from lean_selector.http.allowed_endpoints import AllowedEndpoints

# How many bytes may wait in total. One source may have MAX_BACKLOG_BYTES: one second of events at
# 64 MB/s, or 300 000 small batches.
MAX_WAITING_BYTES = 256 * 1024 * 1024
MAX_BACKLOG_BYTES = 64 * 1024 * 1024
# What is dropped at once, so that not every message has to search for the largest backlog.
_SHED_PART = 16
# How many sockets are opened or closed per turn of the loop. Each takes some 50 us.
STEPS_PER_TURN = 16
# Reading time per turn of the loop, for all links together. The rest is read in the next turns.
READ_SLICE_S = 0.001
# How many probes per second search the reason of a missing connection, for all links together. With
# 4 096 refused sources, each has its reason within 82 s, for some 3 % of a core.
PROBES_PER_S = 50
# Interval in seconds of checks for a lost connection. One check takes a microsecond.
LOOK_EVERY_S = 0.25
LOOKS_PER_TURN = 256
# Descriptors: one per engine rank and per peer, three while a link connects, and one per running
# replay.
MAX_ZMQ_SOCKETS = 65_536

_T = TypeVar("_T")


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


class Watched(Protocol):
    """A connection whose `look()` is called regularly, to detect the loss of the connection."""

    def look(self) -> None: ...


class Rounds(Generic[_T]):
    """Calls `look(member)` for each member every `every_s` seconds, for a few members in each
    iteration of the event loop. Members may be added and removed at any time. The calls stop when
    no member is left; start() then starts the calls again."""

    def __init__(self, members: Collection[_T], look: Callable[[_T], None], every_s: float) -> None:
        self._members: Final = members
        self._look: Final = look
        self._every_s: Final = every_s
        self._left: deque[_T] = deque()  # members still to be checked in this round
        self._next: asyncio.Handle | None = None

    def start(self) -> None:
        if self._next is None:
            self._next = asyncio.get_running_loop().call_later(self._every_s, self._turn)

    def stop(self) -> None:
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _turn(self) -> None:
        loop = asyncio.get_running_loop()
        self._left.extend(() if self._left else self._members)
        try:
            for _ in range(min(len(self._left), LOOKS_PER_TURN)):
                member = self._left.popleft()
                if member in self._members:
                    self._look(member)
        finally:
            self._next = None
            if self._left:
                self._next = loop.call_soon(self._turn)
            elif self._members:
                self.start()


class Links:
    """State that all ZMQ connections (`Link`) of the process share. Not thread-safe."""

    def __init__(
        self,
        context: zmq.asyncio.Context | None = None,
        resolver: Resolver | None = None,
        waiting: Backlogs | None = None,
        allowed: "AllowedEndpoints | None" = None,
        engine_keys: "CurveClient | None" = None,
    ) -> None:
        """`context` must not have sockets yet; the default is pyzmq's context of the process.
        `allowed` restricts the destinations (None: all allowed). With `engine_keys`, links to
        engines use CURVE."""
        self.allowed = allowed
        self.engine_keys = engine_keys
        self.context = context or zmq.asyncio.Context.instance()
        limit = self.context.get(zmq.SOCKET_LIMIT)
        self.context.set(zmq.MAX_SOCKETS, min(MAX_ZMQ_SOCKETS, limit))
        self.resolver = resolver or Resolver()
        self.waiting = waiting or Backlogs()
        self._probing = asyncio.Lock()
        self._probe_at = 0.0
        self._steps: deque[Callable[[], None]] = deque()
        self._is_stepping = False
        self.is_ending = False  # once true, no link starts
        self._read_s = 0.0  # time spent reading in this turn
        self._is_reading = False
        self._put_off: deque[Callable[[], None]] = deque()
        self.seeking: set[object] = set()  # links with a socket but without a connection
        self._watched: dict[Watched, None] = {}
        self._looks = Rounds(self._watched, lambda each: each.look(), LOOK_EVERY_S)

    # opening and closing

    def socket(self, kind: int) -> "zmq.Socket[bytes]":
        """Return a plain (not asyncio) socket, which is closed with the context."""
        make: Any = self.context.socket
        return cast("zmq.Socket[bytes]", make(kind, socket_class=zmq.Socket))

    def call(self, step: Callable[[], None]) -> None:
        """Call `step` soon. Steps run in the order of the calls, a few in each turn of the loop."""
        self._steps.append(step)
        if not self._is_stepping:
            self._is_stepping = True
            asyncio.get_running_loop().call_soon(self._step)

    async def turn(self, after_s: float = 0.0) -> None:
        """Wait for `after_s` seconds, and then until it is this caller's turn to open a socket."""
        loop = asyncio.get_running_loop()
        mine = loop.create_future()
        later = loop.call_later(
            after_s, self.call, lambda: None if mine.done() else mine.set_result(None)
        )
        try:
            await mine
        finally:
            later.cancel()

    async def turn_to_probe(self) -> None:
        """Wait until the limit of probes (test connections) per second permits the next probe."""
        loop = asyncio.get_running_loop()
        async with self._probing:
            while not self._takes_probe():
                await self.turn(self._probe_at - loop.time())

    def may_probe(self) -> bool:
        """Whether the limit permits a probe (test connection) now. If so, the probe is counted."""
        return not self._probing.locked() and self._takes_probe()

    def _takes_probe(self) -> bool:
        now = asyncio.get_running_loop().time()
        if now < self._probe_at:
            return False
        self._probe_at = now + 1 / PROBES_PER_S
        return True

    def _step(self) -> None:
        for _ in range(min(len(self._steps), STEPS_PER_TURN)):
            # A step that raises does not affect the others.
            asyncio.get_running_loop().call_soon(self._steps.popleft())
        self._is_stepping = bool(self._steps)
        if self._is_stepping:
            asyncio.get_running_loop().call_soon(self._step)

    # reading

    def may_read(self) -> bool:
        """Whether this iteration of the loop may receive more messages. If not, call `put_off`."""
        return not self._read_s or self._read_s < READ_SLICE_S

    def has_read(self, began: float) -> None:
        """Count the time since `began` (perf_counter) as spent on receiving in this iteration."""
        self._read_s += time.perf_counter() - began
        self._await_turn()

    def put_off(self, read_on: Callable[[], None]) -> None:
        """Call `read_on` in a later iteration of the event loop, when messages may be received."""
        self._put_off.append(read_on)
        self._await_turn()

    def _await_turn(self) -> None:
        if not self._is_reading:
            self._is_reading = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._is_reading = False
        self._read_s = 0.0
        try:
            for _ in range(len(self._put_off)):
                if not self.may_read():
                    break
                self._put_off.popleft()()
        finally:  # even after an exception
            if self._put_off:
                self._await_turn()

    # connections that may be lost

    def watch(self, connection: Watched) -> None:
        self._watched[connection] = None
        self._looks.start()

    def unwatch(self, connection: Watched) -> None:
        self._watched.pop(connection, None)
