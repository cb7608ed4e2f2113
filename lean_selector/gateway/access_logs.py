"""Frees reservations when a line in another gateway's access log reports the end of a request.

A line has the word `lean-end`, followed by fields `name=value` or `name="value"` in any order. Text
before this word, such as a syslog header, and unknown fields are ignored. A field with the value
`-` or an empty value counts as absent. A line frees the reservation that it names. If the line
names a worker, the outcome of the request counts in outlier detection."""

import asyncio
import ipaddress
import logging
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from lean_selector.core.errors import NotFound
from lean_selector.core.health.ejections import FAILED, NOT_FREE, OK, REFUSED, outcome_of_status
from lean_selector.core.numbers import U64_MAX
from lean_selector.core.selection.selector import Selector
from lean_selector.wire.exposition import Families, by, table

_log = logging.getLogger("lean_selector.access_logs")

# -- sources of lines ------------------------------------------------------------------------------


class LogAddress(NamedTuple):
    """Where the lines of access logs are received: a UDP address, or a UNIX socket's path."""

    host: str = ""
    port: int = 0
    path: str | None = None


def address_of(text: str) -> LogAddress:
    """Parses the log address `syslog:HOST:PORT` or `unixgram:PATH`. Raises ValueError."""
    kind, colon, rest = text.partition(":")
    if kind == "unixgram" and rest:
        return LogAddress(path=rest)
    if kind != "syslog" or not colon:
        raise ValueError(f"expected syslog:HOST:PORT or unixgram:PATH, not `{text}`")
    host, colon, port = rest.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"`{text}`: an IPv6 address needs brackets")
    if not host or not colon:
        raise ValueError(f"`{text}` lacks a host or a port: syslog:HOST:PORT")
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65_536):
        raise ValueError(f"`{text}` has no port from 1 to 65535")
    return LogAddress(host=host, port=int(port))


def networks_of(text: str) -> list[str]:
    """Return the distinct networks (`10.0.0.0/8`) or addresses in a comma-separated list. Raises
    ValueError."""
    items = (item.strip() for item in text.split(",") if item.strip())
    return [str(ipaddress.ip_network(item)) for item in dict.fromkeys(items)]


class Senders:
    """The hosts that may send access-log lines: this machine (loopback), and the given networks."""

    def __init__(self, networks: list[str]) -> None:
        self._networks = [*map(ipaddress.ip_network, networks)]

    def may_write(self, host: str) -> bool:
        """Whether the host with this IP address may send access-log lines."""
        address = ipaddress.ip_address(host)
        if isinstance(address, ipaddress.IPv6Address):
            address = address.ipv4_mapped or address
        return address.is_loopback or any(address in network for network in self._networks)


# -- outcomes --------------------------------------------------------------------------------------
#
# Derive the worker's outcome from the fields of nginx, HAProxy or Envoy: nginx's
# `$upstream_status`, `$upstream_connect_time` and `$request_completion`, HAProxy's `%ts` and `%rc`,
# Envoy's `%RESPONSE_FLAGS%` and `%UPSTREAM_REQUEST_ATTEMPT_COUNT%`. If a gateway tried several
# workers, the outcome is that of the first, which was reserved. The outcome None does not count for
# the worker: the client or the gateway gave up, or the worker shed the request.

_GAVE_UP: Final = 499  # nginx's status if the client disconnected
_LIST: Final = re.compile(r" ?[,:] ")  # separates the attempts in nginx's variables
_TERMINATION: Final = re.compile(r"[-A-Za-z]{2,4}")
_FLAGS: Final = re.compile(r"[A-Za-z]+(?:,[A-Za-z]+)*")
# Envoy's flags, in the order of checking.
_OF_ENVOY: Final[tuple[tuple[str, str | None], ...]] = (
    ("DC", None),
    ("UF", REFUSED),
    ("UC", FAILED),
    ("UT", FAILED),
    ("UR", FAILED),
    ("UPE", FAILED),
)


def outcome_of(fields: Mapping[str, str], status: int | None) -> str | None:
    """Judges the worker tried first: ok, failed or refused; None: unclear. Raises ValueError."""
    if "upstream" in fields:
        return _of_nginx(fields)
    if "termination" in fields or "retries" in fields:
        return _of_haproxy(fields, status)
    if "flags" in fields or "attempts" in fields:
        return _of_envoy(fields, status)
    return _of_status(status)


