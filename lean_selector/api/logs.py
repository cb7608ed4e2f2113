"""Log lines on stderr, as text or JSON: one per event, with fields and the time in UTC.

A log call passes fields as `extra`. Lines that peers or clients can cause are limited per kind
(`RateLimit`), except in the access log, which has one line per request.

A thread writes the lines, so if nobody reads stderr, only this thread blocks. The bytes of waiting
lines are limited. Lines beyond the limit are dropped, and the next line says how many."""

import logging
import os
import queue
import re
import select
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType

import msgspec

from lean_selector.wire.scalars import without_controls

# Some 20 000 lines: a few seconds of an access log at full load
MOST_WAITING_BYTES = 4 * 1024 * 1024
FLUSH_S = 1.0  # seconds allowed for the waiting lines at exit


class LineWriter:
    """A queue of lines, and the thread that writes them to a file descriptor. Only one thread at a
    time may use `write` and `dropped`."""

    def __init__(self, descriptor: int, most_waiting_bytes: int = MOST_WAITING_BYTES) -> None:
        self.dropped = 0  # total lines
        self._descriptor = descriptor
        self._most_waiting_bytes = most_waiting_bytes
        self._queue: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._taken_bytes = 0  # total bytes passed to `write`
        self._done_bytes = 0  # total bytes that the thread has written or dropped
        # A daemon thread, because a blocked reader must not keep the process from exiting.
        threading.Thread(target=self._run, name="log writer", daemon=True).start()

    def write(self, line: str) -> bool:
        """Queues `line` with a line end. Return False if the line was dropped (full queue)."""
        return self.write_lines(line.encode("utf-8", "backslashreplace") + b"\n", 1)

    def write_lines(self, data: bytes, lines: int) -> bool:
        """Queues `data`, which has `lines` complete lines. Return False if the queue is full."""
        if self._taken_bytes - self._done_bytes + len(data) > self._most_waiting_bytes:
            self.dropped += lines
            return False
        self._taken_bytes += len(data)
        self._queue.put(data)
        return True

    def flush(self, timeout_s: float) -> bool:
        """Waits until all queued lines are written. Return False after `timeout_s` seconds."""
        written = threading.Event()
        self._queue.put(written)
        return written.wait(timeout_s)

    def _run(self) -> None:
        while True:
            first = self._queue.get()
            lines: list[bytes] = []
            events: list[threading.Event] = []
            for item in (first, *self._waiting()):
                if isinstance(item, bytes):
                    lines.append(item)
                else:
                    events.append(item)
            data = b"".join(lines)
            self._write_all(data)
            self._done_bytes += len(data)
            for event in events:
                event.set()

    def _waiting(self) -> list[bytes | threading.Event]:
        """Removes and returns the queued lines, and events to set when the lines are written."""
        items = []
        try:
            while True:
                items.append(self._queue.get_nowait())
        except queue.Empty:
            return items

    def _write_all(self, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                try:
                    written = os.write(self._descriptor, rest)
                    rest = rest[written:]
                except BlockingIOError:  # another process may have made the pipe non-blocking
                    select.select((), (self._descriptor,), ())
        except (OSError, ValueError):
            return  # a logging error must not stop the process


class QueuedLines(logging.Handler):
    """Formats log records on the thread that logs, and passes the text to a LineWriter."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self.writer = writer
        self._untold = 0  # dropped since the last queued line

    def emit(self, record: logging.LogRecord) -> None:
        if self._untold:
            record.dropped = self._untold
        try:
            line = self.format(record)
        except Exception:
            self.handleError(record)
            return
        self._untold = 0 if self.writer.write(line) else self._untold + 1

    def flush(self) -> None:
        """Waits up to a second until the queued lines are written. Python calls this at exit."""
        self.writer.flush(FLUSH_S)


# -- lines -----------------------------------------------------------------------------------------

ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]

STDERR = 2
ACCESS_LOG = "lean_selector.access"
# A burst of one kind (a logger and an unformatted message) may have this many lines, as when a
# fleet of 512 workers registers at once; after that, one line per second.
BURST = 1000
LINES_PER_S = 1.0
MAX_KINDS = 1000  # a few dozen exist; if data makes more, the further ones share one

_STANDARD = frozenset((*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"))
_PLAIN_VALUE = re.compile(r"[\w.:/*+@%,\[\]-]+")
_encode = msgspec.json.Encoder(enc_hook=str).encode


@dataclass
class LogState:
    """What limits the lines and what writes them, each with a count of those that it left out."""

    limit: "RateLimit"
    writer: LineWriter
    # Configuration warnings, to be logged once the server listens.
    doubts: tuple[str, ...] = ()


def set_up(level: str, form: str) -> LogState:
    """Sends all logging of the process to stderr; `form` is "text" or "json"."""
    writer = LineWriter(STDERR)
    handler = QueuedLines(writer)
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    limit = RateLimit()
    handler.addFilter(limit)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.raiseExceptions = False  # a closed stderr must not cause a write to stderr
    sys.excepthook = _after_the_lines(handler, sys.excepthook)
    return LogState(limit, writer)


def _after_the_lines(handler: QueuedLines, write: ExceptHook) -> ExceptHook:
    """Return a hook for sys.excepthook that waits until queued log lines are written, and then
    writes the traceback of the crash. Otherwise the traceback would appear among the lines."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        handler.flush()
        write(kind, error, trace)

    return hook


def _fields(record: logging.LogRecord) -> dict[str, object]:
    fields = {name: value for name, value in vars(record).items() if name not in _STANDARD}
    if record.exc_info:
        fields["exception"] = logging.Formatter().formatException(record.exc_info)
    return fields


def _utc(created: float) -> str:
    seconds, milliseconds = divmod(int(created * 1000), 1000)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{milliseconds:03d}Z"


class TextLines(logging.Formatter):
    """Formats lines like `2026-01-31T12:00:00.000Z INFO lean_selector.server listening port=80`."""

    def format(self, record: logging.LogRecord) -> str:
        event = record.getMessage()
        if not event.isprintable():
            event = _quoted(event)
        start = f"{_utc(record.created)} {record.levelname} {record.name} {event}"
        return start + "".join(
            f" {name}={_shown(value)}" for name, value in _fields(record).items()
        )


def _shown(value: object) -> str:
    if value is None or isinstance(value, bool):
        return _encode(value).decode()
    text = value if isinstance(value, str) else str(value)
    return text if _PLAIN_VALUE.fullmatch(text) else _quoted(text)


def _quoted(text: str) -> str:
    """Return the text as a JSON string without line breaks."""
    return _one_line(_encode(text.encode("utf-8", "replace").decode()))


def _one_line(json: bytes) -> str:
    """Return `json` as text. Escapes characters that a terminal or a line reader may interpret."""
    return without_controls(json.decode())


class JsonLines(logging.Formatter):
    """Formats a log record as a JSON object: time, level, logger, event, and its fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        try:
            return _one_line(_encode(line))
        except UnicodeEncodeError:  # a lone surrogate in a client's text
            safe = {name: str(value).encode("utf-8", "replace") for name, value in line.items()}
            return _one_line(_encode({name: value.decode() for name, value in safe.items()}))


class LineAllowance:
    """How many lines of one kind may still be written now, and how many were suppressed."""

    def __init__(self, lines: float, at: float) -> None:
        self.lines = lines  # lines that may still be written at once
        self.at = at
        self.suppressed = 0


class RateLimit(logging.Filter):
    """Each kind of line (logger and unformatted message) has a token bucket of size BURST and rate
    LINES_PER_S. The next line that passes says how many lines of its kind were suppressed."""

    def __init__(self, burst: float = BURST, lines_per_s: float = LINES_PER_S) -> None:
        super().__init__()
        self.suppressed = 0  # total
        self._burst = burst
        self._lines_per_s = lines_per_s
        self._buckets: dict[tuple[str, str], LineAllowance] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == ACCESS_LOG:
            return True
        kind = record.name, str(record.msg)
        if kind not in self._buckets and len(self._buckets) >= MAX_KINDS:
            kind = "", ""
        bucket = self._buckets.setdefault(kind, LineAllowance(self._burst, record.created))
        refill = max(0.0, record.created - bucket.at) * self._lines_per_s
        bucket.lines, bucket.at = min(self._burst, bucket.lines + refill), record.created
        if bucket.lines < 1.0:
            bucket.suppressed += 1
            self.suppressed += 1
            return False
        bucket.lines -= 1.0
        if bucket.suppressed:
            record.suppressed, bucket.suppressed = bucket.suppressed, 0
        return True
