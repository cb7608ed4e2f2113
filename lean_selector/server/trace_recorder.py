"""`--record-trace PATH`: bookings as lines of a trace, for `lean-selector simulate`.

The format is Mooncake's: lengths, times, and an id for each 512 tokens of the prompt that is equal
where the prompt is equal so far. No token and no text is in it. A line is written when a request
ends, by a thread; at a size the recording ends.
"""

import logging
import os
import time
from collections.abc import Callable

import msgspec

from lean_selector.core.load.shapes import Reservation
from lean_selector.core.replication.events import ReplicaTarget
from lean_selector.core.replication.ledger import LifecycleEvents
from lean_selector.server.host import StartError
from lean_selector.service.logs import LineWriter

SPAN_TOKENS = 512
MOST_WAITING_BYTES = 16 << 20
_FLUSH_S = 5.0
_FULL = "the file of --record-trace has the size of --record-trace-mb: no more is recorded"
_log = logging.getLogger("lean_selector.trace")
_encode = msgspec.json.Encoder().encode


class TraceRecord(msgspec.Struct):
    """A line. `timestamp` is that of the booking, in ms since the epoch."""

    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def span_ids(sequence_hashes: bytes, block_size: int) -> list[int]:
    """An id for each SPAN_TOKENS of a prompt, its last part too: by the hash of the block in which
    the span ends, which stands for all before it. Without the low bits: any reader of JSON takes
    them as a number."""
    names = memoryview(sequence_hashes).cast("Q")
    blocks = len(names)
    spans = -(-blocks * block_size // SPAN_TOKENS)
    if SPAN_TOKENS % block_size:
        ends = (min(-(-span * SPAN_TOKENS // block_size), blocks) for span in range(1, spans + 1))
        last = [names[end - 1] for end in ends]
    else:
        each = SPAN_TOKENS // block_size
        last = names[each - 1 :: each].tolist()
        if len(last) < spans:
            last.append(names[-1])
    return [(name >> 12) + span for span, name in enumerate(last)]  # large blocks end several


class TraceRecorder:
    """Hears what the ledgers do, before `then`. Prompts without block hashes are left out."""

    def __init__(
        self,
        path: str,
        most_bytes: int,
        then: LifecycleEvents | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Appends to the file, up to a size. Raises StartError where it cannot be written."""
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise StartError(f"--record-trace: cannot write {path}: {error.strerror}") from error
        self._path = path
        self._left_bytes = most_bytes - os.fstat(self._descriptor).st_size
        self._writer = LineWriter(self._descriptor, MOST_WAITING_BYTES)
        self._then = then
        self._clock = clock
        self._begun: dict[str, TraceRecord] = {}  # by the ids of reservations
        self.requests = 0
        if self._left_bytes <= 0:
            _log.warning(_FULL)

    def booked(
        self, target: ReplicaTarget, reservation: Reservation, sequence_hashes: bytes
    ) -> None:
        if self._then is not None:
            self._then.booked(target, reservation, sequence_hashes)
        if sequence_hashes and self._left_bytes > 0:
            size = target.block_size
            tokens = len(sequence_hashes) // 8 * size
            ids = span_ids(sequence_hashes, size)
            at = round(self._clock() * 1e3, 3)
            self._begun[reservation.request_id] = TraceRecord(at, tokens, 0, ids)

    def prefill_completed(self, target: ReplicaTarget, reservation: Reservation) -> None:
        if self._then is not None:
            self._then.prefill_completed(target, reservation)

    def kept_alive(self, target: ReplicaTarget, reservation: Reservation) -> None:
        if self._then is not None:
            self._then.kept_alive(target, reservation)

    def freed(self, target: ReplicaTarget, reservation: Reservation) -> None:
        if self._then is not None:
            self._then.freed(target, reservation)
        record = self._begun.pop(reservation.request_id, None)
        if record is not None:
            record.output_length = reservation.output_blocks * target.block_size
            self._write(record)

    def _write(self, record: TraceRecord) -> None:
        line = _encode(record).decode()
        self._left_bytes -= len(line) + 1
        if self._left_bytes < 0:
            self._begun.clear()
            _log.warning(_FULL)
        else:
            self.requests += self._writer.write(line)

    def close(self) -> None:
        """Wait for what is still to be written, for a few seconds at most."""
        self._writer.flush(_FLUSH_S)
        counts = {"requests": self.requests, "dropped": self._writer.dropped}
        _log.info("recorded a trace", extra={"path": self._path, **counts})
