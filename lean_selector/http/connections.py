"""The open connections of one server: how many, how much they hold, their time-outs and counts.

Owns what they share and what they may use together; what is said on one is `protocol`'s. Nothing
here waits: `sweep`, called about once a second, is the only clock (decisions D14 and D27).
"""

from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Final, Protocol

from lean_selector.http.head import HeaderBlocks, HttpError, Limits, Request

# Why handshakes fail: the labels of a metric.
REASONS: Final = (
    "client_certificate",  # none, or none that is trusted
    "closed",  # the client left in the middle
    "not_tls",
    "other",
    "refused_by_client",  # it said so; mostly it does not trust our certificate
    "timeout",
    "version_or_cipher",  # nothing that both know
)


class TlsCounts:
    """Ever; all 0 while TLS is off."""

    def __init__(self) -> None:
        self.is_on = False
        self.completed = 0
        self.failures: dict[str, int] = dict.fromkeys(REASONS, 0)
        self.last_failure = ""  # who, and why, in words
        self.reloads = 0  # of the files
        self.reload_failures = 0
        self.not_after: int | None = None  # of the certificate, in seconds since 1970


# A gateway opens some hundreds: enough for a fleet of them, and below a descriptor limit of 2**16,
# of which KV events take two or three for each worker rank.
MAX_CONNECTIONS: Final = 16_384

# What a turn of the loop may take for the input of all connections together, but for small
# requests; what is begun then is a slice that `reader` bounds, and ends it a millisecond later.
TURN_S: Final = 0.002

# Requests that are not complete, or wait for a rank or behind another of their connection: 32
# bodies of 8 MiB, or 2 500 of 100 KiB, a long prompt. One connection alone can hold 9 MiB.
MAX_HELD_BYTES: Final = 256 * 1024 * 1024
_ROOM_KEPT: Final = 7 / 8  # so that one look at all connections makes room for many requests

# Refused clients that are given time to read why; beyond, they are dropped without a word.
_MAX_TOLD: Final = 256


def plain_refusal(error: HttpError) -> bytes:
    """The body of the answer to an error of the HTTP level."""
    return b'{"error":"%b"}' % error.text.encode()


class Timeouts:
    """Seconds, to the precision of the sweep."""

    def __init__(
        self,
        idle_s: float = 75.0,  # a keep-alive connection without a request
        read_s: float = 30.0,  # an unfinished request; the protocol gives bodies more
        write_s: float = 30.0,  # a client that takes nothing of what is written to it
        linger_s: float = 5.0,  # a client that goes on sending after its last answer
        quiet_s: float = 1.0,  # as idle_s and linger_s, while the server drains
        handshake_s: float = 10.0,  # a TLS handshake, from its connection to its end
    ) -> None:
        self.handshake_s = handshake_s
        self.idle_s = idle_s
        self.read_s = read_s
        self.write_s = write_s
        self.linger_s = linger_s
        self.quiet_s = quiet_s


class Connection(Protocol):
    """What `Connections` asks of each."""

    @property
    def held_bytes(self) -> int: ...  # of requests that are not answered
    @property
    def since(self) -> float: ...  # when its present state began, as Connections.now had it
    def expire(self, now: float) -> None: ...
    def turn_away(self, reason: str) -> None: ...  # answer 503, whatever it is at, and close
    def abort(self) -> None: ...


class Connections:
    """All that is open, and the counts of what was refused. Only for the thread of the loop."""

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object],
        limits: Limits | None = None,
        timeouts: Timeouts | None = None,
        max_connections: int = MAX_CONNECTIONS,
        max_held_bytes: int = MAX_HELD_BYTES,
        refusal: Callable[[HttpError], bytes] = plain_refusal,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        """`call_soon` is the loop's; `refusal` words the answer to an error of the HTTP level."""
        self.call_soon = call_soon
        self.clock = clock
        # Whether a request is refused whatever its body says, as for want of a token.
        self.refuses: Callable[[Request], bool] | None = None
        self.spent_s = 0.0  # on input, since the last turn of what was put off
        self._later: deque[Callable[[], None]] = deque()
        self._is_due = False  # a turn of those
        self.limits = limits or Limits()
        self.timeouts = timeouts or Timeouts()
        self.max_connections = max_connections
        self.max_held_bytes = max_held_bytes
        self.refusal = refusal
        self.header_blocks: HeaderBlocks = {}
        self.open: set[Connection] = set()
        self.greeting: set[Connection] = set()  # in their TLS handshake, each a place in `open`
        self.told: set[Connection] = set()  # refused, and reading why
        self.held_bytes = 0  # the sum over `open` and `greeting`
        self.now = 0.0  # monotonic seconds at the last sweep
        self.is_draining = False
        self.quiet_from = 0.0  # when draining began
        self.is_over = False
        # Ever.
        self.accepted = 0
        self.accept_failures = 0  # the listeners': no descriptor or no memory was left
        self.refused = 0
        self.bodies_refused = 0
        self.tls = TlsCounts()

    def admit(self, connection: Connection) -> None:
        """A new one: it joins `open`, or is refused because they are too many."""
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
        """A new one whose TLS handshake begins. Some beyond the limit may finish it, because only
        then can they be told that they are too many."""
        if self.is_over:
            connection.abort()
        elif len(self.open) + len(self.greeting) < self.max_connections + _MAX_TOLD:
            self.greeting.add(connection)
        else:
            self.refused += 1
            connection.abort()

    def forget(self, connection: Connection) -> None:
        """It is closed, or its handshake is over."""
        self.greeting.discard(connection)
        self.open.discard(connection)
        self.told.discard(connection)

    def put_off(self, go_on: Callable[[], None]) -> None:
        """Have `go_on` called in a later turn of the loop, behind what was put off before."""
        self._later.append(go_on)
        if not self._is_due:
            self._is_due = True
            self.call_soon(self._turn)

    def _turn(self) -> None:
        """Go on with what was put off, until the time of a turn is spent."""
        self.spent_s = 0.0
        began, later = self.clock(), self._later
        try:
            for _ in range(len(later)):  # what these put off again is for the next turn
                later.popleft()()
                self.spent_s = self.clock() - began
                if self.spent_s >= TURN_S:
                    break
        finally:
            self._is_due = bool(later)
            if later:
                self.call_soon(self._turn)

    def make_room(self) -> None:
        """Turn away whoever has held the most for the longest, until less than the limit is held.

        Bytes times seconds: a newcomer has held nothing for any time, and a client that sends a
        large body and stalls before its last byte, or drips it, goes first.
        """
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
                connection.turn_away("too many requests are being received")

    def sweep(self, now: float) -> None:
        """Apply the time-outs. `now` is monotonic seconds.

        Call it about once a second, and once before the first connection: ages count from the
        sweep before them.
        """
        self.now = now
        for connection in (*self.open, *self.told, *self.greeting):
            connection.expire(now)

    def start_draining(self) -> None:
        """From now on every answer is the last of its connection, unless more requests are here.

        A connection without a request is closed when it has been quiet for a while, not at once:
        its client may have sent one that has not arrived.
        """
        self.is_draining = True
        self.quiet_from = self.now

    def abort(self) -> None:
        """Drop all connections at once, unsent answers included, and any that is still to come."""
        self.is_over = True
        for connection in (*self.open, *self.told, *self.greeting):
            connection.abort()
