"""The open connections of one server, with limits on their number, memory and time.

The module `protocol` handles a single connection. This module has the state that connections share.
`Connections.sweep`, called about once a second, applies the timeouts (decisions D14, D27)."""

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Final, NamedTuple, Protocol

from lean_selector.http.head import HeaderBlocks, HttpError, Limits, Request

# Why a TLS handshake failed: the labels of a metric.
REASONS: Final = (
    "client_certificate",  # of the client; missing or untrusted
    "closed",  # the client disconnected
    "not_tls",
    "other",
    # the client sent an alert, usually because it does not trust our certificate
    "refused_by_client",
    "timeout",
)


class TlsCounts:
    """TLS statistics since the start of the server; all 0 while TLS is off."""

    def __init__(self) -> None:
        self.is_on = False
        self.completed = 0
        self.failures: dict[str, int] = dict.fromkeys(REASONS, 0)
        self.reloads = 0  # how often the files were reloaded
        self.reload_failures = 0
        self.not_after: int | None = None  # when our certificate expires, in seconds since 1970


# A gateway opens some hundreds of connections, so this suffices for a fleet of gateways. It is
# below a descriptor limit of 2**16, of which KV events take two or three per worker rank.
MAX_CONNECTIONS: Final = 16_384

# Time in seconds per turn of the loop for the input of all connections, except small requests. A
# slice that has begun (limited by `reader`) may exceed this by a millisecond.
TURN_S: Final = 0.002

# Bytes held for requests that are incomplete, queued, or behind another one of their connection: 32
# bodies of 8 MiB, or 2 500 long prompts of 100 KiB. One connection can hold 9 MiB.
MAX_HELD_BYTES: Final = 256 * 1024 * 1024
# if too much is held, free down to this share, so that one pass makes room for many requests
_ROOM_KEPT: Final = 7 / 8

# How many refused clients get time to read the reason. Any further ones are dropped at once.
_MAX_TOLD: Final = 256


def plain_refusal(error: HttpError) -> bytes:
    """Return the body of an error answer: JSON with the error's text."""
    return b'{"error":"%b"}' % error.text.encode()


class ConnectionTimeouts(NamedTuple):
    """Timeouts in seconds. A timeout may take effect late, by at most the pause between sweeps."""

    idle_s: float = 75.0  # for a keep-alive connection without a request
    read_s: float = 30.0  # for an incomplete request; bodies get more
    write_s: float = 30.0  # for a client that does not read its answer
    linger_s: float = 5.0  # for a client that still sends after its last answer
    quiet_s: float = 1.0  # replaces idle_s and linger_s while the server drains
    handshake_s: float = 10.0  # for a TLS handshake, from connect to end


class Connection(Protocol):
    """The part of a connection's interface that `Connections` uses."""

    @property
    def held_bytes(self) -> int: ...  # memory of unanswered requests
    @property
    def since(self) -> float: ...  # start of its current state, in the time of Connections.now
    def expire(self, now: float) -> None: ...
    def turn_away(self, reason: str) -> None: ...  # answer 503 in any state, and close
    def abort(self) -> None: ...


