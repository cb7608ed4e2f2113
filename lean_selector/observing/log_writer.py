"""Writes log lines to a descriptor from a thread of its own: nobody who logs ever waits.

A pipe that nobody reads fills, and then whoever writes to it is held; here that is the thread.
What waits for it is bounded in bytes: beyond, lines are dropped and counted, and the next line that
finds room says how many. Lines keep their order and are never mixed.
"""

import logging
import os
import queue
import select
import threading

MOST_WAITING_BYTES = 4 * 1024 * 1024  # some 20 000 lines: seconds of an access log at full load
FLUSH_S = 1.0  # at the exit, for what still waits


class LineWriter:
    """A queue of lines and its thread. `write` and `dropped` are for one thread at a time."""

    def __init__(self, descriptor: int, most_waiting_bytes: int = MOST_WAITING_BYTES) -> None:
        self.dropped = 0  # lines, ever
        self._descriptor = descriptor
        self._most_waiting_bytes = most_waiting_bytes
        self._queue: queue.SimpleQueue[bytes | threading.Event] = queue.SimpleQueue()
        self._taken_bytes = 0  # ever, of `write`
        self._done_bytes = 0  # ever, of the thread; written or given up
        # A daemon: a reader that sleeps must not keep the process from ending.
        threading.Thread(target=self._run, name="log writer", daemon=True).start()

    def write(self, line: str) -> bool:
        """Takes a line, or drops it: False. Adds its end."""
        data = line.encode("utf-8", "backslashreplace") + b"\n"
        if self._taken_bytes - self._done_bytes + len(data) > self._most_waiting_bytes:
            self.dropped += 1
            return False
        self._taken_bytes += len(data)
        self._queue.put(data)
        return True

    def flush(self, timeout_s: float) -> bool:
        """Waits until what was taken so far is written; False if that takes too long."""
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
        """What came in the meantime, to be written in one go."""
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
                except BlockingIOError:  # whoever shares the pipe may have set it so
                    select.select((), (self._descriptor,), ())
        except (OSError, ValueError):
            return  # nobody will read it: the log is no reason to stop


class QueuedLines(logging.Handler):
    """Formats in the thread that logs, and hands the line to a LineWriter."""

    def __init__(self, writer: LineWriter) -> None:
        super().__init__()
        self.writer = writer
        self._untold = 0  # dropped since the last line that was taken

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
        """At the exit, by logging.shutdown."""
        self.writer.flush(FLUSH_S)