def _of_status(status: int | None) -> str | None:
    if status is None or status < 100 or status == _GAVE_UP:
        return None
    return outcome_of_status(status)


def _of_nginx(fields: Mapping[str, str]) -> str | None:
    tries = _LIST.split(fields["upstream"])
    first = tries[0]
    if first == "-":
        return None
    if not (first.isascii() and first.isdigit() and len(first) == 3):
        raise ValueError("its upstream is not a list of statuses")
    connects = _LIST.split(fields.get("connect", "-"))
    if first in ("502", "504") and connects[0] == "-":
        return REFUSED
    outcome = _of_status(int(first))
    # A truncated answer: nginx does not log which side ended it.
    return None if outcome == OK and fields.get("done") != "OK" else outcome


def _of_haproxy(fields: Mapping[str, str], status: int | None) -> str | None:
    state = fields.get("termination", "--")
    if _TERMINATION.fullmatch(state) is None:
        raise ValueError("its termination is not one of HAProxy's")
    cause, phase = state[0], state[1]
    if cause in "sS":
        return REFUSED if phase == "C" else None if phase == "Q" else FAILED
    if fields.get("retries", "").startswith("+"):
        # Retried on another worker: the first one refused the connection, or closed a kept
        # connection, which does not predict later requests.
        return FAILED
    return _of_status(status) if cause == "-" else None


def _of_envoy(fields: Mapping[str, str], status: int | None) -> str | None:
    attempts = fields.get("attempts", "1")
    if not (attempts.isascii() and attempts.isdigit()):
        raise ValueError("its attempts are not a number")
    flags = fields.get("flags", "")
    if flags and _FLAGS.fullmatch(flags) is None:
        raise ValueError("its flags are not among Envoy's")
    if len(attempts) > 1 or attempts > "1":
        return FAILED
    if not flags:
        return _of_status(status)
    said = set(flags.split(","))
    return next((outcome for flag, outcome in _OF_ENVOY if flag in said), None)


# -- a line ----------------------------------------------------------------------------------------

LONGEST_LINE: Final = 8192  # bytes; nginx and HAProxy truncate earlier
LONGEST_ID: Final = 256
_WORD: Final = re.compile(rb"(?:^|[ :])lean-end(?= )")
_FIELD: Final = re.compile(rb' ([a-z_]+)=(?:"([^"]*)"|([^" ]*))')
_SECONDS: Final = re.compile(r"[0-9]{1,6}(?:\.[0-9]{1,9})?")
_NOT_FREE: Final = frozenset(map(str, NOT_FREE))
_STATUS: Final = re.compile(r"-1|[0-9]{1,3}")  # HAProxy logs -1 and Envoy 0 if there was no answer


class Ended(NamedTuple):
    """The end of a request, as an access-log line reports it. Absent fields are None."""

    reservation_id: str | None
    worker_id: int | None
    dp_rank: int | None
    outcome: str | None  # of the first worker: refused, failed or ok
    ttft_s: float | None = None  # time to the first token
    was_served: bool = True  # False: the first worker computed nothing
    prefill_worker_id: int | None = None  # of a pair
    prefill_outcome: str | None = None


class BadLine(ValueError):
    """A datagram is no valid access-log line; the exception's text says why."""


class OtherLine(BadLine):
    """A datagram without the word `lean-end`, such as a gateway's error message."""


def ended_of(line: bytes) -> Ended:
    """Parses an access-log line. Raises BadLine or OtherLine."""
    if len(line) > LONGEST_LINE:
        raise BadLine(f"it is longer than {LONGEST_LINE} bytes")
    found = _WORD.search(line)
    if found is None:
        raise OtherLine("it lacks the word lean-end")
    fields = _fields(line[found.end() :].rstrip(b"\r\n\0 "))
    reservation_id = fields.get("reservation")
    if reservation_id is not None and len(reservation_id) > LONGEST_ID:
        raise BadLine(f"its reservation is longer than {LONGEST_ID} characters")
    worker_id = _number(fields, "worker", U64_MAX)
    text, status = fields.get("status"), _status(fields, "status")
    try:
        outcome = outcome_of(fields, status)
    except ValueError as error:
        raise BadLine(str(error)) from None
    rank = _number(fields, "rank", 2**32 - 1)
    first = _LIST.split(fields.get("upstream", text or ""))[0]
    was_served = outcome not in (FAILED, REFUSED) and first not in _NOT_FREE
    return Ended(
        reservation_id,
        worker_id,
        rank,
        outcome,
        _ttft_s(fields),
        was_served,
        _number(fields, "prefill_worker", U64_MAX),
        _of_status(_status(fields, "prefill_status")),
    )