class Connections:
    """A server's open connections, and statistics. Used only on the event loop's thread."""

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object],
        limits: Limits | None = None,
        timeouts: ConnectionTimeouts | None = None,
        max_connections: int = MAX_CONNECTIONS,
        max_held_bytes: int = MAX_HELD_BYTES,
        refusal: Callable[[HttpError], bytes] = plain_refusal,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`call_soon` is the event loop's method. `refusal` returns the body of an error answer."""
        self.call_soon = call_soon
        self.clock = clock
        # Return whether to refuse a request whatever its body is, for example without a token.
        self.refuses: Callable[[Request], bool] | None = None
        self.spent_s = 0.0  # seconds spent on input in this turn of the loop
        self._later: deque[Callable[[], None]] = deque()
        self._is_due = False  # a turn of deferred work is scheduled
        self.limits = limits or Limits()
        self.timeouts = timeouts or ConnectionTimeouts()
        self.max_connections = max_connections
        self.max_held_bytes = max_held_bytes
        self.refusal = refusal
        self.header_blocks: HeaderBlocks = {}
        self.open: set[Connection] = set()
        self.greeting: set[Connection] = set()  # during the TLS handshake; count as open
        self.told: set[Connection] = set()  # refused; the client may still read the reason
        self.held_bytes = 0  # the sum over `open` and `greeting`
        self.now = 0.0  # monotonic seconds at the last sweep
        self.is_draining = False
        self.quiet_from = 0.0  # when draining began
        self.is_over = False
        # Totals
        self.accepted = 0
        self.accept_failures = 0  # failed accepts: no descriptor or memory was left
        self.refused = 0
        self.bodies_refused = 0
        self.tls = TlsCounts()

    def admit(self, connection: Connection) -> None:
        """Add a new connection to the set `open`, or refuse the connection if too many are open."""
        if self.is_over:
            connection.abort()
            return
        if len(self.open) + len(self.greeting) < self.max_connections:
            self.accepted += 1
            self.open.add(connection)
            return
        self.refused += 1
        if len(self.told) < _MAX_TOLD:
            self.told.add(connection)
            connection.turn_away("too many connections")
        else:
            connection.abort()

    def greet(self, connection: Connection) -> None:
        """Add a new connection that begins a TLS handshake. A few connections above the limit may
        finish the handshake, because a refusal can be sent only after the handshake."""
        if self.is_over:
            connection.abort()
        elif len(self.open) + len(self.greeting) < self.max_connections + _MAX_TOLD:
            self.greeting.add(connection)
        else:
            self.refused += 1
            connection.abort()

    def forget(self, connection: Connection) -> None:
        """Stop tracking a connection that was closed, or a TLS handshake that is complete."""
        self.greeting.discard(connection)
        self.open.discard(connection)
        self.told.discard(connection)

    def put_off(self, go_on: Callable[[], None]) -> None:
        """Call `go_on` in a later turn of the loop, after the calls that were deferred earlier."""
        self._later.append(go_on)
        if not self._is_due:
            self._is_due = True
            self.call_soon(self._turn)

    def _turn(self) -> None:
        """Call deferred functions until TURN_S seconds are spent in this turn of the event loop."""
        self.spent_s = 0.0
        began, later = self.clock(), self._later
        try:
            for _ in range(len(later)):  # what is put off meanwhile waits for the next turn
                later.popleft()()
                self.spent_s = self.clock() - began
                if self.spent_s >= TURN_S:
                    break
        finally:
            self._is_due = bool(later)
            if later:
                self.call_soon(self._turn)

    def make_room(self) -> None:
        """If unanswered requests hold too much memory, close connections with incomplete or queued
        requests. A connection that sends a large body slowly is closed first: the order is by held
        bytes times the age of the request."""
        if self.held_bytes <= self.max_held_bytes:
            return
        now = self.now

        def cost(connection: Connection) -> tuple[float, int]:
            return connection.held_bytes * (now - connection.since), connection.held_bytes

        for connection in sorted((*self.open, *self.greeting), key=cost, reverse=True):
            if self.held_bytes <= self.max_held_bytes * _ROOM_KEPT:
                break
            if connection.held_bytes:
                self.bodies_refused += 1
                connection.turn_away("too many incomplete requests")

    def sweep(self, now: float) -> None:
        """Apply the timeouts; `now` is in monotonic seconds. Call this about once a second, and
        once before any connection is made: a new connection's age counts from the last `now`."""
        self.now = now
        for connection in (*self.open, *self.told, *self.greeting):
            connection.expire(now)

    def start_draining(self) -> None:
        """From now on, close each connection after its answer, unless the connection has more
        requests queued. An idle connection is closed only after `Timeouts.quiet_s` seconds,
        because a request from the client may be on its way."""
        self.is_draining = True
        self.quiet_from = self.now

    def abort(self) -> None:
        """Drop all connections at once, with any unsent answers. Also drops later connections."""
        self.is_over = True
        for connection in (*self.open, *self.told, *self.greeting):
            connection.abort()