def _status(fields: dict[str, str], name: str) -> int | None:
    text = fields.get(name)
    if text is not None and _STATUS.fullmatch(text) is None:
        raise BadLine(f"its {name} is none")
    return None if text is None else int(text)


def _ttft_s(fields: dict[str, str]) -> float | None:
    """Return the seconds to the first token at the last worker tried (`ttft`). Raises BadLine."""
    text = _LIST.split(fields.get("ttft", "-"))[-1]
    if text == "-":
        return None
    if _SECONDS.fullmatch(text) is None:
        raise BadLine("its ttft is not a number of seconds")
    return float(text)


def _fields(text: bytes) -> dict[str, str]:
    """Return the non-empty fields of an access-log line: name -> value. Raises BadLine."""
    fields: dict[str, str] = {}
    at = 0
    while at < len(text):
        found = _FIELD.match(text, at)
        if found is None:
            raise BadLine(f"byte {at} after lean-end does not begin a name=value")
        at = found.end()
        name, quoted, plain = found.groups()
        value = plain if quoted is None else quoted
        if value in (b"", b"-"):
            continue
        key = name.decode("ascii")
        if key in fields:
            raise BadLine(f"it has {key} twice")
        try:
            fields[key] = value.decode()
        except UnicodeDecodeError:
            raise BadLine(f"its {key} is not UTF-8") from None
    return fields


def _number(fields: dict[str, str], name: str, most: int) -> int | None:
    text = fields.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= most):
        raise BadLine(f"its {name} is not a number from 0 to {most}")
    return int(text)


# How long an end without a reservation is remembered: if a client disconnects while its request
# waits for a worker, the log line may arrive before the reservation is made.
EARLY_MEMORY_S: Final = 30.0
MAX_EARLY: Final = 10_000

# Results of a datagram. `unknown`: its reservation is not there yet, or not any more. `reported`:
# it names no reservation, but a worker. `empty`: neither, since the request was not routed here.
# `other`: it lacks the word lean-end, as other notices of the gateway do.
RESULTS: Final = ("empty", "freed", "malformed", "not_allowed", "other", "reported", "unknown")

_MOST_SHOWN: Final = 200  # characters of a line that our log shows


@dataclass(eq=False)
class LogEnds:
    """Handles access-log lines that report ended requests, and counts the lines by result. Before a
    reservation ends, `served` is called with the reservation, the worker, the rank and the time to
    first token."""

    selector: Selector
    clock: Callable[[], float]
    served: Callable[[str, int | None, int | None, float | None], None] | None = None

    def __post_init__(self) -> None:
        # Reservation -> time of an end that came early, the oldest first
        self._early: dict[str, float] = {}
        self.results: Counter[str] = Counter(dict.fromkeys(RESULTS, 0))
        self.unknown_workers = 0  # lines about a worker that is not registered

    def take(self, line: bytes) -> None:
        """Handles a datagram (an access-log line) from an allowed sender. Never raises."""
        now = self.clock()
        try:
            ended = ended_of(line)
        except OtherLine:
            self.results["other"] += 1
            return
        except BadLine as error:
            self.results["malformed"] += 1
            shown = line[:_MOST_SHOWN].decode("utf-8", "replace")
            _log.warning(
                "invalid line of an access log",
                extra={"reason": str(error), "line": shown},
            )
            return
        if ended.reservation_id is None:
            self.results["empty" if ended.worker_id is None else "reported"] += 1
        else:
            if self.served is not None:
                self.served(ended.reservation_id, ended.worker_id, ended.dp_rank, ended.ttft_s)
            try:
                self.selector.reservations.free(ended.reservation_id, now, ended.was_served)
                self.results["freed"] += 1
            except NotFound:
                self.results["unknown"] += 1
                self._remember(ended.reservation_id, now)
        # A refused connection counts for the whole worker.
        dp_rank = None if ended.outcome == REFUSED else ended.dp_rank
        self._judge(ended.worker_id, dp_rank, ended.outcome, now)
        self._judge(ended.prefill_worker_id, None, ended.prefill_outcome, now)

    def _judge(
        self, worker_id: int | None, dp_rank: int | None, outcome: str | None, now: float
    ) -> None:
        if worker_id is None or outcome is None:
            return
        try:
            self.selector.health.record_outcome(worker_id, dp_rank, outcome, now)
        except NotFound:
            self.unknown_workers += 1

    def refuse(self, host: str) -> None:
        """Counts a datagram from a sender that is not allowed."""
        self.results["not_allowed"] += 1
        _log.warning(
            "line of an access log from an address that --lifecycle-allow does not list",
            extra={"address": host},
        )

    def has_ended(self, reservation_id: str) -> bool:
        """Whether an access-log line ended a reservation before it was made. Forgets the line."""
        at = self._early.pop(reservation_id, None)
        return at is not None and self.clock() - at <= EARLY_MEMORY_S

    def _remember(self, reservation_id: str, now: float) -> None:
        early = self._early
        early.pop(reservation_id, None)
        early[reservation_id] = now
        while len(early) > MAX_EARLY or now - next(iter(early.values())) > EARLY_MEMORY_S:
            del early[next(iter(early))]


LINES_PER_TURN: Final = 64  # some 10 us each
RECEIVE_BUFFER_BYTES: Final = 4 * 1024 * 1024  # if net.core.rmem_max allows it
ENOUGH_QUEUED: Final = 512  # datagrams that should fit into a UNIX socket's queue
_QUEUE_LENGTH: Final = Path("/proc/sys/net/unix/max_dgram_qlen")
_SO_RXQ_OVFL: Final = 40  # Linux: each datagram carries the number of dropped ones
_DROPS: Final = struct.Struct("I")
_ANCILLARY_BYTES: Final = socket.CMSG_SPACE(_DROPS.size)


def warn_of_a_short_queue(address: str) -> None:
    """Logs a warning if the system queues few datagrams per UNIX socket: log lines may be lost."""
    try:
        length = int(_QUEUE_LENGTH.read_text())
    except (OSError, ValueError):
        return  # not Linux, or not readable
    if length < ENOUGH_QUEUED:
        _log.warning(
            "bursts of access-log lines will be lost: net.unix.max_dgram_qlen is %d;"
            " set it to %d or more before the selector starts, or read lines over UDP",
            length,
            ENOUGH_QUEUED,
            extra={"place": address},
        )


class LineReader:
    """Reads access-log lines from one socket."""

    def __init__(
        self,
        bound: socket.socket,
        ends: LogEnds,
        senders: Senders,
    ) -> None:
        """A UNIX socket accepts all lines, because file permissions restrict who can write."""
        self._socket = bound
        self._ends = ends
        self._senders = None if bound.family == socket.AF_UNIX else senders
        self.dropped = 0  # datagrams dropped by the kernel
        bound.setblocking(False)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
        if self._senders is not None:
            bound.setsockopt(socket.SOL_SOCKET, _SO_RXQ_OVFL, 1)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(bound.fileno(), self._read)

    def _read(self) -> None:
        for _ in range(LINES_PER_TURN):
            try:
                # One byte more than the maximum, to detect longer lines.
                line, ancillary, _, sender = self._socket.recvmsg(
                    LONGEST_LINE + 1, _ANCILLARY_BYTES
                )
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                _log.warning("access logs cannot be read", extra={"error": str(error)})
                return
            for _, kind, data in ancillary:
                if kind == _SO_RXQ_OVFL and len(data) == _DROPS.size:
                    self.dropped = _DROPS.unpack(data)[0]
            if self._senders is None or self._senders.may_write(sender[0]):
                self._ends.take(line)
            else:
                self._ends.refuse(sender[0])

    def close(self) -> None:
        """Reads the datagrams that have arrived, then closes the socket."""
        self._read()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()


def access_log_families(ends: LogEnds, readers: Callable[[], Sequence[LineReader]]) -> Families:
    """Return the metrics about access-log lines, such as the number of lines by result."""
    return table({
        "lifecycle_lines_total": (lambda: by("result", ends.results),
            "Lines of gateways' access logs, by result."),
        "lifecycle_lines_dropped_total": (lambda: sum(reader.dropped for reader in readers()),
            "Lines dropped because the UDP socket's buffer was full: their reservations expire."),
        "lifecycle_unknown_workers_total": (lambda: ends.unknown_workers,
            "Lines about a worker that is not registered."),
    })  # fmt: skip
